"""From a Python function to a Declaration, and from a Declaration to Programs.

A Declaration is pure: a signature of tensors, output layouts and a body. Tracing it with the set of
optional inputs that are present (and the sizes its ``unroll`` asks for) gives a verified
:class:`Program`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from attncc.dsl.axes import Pattern, parse
from attncc.dsl.errors import (
    ClosureError,
    PatternError,
    ReservedNameError,
    SignatureError,
    StateNotReturnedError,
)
from attncc.dsl.ir import Input, Kind, Lifetime, Lit, Output, Program, StateUpdate, Tensor
from attncc.dsl.loc import Loc, caller
from attncc.dsl.types import PROBE, Trace, Value, lift, make, tracing
from attncc.dsl.verify import verify

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
    default: float | None = None
    scalar: bool = False
    integer: bool = False
    loc: Loc = field(default=Loc("<unknown>", 0), compare=False)


def _spec(
    pattern: str,
    lifetime: Lifetime,
    default: float | None = None,
    scalar: bool = False,
    integer: bool = False,
) -> Value:
    return cast(Value, Spec(pattern, lifetime, default, scalar, integer, caller()))


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


def param(*, default: float | None = None, integer: bool = False) -> Value:
    """A host number the caller may change (a scale, a cap, a window width).

    Args:
        default: its value where a call gives none.
        integer: a whole number; only those may bound a mask (``t - s < W``).
    """
    return _spec("", Lifetime.PARAMETER, default, scalar=True, integer=integer)


@dataclass(frozen=True, eq=False)
class Declaration:
    """One op: signature, output layouts, body.

    Attributes:
        name: the function's name.
        tensors: the signature, in order.
        outputs: layout of each output by name, in order.
        scan: the axis the body is one step of, or None.
        body: the user's function.
        loc: where it was declared.
    """

    name: str
    tensors: tuple[Tensor, ...]
    outputs: tuple[tuple[str, Pattern], ...]
    scan: str | None
    body: Callable[..., Any] = field(compare=False)
    loc: Loc = field(compare=False)
    doc: str = field(default="", compare=False)
    asked: tuple[str, ...] = field(default=(), compare=False)
    _traces: dict[Any, Program] = field(default_factory=dict, compare=False, repr=False)

    def trace(
        self, given: frozenset[str] | None = None, sizes: Mapping[str, int] | None = None
    ) -> Program:
        """The program of a call.

        Args:
            given: names of the optional inputs that are present; all of them when None.
            sizes: axis sizes; only those the body unrolls matter, and a missing one counts as
                2 (the program's ``sizes`` says so, and the interpreter refuses another).

        Raises:
            DeclarationError: the body has no meaning (each mistake its own subclass, several at
                once in ``SeveralErrors``).
        """
        optional = frozenset(t.name for t in self.tensors if t.optional)
        given = optional if given is None else given & optional
        fixed = {a: n for a, n in (sizes or {}).items() if a in self.asked}
        key = (given, tuple(sorted(fixed.items())))
        if key not in self._traces:
            self._traces[key] = self._run(given, fixed)[0]
        return self._traces[key]

    def _run(self, given: frozenset[str], sizes: dict[str, int]) -> tuple[Program, tuple[str, ...]]:
        declared = frozenset(a for t in self.tensors for a in t.pattern.axes)
        trace = Trace(self.name, self.scan, dict(sizes), declared=declared)
        with tracing(trace):
            args = {t.name: self._argument(t, given) for t in self.tensors}
            result = self.body(**args)
            states, outputs = self._results(result)
        unrolled = {axis: sizes.get(axis, PROBE) for axis in trace.asked}
        program = Program(
            self.name,
            self.tensors,
            states,
            outputs,
            self.scan,
            given,
            tuple(sorted(unrolled.items())),
            self.loc,
        )
        verify(program)
        return program, tuple(sorted(trace.asked))

    def _argument(self, t: Tensor, given: frozenset[str]) -> Value:
        absent = t.optional and t.name not in given
        if absent and t.lifetime in (Lifetime.ACTIVATION, Lifetime.PARAMETER):
            value = t.default if t.default is not None else 0.0
            whole = t.kind is Kind.INT
            return make(Lit(int(value) if whole else float(value), loc=t.loc))
        axes = tuple(a for a in t.pattern.axes if a != self.scan)
        return make(Input(t.name, axes, t.lifetime, t.kind, loc=t.loc))

    def _results(self, result: Any) -> tuple[tuple[StateUpdate, ...], tuple[Output, ...]]:
        held = [t for t in self.tensors if t.lifetime in (Lifetime.STATE, Lifetime.WINDOW)]
        values = result if isinstance(result, tuple) else (result,)
        want = [t.name for t in held] + [name for name, _ in self.outputs]
        if len(values) != len(want) or any(v is None for v in values):
            raise StateNotReturnedError(
                "the body must return its states first, in declaration order, then its outputs",
                op=self.name, expected=f"({', '.join(want)})", loc=self.loc,
                found=f"({', '.join('None' if v is None else 'a value' for v in values)})",
            )  # fmt: skip
        nodes = [lift(v).node for v in values]
        states = tuple(StateUpdate(t.name, n) for t, n in zip(held, nodes, strict=False))
        outputs = tuple(
            Output(name, pattern, n)
            for (name, pattern), n in zip(self.outputs, nodes[len(held) :], strict=True)
        )
        return states, outputs


def _signature(fn: Callable[..., Any], op: str, loc: Loc) -> tuple[Tensor, ...]:
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
        tensors.append(
            Tensor(
                name, _pattern(spec.pattern, op, name, spec.loc), spec.lifetime,
                Kind.INT if spec.integer else Kind.REAL, spec.default, spec.default is not None,
                spec.scalar, spec.loc,
            )
        )  # fmt: skip
    return tuple(tensors)


def _pattern(text: str, op: str, argument: str, loc: Loc) -> Pattern:
    try:
        return parse(text)
    except PatternError as error:
        raise PatternError(text, error.why, op=op, argument=argument, loc=loc) from None


def _captured(fn: Callable[..., Any], op: str, loc: Loc) -> None:
    names = inspect.getclosurevars(fn)
    for name, value in {**names.globals, **names.nonlocals}.items():
        kinds = [f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(value).__mro__]
        if "torch.Tensor" in kinds:
            raise ClosureError(
                "the body captures a torch tensor",
                op=op,
                argument=name,
                expected="an input or ac.Param of the signature",
                found="a captured tensor",
                loc=loc,
                help=f'declare it: {name}=ac.Param("...")',
            )


def _result_names(
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


def _presences(tensors: tuple[Tensor, ...]) -> list[frozenset[str]]:
    """Which optional inputs are there in the calls that a declaration is checked for.

    All of them, all but one, and none: a mistake that shows where an input is absent shows when the
    op is declared, not in some later call. States do not change the trace.
    """
    held = (Lifetime.STATE, Lifetime.WINDOW)
    every = frozenset(t.name for t in tensors if t.optional)
    absent = [t.name for t in tensors if t.optional and t.lifetime not in held]
    found = [every, *(every - {name} for name in absent), every - set(absent)]
    return list(dict.fromkeys(found))


def declare(
    fn: Callable[..., Any], *, out: str | Mapping[str, str], scan: str | None = None
) -> Declaration:
    """Read a function's signature and body.

    Args:
        fn: the body; each argument's default is :func:`Activation`, :func:`Cache`, ...
        out: the output's layout, or layouts by name.
        scan: the axis whose one step the body is; without it the body sees whole histories.

    Raises:
        DeclarationError: a mistake in signature or body; all mistakes of the body are reported
            at once.
    """
    name = fn.__name__
    code = fn.__code__
    loc = Loc(code.co_filename, code.co_firstlineno)
    layouts = {"o": out} if isinstance(out, str) else dict(out)
    outputs = tuple(
        (key, _pattern(text, name, f"out[{key}]", loc)) for key, text in layouts.items()
    )
    tensors = _signature(fn, name, loc)
    _result_names(layouts, tensors, name, loc)
    _captured(fn, name, loc)
    pure = Declaration(name, tensors, outputs, scan, fn, loc, inspect.getdoc(fn) or "")
    asked = sorted({axis for given in _presences(tensors) for axis in pure._run(given, {})[1]})
    return Declaration(name, tensors, outputs, scan, fn, loc, pure.doc, tuple(asked))


def op(
    *, out: str | Mapping[str, str], scan: str | None = None
) -> Callable[[Callable[..., Any]], Declaration]:
    """Decorator form of :func:`declare`; ``attncc.op`` also binds the methods that run things."""

    def wrap(fn: Callable[..., Any]) -> Declaration:
        return declare(fn, out=out, scan=scan)

    return wrap
