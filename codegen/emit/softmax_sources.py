"""Which kernels of the softmax family run a body."""

from __future__ import annotations

from attncc.codegen.forms import Refusal, SoftmaxForm
from attncc.codegen.plan import Spec
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.codegen.printers import source
from attncc.codegen.render import Source
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program


def softmax_sources(program: Program, form: SoftmaxForm, spec: Spec, phase: str) -> list[Source]:
    """Every kernel that a call of this kind may launch, in launch order.

    Raises:
        RefusedError: the family does not cover the program; the message says why and where.
    """
    plans = plan_softmax(program, form, spec, phase)
    if isinstance(plans, Refusal):
        raise RefusedError(plans.reason, op=program.name, loc=plans.loc)
    assert isinstance(plans, SoftmaxPlans)
    found = (plans.append, plans.whole, *plans.parts, plans.merge, *plans.fewer)
    return [source(plan) for plan in found if plan is not None]
