"""What a signature is written with, and how the decorator reads it: tensors and host numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from attncc.dsl.axes import Pattern, parse
from attncc.dsl.errors import PatternError, ReservedNameError, SignatureError
from attncc.dsl.graph import kind_of, walk
from attncc.dsl.ir import Kind, Lifetime, Lit, Map, Node, NodeBase, Size, Tensor
from attncc.dsl.loc import Loc, caller
from attncc.dsl.types import Value

RESERVED = frozenset(
    [
        "out",
        "cache",
        "cu_seqlens",
        "cu_seqlens_k",
        "lengths",
        "return_lse",
        "return_partial",
        "backend",
        "sizes",
        "state_layout",
        "gate_space",
        "deterministic",
        "mesh",
        "phase",
        "dtype",
    ]
)
"""Names of the options that every call takes; no argument of an op may use them."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What stands as a default in the signature until the decorator reads it."""

    pattern: str
    lifetime: Lifetime
    default: float | Node | None = None
    scalar: bool = False
    kind: Kind = Kind.REAL
    loc: Loc = field(default=Loc("<unknown>", 0), compare=False)


def _spec(
    pattern: str,
    lifetime: Lifetime,
    default: float | Value | None = None,
    scalar: bool = False,
    kind: Kind = Kind.REAL,
) -> Value:
    value = default.node if isinstance(default, Value) else default
    return cast(Value, Spec(pattern, lifetime, value, scalar, kind, caller()))


def Activation(pattern: str, *, default: float | None = None) -> Value:
    """A tensor of this call, for instance ``Activation("B T (Hkv G) D")``.

    Args:
        pattern: memory layout, outermost axis first.
        default: the literal a missing argument stands for; without one the argument is required.
    """
    return _spec(pattern, Lifetime.ACTIVATION, default)


def Cache(pattern: str) -> Value:
    """The op's own history along S: T is its tail. Without a cache object it is the whole history.

    The history axis is ``S``, or a group of blocks whose first name starts with S: ``(Sb C)``.
    """
    return _spec(pattern, Lifetime.CACHE)


def Memory(pattern: str) -> Value:
    """A foreign sequence that does not grow (cross-attention)."""
    return _spec(pattern, Lifetime.MEMORY)


def State(pattern: str) -> Value:
    """A carry of fixed size, for ops with ``scan=``; a missing one starts at zero."""
    return _spec(pattern, Lifetime.STATE, 0.0)


def Window(pattern: str) -> Value:
    """The last rows of a sequence (short convolution); a missing one starts empty (zero rows)."""
    return _spec(pattern, Lifetime.WINDOW, 0.0)


def Param(pattern: str, *, default: float | None = None) -> Value:
    """A tensor that belongs to the model (slopes, sinks, convolution weights, WUK)."""
    return _spec(pattern, Lifetime.PARAMETER, default)


def param(*, default: float | Value | None = None, integer: bool = False) -> Value:
    """A host number the caller may change (a scale, a cap, a window width).

    Args:
        default: its value where a call gives none; also an expression of sizes, for instance
            ``ac.rsqrt("K")``.
        integer: a whole number; only those may bound a mask (``t - s < W``).
    """
    kind = Kind.INT if integer else Kind.REAL
    return _spec("", Lifetime.PARAMETER, default, scalar=True, kind=kind)


def flag() -> bool:
    """A choice between two bodies, off unless a call says ``name=True``.

    The body gets a Python bool, so it may stand in an ``if``; each of the two is a program of its
    own, and kernels hold no trace of the other.
    """
    return cast(bool, _spec("", Lifetime.PARAMETER, 0.0, scalar=True, kind=Kind.BOOL))


def signature(fn: Callable[..., Any], op: str, loc: Loc) -> tuple[Tensor, ...]:
    """The tensors and host numbers of a function's arguments, in order.

    Raises:
        SignatureError, ReservedNameError, PatternError: an argument that is not declared well.
    """
    tensors = []
    for name, p in inspect.signature(fn).parameters.items():
        spec = p.default
        if p.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise SignatureError(
                "a body takes its arguments by name",
                op=op, argument=name, expected="an ordinary argument", found=str(p), loc=loc,
            )  # fmt: skip
        if not isinstance(spec, Spec):
            raise SignatureError(
                "each argument is declared by its default",
                op=op, argument=name, expected='for instance ac.Activation("B T H D")', loc=loc,
                found="no default" if spec is inspect.Parameter.empty else repr(spec)[:40],
            )  # fmt: skip
        if name in RESERVED:
            raise ReservedNameError(
                "the name is an option of every call", op=op, argument=name, loc=spec.loc,
                help=f"reserved: {' '.join(sorted(RESERVED))}",
            )  # fmt: skip
        _check_default(spec, op, name)
        tensors.append(
            Tensor(
                name, pattern_of(spec.pattern, op, name, spec.loc), spec.lifetime,
                spec.kind, spec.default, spec.default is not None,
                spec.scalar, spec.loc,
            )
        )  # fmt: skip
    return tuple(tensors)


def _check_default(spec: Spec, op: str, name: str) -> None:
    """A default that is no number is an expression of sizes; a whole number's is one."""
    if spec.default is not None and spec.kind is Kind.INT:
        value = spec.default if isinstance(spec.default, NodeBase) else Lit(spec.default)
        if kind_of(value) is not Kind.INT:
            raise SignatureError(
                "the default of a whole number is none", op=op, argument=name,
                expected="a whole number, or a sum or product of sizes",
                found=repr(spec.default) if isinstance(spec.default, float) else "an expression",
                loc=spec.loc,
            )  # fmt: skip
    if not isinstance(spec.default, NodeBase):
        return
    nodes = list(walk(spec.default))
    if not spec.scalar or not all(isinstance(n, (Lit, Map, Size)) for n in nodes):
        raise SignatureError(
            "only a host number's default may be an expression, and of sizes alone",
            op=op, argument=name, expected='for instance ac.param(default=ac.rsqrt("K"))',
            found=type(spec.default).__name__.lower(), loc=spec.loc,
        )  # fmt: skip


def pattern_of(text: str, op: str, argument: str, loc: Loc) -> Pattern:
    """A pattern of an op's signature; its mistakes name the argument."""
    try:
        return parse(text)
    except PatternError as error:
        raise PatternError(text, error.why, op=op, argument=argument, loc=loc) from None


def check_result_names(
    layouts: Mapping[str, str], tensors: tuple[Tensor, ...], op: str, loc: Loc
) -> None:
    """A call returns states and outputs in one named tuple, and ``lse`` on request."""
    held = {t.name for t in tensors}
    for name in layouts:
        if not name.isidentifier() or name.startswith("_") or name == "lse" or name in held:
            raise SignatureError(
                "the output cannot have this name",
                op=op, argument=f"out[{name}]", found=name, loc=loc,
                expected="an identifier that is no argument's name, not 'lse', without a leading _",
            )  # fmt: skip
