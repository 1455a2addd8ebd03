"""Trials: calls on made-up data that keep what kernels are compiled for, judged by the contract."""

from contextlib import suppress

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.runtime import trial
from attncc.runtime.arrivals import arrivals
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.draws import roles
from attncc.runtime.eager.run import run as run_eager
from attncc.runtime.samples import Sample, Trait, sample_call
from attncc.runtime.sources import call_sources, spec_for
from attncc.runtime.trial import compare, moved, trial_call, trial_spec
from tests.selected_ops import picks, sparse

ATTENTION = {"D": 32, "E": 16, "G": 2, "Hkv": 2}
GDR = {"K": 16, "V": 32, "G": 2, "Hk": 2}
CALLS = [
    (ac.ops.attention, ATTENTION, form)
    for form in ("", "lse", "packed", "cache", "packed cache", "paged", "packed paged lse")
] + [(ac.ops.gated_delta_rule, GDR, form) for form in ("", "packed", "pool", "packed pool")]


def big(op, sizes, form, phase, dtype="bf16"):
    traits = frozenset(Trait(name) for name in form.split())
    return sample_call(op.declaration, Sample(sizes, phase, dtype, traits=traits))


def as_kernel(change=lambda call: None):
    """Runs the torch lowering where kernels would run, then changes something."""

    def run(call, analysis, spec, phase, *, parts=None):
        run_eager(call, trial.as_kernels(analysis), round_operands=True)
        change(call)

    return run


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(("op", "sizes", "form"), CALLS)
def test_a_trial_keeps_the_kind_of_call_and_finds_what_is_wrong(
    monkeypatch, op, sizes, form, phase
):
    call = big(op, sizes, form, phase)
    spec = spec_of(call)
    small = trial_call(call, "cpu")
    assert small.sizes["T"] <= 80 and small.sizes["B"] == 2
    same = spec_of(small)
    for name in ("dtypes", "packed", "lengths", "return_lse", "given_states", "pages", "pools"):
        assert getattr(same, name) == getattr(spec, name)
    assert same.aligned >= spec.aligned - {"lse"}
    monkeypatch.setattr(trial, "run_kernels", as_kernel())
    found = compare(small, spec, phase)
    assert found and all(f.judged.right for f in found), found
    names = {f.output for f in found}
    assert names >= {"o"} | ({"lse"} if "lse" in form else set()) | set(call.program.state_names)
    if call.new_rows:
        assert {f"{n} (appended)" for n in call.new_rows} <= names

    def spoil(call):
        call.outputs["o"].view(-1)[-1] += 1

    monkeypatch.setattr(trial, "run_kernels", as_kernel(spoil))
    found = compare(trial_call(call, "cpu"), spec, phase)
    assert [f.output for f in found if not f.judged.right] == ["o"]


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_histories_stored_as_e4m3_have_scales_of_their_own(monkeypatch, scale):
    how = ac.Quantised(scale=scale)
    sizes = {"B": 4, **{a: ATTENTION[a] for a in ("D", "E", "Hkv")}}
    cache = ac.DenseCache.allocate(ac.ops.attention, sizes=sizes, capacity=256, dtype=how)
    q, rows = torch.empty(4, 1, 4, 32, dtype=torch.bfloat16), {}
    for name, width in (("k", 32), ("v", 16)):
        rows[name] = torch.empty(4, 1, 2, width, dtype=torch.bfloat16)
    call, _ = bind(ac.ops.attention.declaration, (q, *rows.values()), {"cache": cache})
    small = trial_call(call, "cpu")
    assert small.scales.keys() == {"k", "v"} and spec_of(small).quantised == spec_of(call).quantised
    monkeypatch.setattr(trial, "run_kernels", as_kernel())
    found = compare(small, spec_of(call), "decode")
    assert [f.output for f in found] == ["o"] and found[0].judged.right


def test_what_a_wrong_kernel_counted_is_forgotten(monkeypatch):
    call = trial_call(big(ac.ops.attention, ATTENTION, "", "decode"), "cpu")
    device = torch.device("cpu")

    def count(call):
        arrivals(4, device).fill_(3)

    def fail(call):
        count(call)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(trial, "run_kernels", as_kernel(count))
    compare(call, spec_of(call), "decode")
    assert arrivals(4, device).any()  # right answers: whatever they left is their own
    for change in (lambda c: (count(c), c.outputs["o"].zero_()), fail):
        arrivals(4, device).zero_()
        monkeypatch.setattr(trial, "run_kernels", as_kernel(change))
        with suppress(RuntimeError):
            compare(call, spec_of(call), "decode")
        assert not arrivals(4, device).any()


def test_what_nobody_writes_is_seen(monkeypatch):
    call = big(ac.ops.attention, ATTENTION, "cache", "decode")
    monkeypatch.setattr(trial, "run_kernels", lambda *args, **kwargs: None)
    wrong = [f.output for f in compare(trial_call(call, "cpu"), spec_of(call), "decode")
             if not f.judged.right]  # fmt: skip
    assert wrong == ["o", "k (appended)", "v (appended)"]


def test_gates_are_logarithms_and_vectors_have_length_1():
    program = ac.ops.gated_delta_rule.declaration.trace()
    found = roles(program, analyse(program))
    assert found == {"q": "unit", "k": "unit", "g": "gate", "beta": "coef"}
    call = trial_call(big(ac.ops.gated_delta_rule, GDR, "", "prefill", "fp32"), "cpu")
    assert bool((call.tensors["g"] <= 0).all())
    lengths = call.tensors["k"].norm(dim=-1)
    assert torch.allclose(lengths, torch.ones_like(lengths), atol=1e-5)


