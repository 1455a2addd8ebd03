"""A composed layer: its structure, and which of its nodes one op can do at once."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Layer, LayerNode

NO_FLAGS: tuple[str, ...] = ()


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
        self, phase: str, *, sequences: int = 1, fuse: bool = True
    ) -> tuple[tuple[LayerNode, tuple[str, ...]], ...]:
        """The nodes that a phase runs, each with its op's flags, in order.

        Args:
            phase: ``prefill`` or ``decode``.
            sequences: of the call.
            fuse: take one op for several nodes where the composition names one.
        """
        taken: dict[str, Fused] = {}
        for group in self.fused if fuse else ():
            wanted = group.phase in ("", phase) and sequences <= (group.most or sequences)
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
