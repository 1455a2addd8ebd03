"""Scans: one token at a time, states carried, and the law that cutting T changes nothing."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc.dsl.api as ac
from attncc.dsl.errors import RefusedError, SizeError
from attncc.dsl.interp import Result, interpret
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from tests.strategies import cuts, randn, seeds

Tensors = dict[str, torch.Tensor]


def same(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)


@ac.op(scan="T", out="B T H V")
def gated_delta_product(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B (T N) H K"),
    v=ac.Activation("B (T N) H V"),
    g=ac.Activation("B T H", default=0),
    beta=ac.Activation("B (T N) H", default=1),
    s=ac.State("B H K V"),
):
    s = ac.exp(g) * s
    for kj, vj, bj in ac.unroll("N", k, v, beta):
        s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


@ac.op(scan="T", out="B T H")
def convolution(
    x=ac.Activation("B T H"), w=ac.Param("H W"), b=ac.Param("H", default=0), past=ac.Window("B H W")
):
    past = ac.push(past, x, "W")
    return past, ac.silu(ac.dot(past, w, "W") + b)


@ac.op(scan="T", out="B T H V")
def convolved_rule(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    w=ac.Param("H K W"),
    past=ac.Window("B W H K"),
    s=ac.State("B H V K"),
):
    """A window and a state laid out otherwise than usual, both read after they are written."""
    past = ac.push(past, k, "W")
    k = ac.dot(past, w, "W") * (1 + ac.index("T"))
    s = 0.5 * s + k * (v - ac.dot(s, k, "K")) / 8
    return past, s, ac.dot(s, q, "K")


def delta_loop(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    s: torch.Tensor, n: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q, g [B, T, H, ..]; k, v, beta [B, T * n, H, ..], heads repeated; s [B, H, K, V]."""
    s, rows = s.clone(), []
    for t in range(q.shape[1]):
        s = s * g[:, t, :, None, None].exp()
        for j in range(t * n, t * n + n):
            error = v[:, j] - torch.einsum("bhkv,bhk->bhv", s, k[:, j])
            s = s + torch.einsum("bhk,bhv,bh->bhkv", k[:, j], error, beta[:, j])
        rows.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]) / math.sqrt(q.shape[-1]))
    return s, torch.stack(rows, 1) if rows else v.new_zeros(v.shape[0], 0, *v.shape[2:])


@given(seeds(), st.integers(0, 6), st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
@settings(max_examples=20)
def test_the_gated_delta_rule_is_the_plain_loop(seed: int, t: int, heads: tuple[int, int]) -> None:
    hk, group = heads
    hv = hk * group
    q, k, v = (randn(seed + i, 2, t, h, d) for i, (h, d) in enumerate([(hk, 3), (hk, 3), (hv, 4)]))
    g, beta, s = -randn(seed + 3, 2, t, hv).exp(), 2 * randn(seed + 4, 2, t, hv).sigmoid(), None
    s = randn(seed + 5, 2, hv, 3, 4)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "s": s}
    sizes = {"B": 2, "T": t, "Hk": hk, "G": group, "K": 3, "V": 4}
    got = interpret(gated_delta_rule.trace(), tensors, sizes)
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    state, out = delta_loop(q, k, v, g, beta, s)
    same(got.states["s"], state)
    same(got.outputs["o"], out)


@given(seeds(), st.integers(0, 4), st.integers(1, 3))
@settings(max_examples=15)
def test_the_gated_delta_product_decays_once_a_token_and_reads_after_the_last_update(
    seed: int, t: int, n: int
) -> None:
    q, k, v = randn(seed, 1, t, 2, 3), randn(seed + 1, 1, t * n, 2, 3), randn(seed, 1, t * n, 2, 4)
    g, beta = -randn(seed + 2, 1, t, 2).exp(), randn(seed + 3, 1, t * n, 2).sigmoid()
    s = randn(seed + 4, 1, 2, 3, 4)
    sizes = {"B": 1, "T": t, "N": n, "H": 2, "K": 3, "V": 4}
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "s": s}
    got = interpret(gated_delta_product.trace(sizes=sizes), tensors, sizes)
    state, out = delta_loop(q, k, v, g, beta, s, n)
    same(got.states["s"], state)
    same(got.outputs["o"], out)


