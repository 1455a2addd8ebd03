"""The library's recurrences mean what their papers write, and the torch lowering agrees."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl.errors import SizeError
from tests.examples import examples
from tests.library.recurrences import BY_NAME, RECURRENCES, Dims, Recurrence, exact
from tests.runtime.eager_ops import check
from tests.strategies import randn, seeds
from tests.tolerance import max_error

EVERY = pytest.mark.parametrize("r", RECURRENCES, ids=repr)


def op_of(r: Recurrence) -> Any:
    return getattr(ac.ops, r.name)


@st.composite
def calls(draw: st.DrawFn, r: Recurrence, longest: int) -> tuple[dict[str, Any], Dims]:
    """Arguments of one call: lengths, heads, dims, options."""
    several = r.name == "gated_delta_product"
    d = Dims(
        b=draw(st.integers(1, 2)), t=draw(st.integers(1, longest)), hk=draw(st.integers(1, 2)),
        g=draw(st.integers(1, 3)) if r.grouped else 1, k=draw(st.sampled_from([1, 6, 16])),
        v=draw(st.sampled_from([1, 5, 8])), n=draw(st.integers(1, 3)) if several else 1,
    )  # fmt: skip
    args: dict[str, Any] = {n: x.float() for n, x in r.draw(draw(seeds()), d).items()}
    if r.flag and draw(st.booleans()):
        args = {**args, "q": 3 * args["q"], "k": args["k"] / 2, "l2norm": True}
    if r.scaled and draw(st.booleans()):
        args["scale"] = 0.3
    return args, d


def stored(args: dict[str, Any], dtype: torch.dtype, state: torch.dtype) -> dict[str, Any]:
    """Operands in ``dtype``, gates and rates (no more than three axes) in fp32, the state apart."""
    found = dict(args)
    for n, x in args.items():
        if isinstance(x, torch.Tensor) and (x.dim() > 3 or n in ("x", "s")):
            found[n] = x.to(state if n == "s" else dtype)
    return found


@EVERY
def test_the_reference_is_the_papers_formula(r: Recurrence) -> None:
    @examples(12)
    @given(calls(r, 9))
    def holds(call: tuple[dict[str, Any], Dims]) -> None:
        args, d = call
        found = op_of(r).reference(**args)
        for name, x, want in zip(("s", "o"), found, exact(r, args, d), strict=True):
            assert max_error(x, want, name) <= 1e-12 * max(float(want.abs().max()), 1.0)

    holds()


@EVERY
def test_the_torch_lowering_is_the_reference(r: Recurrence) -> None:
    @examples(6)
    @given(calls(r, 70), st.sampled_from([1, 7, 16, 64]))
    def holds(call: tuple[dict[str, Any], Dims], chunk: int) -> None:
        check(op_of(r), chunk=chunk, **call[0])

    holds()


@EVERY
def test_narrow_operands_and_states_are_rounded_once(r: Recurrence) -> None:
    narrow = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])

    @examples(5)
    @given(calls(r, 40), narrow, narrow)
    def holds(call: tuple[dict[str, Any], Dims], dtype: torch.dtype, state: torch.dtype) -> None:
        args = stored(call[0], dtype, state)
        found = op_of(r)(**args, backend="torch")
        for x, want in zip(found, op_of(r).reference(**args), strict=True):
            size = max(float(want.abs().max()), 1.0)
            assert max_error(x, want) <= (torch.finfo(x.dtype).eps + 4e-6) * size

    holds()


@EVERY
def test_what_is_left_out_is_neutral(r: Recurrence) -> None:
    op, d = op_of(r), Dims(t=5)
    args = {n: x.float() for n, x in r.draw(3, d).items()}
    for t in op.declaration.tensors:
        if t.optional and not t.scalar and t.name in args:
            fill = 0.0 if t.default is None else float(t.default)
            filled = {**args, t.name: torch.full_like(args[t.name], fill)}
            absent = {n: x for n, x in args.items() if n != t.name}
            for x, want in zip(op.reference(**absent), op.reference(**filled), strict=True):
                assert torch.equal(x, want), t.name


@pytest.mark.parametrize("r", [r for r in RECURRENCES if r.name != "hgrn"], ids=repr)
def test_a_state_as_v_by_k(r: Recurrence) -> None:
    op, d = op_of(r), Dims(t=20, g=2 if r.grouped else 1)
    pattern = next(t.pattern for t in op.declaration.tensors if t.name == "s")
    first, second = pattern.axes[-2:]
    turned = op.with_patterns(s=f"{str(pattern)[:-4]} {second} {first}")
    args = {n: x.float() for n, x in r.draw(4, d).items()}
    s, o = op(**args)
    other_s, other_o = turned(**{**args, "s": args["s"].mT.contiguous()})
    assert torch.allclose(other_s.mT, s, atol=1e-6) and torch.allclose(other_o, o, atol=1e-6)
    assert other_s.is_contiguous() and turned.declaration.name == r.name


# --- what only some of them have


@pytest.mark.parametrize(("heads_q", "heads_v"), [(6, 2), (2, 6), (3, 3)])
@pytest.mark.parametrize("given_gates", [True, False])
def test_either_side_of_a_delta_product_may_have_more_heads(
    heads_q: int, heads_v: int, given_gates: bool
) -> None:
    wide, n = max(heads_q, heads_v), 2
    x = {
        "q": randn(0, 1, 9, heads_q, 6), "k": randn(1, 1, 18, heads_q, 6) / 3,
        "v": randn(2, 1, 18, heads_v, 5), "s": torch.zeros(1, wide, 6, 5, dtype=torch.float64),
    }  # fmt: skip
    if given_gates:
        x |= {"g": -randn(3, 1, 9, wide).abs(), "beta": randn(4, 1, 18, wide).sigmoid()}
    args = {name: y.float() for name, y in x.items() if given_gates or name != "s"}
    s, o = ac.ops.gated_delta_product.reference(**args)
    rows = {name: y.double() for name, y in args.items()} | {"s": x["s"]}
    want_s, want_o = exact(BY_NAME["gated_delta_product"], rows, Dims(hk=wide, k=6, n=n))
    assert max_error(s, want_s) < 1e-12 and max_error(o, want_o) < 1e-12


def test_heads_that_do_not_divide_each_other_are_refused() -> None:
    q, k, v = torch.ones(1, 4, 6, 8), torch.ones(1, 8, 6, 8), torch.ones(1, 8, 4, 8)
    with pytest.raises(SizeError, match="a multiple of 4 as in v, found 6"):
        ac.ops.gated_delta_product(q, k, v)
    state = ac.ops.gated_delta_product(q, k, v, sizes={"H": 2})[0]
    assert state.shape == (1, 12, 8, 8)  # said outright


def test_one_gate_a_head_is_gla_over_another_layout() -> None:
    simple = ac.ops.gla.with_patterns(g="B T H")
    r, d = BY_NAME["gla"], Dims(t=30)
    args = {n: x.float() for n, x in r.draw(5, d).items()}
    args["g"] = args["g"][..., :1].repeat(1, 1, 1, d.k)
    s, o = ac.ops.gla(**args)
    other_s, other_o = simple(**{**args, "g": args["g"][..., 0].contiguous()})
    assert torch.allclose(other_s, s, atol=1e-5) and torch.allclose(other_o, o, atol=1e-5)


def test_a_vector_of_zeros_stays_zero_under_the_norm() -> None:
    d = Dims(t=4)
    args: dict[str, Any] = {n: x.float() for n, x in BY_NAME["kda"].draw(6, d).items()}
    args["k"][:, 1] = 0.0
    args["q"][:, 2] = 0.0
    s, o = ac.ops.kda(**args, l2norm=True)
    assert not o[:, 2].any() and torch.isfinite(s).all() and torch.isfinite(o).all()


def test_a_rate_of_two_reflects() -> None:
    k = torch.zeros(1, 3, 1, 4)
    k[..., 2] = 1.0
    s, _ = ac.ops.delta_rule(
        k, k, torch.zeros(1, 3, 1, 4), torch.full((1, 3, 1), 2.0), s=torch.ones(1, 1, 4, 4)
    )
    assert torch.equal(s[0, 0, 2], -torch.ones(4)) and torch.equal(s[0, 0, 0], torch.ones(4))
