"""The process's ops by token: how traced code names the op whose custom ops it wants."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncc.dsl.build import Declaration
    from attncc.runtime.api import Op

_NUMBERS = itertools.count()
_OPS: weakref.WeakValueDictionary[str, Op] = weakref.WeakValueDictionary()


def enrol(op: Op) -> str:
    """A token of the op's own, for as long as it lives: a string, so that a trace can guard it."""
    token = f"{op.declaration.name}#{next(_NUMBERS)}"
    _OPS[token] = op
    return token


def of(declaration: Declaration) -> Op:
    """The op of a declaration: one that lives, or a new one."""
    from attncc.runtime.api import Op

    for op in list(_OPS.values()):
        if op.declaration is declaration:
            return op
    return Op(declaration)


def find(token: str) -> Op:
    """The op of a token.

    Raises:
        KeyError: the op is gone.
    """
    return _OPS[token]
