"""The case list (public bug reports, a1 to a34): which tests hold each row of the two forms."""

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

HELD: dict[str, tuple[str, ...]] = {
    "a1": (
        "runtime/test_merge.py::test_two_empty_partials_give_nothing",
        "runtime/test_merge.py::test_an_empty_partial_changes_no_bit",
    ),
    "a2": (
        "dsl/test_cases.py::test_a2_queries_before_the_history_see_nothing",
        "runtime/test_eager_softmax.py::test_a_row_that_sees_nothing_is_empty",
        "interpreter/test_softmax.py::test_rows_that_see_nothing_are_zero_with_lse_minus_infinity",
    ),
    "a3": (
        "dsl/test_cases.py::test_a3_huge_negative_scores_are_ordinary",
        "runtime/test_eager_softmax.py::test_huge_negative_scores_are_exact",
        "interpreter/test_softmax.py::test_huge_negative_scores_and_strided_keys",
    ),
    "a5": (
        "runtime/test_eager_softmax.py::test_packed_equals_dense",
        "runtime/test_eager_softmax.py::test_packed_sequences_of_head_dim_256",
        "interpreter/test_softmax.py::test_packed_sequences_with_empty_ones",
        "runtime/test_eager_affine.py::test_packed_equals_dense",
        "runtime/test_eager_affine.py::test_the_state_of_an_empty_sequence_keeps_its_bits",
        "interpreter/test_affine.py::test_gated_delta_rule_over_packed_sequences_with_empty_ones",
        "gpu/test_affine.py::test_packed_sequences_keep_empty_states_bit_for_bit",
    ),
    "a8": (
        "runtime/test_eager_softmax.py::test_any_group",
        "runtime/test_eager_softmax.py::test_groups_are_repeated_heads",
        "interpreter/test_softmax.py::test_decode_of_grouped_queries_equals_repeated_keys",
    ),
    "a9": (
        "runtime/test_eager_softmax.py::test_any_head_dim",
        "runtime/test_eager_affine.py::test_any_head_dim",
        "interpreter/test_softmax.py::test_causal_prefill_with_a_padded_head_dim",
        "interpreter/test_selected.py::test_head_dims_of_an_index",
        "gpu/test_affine.py::test_head_dims",
    ),
    "a10": (
        "runtime/test_eager_affine.py::test_tiny_decays_stay_finite",
        "interpreter/test_affine.py::test_gates_and_betas_of_public_reports",
        "gpu/test_affine.py::test_strong_decay_stays_finite",
    ),
    "a11": (
        "dsl/test_cases.py::test_a11_a_gate_of_minus_infinity_forgets_everything_before",
        "runtime/test_eager_affine.py::test_a_gate_of_minus_infinity_forgets",
        "interpreter/test_affine.py::test_gates_and_betas_of_public_reports",
        "gpu/test_affine.py::test_a_gate_of_minus_infinity_forgets_everything",
    ),
    "a14": (
        "dsl/test_cases.py::test_a14_keys_that_are_exact_give_exact_values",
        "runtime/test_eager_affine.py::test_a_repeated_key_gives_back_its_value",
        "laws/test_reports.py::test_a14_a_constant_key_under_a_weak_gate_stays_finite",
        "gpu/test_affine.py::test_one_key_repeated_returns_the_latest_value",
        "gpu/test_affine.py::test_one_key_for_16384_tokens_under_a_weak_gate",
    ),
    "a16": (
        "dsl/test_cases.py::test_a16_beta_of_two_flips_the_component_along_the_key",
        "runtime/test_eager_affine.py::test_beta_of_two_flips_the_component_along_the_key",
        "gpu/test_affine.py::test_beta_of_two_flips_and_is_not_clamped",
    ),
    "a17": (
        "dsl/test_cases.py::test_a17_two_updates_of_one_token_read_after_the_last",
        "dsl/test_cases.py::test_a17_the_decay_is_once_a_token_not_once_an_update",
        "runtime/test_eager_affine.py::test_gated_delta_product_by_hand",
        "runtime/test_eager_affine.py::test_one_householder_is_the_gated_delta_rule",
        "interpreter/test_affine.py::test_gdp_of_the_public_example",
    ),
    "a18": (
        "laws/test_reports.py::"
        "test_a18_chunks_over_tokens_or_over_their_expansion_equal_the_recurrence",
        "runtime/test_eager_affine.py::"
        "test_expanded_tokens_decay_on_their_first_copy_and_read_on_their_last",
    ),
    "a20": ("laws/test_reports.py::test_a20_an_initial_state_is_honoured_and_left_alone",),
    "a21": (
        "laws/test_reports.py::test_a21_a_padding_row_writes_nothing",
        "gpu/test_owners.py::test_a_bad_slot_is_one_error_and_nothing_is_written",
        "laws/test_reports.py::"
        "test_a21_a_slot_named_twice_is_refused_before_anything_is_written",
    ),
    "a22": (
        "interpreter/test_addresses.py::test_a22_rows_of_a_prefill",
        "interpreter/test_addresses.py::test_a22_a_state_beyond_4096_slots",
        "interpreter/test_addresses.py::test_a22_a_page_beyond_2_31_elements",
    ),
    "a24": (
        "runtime/test_selected.py::test_a_history_one_longer_than_a_power_of_two",
        "interpreter/test_selected.py::test_a_history_one_longer_than_a_power_of_two",
        "gpu/test_dsa.py::test_one_more_than_a_power_of_two",
    ),
    "a25": (
        "runtime/test_selected.py::test_thousands_of_candidates_that_differ_in_few_bits",
        "interpreter/test_selected.py::test_ties_over_many_chunks_take_the_first_positions",
        "gpu/test_dsa.py::test_thousands_of_equal_or_near_candidates",
    ),
    "a27": (
        "runtime/test_selected.py::test_more_wanted_than_there_are",
        "runtime/test_selected.py::test_picks_of_nothing_attend_to_nothing",
        "interpreter/test_selected.py::test_more_queries_than_history_and_none",
        "gpu/test_dsa.py::test_more_wanted_than_there_are",
    ),
    "a29": (
        "runtime/test_eager_softmax.py::test_strides_do_not_matter",
        "runtime/test_eager_affine.py::test_strides_do_not_matter",
        "interpreter/test_softmax.py::test_huge_negative_scores_and_strided_keys",
        "random/test_meaning.py::test_a_random_fold",
    ),
    "a31": (
        "laws/test_reports.py::test_a31_an_uneven_cut_with_an_empty_rank_is_one_device",
        "laws/test_reports.py::test_a31_an_uneven_cut_has_the_gradients_of_one_device",
        "laws/test_reports.py::test_a31_a_piece_shorter_than_the_convolution",
    ),
    "a32": ("laws/test_reports.py::test_a32_a_selection_over_two_halves_is_merged_by_lse",),
    "a34": (
        "dsl/test_cases.py::test_a34_zero_pads_are_inert",
        "runtime/test_eager_affine.py::test_every_table_at_any_length",
        "runtime/test_eager_affine.py::test_a_thousand_tokens",
        "interpreter/test_affine.py::test_gates_and_betas_of_public_reports",
    ),
}  # fmt: skip

WAITING = {
    "a31": "its ranks, which there are not yet; cuts of one process are held",
    "a32": "its ranks; halves of one process are held",
}
ROWS = (1, 2, 3, 5, 8, 9, 10, 11, 14, 16, 17, 18, 20, 21, 22, 24, 25, 27, 29, 31, 32, 34)


@functools.cache
def names(path: str) -> frozenset[str]:
    """Names of the tests in a file, without importing it."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


def test_every_row_is_held_or_waits_with_a_reason() -> None:
    assert {f"a{n}" for n in ROWS} == HELD.keys() | WAITING.keys()


@pytest.mark.parametrize("row", HELD)
def test_the_tests_of_a_row_exist(row: str) -> None:
    for test in HELD[row]:
        path, _, name = test.partition("::")
        assert (TESTS / path).is_file(), test
        assert name in names(path), test
