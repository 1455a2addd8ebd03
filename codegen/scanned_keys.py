"""Which values of a history a decode step looks at before it reads the history's long rows.

A mask may compare values of the history, such as document ids, which are a few bytes a key where
the key and its value are hundreds. One pass over them finds the first and the last key that any row
can see, and the loop over keys runs between the two. Prefill asks for bounds of whole blocks
instead (:func:`attncc.codegen.intervals.tightened_by`), which are made once for many tiles.
"""

from __future__ import annotations

from attncc.codegen.forms import SoftmaxFold
from attncc.codegen.intervals import Interval, Text, positions_only, truth
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Index, Input, Lifetime, Lit, Node


def scanned_keys(fold: SoftmaxFold) -> tuple[str, ...]:
    """History inputs whose values can hide keys from every row of a tile; none if none can.

    Args:
        fold: the pass' first fold.
    """
    if fold.mask is None:
        return ()
    residual = [n for c in fold.mask.clauses for n in c.residual]
    found = {n for n in walk(*residual) if isinstance(n, Input) and _of_keys(n, fold)}

    def leaf(node: Node) -> Interval[str] | None:
        if node in found or isinstance(node, Index):
            return Interval("lo", "hi")
        hidden = fold.over in axes_of(node) or isinstance(node, Lit) or positions_only(node)
        return None if hidden else Interval("lo", "hi")

    if not found or all(truth(n, leaf, Text()).some == "True" for n in residual):
        return ()
    return tuple(sorted(n.name for n in found))


def _of_keys(node: Input, fold: SoftmaxFold) -> bool:
    """Whether an input has one value a key and a point of the grid."""
    held = node.lifetime in (Lifetime.CACHE, Lifetime.MEMORY)
    return held and fold.over in node.axes and set(node.axes) <= {*fold.batch_axes, fold.over}
