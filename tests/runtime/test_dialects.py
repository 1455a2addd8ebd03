"""Which dialect a call's kernels are written in, and what is said where Gluon cannot be."""

import pytest
import torch

import attncc as ac
from attncc.codegen import printers
from attncc.codegen.emit import gluon as emit_gluon
from attncc.codegen.plan import Dialect
from attncc.dsl.errors import BackendError, RefusedError
from attncc.runtime import backends, dialects
from attncc.runtime.backends import sources
from attncc.runtime.bind import bind
from attncc.runtime.kernels import Kernel
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.sources import call_sources

SIZES = {"D": 128, "E": 128, "G": 4, "Hkv": 8}


@pytest.fixture
def gluon(monkeypatch):
    monkeypatch.setattr(dialects, "gluon_problem", lambda: None)


def test_names_of_backends_stand_for_dialects(gluon):
    assert dialects.dialect_for("gluon", "op") is Dialect.GLUON
    assert dialects.dialect_for("triton", "op") is Dialect.TRITON
    assert dialects.dialect_for("auto", "op") is None  # the tables of plans decide


def test_a_triton_with_other_names_is_named(monkeypatch):
    monkeypatch.setattr(emit_gluon, "missing_names", lambda: ("gluon.language.warp_specialize",))
    monkeypatch.setattr(dialects.knobs, "interpreting", lambda: False)
    with pytest.raises(BackendError, match=r"lacks gluon.language.warp_specialize"):
        dialects.dialect_for("gluon", "op")
    assert dialects.dialect_for("auto", "op") is Dialect.TRITON


def test_the_interpreter_of_triton_does_not_run_gluon(monkeypatch):
    monkeypatch.setattr(dialects.knobs, "interpreting", lambda: True)
    with pytest.raises(BackendError, match="interpreter does not run Gluon"):
        dialects.dialect_for("gluon", "op")


def test_a_named_dialect_is_what_is_generated():
    attention = ac.ops.attention.declaration
    [only] = sources(attention, sizes=SIZES, backend="gluon")
    assert only.plan.dialect is Dialect.GLUON and "gl.warp_specialize" in only.text
    assert all(
        s.plan.dialect is Dialect.TRITON for s in sources(attention, sizes=SIZES, backend="triton")
    )


def test_the_table_of_measured_plans_decides_where_no_dialect_is_named():
    attention = ac.ops.attention.declaration
    long, *_ = sources(attention, sizes={**SIZES, "T": 8192, "S": 8192})
    assert long.plan.dialect is Dialect.GLUON and long.plan.chosen == "warp-bf16-128-prefill"
    short = sources(attention, sizes={**SIZES, "T": 128, "S": 128})
    assert all(s.plan.dialect is Dialect.TRITON for s in short)


def test_an_explanation_says_whether_there_is_a_gluon_kernel_and_why_not():
    assert "as a Gluon kernel (backend='gluon')" in ac.ops.attention.explain(sizes=SIZES)
    odd = {**SIZES, "D": 96, "E": 96}
    assert "no Gluon kernel: q has rows of 96" in ac.ops.attention.explain(sizes=odd)
    other = ac.ops.attention.explain(sizes=SIZES, target="sm_100")
    assert "no Gluon kernel: it is written for sm_90, not sm_100" in other


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs it")
def test_without_a_gpu_a_named_backend_says_so():
    q = torch.randn(1, 8, 2, 64)
    with pytest.raises(BackendError, match="need a GPU"):
        ac.ops.attention(q, q, q, backend="gluon")


@pytest.mark.parametrize("name", ["lightning_indexer", "silu"])
def test_a_dialect_without_the_form_of_an_op_is_refused_not_replaced(name):
    declaration = getattr(ac.ops, name).declaration
    sizes = {"D": 128, "Di": 128, "Hi": 4, "H": 4, "V": 128}
    own = {a for t in declaration.tensors for a in t.pattern.axes}
    sizes = {a: n for a, n in sizes.items() if a in own}
    call = sample_call(declaration, Sample(sizes, "prefill"))
    assert call_sources(call, "prefill", "sm_90")
    for dialect in (Dialect.GLUON, Dialect.CUTEDSL):
        with pytest.raises(RefusedError, match="softmax over a history"):
            call_sources(call, "prefill", "sm_90", dialect=dialect)
        with pytest.raises(RefusedError, match="softmax over a history"):
            sources(declaration, sizes=sizes, backend=dialect.value)


def test_the_dialect_of_an_open_program_is_that_of_its_fold():
    sizes = {"H": 16, "D": 128, "P": 64, "R": 512, "V": 128}
    call = sample_call(ac.ops.mla.declaration, Sample(sizes, "prefill"))
    with pytest.raises(RefusedError, match="a score of several products"):
        call_sources(call, "prefill", "sm_90", dialect=Dialect.CUTEDSL)


@pytest.mark.parametrize("backend", ["torch", "cudnn", "reference", "cuda"])
def test_sources_of_a_backend_without_any_are_refused(backend):
    with pytest.raises(BackendError, match="no kernels are generated for it"):
        sources(ac.ops.attention.declaration, sizes=SIZES, backend=backend)


