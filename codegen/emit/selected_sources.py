"""Which kernels run a selection and the fold over what it picks."""

from __future__ import annotations

from attncc.codegen.forms import Refusal, SelectedForm
from attncc.codegen.plan import Spec
from attncc.codegen.plan_gathered import plan_selected
from attncc.codegen.printers import source
from attncc.codegen.render import Source
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program


def selected_sources(program: Program, form: SelectedForm, spec: Spec, phase: str) -> list[Source]:
    """Every kernel that a call of this kind may launch, in launch order.

    Raises:
        RefusedError: no plan covers the program; the message says why and where.
    """
    plans = plan_selected(form, spec, phase)
    if isinstance(plans, Refusal):
        raise RefusedError(plans.reason, op=program.name, loc=plans.loc)
    return [source(plan) for plan in plans.all]
