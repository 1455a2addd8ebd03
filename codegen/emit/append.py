"""Prints the kernel that copies new rows into caches."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.softmax_rows import Texts, about, atom
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_append import AppendPlan
from attncc.codegen.softmax_checks import TOKENS
from attncc.dsl.axes import PAGE, PAGES


@dataclass(frozen=True, slots=True)
class AppendCode:
    """Printed pieces of appending: the docstring and one copy a history."""

    about: Texts
    copies: Texts


def append_code(plan: AppendPlan) -> AppendCode:
    """Print the copies of new rows into their caches."""
    copies: list[str] = []
    sizes = {a: f"n_{a}" for t in plan.histories for a in plan.tensor(t).pattern.axes}
    sizes |= {a: str(n) for a, n in plan.static}
    tensors = {arg.name: arg for arg in plan.args if isinstance(arg, TensorArg)}
    base = {
        "B": Place(Var("at_B")),
        TOKENS: Place(Var("token" if plan.packed else "t")),
        plan.over: Place(Var("place")),
        PAGES: Place(Var("page")),
        PAGE: Place(Var("page_at")),
    }
    for name in plan.histories:
        axes = tuple(a for a in plan.tensor(name).pattern.axes if a not in base)
        lines, places = _inner(name, axes, sizes)
        width = " * ".join(sizes[a] for a in axes)
        inside = f"i < {width}" if axes else "chunk == 0"
        guard = Var(f"{name}_valid", ("n",) if axes else ())
        copies += [f"{guard.text} = owned & ({inside})", *lines]
        places |= {a: Place(place.index, guard) for a, place in base.items()}
        p = Printer(("n",), tensors, places, sizes=sizes, lines=copies)
        p.store(tensors[name], p.load(tensors[f"new_{name}"], raw=True))
    return AppendCode(about(plan), tuple(copies))


def _inner(
    name: str, axes: tuple[str, ...], sizes: dict[str, str]
) -> tuple[list[str], dict[str, Place]]:
    """An element's index within a row as the indices of its axes."""
    lines, places = [], {}
    for at, axis in enumerate(axes):
        below = " * ".join(sizes[a] for a in axes[at + 1 :])
        text = f"i // {atom(below)}" if below else "i"
        text = f"{atom(text)} % {sizes[axis]}" if at else text
        lines.append(f"{name}_at_{axis} = {text}")
        places[axis] = Place(Var(f"{name}_at_{axis}", ("n",)))
    return lines, places
