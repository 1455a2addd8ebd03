"""Names and Python types of a call's arguments, and the options every call takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError
from attncc.dsl.ir import Kind, Lifetime, Tensor
from attncc.dsl.signature import RESERVED
from attncc.runtime.caches import Cache
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import QuantisedTensor


@dataclass(frozen=True, slots=True)
class Options:
    """The options that every call takes, read from its keywords."""

    cache: Cache | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    out: Any = None
    return_lse: bool = False
    return_partial: bool = False
    backend: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


KNOWN = tuple(Options.__dataclass_fields__)
_TYPES: Mapping[str, tuple[Any, str]] = {
    "cache": (Cache, "DenseCache or PagedCache"),
    "cu_seqlens": (torch.Tensor, "a tensor"),
    "cu_seqlens_k": (torch.Tensor, "a tensor"),
    "return_lse": (bool, "True or False"),
    "return_partial": (bool, "True or False"),
    "sizes": (Mapping, "a mapping of axes to sizes"),
}


def read_options(op: str, kwargs: dict[str, Any]) -> Options:
    """Take the options out of a call's keywords.

    Raises:
        ArgumentError: an option of the reserved list that this version does not offer, or one of
            another type.
    """
    taken = {k: kwargs.pop(k) for k in KNOWN if k in kwargs}
    for name in RESERVED & set(kwargs):
        raise ArgumentError(
            "the option is not offered", op=op, argument=name, expected=" ".join(KNOWN)
        )
    for name, (kinds, expected) in _TYPES.items():
        if taken.get(name) is None:
            taken.pop(name, None)
        elif not isinstance(taken[name], kinds):
            what = "on or off" if kinds is bool else f"not {expected}"
            raise ArgumentError(
                f"the option is {what}", op=op, argument=name, expected=expected,
                found=taken[name] if kinds is bool else type(taken[name]).__name__,
            )  # fmt: skip
    for axis, size in taken.get("sizes", {}).items():
        if not isinstance(size, (int, torch.SymInt)):
            raise ArgumentError(
                "a size is a whole number", op=op, argument=f"sizes[{axis}]", expected="int",
                found=type(size).__name__,
            )  # fmt: skip
    return Options(**taken)


def arguments(
    decl: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Match positional and keyword arguments with the signature; absent optional ones are left out.

    Raises:
        ArgumentError: too many, unknown, doubly given or missing arguments, or of the wrong Python
            type.
    """
    names = [t.name for t in decl.tensors]
    if len(args) > len(names):
        raise ArgumentError(
            "too many arguments", op=decl.name, expected=f"at most {len(names)}", found=len(args)
        )
    found = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise ArgumentError(
                "unknown argument", op=decl.name, argument=name, expected=", ".join(names)
            )
        if name in found:
            raise ArgumentError("given twice", op=decl.name, argument=name)
        found[name] = value
    found = {n: found[n] for n in names if found.get(n) is not None}  # whatever keywords' order
    for t in decl.tensors:
        if t.kind is Kind.BOOL and t.name in found:
            _check_flag(decl.name, t.name, found[t.name])
            if not found[t.name]:
                del found[t.name]  # as if it were not given
            continue
        if t.name not in found and not t.optional:
            raise ArgumentError(
                "missing argument",
                op=decl.name,
                argument=t.name,
                expected=f"[{t.pattern}]",
                loc=t.loc,
            )
        if t.name in found:
            _python_type(decl.name, t, found[t.name])
    return found


def _check_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(
            "a flag is on or off", op=op, argument=name, expected="True or False",
            found=type(value).__name__,
        )  # fmt: skip


def _python_type(op: str, t: Tensor, value: Any) -> None:
    if t.scalar:
        whole = t.kind is Kind.INT
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ArgumentError(
                "a host number is wanted",
                op=op,
                argument=t.name,
                expected="int" if whole else "float",
                found=type(value).__name__,
            )
    elif (isinstance(value, StatePool) and t.lifetime in (Lifetime.STATE, Lifetime.WINDOW)) or (
        isinstance(value, QuantisedTensor) and t.lifetime in (Lifetime.CACHE, Lifetime.MEMORY)
    ):
        return
    elif not isinstance(value, torch.Tensor):
        raise ArgumentError(
            "a tensor is wanted",
            op=op,
            argument=t.name,
            expected=f"a tensor [{t.pattern}]",
            found=type(value).__name__,
        )