def test_one_update_a_token_is_the_gated_delta_rule() -> None:
    t = 5
    tensors = {
        "q": randn(0, 1, t, 2, 3), "k": randn(1, 1, t, 2, 3), "v": randn(2, 1, t, 2, 4),
        "g": -randn(3, 1, t, 2).exp(), "beta": randn(4, 1, t, 2).sigmoid(),
    }  # fmt: skip
    sizes = {"B": 1, "T": t, "N": 1, "H": 2, "Hk": 2, "G": 1, "K": 3, "V": 4}
    one = interpret(gated_delta_product.trace(sizes=sizes), tensors, sizes)
    other = interpret(gated_delta_rule.trace(), tensors, sizes)
    assert torch.equal(one.outputs["o"], other.outputs["o"])
    assert torch.equal(one.states["s"], other.states["s"])


def test_a_program_traced_for_another_unrolled_size_is_refused() -> None:
    program = gated_delta_product.trace()
    with pytest.raises(SizeError) as caught:
        interpret(program, {}, {"B": 1, "T": 1, "N": 3, "H": 1, "K": 1, "V": 1})
    assert (caught.value.axis, caught.value.expected, caught.value.found) == ("N", 2, 3)


def test_a_scan_has_no_lse() -> None:
    sizes = {"B": 1, "T": 0, "Hk": 1, "G": 1, "K": 1, "V": 1}
    empty = {name: randn(0, 1, 0, 1, 1) for name in "qkv"}
    with pytest.raises(RefusedError):
        interpret(gated_delta_rule.trace(frozenset()), empty, sizes, return_lse=True)


# --- windows --------------------------------------------------------------------------------------


@given(seeds(), st.integers(0, 6), st.integers(1, 4), st.booleans())
@settings(max_examples=25)
def test_a_short_convolution_is_conv1d_over_its_kept_rows(
    seed: int, t: int, w: int, started: bool
) -> None:
    x, kernel, bias = randn(seed, 2, t, 3), randn(seed + 1, 3, w), randn(seed + 2, 3)
    past = randn(seed + 3, 2, 3, w - 1) if started else torch.zeros(2, 3, w - 1).double()
    tensors = {"x": x, "w": kernel, "b": bias} | ({"past": past} if started else {})
    sizes = {"B": 2, "T": t, "H": 3, "W": w}
    got = interpret(convolution.trace(frozenset(tensors)), tensors, sizes)
    row = torch.cat([past, x.transpose(1, 2)], 2)
    assert torch.equal(got.states["past"], row[:, :, t:])
    if t:
        want = torch.nn.functional.conv1d(row, kernel[:, None], bias, groups=3)
        same(got.outputs["o"], torch.nn.functional.silu(want).transpose(1, 2))
    else:
        assert got.outputs["o"].shape == (2, 0, 3)


# --- the segmentation law -------------------------------------------------------------------------


def piece(op: ac.Declaration, tensors: Tensors, start: int, stop: int, **sizes: int) -> Tensors:
    """The part of each tensor that belongs to tokens ``start`` to ``stop``."""
    part = {}
    for t in op.tensors:
        if t.name in tensors:
            x = tensors[t.name]
            if "T" in t.pattern.axes:
                dim = t.pattern.dim_of("T")
                rows = math.prod(sizes[a] for a in t.pattern.dims[dim] if a != "T")
                x = x.narrow(dim, start * rows, (stop - start) * rows)
            part[t.name] = x
    return part


