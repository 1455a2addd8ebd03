"""The order of contractions with several operands: by work, and only where it can be run."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.association import Association
from attncc.codegen.forms import Refusal
from attncc.codegen.passes.associate import associate, bucketed, is_open, typical
from attncc.codegen.pipeline import analyse
from attncc.dsl.errors import RefusedError
from attncc.dsl.text import program_text

MLA = ac.ops.mla
REAL = {"H": 128, "D": 128, "P": 64, "R": 512, "V": 128}


@ac.op(out="B T H V")
def nested(
    q_nope=ac.Activation("B T H D"), q_rope=ac.Activation("B T H P"), c=ac.Cache("B S R"),
    r=ac.Cache("B S P"), wuk=ac.Param("H D R"), wuv=ac.Param("H V R"), scale=ac.param(),
):  # fmt: skip
    """The same with one order written down, which is not what decides."""
    absorbed = ac.dot(ac.dot(q_nope, wuk, "D"), c, "R")
    score = (absorbed + ac.dot(q_rope, r, "P")) * scale
    return ac.dot(ac.dot(ac.softmax(score, "S", where=ac.causal), c, "S"), wuv, "R")


@ac.op(out="B T H R")
def chained(
    q=ac.Activation("B T H D"), a=ac.Param("H D E"), b=ac.Param("E F"), k=ac.Memory("B S F"),
    v=ac.Memory("B S R"),
):  # fmt: skip
    """Two projections between the query and a foreign history."""
    return ac.dot(ac.softmax(ac.dot(q, a, b, k, "D E F"), "S"), v, "S")


@ac.op(out="B T H V")
def gated(
    q=ac.Activation("B T H D"), c=ac.Cache("B S R"), w=ac.Param("H D R"), u=ac.Param("H V R"),
    g=ac.Activation("B T H"),
):  # fmt: skip
    """What follows the last product is no product."""
    score = ac.dot(q, w, c, "D R") * ac.rsqrt("D")
    return ac.sigmoid(g) * ac.dot(ac.softmax(score, "S", where=ac.causal), c, u, "S R")


@ac.op(out="B T H R")
def rectified(q=ac.Activation("B T H D"), c=ac.Cache("B S R"), w=ac.Param("H D R")):
    """Neither side of the weight is a stored tensor."""
    return ac.dot(
        ac.softmax(ac.dot(ac.relu(q), w, ac.relu(c), "D R"), "S", where=ac.causal), c, "S"
    )


@ac.op(out="B T H D")
def scaled(q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), w=ac.Param("H D")):
    """Three operands, but both sides have the summed axis: the kernel multiplies them."""
    return ac.dot(ac.softmax(ac.dot(q, w, k, "D"), "S", where=ac.causal), k, "S")


def order(op, sizes, phase="prefill", **kwargs):
    """The order of an op at some sizes."""
    found = associate(op.declaration.trace(), sizes, phase, **kwargs)
    assert isinstance(found, Association), found
    return found


def products(found):
    """Before and after, as text."""
    return [p.text() for p in found.before], [p.text() for p in found.after]


ABSORBED = (
    ["q_nope_wuk[B T H R] = sum_D(q_nope * wuk)"],
    ["o[B T H V] = sum_R(o * wuv)"],
)
EXPANDED = (
    ["c_wuk[B S H D] = sum_R(c * wuk)", "c_wuv[B S H V] = sum_R(c * wuv)"],
    [],
)


def test_only_what_sizes_must_decide_is_open():
    opened = [op.declaration.name for op in (MLA, nested, chained, gated, rectified, scaled)
              if is_open(op.declaration.trace())]  # fmt: skip
    assert opened == ["mla", "nested", "chained", "gated", "rectified"]
    plain = ac.ops.attention.declaration.trace()
    assert not is_open(plain) and typical(plain) is plain
    assert not is_open(ac.ops.gated_delta_rule.declaration.trace())


@pytest.mark.parametrize("op", [MLA, nested], ids=["n-ary", "nested"])
def test_a_decode_step_absorbs_and_a_prompt_expands(op):
    step = order(op, {**REAL, "B": 32, "T": 1, "S": 8192}, "decode")
    assert products(step) == ABSORBED
    prompt = order(op, {**REAL, "B": 1, "T": 4096, "S": 4096})
    assert products(prompt) == EXPANDED
    assert min(step.others) > step.flops and min(prompt.others) > prompt.flops


def test_both_spellings_give_one_program():
    for phase, tokens in (("decode", 1), ("prefill", 4096)):
        sizes = {**REAL, "B": 2, "T": tokens, "S": 8192}
        texts = [program_text(order(op, sizes, phase).program) for op in (MLA, nested)]
        assert texts[0].replace("op mla", "op nested") == texts[1]


@given(st.fixed_dictionaries({a: st.integers(1, 600) for a in "TSHDRV"}), st.integers(1, 2))
@settings(max_examples=60)
def test_the_fewest_operations_win(sizes, batch):
    sizes = {**sizes, "B": batch}
    n = bucketed({**sizes, "P": 8}, "prefill")
    rows, keys = n["B"] * n["T"] * n["H"], n["B"] * n["S"] * n["H"]
    pairs = rows * n["S"]
    query = (rows * n["D"] * n["R"] + pairs * n["R"], keys * n["D"] * n["R"] + pairs * n["D"])
    value = (rows * n["R"] * n["V"] + pairs * n["R"], keys * n["R"] * n["V"] + pairs * n["V"])
    found = order(MLA, {**sizes, "P": 8})
    assert found.flops == 2 * (min(query) + min(value))
    names = {p.name for p in found.before}
    if query[0] != query[1]:
        assert ("q_nope_wuk" in names) == (query[0] < query[1])
    if value[0] != value[1]:
        assert bool(found.after) == (value[0] < value[1])


def test_four_operands_have_every_order_looked_at():
    sizes = {"B": 2, "H": 4, "D": 16, "R": 8}
    met = set()
    for tokens, keys, e, f in product((1, 64), (1, 64), (2, 512), (2, 512)):
        n = {**sizes, "T": tokens, "S": keys, "E": e, "F": f}
        rows, held = 2 * tokens * 4, 2 * keys
        ab, meet = 4 * 16 * e * f, rows * keys
        costs = {
            "(qa)b.k": rows * 16 * e + rows * e * f + meet * f,
            "q(ab).k": ab + rows * 16 * f + meet * f,
            "qa.(bk)": rows * 16 * e + held * e * f + meet * e,
            "q.(a(bk))": held * e * f + held * 4 * 16 * e + meet * 16,
            "q.((ab)k)": ab + held * 4 * 16 * f + meet * 16,
        }
        assert order(chained, n).flops == 2 * min(costs.values())
        met.add(min(costs, key=lambda k: costs[k]))
    assert len(met) >= 3


def test_one_order_has_one_program_whatever_the_lengths():
    one = order(MLA, {**REAL, "B": 1, "T": 1, "S": 700}, "decode")
    other = order(MLA, {**REAL, "B": 60, "T": 2, "S": 30000}, "decode")
    assert one.program is other.program and one.flops < other.flops


def test_an_output_that_goes_on_after_its_contraction_has_no_product_there():
    found = order(gated, {"B": 8, "T": 1, "S": 4096, "H": 16, "D": 64, "R": 256, "V": 64})
    assert not found.after and {p.name for p in found.before} == {"q_w", "c_u"}
    assert analyse(found.program).softmax is not None


def test_a_tensor_that_no_matrix_product_takes_stays_in_the_fold():
    sizes = {**REAL, "B": 1, "T": 4096, "S": 4096}
    assert products(order(MLA, sizes, stored=frozenset({"c"}))) == ABSORBED


def test_products_that_take_too_much_memory_are_not_formed():
    sizes = {**REAL, "T": 512, "S": 32768}
    assert products(order(MLA, {**sizes, "B": 4})) == EXPANDED  # 2 x 4 GiB in bf16
    found = order(MLA, {**sizes, "B": 5})
    assert products(found) == ABSORBED and min(found.others) < found.flops


def test_the_layout_of_results_is_that_of_an_order_without_products_behind():
    form = analyse(typical(MLA.declaration.trace())).softmax
    assert form is not None and form.folds[0].value_axes == ("V",)


def test_no_possible_order_is_refused_with_its_line():
    found = associate(rectified.declaration.trace(), {}, "prefill")
    assert isinstance(found, Refusal) and "no order of this contraction" in str(found)
    with pytest.raises(RefusedError, match="no order of this contraction"):
        rectified.source(sizes={"H": 2, "D": 16, "R": 16})


def test_too_many_operands_are_refused():
    @ac.op(out="B T H R")
    def long(
        q=ac.Activation("B T H D"), c=ac.Cache("B S R"), w=ac.Param("H D R"), a=ac.Param("H"),
        b=ac.Param("D"), d=ac.Param("R"), e=ac.Param("D R"),
    ):  # fmt: skip
        return ac.dot(ac.softmax(ac.dot(q, w, a, b, d, e, c, "D R"), "S"), c, "S")

    found = associate(long.declaration.trace(), {}, "prefill")
    assert isinstance(found, Refusal) and "more than 6 operands" in found.reason


def test_an_explanation_shows_the_order_and_what_others_cost():
    text = MLA.explain(sizes={**REAL, "B": 32, "S": 8192}, phase="decode")
    assert f"before the fold (matrix product): {ABSORBED[0][0]}" in text
    assert f"after the fold (matrix product): {ABSORBED[1][0]}" in text
    assert "other orders: 4.4" in text and "mla__decode__" in text
    assert "refused: the sizes of a call choose the order" in MLA.explain()
