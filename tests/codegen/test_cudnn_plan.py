"""What a cuDNN graph is described as, and which tables have none: nothing of cuDNN is needed."""

import pytest
import torch

import attncc.dsl.api as ac
from attncc.codegen.emit.cudnn import ONES, GraphTensor
from attncc.codegen.forms import Refusal
from attncc.codegen.passes.find_updates import Updates, find_updates
from attncc.codegen.pipeline import analyse
from attncc.dsl.library.gated_delta_product import gated_delta_product
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from tests.gdp_document import Shape
from tests.runtime.cudnn_calls import plan_of


def body(update, out=None):
    """A declaration of one token with the update and read-out given."""

    @ac.op(scan="T", out="B T H V")
    def drawn(
        q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
        g=ac.Activation("B T H"), beta=ac.Activation("B T H"), w=ac.Activation("B T H K"),
        s=ac.State("B H V K"),
    ):  # fmt: skip
        new = update(s, k, v, g, beta, w)
        return new, out(s, new, q) if out else ac.dot(new, q, "K")

    return drawn


def found(declaration, given=None, sizes=None):
    program = declaration.trace(given, sizes)
    form = analyse(program).affine
    assert form is not None
    return find_updates(program, form)


def delta(s, k, v, g, beta, w):
    s = ac.exp(g) * s
    return s + k * (beta * (v - ac.dot(s, k, "K")))


SPELLINGS = {
    "as usual": delta,
    "beta on the key": lambda s, k, v, g, beta, w: (
        ac.exp(g) * s + (beta * k) * (v - ac.dot(ac.exp(g) * s, k, "K"))
    ),
    "distributed": lambda s, k, v, g, beta, w: (
        ac.exp(g) * s + k * (beta * v) - k * (beta * ac.dot(ac.exp(g) * s, k, "K"))
    ),
    "the gate inside": lambda s, k, v, g, beta, w: (
        ac.exp(g) * s + k * (beta * (v - ac.exp(g) * ac.dot(s, k, "K")))
    ),
    "negated": lambda s, k, v, g, beta, w: (
        ac.exp(g) * s - k * (beta * (ac.sum(ac.exp(g) * s * k, "K") - v))
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_update_are_one_chain(name):
    got = found(body(SPELLINGS[name]))
    assert got == Updates("q", "k", "v", "g", True, "beta", 1, False, ()), got


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("unit", [False, True])
def test_several_updates_of_unit_rows(rows, unit):
    given = {"alpha", "beta", "s"} | ({"l2norm"} if unit else set())
    got = found(gated_delta_product, frozenset(given), {"N": rows})
    assert isinstance(got, Updates), got
    assert (got.gate, got.log_gate, got.beta) == ("alpha", False, "beta")
    assert (got.rows, got.unit, got.k) == (rows, unit, "k") and len(got.scale) == 1


def test_absent_gates_are_none():
    got = found(gated_delta_rule, frozenset())
    assert isinstance(got, Updates) and (got.gate, got.beta) == (None, None)


OTHERS = {
    "nothing is corrected": (
        lambda s, k, v, g, beta, w: ac.exp(g) * s + k * v, None, "corrects nothing",
    ),
    "read before the decay": (
        lambda s, k, v, g, beta, w: ac.exp(g) * s + k * (beta * (v - ac.dot(s, k, "K"))), None,
        "before the decay",
    ),
    "another vector": (
        lambda s, k, v, g, beta, w: s + w * (beta * (v - ac.dot(s, k, "K"))), None,
        "along another vector",
    ),
    "half the error": (
        lambda s, k, v, g, beta, w: s + k * (beta * v - 0.5 * beta * ac.dot(s, k, "K")), None,
        "not beta times the error",
    ),
    "a decay of a sigmoid": (
        lambda s, k, v, g, beta, w: delta(ac.sigmoid(g) * s, k, v, 0 * g, beta, w), None,
        "the decay is neither",
    ),
    "a decay for each key element": (
        lambda s, k, v, g, beta, w: delta(ac.exp(w) * s, k, v, 0, beta, w), None,
        "along the axis of keys",
    ),
    "a beta of a sigmoid": (
        lambda s, k, v, g, beta, w: delta(s, k, v, g, ac.sigmoid(beta), w), None,
        "a beta is computed",
    ),
    "a read-out before": (delta, lambda s, new, q: ac.dot(s, q, "K"), "does not read after"),
    "a gated output": (
        delta, lambda s, new, q: ac.silu(ac.dot(new, q, "K")), "not a multiple of the read-out",
    ),
    "unit queries alone": (
        delta, lambda s, new, q: ac.dot(new, ac.l2norm(q, "K"), "K"), "only one of queries",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_a_table_says_is_the_reason(name):
    update, out, reason = OTHERS[name]
    got = found(body(update, out))
    assert isinstance(got, Refusal) and reason in got.reason, got


def test_the_graph_of_a_call_to_the_letter():
    plan = plan_of(Shape((9, 4), n=2, heads=(4, 2, 2), gate=None, v_dim=128, scale=0.3))
    heads = {"q": 4, "k": 2, "v": 2}
    rows = {"q": 13, "k": 26, "v": 26}
    width = {"q": 64, "k": 64, "v": 128}
    operands = [
        GraphTensor(
            n, n, i, (rows[n], heads[n], width[n]), (heads[n] * width[n], width[n], 1), "bf16"
        )
        for i, n in enumerate("qkv", 1)
    ]
    state = ((2, 4, 128, 64), (4 * 128 * 64, 128 * 64, 64, 1), "fp32")
    assert plan.node == "gdp"
    assert plan.inputs == (
        *operands,
        GraphTensor("g", ONES, 4, (13, 4), (4, 1), "fp32"),
        GraphTensor("beta", "beta", 5, (26, 4), (4, 1), "fp32"),
        GraphTensor("cu_seqlens", "cu_seqlens", 6, (3,), (1,), "i32"),
        GraphTensor("initial_state", "s", 7, *state),
    )
    assert plan.outputs == (
        GraphTensor("O", "o", 8, (13, 4, 128), (512, 128, 1), "bf16"),
        GraphTensor("final_state", "final s", 9, *state),
    )
    assert dict(plan.attributes) == {
        "num_householder": 2, "scale": 0.3, "output_final_state": True, "gate_domain": "linear",
    }  # fmt: skip


def test_strides_are_the_callers():
    plan = plan_of(Shape((9, 4), strided=True))
    assert plan.inputs[0].strides == (80, 13 * 80, 1) and plan.inputs[1].strides == (80, 26 * 80, 1)
    assert torch.Size(plan.inputs[1].dims) == (26, 2, 64)