def in_pieces(op: ac.Declaration, tensors: Tensors, lengths: list[int], **sizes: int) -> Result:
    """A scan run piece by piece, each piece starting from the states of the one before."""
    outputs: list[torch.Tensor] = []
    now, start = dict(tensors), 0
    for length in lengths:
        part = piece(op, now, start, start + length, **sizes)
        program = op.trace(frozenset(part), sizes)
        result = interpret(program, part, {**sizes, "T": length}, position=start)
        now |= result.states
        outputs.append(result.outputs["o"])
        start += length
    return Result(result.states, {"o": torch.cat(outputs, 1)})


LAWFUL: dict[str, Any] = {
    "gated_delta_rule": (
        gated_delta_rule,
        {"q": "B T Hk K", "k": "B T Hk K", "v": "B T HG V", "g": "B T HG", "s": "B HG K V"},
    ),
    "gated_delta_product": (
        gated_delta_product,
        {"q": "B T H K", "k": "B TN H K", "v": "B TN H V", "beta": "B TN H"},
    ),
    "convolution": (convolution, {"x": "B T H", "w": "H W"}),
    "convolved_rule": (
        convolved_rule,
        {"q": "B T H K", "k": "B T H K", "v": "B T H V", "w": "H K W"},
    ),
}


@pytest.mark.parametrize("name", LAWFUL)
@given(data=st.data(), seed=seeds(), length=st.integers(0, 8))
@settings(max_examples=15)
def test_cutting_the_sequence_anywhere_changes_nothing(
    name: str, data: st.DataObject, seed: int, length: int
) -> None:
    op, shapes = LAWFUL[name]
    sizes = {"B": 2, "Hk": 2, "G": 2, "H": 2, "K": 3, "V": 4, "N": 2, "W": 3}
    extent = {**sizes, "T": length, "TN": 2 * length, "HG": 4}
    tensors = {
        x: randn(seed + i, *(extent[a] for a in axes.split()))
        for i, (x, axes) in enumerate(shapes.items())
    }
    lengths = data.draw(cuts(length))
    whole = in_pieces(op, tensors, [length], **sizes)
    parts = in_pieces(op, tensors, lengths, **sizes)
    assert torch.equal(parts.outputs["o"], whole.outputs["o"])
    assert all(torch.equal(parts.states[s], whole.states[s]) for s in whole.states)


def test_an_empty_sequence_leaves_the_state_bit_for_bit() -> None:
    s = randn(0, 1, 1, 2, 2)
    s[0, 0, 0, 0], s[0, 0, 1, 1] = math.nan, -0.0
    empty = {name: randn(0, 1, 0, 1, 2) for name in "qkv"} | {"s": s}
    sizes = {"B": 1, "T": 0, "Hk": 1, "G": 1, "K": 2, "V": 2}
    got = interpret(gated_delta_rule.trace(frozenset({"s"})), empty, sizes)
    assert torch.equal(got.states["s"].view(torch.int64), s.view(torch.int64))
    assert got.states["s"].data_ptr() != s.data_ptr()
    assert got.outputs["o"].shape == (1, 0, 1, 2)


def test_a_scan_leaves_its_inputs_as_they_were() -> None:
    tensors = {name: randn(i, 1, 3, 1, 2) for i, name in enumerate("qkv")}
    tensors["s"] = randn(9, 1, 1, 2, 2)
    before = {name: x.clone() for name, x in tensors.items()}
    interpret(
        gated_delta_rule.trace(frozenset({"s"})),
        tensors,
        {"B": 1, "T": 3, "Hk": 1, "G": 1, "K": 2, "V": 2},
    )
    assert all(torch.equal(tensors[n], before[n]) for n in before)


def test_the_prefix_of_a_longer_run_is_the_shorter_run() -> None:
    tensors = {name: randn(i, 1, 6, 1, 2) for i, name in enumerate("qkv")}
    sizes = {"B": 1, "Hk": 1, "G": 1, "K": 2, "V": 2}
    long = in_pieces(gated_delta_rule, tensors, [6], **sizes).outputs["o"]
    short = in_pieces(gated_delta_rule, tensors, [4], **sizes).outputs["o"]
    assert torch.equal(long[:, :4], short)
