"""Which dialect a call's generated kernels are written in, and whether Gluon is there."""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.emit.gluon import missing_names
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_softmax import plan_softmax
from attncc.dsl.errors import BackendError
from attncc.dsl.ir import Program
from attncc.runtime import knobs
from attncc.runtime.key import triton_version

GLUON = Dialect.GLUON.value
"""Name of the backend that runs Gluon kernels and nothing else."""


def gluon_problem() -> str | None:
    """Why no Gluon kernel can be compiled or run in this process, or None."""
    if knobs.interpreting():
        return "Triton's interpreter does not run Gluon"
    missing = missing_names()
    if missing:
        return f"Triton {triton_version()} lacks {missing[0]}"
    return None


def dialect_for(backend: str, op: str) -> Dialect | None:
    """The dialect that a backend's name stands for; None where the tables of plans decide.

    Args:
        backend: ``gluon``, ``triton`` or another name.
        op: named in errors.

    Raises:
        BackendError: Gluon was asked for by name and is not there; the message says why.
    """
    if backend == Dialect.TRITON.value:
        return Dialect.TRITON
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


def gluon_lines(program: Program, spec: Spec, phase: str) -> list[str]:
    """What an explanation says of a call's Gluon kernel: its name, or why there is none."""
    form = analyse(program).softmax
    if form is None:
        return []
    plans = plan_softmax(program, form, replace(spec, dialect=Dialect.GLUON), phase)
    if isinstance(plans, Refusal):
        return [f"  no Gluon kernel: {plans}"]
    assert plans.whole is not None
    return [f"  as a Gluon kernel (backend='gluon'): {plans.whole.kernel}"]
