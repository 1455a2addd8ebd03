"""What every node means, against torch code that shares nothing with the interpreter."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attncc.dsl.api as ac
from attncc.dsl.axes import Pattern
from attncc.dsl.errors import ArgumentError, RankError, RefusedError, SizeError
from attncc.dsl.interp import Named, interpret, pack, unpack
from attncc.dsl.library.attention import attention
from tests.strategies import patterns, randn, seeds, whole

INF, NAN = math.inf, math.nan


def run(op: ac.Declaration, tensors: dict[str, Any], **sizes: int) -> Any:
    """The one output of a call in fp64; arguments that are not given are absent."""
    program = op.trace(frozenset(tensors), sizes)
    (output,) = interpret(program, tensors, sizes).outputs.values()
    return output


def fp64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(x: torch.Tensor, y: torch.Tensor, tol: float = 1e-13) -> None:
    torch.testing.assert_close(x, y, rtol=tol, atol=tol, equal_nan=True)


def exactly(x: torch.Tensor, y: Any) -> None:
    torch.testing.assert_close(x, torch.as_tensor(y, dtype=x.dtype), rtol=0, atol=0, equal_nan=True)


# --- layouts --------------------------------------------------------------------------------------


@given(patterns(), st.data())
def test_a_tensor_unpacked_and_packed_is_itself(pattern: Pattern, data: st.DataObject) -> None:
    sizes = {a: data.draw(st.integers(0, 3)) for a in pattern.axes}
    shape = [math.prod(sizes[a] for a in dim) for dim in pattern.dims]
    x = randn(0, *shape)
    value = unpack(x, pattern, sizes)
    turned = Named(value.data.permute(list(range(value.data.dim()))[::-1]), value.axes[::-1])
    assert torch.equal(pack(value, pattern, sizes), x)
    assert torch.equal(pack(turned, pattern, sizes), x)


def test_the_last_axis_of_a_group_varies_fastest() -> None:
    x = torch.arange(6.0)
    named = unpack(x, Pattern((("H", "G"),)), {"H": 2, "G": 3})
    assert named.axes == ("H", "G")
    assert named.data.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_of_the_right_count_but_another_shape_is_refused() -> None:
    q, k = randn(0, 1, 3, 2, 4), randn(1, 1, 3, 1, 4)
    sizes = {"B": 1, "T": 3, "S": 3, "Hkv": 1, "G": 2, "D": 4, "E": 4}
    with pytest.raises(SizeError, match=r"expected \(1, 3, 2, 4\), found \(1, 2, 3, 4\)"):
        run(attention, {"q": q.transpose(1, 2), "k": k, "v": k}, **sizes)
    with pytest.raises(RankError):
        run(attention, {"q": q.flatten(2), "k": k, "v": k}, **sizes)


def test_a_missing_input_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        run(attention, {}, B=1, T=1, S=1, Hkv=1, G=1, D=1, E=1)
    assert caught.value.argument == "q"


# --- softmax --------------------------------------------------------------------------------------


@given(seeds(), st.sampled_from([(1, 1), (2, 3), (1, 6), (3, 1)]), st.integers(1, 5), seeds())
@settings(max_examples=25)
def test_attention_is_torch_attention_on_grouped_heads(
    seed: int, heads: tuple[int, int], t: int, more: int
) -> None:
    (hkv, g), s, d, e = heads, t + more % 4, 5, 3
    q, k, v = randn(seed, 2, t, hkv * g, d), randn(seed, 2, s, hkv, d), randn(more, 2, s, hkv, e)
    sizes = {"B": 2, "T": t, "S": s, "Hkv": hkv, "G": g, "D": d, "E": e}
    got = interpret(attention.trace(), {"q": q, "k": k, "v": v}, sizes, return_lse=True)
    mask = torch.ones(t, s, dtype=torch.bool).tril(s - t)
    k, v = (x.repeat_interleave(g, 2).transpose(1, 2) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask)
    same(got.outputs["o"], want.transpose(1, 2))
    score = (q.transpose(1, 2) @ k.mT / d**0.5).masked_fill(~mask, -INF)
    assert got.lse is not None and got.lse_axes == ("B", "T", "Hkv", "G")
    same(got.lse.flatten(2), score.logsumexp(-1).transpose(1, 2))


@ac.op(out="T S")
def probabilities(
    x=ac.Cache("T S"),
    seen=ac.Cache(
        "T S",
    ),
    sink=ac.Param("T", default=-INF),
):
    return ac.softmax(x, "S", where=seen > 0, sink=sink)


def rows(x: list[list[float]], seen: list[list[float]], sink: list[float] | None = None) -> Any:
    tensors = {"x": fp64(x), "seen": fp64(seen)}
    if sink is not None:
        tensors["sink"] = fp64(sink)
    program = probabilities.trace(frozenset(tensors))
    t, s = tensors["x"].shape
    result = interpret(program, tensors, {"T": t, "S": s}, return_lse=True)
    return result.outputs["o"], result.lse


def test_a_row_that_sees_nothing_is_zero_and_its_lse_is_minus_infinity() -> None:
    p, lse = rows([[1.0, 2.0], [NAN, INF], [-INF, -INF]], [[1, 1], [0, 0], [1, 1]])
    exactly(p[1:], [[0, 0], [0, 0]])
    exactly(lse[1:], [-INF, -INF])
    same(p[0], fp64([1.0, 2.0]).softmax(-1))


def test_masked_scores_do_not_count_whatever_they_are() -> None:
    for hidden in (NAN, INF, -INF, 1e300):
        p, lse = rows([[0.0, hidden, math.log(3.0)]], [[1, 0, 1]])
        same(p, fp64([[0.25, 0.0, 0.75]]))
        same(lse, fp64([math.log(4.0)]))


def test_a_visible_nan_shows_but_masked_weights_stay_zero() -> None:
    p, lse = rows([[NAN, 0.0, 1.0]], [[1, 0, 1]])
    exactly(p, [[NAN, 0.0, NAN]])
    exactly(lse, [NAN])


def test_a_sink_takes_weight_and_stays_in_the_lse() -> None:
    p, lse = rows([[0.0, 0.0], [5.0, 5.0]], [[1, 1], [0, 0]], [math.log(2.0), 3.0])
    same(p, fp64([[0.25, 0.25], [0.0, 0.0]]))
    same(lse, fp64([math.log(4.0), 3.0]))


def test_a_sink_of_minus_infinity_is_none() -> None:
    scores, seen = [[1.0, 2.0], [3.0, 4.0]], [[1, 1], [0, 0]]
    for with_sink, without in zip(
        rows(scores, seen, [-INF, -INF]), rows(scores, seen), strict=True
    ):
        exactly(with_sink, without)


def test_a_sink_larger_than_every_score_overflows_nothing() -> None:
    p, lse = rows([[-1e5, -1e5]], [[1, 1]], [1e5])
    exactly(p, [[0.0, 0.0]])
    exactly(lse, [1e5])


def test_a_sink_may_have_an_axis_that_the_score_lacks() -> None:
    @ac.op(out="H")
    def f(x=ac.Cache("S"), sink=ac.Param("H")):
        return ac.sum(ac.softmax(x, "S", sink=sink), "S")

    x, sink = randn(0, 4), randn(1, 3)
    mass = x.exp().sum()
    same(run(f, {"x": x, "sink": sink}, S=4, H=3), mass / (mass + sink.exp()))


def test_a_mask_may_have_axes_that_the_score_lacks() -> None:
    @ac.op(out="T S")
    def f(x=ac.Cache("S"), t=ac.Activation("T")):
        return ac.softmax(x, "S", where=ac.causal) + 0 * t

    x = randn(0, 3)
    want = [x[: i + 2].softmax(0).tolist() + [0.0] * (1 - i) for i in range(2)]
    same(run(f, {"x": x, "t": torch.zeros(2)}, T=2, S=3), fp64(want))


def test_lse_needs_exactly_one_softmax() -> None:
    @ac.op(out="S")
    def two(x=ac.Cache("S")):
        return ac.softmax(x, "S") - ac.softmax(-x, "S")

    with pytest.raises(RefusedError) as caught:
        interpret(two.trace(), {"x": randn(0, 3)}, {"S": 3}, return_lse=True)
    assert caught.value.found == 2


# --- top-k ----------------------------------------------------------------------------------------

ODD = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0])


def by_the_contract(row: list[float], seen: list[bool], k: int) -> list[int]:
    def order(i: int) -> tuple[bool, float, int]:
        nan = math.isnan(row[i])
        return (nan, 0.0 if nan else -row[i], i)

    picked = sorted((i for i in range(len(row)) if seen[i]), key=order)[:k]
    return picked + [-1] * (k - len(picked))


@given(st.lists(st.tuples(ODD, st.booleans()), max_size=9), st.integers(1, 6))
@example([(NAN, True), (-INF, True), (NAN, False), (0.0, True), (-0.0, True), (0.0, True)], 6)
def test_topk_is_the_total_order_of_the_contract(places: list[Any], k: int) -> None:
    @ac.op(out="J")
    def picks(x=ac.Cache("S"), seen=ac.Cache("S")):
        return ac.topk(x, "S", k=k, where=seen > 0) + 0

    row, seen = [x for x, _ in places], [b for _, b in places]
    tensors = {"x": fp64(row), "seen": fp64(seen)}
    assert run(picks, tensors, S=len(row)).tolist() == by_the_contract(row, seen, k)


@given(seeds(), st.integers(1, 7), st.integers(0, 9), st.booleans())
@settings(max_examples=20)
def test_sparse_attention_is_dense_attention_over_the_selected_set(
    seed: int, k: int, s: int, causal: bool
) -> None:
    @ac.op(out="T D")
    def sparse(i=ac.Cache("S"), q=ac.Activation("T D"), c=ac.Cache("S D")):
        places = ac.topk(i, "S", k=k, where=ac.causal if causal else None)
        score = ac.dot(q, c[places], "D")
        return ac.dot(ac.softmax(score, places), c[places], places)

    i, q, c = whole(seed, s), randn(seed, 3, 2), randn(seed, s, 2)
    got = run(sparse, {"i": i, "q": q, "c": c}, T=3, S=s, D=2)
    for t in range(3):
        seen = [not causal or j <= t + s - 3 for j in range(s)]
        chosen = [j for j in by_the_contract(i.tolist(), seen, k) if j >= 0]
        want = (c[chosen] @ q[t]).softmax(0) @ c[chosen] if chosen else torch.zeros(2).double()
        same(got[t], want)


def test_gathering_at_minus_one_gives_zero_even_next_to_a_nan() -> None:
    @ac.op(out="J D")
    def rows_of(i=ac.Cache("S"), c=ac.Cache("S D")):
        return c[ac.topk(i, "S", k=3, where=i > 0)]

    c = torch.tensor([[NAN, NAN], [1.0, 2.0]])
    got = run(rows_of, {"i": torch.tensor([-1.0, 5.0]), "c": c}, S=2, D=2)
    exactly(got, [[1, 2], [0, 0], [0, 0]])


# --- positions, tables, history -------------------------------------------------------------------


@pytest.mark.parametrize(("t", "s"), [(4, 2), (2, 5), (3, 3), (1, 4), (3, 0)])
def test_queries_are_the_tail_of_their_own_history(t: int, s: int) -> None:
    @ac.op(out="T S")
    def distance(q=ac.Activation("T"), k=ac.Cache("S")):
        return (ac.index("T") - ac.index("S")) * (q * 0 + 1) + k * 0

    want = [[i + s - t - j for j in range(s)] for i in range(t)]
    got = run(distance, {"q": torch.zeros(t), "k": torch.zeros(s)}, T=t, S=s)
    assert got.tolist() == want


def test_positions_in_a_foreign_memory_start_at_zero() -> None:
    @ac.op(out="T S")
    def positions(q=ac.Activation("T"), k=ac.Memory("S")):
        return 10 * ac.index("T") + ac.index("S") + 0 * q * k

    assert run(positions, {"q": torch.zeros(2), "k": torch.zeros(3)}, T=2, S=3).tolist() == [
        [0, 1, 2],
        [10, 11, 12],
    ]


def test_a_history_in_blocks_counts_every_token() -> None:
    @ac.op(out="T")
    def position(q=ac.Activation("T"), k=ac.Cache("(Sb C)")):
        return ac.index("T") + 0 * q + 0 * ac.sum(k, "Sb C")

    got = run(position, {"q": torch.zeros(2), "k": torch.zeros(12)}, T=2, Sb=3, C=4)
    assert got.tolist() == [10, 11]


def test_take_clamps_to_the_table_and_follows_the_index() -> None:
    @ac.op(out="H T")
    def relative(table=ac.Param("H L"), i=ac.Activation("T")):
        return ac.take(table, "L", i)

    table, i = randn(0, 2, 4), torch.tensor([-7, 0, 3, 4, 99])
    got = run(relative, {"table": table, "i": i}, H=2, L=4, T=5)
    exactly(got, table[:, [0, 0, 3, 3, 3]])


def test_take_may_shift_a_sequence_along_its_own_axis() -> None:
    @ac.op(out="B T")
    def shifted(x=ac.Activation("B T")):
        return ac.take(x, "T", ac.index("T") - 1)

    x = randn(0, 2, 4)
    exactly(run(shifted, {"x": x}, B=2, T=4), x[:, [0, 0, 1, 2]])


def test_at_query_is_the_value_at_the_querys_own_position() -> None:
    @ac.op(out="B T S")
    def documents(q=ac.Activation("B T"), doc=ac.Cache("B S")):
        return ac.where(ac.eq(ac.at_query(doc, "S"), doc), 1, 0) + 0 * q

    doc = torch.tensor([[7, 7, 8, 8, 8], [1, 2, 2, 1, 1]])
    got = run(documents, {"q": torch.zeros(2, 3), "doc": doc}, B=2, T=3, S=5)
    want = doc[:, 2:, None] == doc[:, None, :]
    exactly(got, want)


def test_at_query_keeps_ids_exact_that_a_float_would_round() -> None:
    @ac.op(out="T")
    def same_id(doc=ac.Cache("S"), other=ac.Activation("T")):
        return ac.where(ac.eq(ac.at_query(doc, "S"), other), 1.0, 0.0)

    program, big = same_id.trace(), 2**24
    tensors = {"doc": torch.tensor([big + 1]), "other": torch.tensor([big])}
    got = interpret(program, tensors, {"T": 1, "S": 1}, dtype=torch.float32)
    assert got.outputs["o"].tolist() == [0.0]


@given(seeds(), st.integers(1, 4), st.integers(0, 4), st.booleans())
@settings(max_examples=25)
def test_between_sums_the_gates_after_the_key_up_to_the_query(
    seed: int, t: int, more: int, forget: bool
) -> None:
    @ac.op(out="B T S")
    def decay(q=ac.Activation("B T"), f=ac.Cache("B S")):
        return ac.between(f, "S") + 0 * q

    s = t + more
    f = whole(seed, 2, s, low=-3, high=0)
    if forget:
        f[:, s // 2] = -INF
    got = run(decay, {"q": torch.zeros(2, t), "f": f}, B=2, T=t, S=s)
    for i in range(t):
        for j in range(s):
            exactly(got[:, i, j], f[:, j + 1 : i + more + 1].sum(1))


def test_between_of_an_empty_history_is_empty() -> None:
    @ac.op(out="T")
    def total(q=ac.Activation("T"), f=ac.Cache("S")):
        return ac.sum(ac.between(f, "S"), "S") + 0 * q

    exactly(run(total, {"q": torch.zeros(2), "f": torch.zeros(0)}, T=2, S=0), [0, 0])


def test_cumsum_includes_the_element_itself_and_survives_minus_infinity() -> None:
    @ac.op(out="B T")
    def running(x=ac.Activation("B T")):
        return ac.cumsum(x, "T")

    x = torch.tensor([[1.0, 2.0, -INF, 4.0]])
    exactly(run(running, {"x": x}, B=1, T=4), [[1, 3, -INF, -INF]])


# --- element-wise, contractions, reductions -------------------------------------------------------

UNARY = {
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "softplus": lambda x: math.log1p(math.exp(x)),
}


@pytest.mark.parametrize("name", sorted(UNARY))
def test_element_wise_functions(name: str) -> None:
    @ac.op(out="T")
    def f(x=ac.Activation("T")):
        return getattr(ac, name)(x)

    x = [0.1, 0.5, 1.0, 3.0, 25.0] + ([] if "log" in name or "sqrt" in name else [-2.0, -30.0])
    got = run(f, {"x": fp64(x)}, T=len(x))
    same(got, fp64([UNARY[name](v) for v in x]), tol=1e-12)


def test_softplus_and_exp_at_the_ends() -> None:
    @ac.op(out="T")
    def f(x=ac.Activation("T")):
        return ac.softplus(x) + 0 * ac.exp(-ac.relu(x))

    exactly(run(f, {"x": torch.tensor([-INF, -800.0, 800.0])}, T=3), [0, 0, 800])


def test_minimum_and_maximum_let_nan_win() -> None:
    @ac.op(out="T")
    def f(x=ac.Activation("T"), y=ac.Activation("T")):
        return ac.minimum(x, y) + 10 * ac.maximum(x, y)

    x, y = torch.tensor([1.0, NAN, 2.0]), torch.tensor([3.0, 0.0, NAN])
    exactly(run(f, {"x": x, "y": y}, T=3), [31, NAN, NAN])


def test_comparisons_logic_and_choice() -> None:
    @ac.op(out="T S")
    def f(x=ac.Activation("T"), y=ac.Activation("S")):
        low, high = (x < y) | ac.eq(x, y), ~(x <= y) & (x >= y) & (x > y)
        return ac.where(low, -1.0, ac.where(high, 1.0, 0.0))

    v = torch.tensor([-1.0, 0.0, 2.0])
    want = torch.where(v[:, None] <= v[None, :], -1.0, 1.0)
    exactly(run(f, {"x": v, "y": v}, T=3, S=3), want)


def test_division_of_whole_numbers_is_real() -> None:
    @ac.op(out="T")
    def half(x=ac.Activation("T")):
        return ac.index("T") / 2 + 0 * x

    exactly(run(half, {"x": torch.zeros(3)}, T=3), [0, 0.5, 1])


def test_a_host_number_is_an_operand_and_its_default_a_literal() -> None:
    @ac.op(out="T")
    def capped(x=ac.Activation("T"), cap=ac.param(default=2.0)):
        return cap * ac.tanh(x / cap)

    x = randn(0, 3)
    same(run(capped, {"x": x}, T=3), 2 * torch.tanh(x / 2))
    same(run(capped, {"x": x, "cap": 5.0}, T=3), 5 * torch.tanh(x / 5))


def test_contractions_of_many_operands_match_by_axis_name() -> None:
    @ac.op(out="V B")
    def f(a=ac.Activation("B K"), b=ac.Param("R K"), c=ac.Param("V R"), d=ac.Activation("B")):
        return ac.dot(a, b, c, d, "K R")

    a, b, c, d = randn(0, 2, 3), randn(1, 4, 3), randn(2, 5, 4), randn(3, 2)
    want = (a @ b.T @ c.T * d[:, None]).T
    same(run(f, {"a": a, "b": b, "c": c, "d": d}, B=2, K=3, R=4, V=5), want)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_reductions_also_of_nothing(n: int) -> None:
    @ac.op(out={"sum": "B", "max": "B", "min": "B"})
    def f(x=ac.Activation("B T K")):
        return ac.sum(x, "T K"), ac.amax(x, "K T"), ac.amin(x, "T K")

    x = randn(0, 2, n, 2)
    got = interpret(f.trace(), {"x": x}, {"B": 2, "T": n, "K": 2}).outputs
    flat = x.reshape(2, -1)
    edge = torch.full((2, 1), INF).double()
    same(got["sum"], flat.sum(1))
    same(got["max"], torch.cat([flat, -edge], 1).amax(1))
    same(got["min"], torch.cat([flat, edge], 1).amin(1))


def test_sum_of_a_product_equals_the_contraction() -> None:
    @ac.op(out={"a": "B", "b": "B"})
    def f(g=ac.Activation("B"), x=ac.Activation("B K"), y=ac.Activation("B K")):
        return ac.sum(x * (g * y), "K"), g * ac.dot(x, y, "K")

    x, y, g = randn(0, 2, 3), randn(1, 2, 3), randn(2, 2)
    got = interpret(f.trace(), {"g": g, "x": x, "y": y}, {"B": 2, "K": 3}).outputs
    same(got["a"], g * (x * y).sum(1))
    same(got["a"], got["b"])


def test_everything_is_computed_in_the_asked_precision() -> None:
    x = fp64([1.0, 1e-9])

    @ac.op(out="B")
    def f(x=ac.Activation("B T")):
        return ac.sum(x, "T") - 1.0

    for dtype, want in ((torch.float64, 1e-9), (torch.float32, 0.0)):
        got = interpret(f.trace(), {"x": x[None]}, {"B": 1, "T": 2}, dtype=dtype).outputs["o"]
        assert got.dtype == dtype
        assert got.item() == pytest.approx(want, rel=1e-6)
