"""Which dialect a call's generated kernels are written in, and whether it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from attncc.codegen.affine_plans import ChunkedPlans
from attncc.codegen.forms import Analysis, Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_gathered import SelectedPlans
from attncc.codegen.plan_scan import final_name, initial_name
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.codegen.printers import source
from attncc.codegen.render import Source
from attncc.dsl.errors import BackendError, RefusedError
from attncc.dsl.ir import Program
from attncc.runtime import knobs
from attncc.runtime.key import triton_version

Plans = TypeVar("Plans", SoftmaxPlans | Refusal, SelectedPlans | Refusal)

GLUON, CUTEDSL = Dialect.GLUON.value, Dialect.CUTEDSL.value
"""Names of the backends that run kernels of one dialect and nothing else."""


def gluon_problem() -> str | None:
    """Why no Gluon kernel can be compiled or run in this process, or None."""
    if knobs.interpreting():
        return "Triton's interpreter does not run Gluon"
    from attncc.codegen.emit.gluon import missing_names

    missing = missing_names()
    if missing:
        return f"Triton {triton_version()} lacks {missing[0]}"
    return None


def dialect_for(backend: str, op: str, phase: str = "prefill") -> Dialect | None:
    """The dialect that a backend's name stands for; None where the tables of plans decide.

    Args:
        backend: ``gluon``, ``cutedsl``, ``triton`` or another name.
        op: named in errors.
        phase: ``prefill`` or ``decode``, whose first call need not look for Gluon, an import that
            takes as long as the rest of that call: :func:`there` does where a table names it.

    Raises:
        BackendError: a dialect was asked for by name and is not there; the message says why.
    """
    if backend == Dialect.TRITON.value:
        return Dialect.TRITON
    if backend == CUTEDSL:
        if knobs.interpreting():
            raise BackendError(
                "no CuTe-DSL kernel: Triton's interpreter does not run it",
                op=op, argument="backend", expected="a GPU", found="Triton's interpreter",
            )  # fmt: skip
        return Dialect.CUTEDSL
    if backend != GLUON and phase == "decode":
        return Dialect.TRITON if knobs.interpreting() else None
    problem = gluon_problem()
    if backend == GLUON and problem is not None:
        raise BackendError(
            f"no Gluon kernel: {problem}",
            op=op,
            argument="backend",
            expected="Gluon as in Triton 3.6",
            found=f"triton {triton_version()}",
        )
    if backend == GLUON:
        return Dialect.GLUON
    return None if problem is None else Dialect.TRITON


def there(spec: Spec, plan: Callable[[Spec], Plans]) -> Plans:
    """Plans in the dialect of a table, or in Triton where that dialect is not.

    Args:
        spec: what selects kernels.
        plan: makes the plans of a spec, or says why there are none.
    """
    plans = plan(spec)
    if spec.dialect is not None or isinstance(plans, Refusal):
        return plans
    gluon = plans.whole is not None and plans.whole.dialect is Dialect.GLUON
    plain = replace(spec, dialect=Dialect.TRITON)
    return plan(plain) if gluon and gluon_problem() is not None else plans


def named_dialect(backend: str, op: str) -> Dialect | None:
    """The dialect of a backend whose kernels are generated; None for ``auto``.

    Raises:
        BackendError: another backend, for which none are.
    """
    named: dict[str, Dialect | None] = {"auto": None, **{d.value: d for d in Dialect}}
    if backend not in named:
        raise BackendError(
            "no kernels are generated for it", op=op, argument="backend",
            expected=", ".join(named), found=backend,
        )  # fmt: skip
    return named[backend]


Found = TypeVar("Found")
_WITHOUT_TEXT: dict[tuple[int, Spec, str], Program] = {}
"""Kinds of calls whose dialect by the tables of plans has no text; the program keeps its id."""


def in_turn(program: Program, spec: Spec, phase: str, attempt: Callable[[Spec], Found]) -> Found:
    """What an attempt gives in the dialect of the tables of plans, or else in Triton.

    A table chooses by dtype, widths and sizes. Whether an expression has a text in its dialect is
    known when the kernel is printed, which happens before anything is launched.

    Args:
        program: of the call.
        spec: what selects its kernels; a dialect that it names is the only one that is tried.
        phase: ``prefill`` or ``decode``.
        attempt: finds or runs the kernels of a spec.

    Raises:
        RefusedError: it was refused in every dialect; the first reason.
    """
    if spec.dialect is not None:
        return attempt(spec)
    key, plain = (id(program), spec, phase), replace(spec, dialect=Dialect.TRITON)
    if key in _WITHOUT_TEXT:
        return attempt(plain)
    try:
        return attempt(spec)
    except RefusedError as refused:
        try:
            found = attempt(plain)
        except RefusedError:
            raise refused from None
        _WITHOUT_TEXT[key] = program
        return found


def printable(
    program: Program, spec: Spec, phase: str, find: Callable[[Spec], list[Source]]
) -> list[Source]:
    """The kernels of a spec, those in a table's dialect printed; see :func:`in_turn`."""
    return in_turn(program, spec, phase, lambda own: _printed(find(own)))


def _printed(found: list[Source]) -> list[Source]:
    for own in found:
        if own.plan.dialect is not Dialect.TRITON:
            _ = own.text  # printing is what refuses
    return found


def need_form(dialect: Dialect | None, analysis: Analysis, op: str) -> None:
    """Nothing where a dialect has skeletons for a program's form.

    Raises:
        RefusedError: it has none, and why.
    """
    warps = dialect in (Dialect.GLUON, Dialect.CUTEDSL)
    if warps and analysis.softmax is None and analysis.affine is None:
        raise RefusedError("neither a softmax over a history nor an affine state", op=op)


def gluon_lines(program: Program, spec: Spec, phase: str) -> list[str]:
    """What an explanation says of a call's Gluon kernel: its name, or why there is none."""
    analysis = analyse(program)
    form = analysis.softmax
    if analysis.affine is not None and phase == "prefill":
        return _state_lines(program, analysis, replace(spec, dialect=Dialect.GLUON))
    if form is None:
        return []
    plans = plan_softmax(program, form, replace(spec, dialect=Dialect.GLUON), phase)
    if isinstance(plans, Refusal):
        return [f"  no Gluon kernel: {plans}"]
    assert plans.whole is not None
    try:
        _printed([source(plans.whole)])
    except RefusedError as refused:
        return [f"  no Gluon kernel: {refused.message}"]
    return [f"  as a Gluon kernel (backend='gluon'): {plans.whole.kernel}"]


def _state_lines(program: Program, analysis: Analysis, spec: Spec) -> list[str]:
    from attncc.codegen.emit.scan_sources import choose_plans, in_parts
    from attncc.codegen.rows_apart import core_spec

    finals = {f(n) for n in program.state_names for f in (initial_name, final_name)}
    spec = replace(spec, aligned=spec.aligned | finals)
    parts = in_parts(program, spec, chunked=True)
    if parts is not None:  # the rows behind it are Triton's in every dialect
        program, analysis, spec = parts.core, analyse(parts.core), core_spec(parts, spec)
    try:
        plans = choose_plans(program, analysis, spec, chunked=True)
        assert isinstance(plans, ChunkedPlans)
        _printed([source(p) for p in plans.kernels])
    except RefusedError as refused:
        return [f"  no Gluon kernel: {refused.message}"]
    names = ", ".join(p.kernel for p in plans.kernels if p.dialect is Dialect.GLUON)
    return [f"  as Gluon kernels (backend='gluon'): {names}"]
