"""The library's attention variants mean what their formulas say, in every kind of call."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl.ir import Lifetime
from tests.examples import examples
from tests.library.variants import BY_NAME, VARIANTS, Heads, Variant, arguments, exact
from tests.runtime.eager_ops import check
from tests.strategies import seeds
from tests.tolerance import max_error

EVERY = pytest.mark.parametrize("v", VARIANTS, ids=repr)
OWN = pytest.mark.parametrize("v", [v for v in VARIANTS if not v.memory], ids=repr)


def op_of(v: Variant) -> Any:
    return getattr(ac.ops, v.name)


def single(args: dict[str, Any]) -> dict[str, Any]:
    """Real tensors in fp32."""
    return {
        n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in args.items()
    }


@st.composite
def calls(draw: st.DrawFn, v: Variant, longest: int) -> dict[str, Any]:
    s = draw(st.integers(1, longest))
    h = Heads(
        b=draw(st.integers(1, 2)), s=s, t=draw(st.integers(1, s)), hkv=draw(st.integers(1, 2)),
        g=draw(st.integers(1, 3)), d=draw(st.sampled_from([1, 6, 8])), e=draw(st.integers(1, 5)),
    )  # fmt: skip
    args = single(arguments(v, draw(seeds()), h))
    if draw(st.booleans()):
        args["scale"] = draw(st.sampled_from([0.0, 0.7]))
    return args


@EVERY
def test_the_reference_is_the_formula(v: Variant) -> None:
    @examples(12)
    @given(calls(v, 11))
    def holds(args: dict[str, Any]) -> None:
        assert max_error(op_of(v).reference(**args), exact(v, args)) <= 1e-12

    holds()


@EVERY
def test_the_torch_lowering_is_the_reference(v: Variant) -> None:
    @examples(6)
    @given(calls(v, 70))
    def holds(args: dict[str, Any]) -> None:
        check(op_of(v), **args, return_lse=True)

    holds()


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_operands(v: Variant, dtype: torch.dtype) -> None:
    args = single(arguments(v, 5, Heads(s=30, t=30)))
    args |= {n: args[n].to(dtype) for n in ("q", "k", "v", "pk", "pv") if n in args}
    found, want = op_of(v)(**args, backend="torch"), op_of(v).reference(**args)
    assert max_error(found, want) <= 2 * torch.finfo(dtype).eps * float(want.abs().max())


def rows(v: Variant, args: dict[str, Any], b: int, low: int, high: int) -> dict[str, Any]:
    """One sequence's rows of everything that has rows; what belongs to the model stays."""
    found = dict(args)
    for t in op_of(v).declaration.tensors:
        if "B" in t.pattern.axes and t.name in args:
            own = args[t.name][b : b + 1]
            long = {"T", "S"} & set(t.pattern.axes)
            found[t.name] = own[:, low:high] if long else own
    return found


@EVERY
def test_packed_sequences_are_those_sequences(v: Variant) -> None:
    lengths, h = [3, 0, 8], Heads(b=3, t=8, s=8)
    args = single(arguments(v, 6, h))
    alone = [rows(v, args, b, 0, n) for b, n in enumerate(lengths)]
    packed = dict(args)
    for t in op_of(v).declaration.tensors:
        if {"B"} < {*t.pattern.axes} and {"T", "S"} & {*t.pattern.axes}:
            packed[t.name] = torch.cat([x[t.name][0] for x in alone])
    cu = torch.tensor([0, 3, 3, 11], dtype=torch.int32)
    for backend in ("torch", "reference"):
        found = op_of(v)(**packed, cu_seqlens=cu, backend=backend)
        want = torch.cat([exact(v, x)[0] for x in alone])
        assert max_error(found, want) <= 3e-6


def paged(v: Variant, args: dict[str, Any], pages: int) -> Any:
    """An empty cache of pages of 4 rows, handed out from the last to the first."""
    held = {}
    for t in op_of(v).declaration.tensors:
        if t.lifetime is Lifetime.CACHE:
            x = args[t.name]
            fill = torch.nan if x.is_floating_point() else -7
            held[t.name] = x.new_full((2 * pages + 1, 4, *x.shape[2:]), fill)
    table = torch.arange(2 * pages, 0, -1).int().view(2, pages)
    return ac.PagedCache(held, table, torch.zeros(2, dtype=torch.int32))


@OWN
def test_prefill_and_decode_in_pages(v: Variant) -> None:
    h = Heads(t=13, s=13)
    args, cut = single(arguments(v, 7, h)), 9
    if v.name == "prefix_lm":
        args["prefix"] = torch.tensor([3, 8], dtype=torch.int32)  # all of it there at once
    cache, whole = paged(v, args, 4), exact(v, args)
    cached = {t.name for t in op_of(v).declaration.tensors if t.lifetime is Lifetime.CACHE}

    def part(low: int, high: int) -> dict[str, Any]:
        return {n: x[:, low:high] if n in {"q", *cached} else x for n, x in args.items()}

    out = [op_of(v)(**part(0, cut), cache=cache)]
    out += [op_of(v).decode(**part(i, i + 1), cache=cache) for i in range(cut, 13)]
    assert max_error(torch.cat(out, 1), whole) <= 3e-6
    assert cache.lengths.tolist() == [13, 13]


def test_a_window_of_the_whole_history_and_a_cap_far_away_change_nothing() -> None:
    args = single(arguments(BY_NAME["attention"], 8, Heads(t=9)))
    plain = ac.ops.attention(**args)
    for name, more in (("sliding_window", {"w": 9}), ("soft_cap", {"cap": 1e6})):
        assert max_error(getattr(ac.ops, name)(**args, **more), plain) < 1e-6


def test_a_cascade_is_attention_over_the_joined_keys() -> None:
    h = Heads(t=9)
    args = single(arguments(BY_NAME["cascade"], 9, h))
    joined = {
        n: torch.cat([args[p].expand(h.b, *args[p].shape), args[n]], 1)
        for n, p in (("k", "pk"), ("v", "pv"))
    }
    assert max_error(ac.ops.cascade(**args), ac.ops.attention(args["q"], **joined)) < 1e-6


def test_a_memory_does_not_grow() -> None:
    args = single(arguments(BY_NAME["cross_attention"], 10, Heads(t=3, s=8)))
    first = ac.ops.cross_attention(**args)
    later = ac.ops.cross_attention.decode(args["q"][:, 2:], args["k"], args["v"])
    assert max_error(later, first[:, 2:]) < 1e-6
