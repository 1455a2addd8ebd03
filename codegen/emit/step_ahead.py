"""A token's inputs, asked for while the token before it is worked on.

Written where they are used, they would be waited for one after the other, each behind a sum over
the state: a token took several times the latency of memory. Numbers pass from token to token as
they are stored; what converts them waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan_scan import StepPlan
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Node, Select


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is asked for ahead.

    Attributes:
        first: lines that ask for the first token's inputs.
        here: lines that take a token's inputs, and ask for those of the next one.
        known: the inputs, in the variables of ``here``.
    """

    first: tuple[str, ...]
    here: tuple[str, ...]
    known: dict[Node, Var]


def asked(plan: StepPlan, printer: Printer) -> Iterator[tuple[Node, Input, dict[str, Place]]]:
    """A token's inputs, as they are found in a body and as they are loaded."""
    scan = plan.program.scan
    for node in walk(*plan.body.roots):
        inner = node.arg if isinstance(node, Select) else node
        if not isinstance(inner, Input) or inner.lifetime in (Lifetime.STATE, Lifetime.WINDOW):
            continue
        picked = {node.over: Place(Var(str(node.at)))} if isinstance(node, Select) else {}
        arg = printer.tensors.get(inner.name)
        if arg is None or scan not in arg.pattern.axes:
            continue
        if set(inner.axes) <= printer.places.keys() | picked.keys():
            yield node, inner, picked


def ahead_of(plan: StepPlan, printer: Printer) -> Ahead:
    """Print the loads of a token ahead; the printer's own lines stay as they are."""
    scan = plan.program.scan or "T"
    wanted = tuple(asked(plan, printer))
    places = {scan: Place(Var("ask_row"), Var("ask"))}
    loads: list[str] = []
    here: list[str] = []
    known: dict[Node, Var] = {}
    for i, (node, inner, picked) in enumerate(wanted):
        arg = printer.tensors[inner.name]
        child = printer.child(**places, **picked)
        child.lines = loads
        value = child.load(arg, raw=True)
        loads.append(f"ahead_{i} = {value.text}")
        real = not arg.dtype.startswith(("i", "u"))
        here.append(f"token_{i} = ahead_{i}{'.to(tl.float32)' if real else ''}")
        known[node] = Var(f"token_{i}", value.dims)
    # without a token to ask for, the first row's address is one that is not used
    first = ("ask = length > 0", "ask_row = first", *loads)
    return Ahead(first, (*here, "ask = t + 1 < length", "ask_row = row + 1", *loads), known)
