"""Triton text of element-wise scans whose warps take runs of tokens side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.codegen.emit.running import index_of, said_of
from attncc.codegen.emit.scan import store_results
from attncc.codegen.emit.step import printed, printer_of
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan_running import RunningPlan
from attncc.dsl.ir import Input, Node

RUN = "r"
"""The dimension of runs."""


@dataclass(frozen=True, slots=True)
class RunsCode:
    """Printed pieces of ``scan_runs.py.jinja``.

    Attributes:
        summary: what a program does.
        index: where it works.
        load: the state before the first token, and what no token changes.
        front: every run's (a, b).
        body: the tokens of a run, in order.
        rest: a token behind the last whole runs.
        finish: behind the loops.
        state: the state's name.
        width: columns of a program.
    """

    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    front: tuple[str, ...]
    body: tuple[str, ...]
    rest: tuple[str, ...]
    finish: tuple[str, ...]
    state: str
    width: int


def emit(plan: RunningPlan) -> RunsCode:
    """Print a plan's expressions."""
    single = printer_of(plan, exact=plan.exact)
    code = printed(plan, single)
    scan = plan.program.scan or "T"
    fixed: dict[Node, Var] = {
        node: var
        for node, var in single.known.items()
        if isinstance(node, Input) and node.name in single.tensors
        and scan not in single.tensors[node.name].pattern.axes
    }  # fmt: skip
    dims = (RUN, plan.blocked)
    base = replace(printer_of(plan, exact=plan.exact), dims=dims, prefix="y")
    tokens = [_token(base, scan, place, fixed) for place in range(plan.group)]
    for place, printer in enumerate(tokens):
        base.lines += [f"t_{place} = run_token + {place}", f"row_{place} = run_row + {place}"]
        _advance(printer, plan, dims)
    front = tuple(base.lines)
    base.lines.clear()
    for printer in tokens:
        _through(printer, plan, dims)
    width = plan.axis(plan.blocked).block
    return RunsCode(
        said_of(plan), tuple(index_of(plan)), code.load, front, tuple(base.lines), code.body,
        code.finish, plan.form.state, width,
    )  # fmt: skip


def _token(base: Printer, scan: str, place: int, fixed: dict[Node, Var]) -> Printer:
    """What prints the token at a place of every run."""
    printer = base.child(**{scan: Place(Var(f"row_{place}", (RUN,)))})
    positions = {**base.positions, scan: Var(f"t_{place}", (RUN,))}
    return replace(printer, positions=positions, known=dict(fixed))


def _advance(printer: Printer, plan: RunningPlan, dims: tuple[str, ...]) -> None:
    """Take a token into each run's (a, b)."""
    form = plan.form
    if form.decay is not None:
        factor = printer.lift(printer.emit(form.decay), dims)
        printer.lines += [f"{name} = {name} * ({factor})" for name in ("through", "added")]
    if form.add is not None:
        term = printer.lift(printer.emit(form.add), dims)
        printer.lines.append(f"added = added + ({term})")


def _through(printer: Printer, plan: RunningPlan, dims: tuple[str, ...]) -> None:
    """One token of each run, from the state before it."""
    program, name = plan.program, plan.form.state
    t = program.tensor(name)
    old = Input(t.name, t.pattern.axes, t.lifetime, t.kind, loc=t.loc)
    printer.known[old] = Var(f"{name}_run", dims)
    values = {
        o.name: printer.emit(n) for o, n in zip(program.outputs, plan.body.outputs, strict=True)
    }
    new = printer.emit(dict(plan.body.states)[name])
    store_results(printer, plan, values)
    printer.lines.append(f"{name}_run = {printer.lift(new, dims)}")
