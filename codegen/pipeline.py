"""The passes in order, read in one place: program -> verified forms."""

from __future__ import annotations

from attncc.codegen.emit.append import AppendCode
from attncc.codegen.emit.carry import StateCode
from attncc.codegen.emit.gluon_softmax import WarpCode
from attncc.codegen.emit.mix import MixCode
from attncc.codegen.emit.scan_sources import scan_sources
from attncc.codegen.emit.segments import StartCode
from attncc.codegen.emit.softmax import TiledCode, softmax_sources
from attncc.codegen.emit.softmax_finish import MergeCode
from attncc.codegen.emit.solve import PrepareCode
from attncc.codegen.emit.step import StepCode
from attncc.codegen.emit.window import WindowCode
from attncc.codegen.forms import AffineForm, Analysis, DiagonalForm, Refusal, WindowForm
from attncc.codegen.passes.find_affine import find_affine
from attncc.codegen.passes.find_carries import find_carries
from attncc.codegen.passes.find_softmax import find_softmax
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import MixPlan, PreparePlan, StartPlan, StatePlan
from attncc.codegen.plan_append import AppendPlan
from attncc.codegen.plan_gluon import WarpPlan
from attncc.codegen.plan_scan import StepPlan
from attncc.codegen.plan_softmax import MergePlan, TiledPlan
from attncc.codegen.plan_window import WindowPlan
from attncc.codegen.render import Source
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program
from attncc.dsl.memo import once_a_program
from attncc.dsl.verify import verify

TEMPLATE_TYPES: dict[str, tuple[type, type]] = {
    "triton/softmax_tiled.py.jinja": (TiledPlan, TiledCode),
    "gluon/softmax_prefill.py.jinja": (WarpPlan, WarpCode),
    "triton/softmax_merge.py.jinja": (MergePlan, MergeCode),
    "triton/append.py.jinja": (AppendPlan, AppendCode),
    "triton/scan_step.py.jinja": (StepPlan, StepCode),
    "triton/window.py.jinja": (WindowPlan, WindowCode),
    "triton/affine_prepare.py.jinja": (PreparePlan, PrepareCode),
    "triton/affine_mix.py.jinja": (MixPlan, MixCode),
    "triton/affine_state.py.jinja": (StatePlan, StateCode),
    "triton/affine_start.py.jinja": (StartPlan, StartCode),
}
"""For each skeleton, the plan and the printed code whose fields it may use."""


@once_a_program
def analyse(program: Program) -> Analysis:
    """Find a program's form; what does not apply is kept with its reason."""
    verify(program)
    if program.scan is not None:
        return _analyse_scan(program)
    softmax = find_softmax(program)
    if isinstance(softmax, Refusal):
        return Analysis(refusals=(softmax,))
    return Analysis(softmax=softmax)


def _analyse_scan(program: Program) -> Analysis:
    carries = find_carries(program)
    if isinstance(carries, Refusal):
        return Analysis(refusals=(carries,))
    match carries.forms:
        case (AffineForm() as affine,):
            return Analysis(affine=affine, carries=carries)
        case (DiagonalForm(),):
            why = find_affine(program)  # why the state has no matrix products in chunks
            assert isinstance(why, Refusal)
            return Analysis(refusals=(why,), carries=carries)
        case forms if all(isinstance(f, WindowForm) for f in forms):
            return Analysis(carries=carries)
        case forms:
            names = " ".join(f.state for f in forms)
            text = f"the chunk kernels carry one affine state, the body carries {names}: stepped"
            return Analysis(refusals=(Refusal(text, program.loc),), carries=carries)


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
