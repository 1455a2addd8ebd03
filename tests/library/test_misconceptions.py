"""The source document's common misconceptions, each held to be one.

"Attention Cache and Sequence Parallelism" ends with seven; the last three are about plans for
several GPUs and are tested where those are made.
"""

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import (
    CacheInTrainingError,
    EvictionError,
    LifetimeError,
    StateAxesError,
    SymbolicError,
    TokenIndexError,
)
from attncc.dsl.ir import Lifetime
from attncc.dsl.ledger import Growth, Held

ATTENTION = {"B": 1, "Hkv": 8, "G": 4, "D": 128, "E": 128}
SPARSE = {"B": 1, "Hi": 64, "Di": 128, "H": 128, "R": 512, "P": 64}
DELTA = {"B": 1, "Hk": 16, "G": 2, "K": 128, "V": 128}


# 1. "Training has keys and values too, so it has a KV cache."


def test_1_keys_and_values_of_training_are_activations():
    found = ac.ops.attention.ledger({**ATTENTION, "T": 4096}, "train", layers=32)
    for name in ("k", "v"):
        assert found.entry(name).declared is Lifetime.CACHE
        assert found.entry(name).lifetime is Lifetime.ACTIVATION
        assert name in found.peak["M_saved_activation"].of
    assert found.bytes_of(Lifetime.CACHE) == 0
    assert found.peak["M_persistent_cache_or_state"].bytes == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"page": 16},
        {"dtype": {"k": ac.Quantised()}},
        {"dtype": ac.Quantised(block=64)},
        {"keep": {"k": 128}},
    ],
    ids=["pages", "quantised", "quantised all", "rows"],
)
def test_1_a_cache_in_training_is_refused_with_the_reason(asked):
    with pytest.raises(CacheInTrainingError, match="no place in autograd") as caught:
        ac.ops.attention.ledger({**ATTENTION, "T": 64}, "train", **asked)
    assert caught.value.op == "attention" and isinstance(caught.value, ValueError)


def test_1_nothing_outlives_a_training_step():
    for op, sizes in ((ac.ops.attention, ATTENTION), (ac.ops.gated_delta_rule, DELTA)):
        found = op.ledger({**sizes, "T": 64}, "train")
        with pytest.raises(CacheInTrainingError, match="there is no cache in training"):
            found.kept()
    with pytest.raises(CacheInTrainingError):
        ac.ops.attention.ledger({**ATTENTION, "T": 64}, "train").token_bytes("k")


def test_1_caches_are_not_allocated_for_training():
    with pytest.raises(CacheInTrainingError, match="no place in autograd"):
        ac.ops.attention.caches(sizes=ATTENTION, capacity=64, phase="train")
    held = ac.ops.attention.caches(sizes=ATTENTION, capacity=4, phase="decode", device="meta")
    assert held.cache is not None


def test_1_a_call_that_wants_gradients_cannot_append():
    op, sizes = ac.ops.attention, {"B": 1, "Hkv": 1, "D": 4, "E": 4}
    cache = ac.DenseCache.allocate(op, sizes=sizes, capacity=4, dtype=torch.float32)
    q, k, v = (torch.randn(1, 2, 1, 4) for _ in range(3))
    with pytest.raises(CacheInTrainingError, match="whole histories"):
        op(q, k.requires_grad_(), v, cache=cache)
    assert cache.lengths.tolist() == [0] and not cache.tensors["k"].any()
    with torch.no_grad():
        o = op(q, k, v, cache=cache)
    assert cache.lengths.tolist() == [2]
    torch.testing.assert_close(o, op(q, k, v).detach(), rtol=0, atol=0)


# 2. "With a KV cache decode costs O(1)."


def test_2_a_decode_step_still_reads_the_whole_history():
    read = {}
    for context in (1024, 2048, 4096, 65536):
        found = ac.ops.attention.ledger({**ATTENTION, "S": context})
        assert found.entry("k").read.bytes == found.entry("k").size.bytes
        read[context] = found.entry("k").read.bytes + found.entry("v").read.bytes
    assert all(total == 2 * context * 8 * 128 * 2 for context, total in read.items())
    assert found.entry("k").growth is Growth.LINEAR
    formula = ac.ops.attention.ledger().entry("k").read
    assert "S" in {s.name for s in formula.expr.free_symbols}


def test_2_the_state_is_what_makes_it_constant():
    sizes = [{**DELTA}, {**DELTA, "S": 4096}, {**DELTA, "S": 1_000_000}]
    assert len({ac.ops.gated_delta_rule.ledger(s).read for s in sizes}) == 1


