"""Which folds a body has, and what is refused with its line."""

import pytest

import attncc as ac
from attncc.codegen.forms import FoldKind, Refusal
from attncc.codegen.passes.find_softmax import find_softmax
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan_softmax import plan_softmax
from tests import score_ops as ops
from tests.compile.test_scores import plans_of


def folds_of(name):
    """The folds of a case."""
    form = analyse(ops.CASES[name][0].declaration.trace()).softmax
    assert form is not None
    return form


@pytest.mark.parametrize(
    ("name", "folds", "passes"),
    [("differential", 2, 2), ("two_values", 2, 1), ("softmax_and_sum", 2, 2), ("rectified", 1, 1),
     ("indexed", 1, 1), ("shared_prefix", 2, 2), ("forgetting", 1, 1)],
)  # fmt: skip
def test_folds_that_share_score_and_mask_share_a_pass(name, folds, passes):
    form = folds_of(name)
    assert (len(form.folds), len(form.passes)) == (folds, passes)


def test_a_plain_sum_keeps_its_mask():
    [fold] = folds_of("rectified").folds
    assert fold.kind is FoldKind.SUM and fold.mask is not None and fold.mask.clauses[0].bands
    assert fold.sink is None and fold.beside == ()


def declared(expression):
    """An op whose body is one expression of two softmaxes and the values."""

    def body(q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H D")):
        p = ac.softmax(ac.dot(q, k, "D"), "S", where=ac.causal)
        return expression(p, ac.softmax(2 * ac.dot(q, k, "D"), "S"), v)

    return ac.op(out="B T H D")(body)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (lambda p, r, v: ac.dot(p * p, v, "S"), "product of two softmaxes"),
        (lambda p, r, v: ac.dot(p * r, v, "S"), "product of two softmaxes"),
        (lambda p, r, v: ac.dot(ac.exp(p), v, "S"), "non-linearly"),
        (lambda p, r, v: ac.dot(v / (1 + p), v, "S"), "non-linearly"),
        (lambda p, r, v: ac.dot(p * ac.index("T"), v, "S") + ac.sum(p, "S") * 0 +
         ac.dot(p, v, "S"), "outside its fold"),
    ],
)  # fmt: skip
def test_probabilities_used_otherwise_are_refused_with_a_line(expression, reason):
    found = find_softmax(declared(expression).declaration.trace())
    assert isinstance(found, Refusal) and reason in found.reason and found.loc.line > 0


def test_products_distribute_and_factors_leave_the_sum():
    op = declared(lambda p, r, v: ac.dot((p - 0.5 * (r - p)) / 3, v, "S"))
    form = find_softmax(op.declaration.trace())
    assert len(form.folds) == len(form.passes) == 2  # equal sums are one fold


def test_blocks_are_told_apart_by_the_documents_of_their_keys():
    plans = plans_of("documents", 90)
    assert plans.whole.stats == ("document",) and plans.whole.first_part == 0
    assert plans_of("documents", 90, "decode").whole.stats == ()
    assert plans_of("by_importance", 90).whole.stats == ("weight",)


def test_a_plan_of_different_rows_is_refused():
    def body(
        q=ac.Activation("B T H D"), r=ac.Activation("B T D"), k=ac.Cache("B S D"),
        v=ac.Cache("B S H D"), w=ac.Cache("B S D"),
    ):  # fmt: skip
        one = ac.dot(ac.softmax(ac.dot(q, k, "D"), "S"), v, "S")
        return one + ac.dot(ac.softmax(ac.dot(r, k, "D"), "S"), w, "S")

    program = ac.op(out="B T H D")(body).declaration.trace()
    form = analyse(program).softmax
    found = plan_softmax(program, form, None, "prefill")
    assert isinstance(found, Refusal) and "different rows" in found.reason


def test_explain_names_each_kind_of_fold():
    assert "plain sum over S, carry u" in ops.rectified.explain()
    assert "shares its sum with S" in ops.shared_prefix.explain()


def test_a_prefix_a_sequence_hides_blocks_without_any_statistics():
    plan = plans_of("prefix_lm", 90).whole
    assert plan.tighten and plan.stats == ()
    assert not plans_of("differential", 90).parts[0].tighten
    assert not plans_of("prefix_of", 90).whole.tighten  # all bands
