"""The library's ops: ``attncc.runtime.ops`` under the package's own name."""

from __future__ import annotations

from attncc.runtime import ops as _named
from attncc.runtime.api import Op

__all__ = _named.__all__


def __getattr__(name: str) -> Op:
    if name.startswith("__"):
        raise AttributeError(f"attncc.ops has no {name!r}")
    found: Op = getattr(_named, name)
    return found


def __dir__() -> list[str]:
    return list(__all__)
