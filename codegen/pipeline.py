"""The passes in order, read in one place: program -> verified forms.

Each family's modules are imported where a program needs them: a first call needs one family.
"""

from __future__ import annotations

from attncc.codegen.forms import AffineForm, Analysis, DiagonalForm, Refusal, WindowForm
from attncc.codegen.plan import Spec
from attncc.codegen.render import Source
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Lifetime, Program
from attncc.dsl.memo import once_a_program
from attncc.dsl.verify import verify


@once_a_program
def analyse(program: Program) -> Analysis:
    """Find a program's form; what does not apply is kept with its reason."""
    verify(program)
    if program.scan is not None:
        return _analyse_scan(program)
    if all(t.lifetime in (Lifetime.ACTIVATION, Lifetime.PARAMETER) for t in program.tensors):
        return Analysis(pointwise=True)
    from attncc.codegen.passes.associate import is_open
    from attncc.codegen.passes.find_selected import find_selected
    from attncc.codegen.passes.find_softmax import find_softmax

    if is_open(program):
        why = "the sizes of a call choose the order of a contraction"
        return Analysis(refusals=(Refusal(why, program.loc),))
    softmax = find_softmax(program)
    if not isinstance(softmax, Refusal):
        return Analysis(softmax=softmax)
    selected = find_selected(program)
    if selected is None:
        return Analysis(refusals=(softmax,))
    if isinstance(selected, Refusal):
        return Analysis(refusals=(selected,))
    return Analysis(selected=selected)


def _analyse_scan(program: Program) -> Analysis:
    from attncc.codegen.passes.find_affine import find_affine
    from attncc.codegen.passes.find_carries import find_carries

    carries = find_carries(program)
    if isinstance(carries, Refusal):
        from attncc.codegen.passes.find_across import find_across

        across = find_across(program)
        found = None if isinstance(across, Refusal) else across
        return Analysis(refusals=(carries,), across=found)
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


def pointwise_source(program: Program, spec: Spec) -> Source:
    """The kernel of an op that carries nothing.

    Raises:
        RefusedError: there is none, with the line and the reason.
    """
    from attncc.codegen.plan_pointwise import plan_pointwise
    from attncc.codegen.printers import source

    plan = plan_pointwise(program, spec)
    if isinstance(plan, Refusal):
        raise RefusedError(plan.reason, op=program.name, loc=plan.loc)
    return source(plan)


def kernel_sources(program: Program, spec: Spec, phase: str) -> list[Source]:
    """The generated kernels of one phase, in launch order.

    Raises:
        RefusedError: no plan covers the program; the message gives the line and the reason.
    """
    from attncc.codegen.emit.scan_sources import scan_sources
    from attncc.codegen.emit.selected_sources import selected_sources
    from attncc.codegen.emit.softmax_sources import softmax_sources

    analysis = analyse(program)
    if analysis.softmax is not None:
        return softmax_sources(program, analysis.softmax, spec, phase)
    if analysis.selected is not None:
        return selected_sources(program, analysis.selected, spec, phase)
    if program.scan is not None:
        return scan_sources(program, analysis, spec, phase)
    if analysis.pointwise:
        return [pointwise_source(program, spec)]
    raise RefusedError("; ".join(map(str, analysis.refusals)), op=program.name)
