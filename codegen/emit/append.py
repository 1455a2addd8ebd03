"""Prints the kernel that copies new rows into caches, quantised where they are stored so."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.softmax_rows import Texts, about, atom
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_append import AppendPlan
from attncc.codegen.quantised import LARGEST, SMALLEST, Scaled
from attncc.codegen.softmax_checks import TOKENS
from attncc.codegen.tiles import padded
from attncc.dsl.axes import PAGE, PAGES, block_axis


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
    scales = {s.name: s for s in plan.quantised}
    for name in plan.histories:
        axes = tuple(a for a in plan.tensor(name).pattern.axes if a not in base)
        p = Printer(("g", "n"), tensors, base, sizes=sizes, lines=copies)
        if name in scales:
            _quantise(p, plan, scales[name], axes)
        else:
            _copy(p, name, axes)
    return AppendCode(about(plan), tuple(copies))


def _copy(p: Printer, name: str, axes: tuple[str, ...]) -> None:
    """A row as it is."""
    lines, places = inner_lines(name, axes, dict(p.sizes))
    width = " * ".join(p.sizes[a] for a in axes)
    inside = f"i < {width}" if axes else "chunk == 0"
    guard = Var(f"{name}_valid", ("n",) if axes else ())
    p.lines += [f"{guard.text} = owned & ({inside})", *lines]
    places |= {a: Place(place.index, guard) for a, place in p.places.items()}
    own = p.child(**places)
    own.store(p.tensors[name], own.load(p.tensors[f"new_{name}"], raw=True))


def _quantise(p: Printer, plan: AppendPlan, own: Scaled, axes: tuple[str, ...]) -> None:
    """A row as e4m3 and scales: groups of elements with one scale, side by side.

    The arithmetic is that of :func:`attncc.runtime.quantised.quantise`, operation by operation.
    """
    name, lanes = own.name, padded(own.block)
    groups = plan.block // lanes
    order = (*(a for a in axes if a != own.axis), block_axis(own.axis))
    sizes = {**p.sizes, order[-1]: str(int(p.sizes[own.axis]) // own.block)}
    count = " * ".join(sizes[a] for a in order)
    lines, places = inner_lines(name, order, sizes, f"{name}_g", "g")
    group = Var(f"{name}_owned", ("g",))
    element = Var(f"{name}_valid", ("g", "n"))
    block, lane = places[order[-1]].index.text, f"{name}_lane"
    p.lines += [
        f"{name}_g = chunk * {groups} + tl.arange(0, {groups})  # [g] elements with one scale",
        f"{lane} = tl.arange(0, {lanes})  # [n] one of them",
        f"{group.text} = owned & ({name}_g < {count})",
        f"{element.text} = {group.text}[:, None] & ({lane} < {own.block})[None, :]",
        *lines,
    ]
    at = Var(f"{block}[:, None] * {own.block} + {lane}[None, :]", ("g", "n"))
    moved = {a: Place(place.index, element) for a, place in p.places.items()}
    data = p.child(**{**places, **moved, own.axis: Place(at, element)})
    value = data.load(p.tensors[f"new_{name}"])
    x, scale, code = (f"{name}_{part}" for part in ("x", "scale", "code"))
    nan = 'float("nan")'
    p.lines += [
        f"{x} = {value.text}  # [g, n]",
        f'{name}_size = tl.where(tl.abs({x}) < float("inf"), tl.abs({x}), 0.0)',
        f"{name}_most = tl.max({name}_size, 1)  # [g] of the finite ones",
        f"{scale} = tl.maximum(tl.div_rn({name}_most, {LARGEST}), {SMALLEST!r})",
        f"{scale} = tl.where({name}_most > 0, {scale}, 1.0)",
    ]
    stored = Var(scale, ("g",))
    if own.dtype == "u8":  # the next power of two, by its exponent
        stored = Var(f"{name}_exponent", ("g",))
        p.lines += [
            f"{stored.text} = ({scale}.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23",
            f"{scale} = ({stored.text} << 23).to(tl.float32, bitcast=True)",
        ]
    p.lines += [
        f"{code} = tl.div_rn({x}, {scale}[:, None])",
        f"{code} = tl.clamp({code}, -{LARGEST}, {LARGEST}, propagate_nan=tl.PropagateNan.ALL)",
        f"{code} = tl.where({code} != {code}, {nan}, {code})",
    ]
    data.store(p.tensors[name], Var(code, ("g", "n")))
    held = {a: Place(place.index, group) for a, place in p.places.items()}
    p.child(**{**places, **held}).store(p.tensors[own.scales], stored)


def inner_lines(
    name: str, axes: tuple[str, ...], sizes: dict[str, str], i: str = "i", dim: str = "n"
) -> tuple[list[str], dict[str, Place]]:
    """An element's (or group's) index within a row as the indices of its axes.

    Args:
        name: of the history.
        axes: of a row, the last varying fastest.
        sizes: text of their sizes.
        i: the index.
        dim: the tile dimension it runs along.
    """
    lines, places = [], {}
    for at, axis in enumerate(axes):
        below = " * ".join(sizes[a] for a in axes[at + 1 :])
        text = f"{i} // {atom(below)}" if below else i
        text = f"{atom(text)} % {sizes[axis]}" if at else text
        label = f"{name}_at_{axis}".replace("'", "_block")
        lines.append(f"{label} = {text}")
        places[axis] = Place(Var(label, (dim,)))
    return lines, places
