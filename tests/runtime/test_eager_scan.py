"""Scans that are not affine: the token loop of the torch lowering against the interpreter."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from attncc.codegen.pipeline import analyse
from attncc.runtime.eager import blocks, scan
from attncc.runtime.eager.run import run
from tests.runtime import eager_ops as ops
from tests.runtime.eager_ops import call_of, check, results
from tests.runtime.test_eager_affine import tables
from tests.strategies import randn
from tests.tolerance import max_error


def bodies(b: int, t: int) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    h, k, v, w = 2, 4, 3, 4
    key, vec = 0.5 * randn(0, b, t, h, k).float(), randn(1, b, t, h, v).float()
    s, m = randn(2, b, h, k, v).float(), randn(3, b, h, k, v).float()
    win = randn(4, b, h, k, w - 1).float()
    return {
        "not affine": (ops.squashed, {"k": key, "v": vec, "s": s}),
        "two states": (ops.momentum, {"k": key, "v": vec, "m": m, "s": s}),
        "window": (
            ops.convolved,
            {"k": key, "v": vec, "w": randn(5, h, k, w).float(), "win": win, "s": s},
        ),
    }


NAMES = list(bodies(1, 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("t", [0, 1, 2, 33])
@pytest.mark.parametrize("given", [True, False])
def test_any_body(name: str, t: int, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BUDGET", 300)  # some tokens at a time
    op, args = bodies(2, t)[name]
    assert analyse(op.declaration.trace()).affine is None
    held = ("s", "m", "win")
    args = {n: x for n, x in args.items() if given or n not in held}
    check(op, **args, sizes={"W": 4} if name == "window" else {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cu", [[0, 0, 9, 20], [0, 7, 7, 20], [0, 20, 20, 20], [0, 5, 10, 20]])
def test_packed_equals_dense(name: str, cu: list[int]) -> None:
    op, args = bodies(1, 20)[name]
    dense = bodies(3, 20)[name][1]
    held = {n: dense[n] for n in ("s", "m", "win") if n in args}
    model = {n: args[n] for n in ("w",) if n in args}
    flat = {n: x[0] for n, x in args.items() if n not in held and n not in model}
    got = op(**flat, **held, **model, cu_seqlens=torch.tensor(cu), backend="torch")
    for b, (lo, hi) in enumerate(pairwise(cu)):
        part = {n: x[None, lo:hi] for n, x in flat.items()}
        state = {n: x[b : b + 1] for n, x in held.items()}
        want = op(**part, **state, **model, backend="torch")
        assert max_error(got.o[lo:hi], want.o[0].double()) < 1e-6
        for n in held:
            new = getattr(got, n)[b]
            assert max_error(new, getattr(want, n)[0].double()) < 1e-6
            if lo == hi:
                assert torch.equal(new, held[n][b])


@pytest.mark.parametrize("name", ["two states", "window"])
def test_two_calls_are_one(name: str) -> None:
    op, args = bodies(2, 20)[name]
    whole = op(**args, backend="torch")
    held, outs, start = {n: args.pop(n) for n in ("s", "m", "win") if n in args}, [], 0
    model = {n: args.pop(n) for n in ("w",) if n in args}
    for n in (3, 1, 0, 16):
        part = {m: x[:, start : start + n] for m, x in args.items()}
        got = op(**part, **held, **model, backend="torch")
        held, start = {m: getattr(got, m) for m in held}, start + n
        outs.append(got.o)
    assert max_error(torch.cat(outs, 1), whole.o.double()) < 1e-6
    for m, x in held.items():
        assert max_error(x, getattr(whole, m).double()) < 1e-6


@pytest.mark.parametrize("name", ["gdn", "gdp", "rwkv7", "two slots", "position"])
def test_affine_bodies_may_also_run_token_by_token(name: str) -> None:
    op, args = tables(0, 2, 40)[name]
    call, other = call_of(op, **args), call_of(op, **args, backend="torch")
    scan.run(call)
    run(other, analyse(call.program))
    for n, x in results(call).items():
        assert max_error(x, results(other)[n].double()) < 1e-5


def test_states_may_be_updated_in_place() -> None:
    op, args = bodies(2, 5)["two states"]
    want = op(**args, backend="torch")
    state = {n: args[n].clone() for n in ("s", "m")}
    call = replace(call_of(op, **{**args, **state}), final_states=state)
    scan.run(call)
    assert torch.equal(state["s"], want.s) and torch.equal(state["m"], want.m)
    assert torch.equal(call.outputs["o"], want.o)
