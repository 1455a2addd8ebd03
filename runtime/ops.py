"""The library's declarations as ops: ``attncc.ops.attention(q, k, v)``.

Every file of ``dsl/library`` is one op of the file's name, read when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from attncc.dsl import library
from attncc.runtime.api import Op

__all__ = sorted(m.name for m in iter_modules(library.__path__) if not m.ispkg)


def __getattr__(name: str) -> Op:
    if name not in __all__:
        raise AttributeError(f"the library has no op {name!r}; it has {', '.join(__all__)}")
    module = import_module(f"{library.__name__}.{name}")
    found = globals()[name] = Op(getattr(module, name))
    return found


def __dir__() -> list[str]:
    return list(__all__)
