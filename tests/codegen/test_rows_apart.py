"""Which scans leave what follows their read-outs to a kernel of rows, and how they are split."""

import pytest

import attncc as ac
from attncc.codegen.affine_checks import table_nodes
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.rows_apart import numbers_ahead, rows_behind
from attncc.dsl.errors import RefusedError
from attncc.dsl.graph import walk
from attncc.dsl.ir import Contract, Reduce
from attncc.runtime.backends import sources
from tests.rows_apart_ops import normed_rule, several_reads

SIZES = {"B": 1, "T": 8192, "Hk": 16, "G": 1, "K": 128, "V": 128}


@ac.op(scan="T", out="B T H V")
def read_of_both(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
):  # fmt: skip
    """One sum over both axes of the state, beside a read-out."""
    s = 0.5 * s + k * v
    return s, ac.dot(s, q, "K") + ac.sum(s * q * v, "K V")


@ac.op(scan="T", out="B T H V")
def shows_the_state(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.tanh(s) + k * v
    r = ac.dot(s, q, "K")
    return s, r / ac.sum(r, "V")


@ac.op(scan="T", out="B T H V")
def normed_values(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
):  # fmt: skip
    s = s + k * (ac.l2norm(v, "V") - ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K")


def dialects(op, **options):
    found = sources(op.declaration, sizes=SIZES, **options)
    return {s.plan.phase: s.plan.dialect.value for s in found}


def test_the_core_has_read_outs_and_the_rows_have_what_follows():
    parts = rows_behind(normed_rule.declaration.trace())
    assert parts.read_outs == ("readout0",)
    assert [str(o.pattern) for o in parts.core.outputs] == ["B T Hk G V"]
    [read] = analyse(parts.core).affine.reads
    assert read.vector.name == "q"
    assert analyse(parts.rows).pointwise and not parts.rows.state_names
    assert [o.name for o in parts.rows.outputs] == ["o"]


def test_outputs_that_chunks_hold_stay_there():
    parts = rows_behind(several_reads.declaration.trace())
    assert [o.name for o in parts.core.outputs] == ["plain", "readout0", "readout1"]
    assert [o.name for o in parts.rows.outputs] == ["o", "n"]


def test_a_sum_over_both_axes_is_a_sum_of_a_read_out():
    parts = rows_behind(read_of_both.declaration.trace())
    assert len(parts.read_outs) == 1
    assert dialects(read_of_both, target="sm_100") == {
        "mix": "triton", "state": "triton", "pointwise": "triton",
    }  # fmt: skip


@pytest.mark.parametrize(("op", "reason"), [
    (ac.ops.gated_delta_rule, "the kernels of chunks hold all of it"),
    (ac.ops.hgrn, "no affine state"), (shows_the_state, "no affine state"),
])  # fmt: skip
def test_others_are_one_program(op, reason):
    found = rows_behind(op.declaration.trace())
    assert isinstance(found, Refusal) and reason in found.reason
    assert isinstance(numbers_ahead(op.declaration.trace()), Refusal)


def test_sums_of_a_row_are_found_ahead():
    parts = numbers_ahead(ac.ops.gated_delta_net.declaration.trace())
    [ahead] = parts.ahead
    assert [str(o.pattern) for o in ahead.outputs] == ["B T Hk", "B T Hk"]
    assert analyse(ahead).pointwise
    form = analyse(parts.core).affine
    nodes = list(walk(*table_nodes(form)))
    assert not any(isinstance(n, (Contract, Reduce)) for n in nodes)
    assert parts.read_outs == ("readout0",) and [o.name for o in parts.rows.outputs] == ["o"]
    whole = numbers_ahead(ac.ops.raw_gated_delta_rule.declaration.trace())
    assert whole.rows is None and [o.name for o in whole.core.outputs] == ["o"]


def test_a_norm_of_values_is_no_longer_in_the_chunk():
    assert isinstance(rows_behind(normed_values.declaration.trace()), Refusal)
    assert list(dialects(normed_values, target="sm_100")) == [
        "pointwise", "prepare", "mix", "state",
    ]  # fmt: skip


@pytest.mark.gluon
def test_sums_are_found_ahead_where_they_keep_gluon_away():
    raw = ac.ops.raw_gated_delta_rule
    assert set(dialects(raw, backend="triton")) == {"prepare", "mix", "state"}
    for op in (raw, ac.ops.gated_delta_net):
        found = dialects(op)
        assert next(iter(found)) == "pointwise"
        assert found["systems"] == found["state"] == Dialect.GLUON.value
    assert "pointwise" not in dialects(ac.ops.gated_delta_rule)
    with pytest.raises(RefusedError, match="readout0 is fp32"):
        dialects(normed_rule, backend="cutedsl")


def test_steps_keep_all_of_it_in_one_kernel():
    assert set(dialects(normed_rule, phase="decode")) == {"step"}


def test_explanations_say_what_lies_between():
    text = normed_rule.explain()
    assert "prompts in parts: a sum over V inside the chunk" in text
    assert "chunks: readout0 [B T Hk G V] = read0 * rsqrt(|K|)" in text and "rows: o = " in text
    assert "prompts" not in ac.ops.gated_delta_rule.explain()
    text = ac.ops.raw_gated_delta_rule.explain()
    assert "what Gluon's kernels of chunks take as inputs" in text and "number0 = rsqrt(" in text
