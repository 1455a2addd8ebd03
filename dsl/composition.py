"""A composed layer: its structure, and which of its nodes one op can do at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from attncc.dsl.errors import LayerError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Layer, LayerNode, NodeKind

NO_FLAGS: tuple[str, ...] = ()

SETTINGS: Mapping[NodeKind, tuple[str, ...]] = {
    NodeKind.SCALE: ("by",),
    NodeKind.QUANTISE: ("block", "dequantised"),
    NodeKind.ROPE: ("rotated", "base", "interleaved"),
    NodeKind.RMSNORM: ("eps",),
    NodeKind.GATED_RMSNORM: ("eps", "gate_first"),
    NodeKind.LAYERNORM: ("eps",),
    NodeKind.L2NORM: ("eps",),
}
"""Host numbers that nodes take by kind; an op's node takes those of its op."""


def check_settings(
    nodes: Sequence[LayerNode], settings: Mapping[str, Mapping[str, float]], layer: str
) -> None:
    """Whether every host number has a node that takes it.

    Raises:
        LayerError: no such node, or it takes no such number.
    """
    known = {n.name: n for n in nodes}
    for name, numbers in settings.items():
        node = known.get(name)
        if node is None:
            raise LayerError(
                "no such node has settings", op=layer, argument=name, expected=" ".join(known)
            )
        scalars = () if node.op is None else tuple(t.name for t in node.op.tensors if t.scalar)
        takes = SETTINGS.get(node.kind, scalars)
        for number in numbers:
            if number not in takes:
                raise LayerError(
                    f"node {name} has no such setting", op=layer, argument=number,
                    expected=" ".join(takes) or "none", found=number, loc=node.loc,
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fused:
    """Several nodes that one op can do at once.

    Attributes:
        nodes: those that it stands for, by name.
        by: the node that takes their place; its objects are those of the layer.
        flags: flags of its op that are on.
        phase: the phase in which it is taken, or "" for all.
        most: sequences of a call up to which it is taken; 0 for any number.
    """

    nodes: tuple[str, ...]
    by: LayerNode
    flags: tuple[str, ...] = ()
    phase: str = ""
    most: int = 0

    def serves(self, settings: Mapping[str, Mapping[str, float]]) -> bool:
        """Whether the op takes the nodes' settings: the last node's by name, no other's."""
        scalars = {t.name for t in self.by.op.tensors if t.scalar} if self.by.op else set()
        known = {self.nodes[-1]: scalars}
        return all(settings.get(n, {}).keys() <= known.get(n, set()) for n in self.nodes)


@dataclass(frozen=True, slots=True)
class Composition:
    """A layer, and what of it may run as one.

    Attributes:
        layer: nodes and objects.
        fused: groups of its nodes that one op can do, in order of preference.
        settings: host numbers of nodes by name (``eps``, ``base``), where they are not the usual.
    """

    layer: Layer
    fused: tuple[Fused, ...] = ()
    settings: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer.name

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes whose sizes a model fixes: of parameters and of what is kept, but B, T and S."""
        fixed = (*KEPT, Lifetime.PARAMETER)
        held = [o.pattern.axes for o in self.layer.objects if o.lifetime in fixed]
        found = dict.fromkeys(a for axes in held for a in axes)
        return tuple(a for a in found if a not in ("B", "T", "S"))

    def setting(self, node: str, name: str, usual: float) -> float:
        """A host number of a node."""
        return dict(dict(self.settings).get(node, ())).get(name, usual)

    def running(
        self, phase: str, *, sequences: int = 1, fuse: bool = True,
        settings: Mapping[str, Mapping[str, float]] | None = None,
    ) -> tuple[tuple[LayerNode, tuple[str, ...]], ...]:  # fmt: skip
        """The nodes that a phase runs, each with its op's flags, in order.

        Args:
            phase: ``prefill`` or ``decode``.
            sequences: of the call.
            fuse: take one op for several nodes where the composition names one and it can do what
                the nodes' settings ask for.
            settings: host numbers of nodes by name; the composition's own if None.
        """
        numbers = {n: dict(x) for n, x in self.settings} if settings is None else settings
        taken: dict[str, Fused] = {}
        for group in self.fused if fuse else ():
            wanted = group.phase in ("", phase) and sequences <= (group.most or sequences)
            wanted = wanted and group.serves(numbers)
            if wanted and not taken.keys() & set(group.nodes):
                taken |= dict.fromkeys(group.nodes, group)
        found = []
        for node in self.layer.nodes:
            group_of = taken.get(node.name)
            if group_of is None:
                found.append((node, NO_FLAGS))
            elif node.name == group_of.nodes[-1]:  # what it reads is there by then
                found.append((group_of.by, group_of.flags))
        return tuple(found)


def misfits(nodes: Sequence[LayerNode], group: Fused, result: str) -> Iterator[tuple[str, str]]:
    """Why an op cannot stand for a group of nodes, each reason with the object that it is about.

    It runs in the place of the group's last node, and the others do not run: what the rest of the
    layer reads of theirs it must have made by then, and what it reads itself must be there.

    Args:
        nodes: the layer's, in order.
        group: some of them, and the node that takes their place.
        result: the layer's output.
    """
    place = {n.name: i for i, n in enumerate(nodes)}
    last = max(place[name] for name in group.nodes)
    if group.phase not in ("", "prefill", "decode"):
        yield f"a layer has no phase {group.phase!r}: prefill or decode", group.by.name
    if place[group.nodes[-1]] != last:
        yield "the last node of a fusion is the one that runs last", nodes[last].name
    by, inside = group.by, [n for n in nodes if n.name in group.nodes]
    dropped = {o for n in inside for o in _creates(n)} - set(by.outputs)
    later = {o for n in nodes[last + 1 :] for o in _creates(n)}
    for name in by.inputs:
        if name in dropped | later:
            yield f"{by.name} reads what is not there by then", name
    for at, node in enumerate(nodes):
        missing = dropped | (set(by.outputs) if at < last else set())
        for name in () if node in inside else node.inputs:
            if name in missing and any(name in _creates(n) for n in inside):
                yield f"node {node.name} reads what {by.name} has not made by then", name
    if result in dropped:
        yield f"the layer gives back what {by.name} does not make", result


def _creates(node: LayerNode) -> set[str]:
    """What a node makes new: a history, state or window that it changes was there."""
    return set(node.outputs) - set(node.inputs)