# 3. "DSA keeps the top-k only."


@pytest.mark.parametrize("name", ["ki", "c", "r"])
def test_3_unselected_rows_cannot_be_dropped(name):
    with pytest.raises(EvictionError, match="the next query selects anew") as caught:
        ac.ops.sparse_mla.ledger({**SPARSE, "S": 65536}, keep={name: 2048})
    assert isinstance(caught.value, NotImplementedError) and caught.value.argument == name


def test_3_every_row_is_kept_and_the_index_reads_them_all():
    found = ac.ops.sparse_mla.ledger({**SPARSE, "S": 65536})
    assert found.bytes_of(Lifetime.CACHE) == 65536 * (128 + 512 + 64) * 2
    assert found.entry("ki").read.bytes == found.entry("ki").size.bytes
    assert found.entry("c").read.bytes == 2048 * 512 * 2
    assert found.entry("J").lifetime is Lifetime.CONTROL
    assert found.entry("J").growth is Growth.BOUNDED


def test_3_a_row_that_one_query_leaves_out_is_selected_by_the_next():
    """Two queries with opposite indexes pick disjoint rows of one history."""
    keys = torch.zeros(1, 4096, 1, dtype=torch.float32)
    keys[:, :2048], keys[:, 2048:] = 1.0, -1.0
    c = torch.cat([torch.ones(1, 2048, 2), torch.full((1, 2048, 2), 5.0)], 1)
    zeros = torch.zeros(1, 1, 1, 2)
    picked = []
    for sign in (1.0, -1.0):
        o = ac.ops.sparse_mla(
            torch.full((1, 1, 1, 1), sign), torch.ones(1, 1, 1), keys, zeros,
            torch.zeros(1, 1, 1, 1), c, torch.zeros(1, 4096, 1), scale=1.0,
        )  # fmt: skip
        picked.append(float(o.mean()))
    assert picked == pytest.approx([1.0, 5.0])


def test_3_dense_attention_cannot_drop_rows_either_and_a_window_can():
    with pytest.raises(EvictionError, match="a later query reads"):
        ac.ops.attention.ledger({**ATTENTION, "S": 4096}, keep={"k": 1024})
    windowed = {**ATTENTION, "S": 4096, "w": 1024}
    with pytest.raises(EvictionError, match="at least 1024 rows"):
        ac.ops.sliding_window.ledger(windowed, keep={"k": 1023})
    found = ac.ops.sliding_window.ledger(windowed, keep={"k": 1024})
    assert found.entry("k").size.bytes == 1024 * 8 * 128 * 2
    assert found.entry("k").growth is Growth.BOUNDED


# 4. "GDN is another compressed KV cache."


def test_4_a_state_has_no_row_of_a_token():
    found = ac.ops.gated_delta_rule.ledger({**DELTA, "S": 4096})
    assert found.entry("s").growth is Growth.FIXED and found.entry("s").held is Held.MEMORY
    with pytest.raises(TokenIndexError, match="cannot be indexed by token"):
        found.token_bytes("s")
    with pytest.raises(TokenIndexError, match="every token changes all of it"):
        ac.ops.gated_delta_rule.ledger(DELTA, keep={"s": 64})


def test_4_a_declaration_cannot_index_a_state_by_token():
    with pytest.raises(StateAxesError, match="a state has no axis of tokens"):

        @ac.op(scan="T", out="B T H V")
        def by_token(
            k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), s=ac.State("B T H K V")
        ):
            s = s + k * v
            return s, ac.dot(s, k, "K")

    with pytest.raises(SymbolicError, match="indexing"):

        @ac.op(scan="T", out="B T H V")
        def subscript(k=ac.Activation("B T H K"), s=ac.State("B H K V")):
            return s, ac.dot(s[3], k, "K")

    with pytest.raises(LifetimeError, match="not a history"):

        @ac.op(scan="T", out="B T H V")
        def with_history(q=ac.Activation("B T H V"), k=ac.Cache("B S H V"), s=ac.State("B H V")):
            return s + q, s


def test_4_the_old_tokens_cannot_be_told_apart():
    """Two different histories that leave one state: nothing of either can be read back."""
    k = torch.zeros(1, 2, 1, 2)
    k[0, 0, 0, 0] = k[0, 1, 0, 0] = 1.0
    v = torch.tensor([[[[1.0]], [[3.0]]]])
    other = torch.tensor([[[[-7.0]], [[3.0]]]])
    states = [ac.ops.gated_delta_rule(k, k, x)[0] for x in (v, other)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
