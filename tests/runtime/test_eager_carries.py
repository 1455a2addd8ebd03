"""Windows, element-wise states and several states in the torch lowering, all tokens at once."""

from itertools import pairwise

import pytest
import torch

import attncc as ac
from attncc.codegen.forms import AffineForm, DiagonalForm, WindowForm
from attncc.codegen.pipeline import analyse
from attncc.runtime.eager import blocks
from tests.runtime import state_ops as ops
from tests.runtime.eager_ops import check
from tests.strategies import randn
from tests.tolerance import max_error

KINDS = {
    "hgrn": (DiagonalForm,), "selective": (DiagonalForm,), "skips": (DiagonalForm,),
    "normalised": (AffineForm, DiagonalForm), "two memories": (AffineForm, AffineForm),
    "cascade": (AffineForm, AffineForm), "one way": (DiagonalForm, DiagonalForm),
    "momentum": None, "convolution": (WindowForm,), "stacked": (WindowForm, WindowForm),
    "convolved delta": (WindowForm, AffineForm), "fed back": None,
    "more query heads": (AffineForm,), "more value heads": (AffineForm,),
    "shared state": (AffineForm,),
}  # fmt: skip


@pytest.mark.parametrize("name", ops.NAMES)
def test_the_forms_that_are_found(name: str) -> None:
    op, _, _, _ = ops.cases(1, 1)[name]
    analysis = analyse(op.declaration.trace())
    kinds = None if analysis.carries is None else tuple(map(type, analysis.carries.forms))
    assert kinds == KINDS[name], analysis.refusals
    assert kinds is not None or analysis.refusals


@pytest.mark.parametrize("name", ops.NAMES)
@pytest.mark.parametrize("t", [0, 1, 2, 70])
@pytest.mark.parametrize("given", [True, False])
def test_any_length(name: str, t: int, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in KINDS and KINDS[name] != (AffineForm,):
        monkeypatch.setattr(blocks, "BUDGET", 2000)  # some tokens at a time
    op, args, held, _ = ops.cases(2, t)[name]
    args = {n: x for n, x in args.items() if given or n not in held}
    check(op, chunk=16, **args, sizes=ops.SIZES.get(name, {}))


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("t", [1, 3, 20])
def test_any_width_of_a_window(width: int, t: int) -> None:
    for name in ("convolution", "stacked", "convolved delta"):
        op, args, _, _ = ops.cases(2, t, width)[name]
        check(op, **args)


@pytest.mark.parametrize("name", ops.NAMES)
@pytest.mark.parametrize("cu", [[0, 0, 9, 20], [0, 20, 20, 20], [0, 2, 3, 20]])
def test_packed_equals_dense(name: str, cu: list[int]) -> None:
    op, args, held, model = ops.cases(1, 20)[name]
    dense = ops.cases(3, 20)[name][1]
    states = {n: dense[n] for n in held}
    params = {n: args[n] for n in model}
    flat = {n: x[0] for n, x in args.items() if n not in held and n not in model}
    sizes = ops.SIZES.get(name, {})
    got = op(**flat, **states, **params, cu_seqlens=torch.tensor(cu), backend="torch", sizes=sizes)
    for b, (lo, hi) in enumerate(pairwise(cu)):
        rows = {n: len(x) // 20 for n, x in flat.items()}
        part = {n: x[None, lo * rows[n] : hi * rows[n]] for n, x in flat.items()}
        state = {n: x[b : b + 1] for n, x in states.items()}
        want = op(**part, **state, **params, backend="torch", sizes=sizes)
        for out in got._fields:
            value, exact = getattr(got, out), getattr(want, out)[0].double()
            value = value[b] if out in held else value[lo:hi]
            assert max_error(value, exact) < 2e-6, out
            if lo == hi and out in held:
                assert torch.equal(value, states[out][b])


@pytest.mark.parametrize("name", [n for n in ops.NAMES if n != "skips"])  # takes the position
def test_several_calls_are_one(name: str) -> None:
    op, args, held, model = ops.cases(2, 20)[name]
    sizes = ops.SIZES.get(name, {})
    whole = op(**args, backend="torch", sizes=sizes)
    states = {n: args[n] for n in held}
    params = {n: args[n] for n in model}
    tokens = {n: x for n, x in args.items() if n not in held and n not in model}
    outs, start = [], 0
    for n in (3, 1, 0, 16):
        rows = {m: x.shape[1] // 20 for m, x in tokens.items()}
        part = {m: x[:, start * rows[m] : (start + n) * rows[m]] for m, x in tokens.items()}
        got = op(**part, **states, **params, backend="torch", sizes=sizes)
        states, start = {m: getattr(got, m) for m in held}, start + n
        outs.append(got.o)
    assert max_error(torch.cat(outs, 1), whole.o.double()) < 3e-6
    for m, x in states.items():
        assert max_error(x, getattr(whole, m).double()) < 3e-6


def test_a_decay_of_zero_forgets_and_a_negative_one_flips() -> None:
    x = torch.ones(1, 9, 1)
    w = torch.tensor([0.5, 1.0, 3.0, 0.5, -1.0, 0.5, 1.0, 2.0, 2.0]).reshape(1, 9, 1)
    state, o = ops.skips(x, w, s=torch.full((1, 1), 5.0), backend="torch")
    want, exact = ops.skips.reference(x, w, s=torch.full((1, 1), 5.0))
    assert torch.equal(o.double(), exact) and torch.equal(state.double(), want)


def test_a_state_that_is_replaced_by_every_token() -> None:
    @ac.op(scan="T", out="B T H")
    def latest(x=ac.Activation("B T H"), s=ac.State("B H")):
        return x, x - s

    x, s = randn(0, 2, 9, 3).float(), randn(1, 2, 3).float()
    check(latest, x=x, s=s)