def test_an_explanation_lists_no_kernel_that_cannot_be_printed(monkeypatch):
    def no_text(plan):
        raise RefusedError("no text for it")

    monkeypatch.setattr(printers, "printer", lambda template: no_text)
    text = ac.ops.attention.explain(sizes=SIZES, phase="decode")
    assert text.endswith("kernels: none: no text for it\n")


def test_a_kernel_that_two_forms_share_is_listed_once():
    """Cut or not, sequences have the same systems."""
    sizes = {"K": 128, "V": 128, "G": 2, "Hk": 4, "B": 2}
    call = sample_call(ac.ops.gated_delta_rule.declaration, Sample(sizes, "prefill"))
    found = call_sources(call, "prefill", "sm_90")
    assert len({s.entry for s in found}) == len(set(found)) == len(found) > 1


# --- a table's dialect that has no text for an expression


LONG = {"T": 8192, "S": 8192}


@pytest.fixture
def no_gluon_text(monkeypatch):
    """An expression that Gluon's translation does not know."""
    usual = printers.printer

    def refuses(plan):
        raise RefusedError("no Gluon text for tl.unheard_of", op=plan.op)

    monkeypatch.setattr(printers, "printer", lambda t: refuses if "gluon/" in t else usual(t))
    monkeypatch.setattr(dialects, "_WITHOUT_TEXT", {})


@pytest.mark.parametrize(
    ("op", "sizes", "form"),
    [
        (ac.ops.attention, {**SIZES, **LONG}, "softmax"),
        (ac.ops.gated_delta_rule, {"K": 128, "V": 128, "G": 2, "Hk": 16, **LONG}, "affine"),
    ],
)
def test_a_dialect_without_a_text_gives_way_to_triton(no_gluon_text, op, sizes, form):
    own = {n: k for n, k in sizes.items() if form == "softmax" or n != "S"}
    found = sources(op.declaration, sizes=own)
    assert found and all(s.plan.dialect is Dialect.TRITON and s.text for s in found)
    call = sample_call(op.declaration, Sample({**own, "B": 1}, "prefill"))
    kernels = call_sources(call, "prefill", "sm_90")
    assert kernels and all(s.plan.dialect is Dialect.TRITON for s in kernels)
    text = op.explain(sizes=own)
    assert "no Gluon kernel: no Gluon text for tl.unheard_of" in text
    assert all(s.entry in text for s in found)
    with pytest.raises(RefusedError, match="no Gluon text"):
        sources(op.declaration, sizes=own, backend="gluon")


def test_a_call_takes_triton_where_the_tables_dialect_has_no_text(no_gluon_text, monkeypatch):
    """And remembers it: the next call does not print in vain."""
    q = torch.zeros(1, 8192, 4, 128, dtype=torch.bfloat16)
    call, _ = bind(ac.ops.attention.declaration, (q, q[:, :, :1], q[:, :, :1]), {})
    ran, eager = [], []

    def launched(kernel, grid, args, route=None):
        ran.append(kernel.plan.dialect)

    monkeypatch.setattr(backends, "has_triton", lambda call: True)
    monkeypatch.setattr(dialects, "gluon_problem", lambda: None)
    monkeypatch.setattr(backends, "run_eager", lambda *args: eager.append(args))
    monkeypatch.setattr(Kernel, "launch", launched)
    backends.run(call, "prefill", "auto")
    assert ran == [Dialect.TRITON] and not eager
    kept = dict(dialects._WITHOUT_TEXT)
    assert len(kept) == 1
    backends.run(call, "prefill", "auto")
    assert ran == [Dialect.TRITON] * 2 and kept == dialects._WITHOUT_TEXT
    with pytest.raises(BackendError, match="no Gluon text"):
        backends.run(call, "prefill", "gluon")


def test_what_no_dialect_has_a_text_for_runs_in_torch(monkeypatch):
    def refuses(plan):
        raise RefusedError(f"no text in {plan.dialect.value}")

    ran = []
    monkeypatch.setattr(printers, "printer", lambda template: refuses)
    monkeypatch.setattr(dialects, "_WITHOUT_TEXT", {})
    monkeypatch.setattr(dialects, "gluon_problem", lambda: None)
    monkeypatch.setattr(backends, "has_triton", lambda call: True)
    monkeypatch.setattr(backends, "run_eager", lambda *args: ran.append("torch"))
    monkeypatch.setattr(Kernel, "launch", lambda *args: ran.append("a kernel"))
    q = torch.zeros(1, 8192, 2, 128, dtype=torch.float16)  # no other test has printed these
    call, _ = bind(ac.ops.attention.declaration, (q, q[:, :, :1], q[:, :, :1]), {})
    backends.run(call, "prefill", "auto")
    assert ran == ["torch"] and not dialects._WITHOUT_TEXT
    with pytest.raises(BackendError, match="no text in triton"):
        backends.run(call, "prefill", "triton")
