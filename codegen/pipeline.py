"""The passes in order, read in one place: program -> verified forms."""

from __future__ import annotations

from functools import lru_cache

from attncc.codegen.emit.affine import PrepareCode
from attncc.codegen.emit.append import AppendCode
from attncc.codegen.emit.carry import StateCode
from attncc.codegen.emit.scan_sources import scan_sources
from attncc.codegen.emit.softmax import MergeCode, TiledCode, softmax_sources
from attncc.codegen.emit.step import StepCode
from attncc.codegen.forms import AffineForm, Analysis, Refusal, SoftmaxForm
from attncc.codegen.passes.find_affine import find_affine
from attncc.codegen.passes.find_softmax import find_softmax
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import PreparePlan, StatePlan
from attncc.codegen.plan_scan import StepPlan
from attncc.codegen.plan_softmax import AppendPlan, MergePlan, TiledPlan
from attncc.codegen.render import Source
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program
from attncc.dsl.verify import verify

TEMPLATE_TYPES: dict[str, tuple[type, type]] = {
    "triton/softmax_tiled.py.jinja": (TiledPlan, TiledCode),
    "triton/softmax_merge.py.jinja": (MergePlan, MergeCode),
    "triton/append.py.jinja": (AppendPlan, AppendCode),
    "triton/scan_step.py.jinja": (StepPlan, StepCode),
    "triton/affine_prepare.py.jinja": (PreparePlan, PrepareCode),
    "triton/affine_state.py.jinja": (StatePlan, StateCode),
}
"""For each skeleton, the plan and the printed code whose fields it may use."""


@lru_cache(maxsize=512)
def analyse(program: Program) -> Analysis:
    """Find a program's form; what does not apply is kept with its reason."""
    verify(program)
    softmax = find_softmax(program)
    affine = find_affine(program)
    found = (softmax, affine)
    applicable = affine if program.scan is not None else softmax
    return Analysis(
        softmax if isinstance(softmax, SoftmaxForm) else None,
        affine if isinstance(affine, AffineForm) else None,
        (applicable,) if isinstance(applicable, Refusal) and applicable in found else (),
    )


def kernel_sources(program: Program, spec: Spec, phase: str) -> list[Source]:
    """The generated kernels of one phase, in launch order.

    Raises:
        RefusedError: no plan covers the program; the message gives the line and the reason.
    """
    analysis = analyse(program)
    if analysis.softmax is not None:
        return softmax_sources(program, analysis.softmax, spec, phase)
    if program.scan is not None:
        return scan_sources(program, analysis, spec, phase)
    raise RefusedError("; ".join(map(str, analysis.refusals)), op=program.name)
