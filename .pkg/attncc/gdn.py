"""FlashInfer's gated delta rule: ``attncc.runtime.adapters.gdn`` by its public name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncc.runtime.adapters import gdn as _named

if TYPE_CHECKING:
    from attncc.runtime.adapters.gdn import *  # noqa: F403

__all__ = _named.__all__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"attncc.gdn has no {name!r}")
    return getattr(_named, name)


def __dir__() -> list[str]:
    return list(__all__)
