"""Histories stored as e4m3 beside scales: what a kernel has to know of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from attncc.codegen.forms import Refusal, SoftmaxFold
from attncc.codegen.tiles import Tiles
from attncc.dsl.axes import Pattern
from attncc.dsl.graph import children
from attncc.dsl.ir import Input, Node, Program

E4M3 = "fp8e4nv"
"""Triton's name of the storage type."""

LARGEST = 448.0
"""The largest e4m3 number (Micikevicius et al., FP8 Formats for Deep Learning, 2022)."""

SMALLEST = 2.0**-126
"""The least scale that is written: fp32's smallest normal number."""

_FIRST_TARGET = 89


@dataclass(frozen=True, slots=True)
class Scaled:
    """One quantised history: element i of a row is ``data[i] * scale[i // block]``.

    Attributes:
        name: the input's.
        axis: the axis with the scales.
        block: its elements with one scale.
        pattern: memory axes of the scales (:func:`attncc.dsl.axes.scales_of`).
        dtype: ``fp32``, or ``u8`` for exponents: 2^(e - 127).
        operand: element type of the scores' products, ``fp16`` or ``fp32``; e4m3 fits either.
        value: element type of the weighted sum's product, the call's own: it is the weights' too.
        aligned: the scales' pointer and strides are multiples of 16 bytes and elements.
    """

    name: str
    axis: str
    block: int
    pattern: Pattern
    dtype: str
    operand: str
    value: str
    aligned: bool = False

    @property
    def scales(self) -> str:
        """Name of the scales' parameter."""
        return f"scale_{self.name}"


def quantised_input(found: Iterable[Scaled], node: Node) -> Scaled | None:
    """The quantised history that a node reads, if it is nothing but that."""
    if not isinstance(node, Input):
        return None
    return next((s for s in found if s.name == node.name), None)


def storage_problems(
    program: Program, folds: tuple[SoftmaxFold, ...], quantised: tuple[Scaled, ...], target: str
) -> Iterator[Refusal]:
    """Why a program's quantised histories have no kernel, with the lines that say so."""
    if not quantised:
        return
    if int(target.removeprefix("sm_")) < _FIRST_TARGET:
        yield Refusal(f"e4m3 needs sm_{_FIRST_TARGET}, not {target}")
    held = {s.name: s for s in quantised}
    taken: set[Node] = set()
    for fold in folds:
        taken.add(fold.node)
        for over, nodes in ((fold.value_axes, fold.value), *((d.over, d.key) for d in fold.dots)):
            yield from _operand_problems(over, nodes, held)
        taken |= {d.node for d in fold.dots}
        yield from _elsewhere((n for d in fold.dots for n in d.query), set(), held)
        yield from _elsewhere((n for n in (fold.score, fold.where, fold.sink) if n), taken, held)
    yield from _elsewhere((o.value for o in program.outputs), taken, held)


def _operand_problems(
    over: tuple[str, ...], nodes: tuple[Node, ...], held: dict[str, Scaled]
) -> Iterator[Refusal]:
    """A quantised operand stands alone, and what is summed or kept ends with its scaled axis."""
    for node in nodes:
        own = quantised_input(held.values(), node)
        if own is None:
            yield from _elsewhere((node,), set(), held)
        elif len(nodes) > 1:
            yield Refusal(f"{own.name}, which is quantised, in a product of several", node.loc)
        elif over[-1:] != (own.axis,):
            yield Refusal(f"{own.name} has scales along {own.axis}, not {' '.join(over)}", node.loc)
        elif own.block & (own.block - 1) and len(over) > 1:
            yield Refusal(f"{own.name} has several scales over {own.block} columns each", node.loc)


def with_room(tiles: Tiles, quantised: tuple[Scaled, ...], width: int) -> Tiles:
    """Tiles with registers to widen e4m3 in.

    Args:
        tiles: what 16-bit operands would have.
        quantised: the quantised histories of the call.
        width: the widest operand; blocks below it have loads of their own.
    """
    if quantised and tiles.block_m == 32:
        return replace(tiles, num_warps=8)
    if any(s.block < width for s in quantised):
        return replace(tiles, num_stages=min(tiles.num_stages, 3))
    return tiles


def pieces(own: Scaled | None, width: int) -> int:
    """Into how many parts with one scale each an operand's columns are cut; 1 if not quantised."""
    return 1 if own is None else width // own.block


def _elsewhere(
    roots: Iterable[Node], stop: set[Node], held: dict[str, Scaled]
) -> Iterator[Refusal]:
    """Quantised histories outside the operands of matrix products."""
    stack = [r for r in roots if r not in stop]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Input) and node.name in held:
            yield Refusal(f"{node.name}, which is quantised, in element-wise code", node.loc)
        stack.extend(c for c in children(node) if c not in stop)
