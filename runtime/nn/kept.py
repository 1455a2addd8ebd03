"""What a layer keeps between calls: a cache for each of its ops, a pool for each state and window.

For a fixed set of sequences :meth:`LayerModule.allocate` makes it at once; where sequences come and
go, a :class:`attncc.nn.LayerOwner` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.axes import PAGE
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Dtype, Layer, LayerNode
from attncc.runtime.caches import Cache, Storage
from attncc.runtime.owners.allocation import allocate
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import Quantised

if TYPE_CHECKING:
    from attncc.runtime.nn.module import LayerModule


@dataclass(frozen=True, slots=True)
class Kept:
    """What one call of a layer reads and writes of the past.

    Attributes:
        caches: by name of the op's node.
        pools: by name of the state or window among the layer's objects.
    """

    caches: Mapping[str, Cache]
    pools: Mapping[str, StatePool]

    @property
    def lengths(self) -> torch.Tensor | None:
        """Tokens that each sequence holds, on the device; None where nothing grows."""
        return next((c.lengths for c in self.caches.values()), None)


def capacity(module: LayerModule, kept: Kept) -> int:
    """Most tokens that a sequence may come to hold; 0 where nothing grows."""
    most = 0
    for node, grows, _ in module.keeping:
        cache = kept.caches.get(node.name) if grows else None
        if cache is not None and node.op is not None:
            t = next(t for t in node.op.tensors if t.lifetime is Lifetime.CACHE)
            dims = cache.pattern(node.op.name, t)
            table = getattr(cache, "block_table", None)
            rows = cache.tensors[t.name].shape[dims.dim_of("S" if table is None else PAGE)]
            most = max(most, rows if table is None else rows * table.shape[1])
    return most


def keeping(layer: Layer) -> Iterator[tuple[LayerNode, bool, dict[str, str]]]:
    """The ops of a layer that keep something: node, whether it grows, and pools' objects."""
    for node in layer.nodes:
        if node.op is None:
            continue
        bound = dict(node.binds)
        held = [t for t in node.op.tensors if t.lifetime in KEPT and t.name in bound]
        pools = {t.name: bound[t.name] for t in held if t.lifetime is not Lifetime.CACHE}
        if held:
            yield node, len(pools) < len(held), pools


def stored(module: LayerModule, node: LayerNode) -> dict[str, Storage]:
    """What histories and windows of an op are stored as: the module's dtype, or e4m3 by the layer.

    Scales are the history's own: powers of two, so that quantising rows twice changes no bit.
    """
    assert node.op is not None
    quantised = Quantised(scale="ue8m0")
    objects = {name: module.layer.object(target) for name, target in node.binds}
    return {
        t.name: quantised if objects[t.name].dtype is Dtype.E4M3 else module.dtype
        for t in node.op.tensors
        if t.lifetime in (Lifetime.CACHE, Lifetime.WINDOW) and t.name in objects
    }


def fixed(
    module: LayerModule, batch: int, capacity: int, page: int | None, dtype: Any,
    state_dtype: torch.dtype,
) -> Kept:  # fmt: skip
    """Everything for a fixed set of sequences, empty; see :meth:`LayerModule.allocate`."""
    caches: dict[str, Cache] = {}
    pools: dict[str, StatePool] = {}
    for node, _, names in module.keeping:
        found = allocate(
            node.op, sizes={**module.sizes_of(node), "B": batch}, capacity=capacity, page=page,
            dtype=dtype or stored(module, node), state_dtype=state_dtype, device=module.device,
        )  # fmt: skip
        if found.cache is not None:
            caches[node.name] = found.cache
        pools |= {names[n]: pool for n, pool in found.states.items()}
    return Kept(caches, pools)
