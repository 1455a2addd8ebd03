"""Complete layers as torch modules: composed of named nodes, run from caches or as a whole.

A module is imported when something of it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attncc.runtime.nn.kept import Kept
    from attncc.runtime.nn.library import (
        GatedDeltaNet,
        MultiHeadAttention,
        SparseLatentAttention,
    )
    from attncc.runtime.nn.module import LayerModule
    from attncc.runtime.nn.owner import LayerBatch, LayerOwner

_WHERE = {
    "GatedDeltaNet": "library", "Kept": "kept", "LayerBatch": "owner", "LayerModule": "module",
    "LayerOwner": "owner", "MultiHeadAttention": "library", "SparseLatentAttention": "library",
}  # fmt: skip

__all__ = [
    "GatedDeltaNet", "Kept", "LayerBatch", "LayerModule", "LayerOwner", "MultiHeadAttention",
    "SparseLatentAttention",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"attncc.nn has no {name!r}; it has {', '.join(__all__)}")
    found = globals()[name] = getattr(import_module(f"attncc.runtime.nn.{_WHERE[name]}"), name)
    return found


def __dir__() -> list[str]:
    return list(__all__)
