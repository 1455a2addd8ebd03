"""Complete layers as torch modules: ``attncc.runtime.nn`` under the package's own name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncc.runtime import nn as _named

if TYPE_CHECKING:
    from attncc.runtime.nn import *  # noqa: F403

__all__ = _named.__all__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # no __path__: a submodule of this name would be a second copy
        raise AttributeError(f"attncc.nn has no {name!r}")
    return getattr(_named, name)


def __dir__() -> list[str]:
    return list(__all__)