def test_a_body_without_a_table_stays_finite_too():
    program = ac.ops.gated_oja.declaration.trace()
    assert analyse(program).affine is None
    found = roles(program, analyse(program))
    assert found == {"q": "unit", "v": "unit", "g": "gate", "beta": "coef"}
    plain = ac.ops.hgrn.declaration.trace()  # nothing is read along an axis
    assert roles(plain, analyse(plain)) == {"g": "gate"}


def test_a_seed_gives_the_same_call_and_another_one_other_data():
    call = big(ac.ops.attention, ATTENTION, "paged", "decode")
    one, two, other = (trial_call(call, "cpu", seed=n) for n in (0, 0, 1))
    assert torch.equal(one.tensors["q"], two.tensors["q"])
    assert torch.equal(one.block_table, two.block_table)
    assert not torch.equal(one.tensors["q"], other.tensors["q"])


def test_the_callers_defaults_change_nothing():
    call = big(ac.ops.attention, ATTENTION, "packed lse cache", "prefill")
    want = trial_call(call, "cpu")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        got = trial_call(call, "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(got.tensors["q"], want.tensors["q"])
    assert got.lse.dtype is torch.float32 and torch.equal(got.lengths, want.lengths)


def test_a_copy_shares_no_memory():
    call = trial_call(big(ac.ops.gated_delta_rule, GDR, "pool", "decode"), "cpu")
    other = moved(call, torch.device("cpu"))
    other.pools["s"].pool.zero_()
    assert other.tensors["s"] is other.pools["s"].pool
    assert bool(call.pools["s"].pool.abs().sum() > 0)


def test_a_full_trial_has_the_calls_own_sizes():
    sizes = {**ATTENTION, "B": 2, "T": 70, "S": 70}
    call = sample_call(ac.ops.attention.declaration, Sample(sizes, "prefill"))
    assert trial_call(call, "cpu", small=False).sizes == call.sizes


# --- selections


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("form", ["", "cache", "paged"])
def test_a_trial_of_a_selection_has_more_rows_than_are_picked(monkeypatch, form, phase):
    sizes = {"Hi": 4, "Di": 16, "H": 5, "R": 32, "P": 16}
    call = big(sparse, sizes, form, phase)
    small = trial_call(call, "cpu")
    k = analyse(call.program).selected.selection.node.k
    assert small.sizes["S"] >= k + 48 and small.sizes["T"] <= 24
    assert spec_of(small).static == spec_of(call).static
    for name in ("qi", "w", "ki"):  # sums of these are exact in any order
        assert set((small.tensors[name].float() / 1.75).unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert not small.tensors["qc"].float().frac().eq(0).all()
    monkeypatch.setattr(trial, "run_kernels", as_kernel())
    found = compare(small, spec_of(call), phase)
    assert all(f.judged.right for f in found), found


def test_a_trial_finds_one_wrong_pick(monkeypatch):
    """What is picked in its place is a row that no order of sums would have picked."""
    call = big(picks, {"Hi": 3, "Di": 16}, "", "decode")

    def spoil(call):
        own = call.outputs["o"]
        missing = set(range(call.sizes["S"])) - set(own[0, 0].tolist())
        own[0, 0, -1] = max(missing)

    monkeypatch.setattr(trial, "run_kernels", as_kernel())
    [right] = compare(trial_call(call, "cpu"), spec_of(call), "decode")
    assert right.judged.error == right.judged.budget == 0.0
    monkeypatch.setattr(trial, "run_kernels", as_kernel(spoil))
    [wrong] = compare(trial_call(call, "cpu"), spec_of(call), "decode")
    assert wrong.judged.budget == 0.0 and not wrong.judged.right


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_an_index_stored_as_e4m3_is_exact_too(monkeypatch, scale):
    how = ac.Quantised(scale=scale)
    cache = ac.DenseCache.allocate(picks, sizes={"B": 2, "Di": 16}, capacity=128, dtype=how)
    named = {"qi": torch.empty(2, 1, 3, 16), "w": torch.empty(2, 1, 3), "ki": torch.empty(2, 1, 16)}
    named = {n: t.bfloat16() for n, t in named.items()}
    call, _ = bind(picks.declaration, (), {**named, "cache": cache})
    small = trial_call(call, "cpu")
    scales = small.scales["ki"].tensor
    assert scales.dtype is torch.uint8 or bool((scales.log2() % 1 == 0).all())
    monkeypatch.setattr(trial, "run_kernels", as_kernel())
    found = compare(small, spec_of(call), "decode")
    assert [f.judged.error for f in found if f.output == "o"] == [0.0]


@pytest.mark.parametrize("form", ["", "pool"])
def test_a_trial_of_many_states_has_the_kernels_of_many(form):
    """Plans follow the number of systems, of which a trial has few."""
    call = big(ac.ops.gated_delta_rule, {"K": 128, "V": 128, "G": 2, "Hk": 8, "B": 16}, form,
               "prefill")  # fmt: skip
    spec, small = spec_for(call, "sm_90"), trial_call(call, "cpu")
    own = [s.digest for s in call_sources(call, "prefill", spec=spec)]
    assert own != [s.digest for s in call_sources(small, "prefill", spec=spec)]
    kept = trial_spec(call, spec)
    assert own == [s.digest for s in call_sources(small, "prefill", spec=kept)]
