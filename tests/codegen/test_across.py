"""Affine states that outputs read across: what is found, and what is not."""

import pytest

import attncc as ac
from attncc.codegen import plan_across
from attncc.codegen.forms import AcrossForm, Refusal
from attncc.codegen.passes.find_across import find_across
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, TensorArg
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Input
from attncc.runtime.backends import sources
from attncc.runtime.explain import explain_program
from tests.across_ops import OJA, two_queries

SIZES = {"Hk": 4, "G": 1, "K": 64, "V": 128, "T": 4096}


def body(update, output):
    """An op with a state [K, V] whose body is given by two functions."""

    @ac.op(scan="T", out="B T H V")
    def made(
        q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
        w=ac.Activation("B T H V"), s=ac.State("B H K V"),
    ):  # fmt: skip
        new = update(s, k, v)
        return new, output(s, new, q, w)

    return made.declaration.trace()


def oja(s, k, v):
    return s + v * (k - ac.dot(s, v, "V"))


def test_the_table_is_that_of_the_updates_and_the_read_is_the_output_s():
    found = analyse(OJA.declaration.trace()).across
    assert isinstance(found, AcrossForm)
    assert (found.form.active, found.form.passive, found.over) == (("V",), ("K",), "K")
    [row], [read] = found.form.rows, found.reads
    assert row.a == row.b and isinstance(row.a, Input) and row.a.name == "v"
    assert (row.read_slot, row.write_slot, row.rows_visible) == (1, 1, 0)
    assert isinstance(read.vector, Input) and read.vector.name == "q"
    assert found.core.outputs == () and found.form.reads == ()


def test_reads_of_one_vector_are_found_once_and_outputs_go_on_from_them():
    found = find_across(two_queries.declaration.trace())
    assert isinstance(found, AcrossForm)
    assert [r.name for r in found.reads] == ["across0", "across1"]
    text = explain_program(two_queries.declaration.trace(), analyse(found.core))
    assert "active  V" in text
    text = explain_program(OJA.declaration.trace(), analyse(OJA.declaration.trace()))
    assert "across0 = q . S along K" in text and "output: across0 * " in text


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (lambda s, new, q, w: ac.dot(s, q, "K"), "not its token's last"),
        (lambda s, new, q, w: ac.dot(new, q, "K") * ac.sum(ac.dot(new, w, "V"), "K"), "over V"),
        (lambda s, new, q, w: ac.sum(new, "K"), "other than through its reads"),
        (lambda s, new, q, w: ac.dot(new * w, q, "K"), "columns that are read"),
    ],
)
def test_other_reads_are_refused(output, reason):
    found = find_across(body(oja, output))
    assert isinstance(found, Refusal) and reason in str(found), found


def test_an_update_that_is_not_affine_is_refused():
    program = body(lambda s, k, v: ac.tanh(oja(s, k, v)), lambda s, new, q, w: ac.dot(new, q, "K"))
    assert isinstance(find_across(program), Refusal)
    assert analyse(program).across is None


def test_plans_of_prompts():
    found = [s.plan for s in sources(OJA.declaration, sizes=SIZES)]
    assert [(p.phase, p.dialect) for p in found] == [
        ("systems", Dialect.GLUON), ("solve", Dialect.GLUON), ("state", Dialect.TRITON),
        ("across_bases", Dialect.TRITON), ("across", Dialect.TRITON),
    ]  # fmt: skip
    left = {a.name for a in found[2].args if isinstance(a, TensorArg) and a.written} & {
        a.name for a in found[3].args
    }
    assert left == {plan_across.STARTS, plan_across.ADDED}
    assert found[4].columns == 4 and found[4].programs(10) == 40
    for kwargs in ({"dtype": "fp32"}, {"phase": "decode"}, {"sizes": {**SIZES, "V": 256}}):
        kinds = {s.plan.phase for s in sources(OJA.declaration, **{"sizes": SIZES, **kwargs})}
        assert "step" in kinds and kinds <= {"step", "pointwise"}, kwargs  # in parts
    with pytest.raises(RefusedError):
        sources(OJA.declaration, sizes=SIZES, backend="gluon")


def test_sums_over_the_outputs_columns_keep_them_in_one_program():
    last = sources(two_queries.declaration, sizes={"H": 4, "K": 64, "V": 128, "T": 4096})[-1].plan
    assert last.phase == "across" and last.columns == 1 and last.num_warps == 4
