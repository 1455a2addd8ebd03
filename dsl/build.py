"""From a Python function to a Declaration, and from a Declaration to Programs.

A Declaration is pure: a signature of tensors, output layouts and a body. Tracing it with the set of
optional inputs that are present (and the sizes its ``unroll`` asks for) gives a verified
:class:`Program`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import ClosureError, SignatureError, StateNotReturnedError
from attncc.dsl.ir import (
    Input,
    Kind,
    Lifetime,
    Lit,
    NodeBase,
    Output,
    Program,
    StateUpdate,
    Tensor,
)
from attncc.dsl.loc import Loc
from attncc.dsl.signature import check_result_names, pattern_of, signature
from attncc.dsl.types import Trace, lift, make, tracing
from attncc.dsl.verify import verify


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
            given: names of the optional inputs that are present, and of the flags that are on;
                when None, those of a usual call (:attr:`Tensor.usual`).
            sizes: axis sizes; only those the body unrolls matter, and a missing one counts as
                2 (the program's ``sizes`` says so, and the interpreter refuses another).

        Raises:
            DeclarationError: the body has no meaning (each mistake its own subclass, several at
                once in ``SeveralErrors``).
        """
        optional = frozenset(t.name for t in self.tensors if t.optional)
        given = frozenset(t.name for t in self.tensors if t.usual) if given is None else given
        given = given & optional
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
        unrolled = {axis: trace.sizes[axis] for axis in trace.asked}
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

    def with_patterns(
        self, out: str | Mapping[str, str] | None = None, **patterns: str
    ) -> Declaration:
        """The same body over other layouts: ``gla.with_patterns(s="B H V K")``.

        The body knows axes by name alone, so a layout may be any that gives its results the axes
        they have to have: another order, another grouping, axes more or less.

        Args:
            out: the output's layout, or layouts by name; those not named stay.
            **patterns: layouts by argument.

        Raises:
            SignatureError: no tensor argument or output of that name.
            DeclarationError: the body has no meaning over these layouts.
        """
        layouts = {self.outputs[0][0]: out} if isinstance(out, str) else dict(out or {})
        tensors = {t.name: t for t in self.tensors if not t.scalar}
        known = dict(self.outputs)
        wrong = [n for n in patterns if n not in tensors]
        wrong += [f"out[{n}]" for n in layouts if n not in known]
        if wrong:
            raise SignatureError(
                "no layout to replace", op=self.name, argument=wrong[0],
                expected=" ".join([*tensors, *(f"out[{n}]" for n in known)]), loc=self.loc,
            )  # fmt: skip
        changed = {
            n: replace(tensors[n], pattern=pattern_of(text, self.name, n, tensors[n].loc))
            for n, text in patterns.items()
        }
        known |= {n: pattern_of(x, self.name, f"out[{n}]", self.loc) for n, x in layouts.items()}
        return _checked(
            replace(
                self, tensors=tuple(changed.get(t.name, t) for t in self.tensors),
                outputs=tuple(known.items()), asked=(), _traces={},
            )
        )  # fmt: skip

    def _argument(self, t: Tensor, given: frozenset[str]) -> Any:
        if t.kind is Kind.BOOL:
            return t.name in given
        absent = t.optional and t.name not in given
        if absent and t.lifetime in (Lifetime.ACTIVATION, Lifetime.PARAMETER):
            if isinstance(t.default, NodeBase):  # of sizes
                return make(t.default)
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
        (key, pattern_of(text, name, f"out[{key}]", loc)) for key, text in layouts.items()
    )
    tensors = signature(fn, name, loc)
    check_result_names(layouts, tensors, name, loc)
    _captured(fn, name, loc)
    doc = inspect.getdoc(fn) or ""
    return _checked(Declaration(name, tensors, outputs, scan, fn, loc, doc))


def _checked(pure: Declaration) -> Declaration:
    """The declaration, tried with its optional inputs there or not."""
    presences = _presences(pure.tensors)
    asked = sorted({axis for given in presences for axis in pure._run(given, {})[1]})
    return replace(pure, asked=tuple(asked))


def op(
    *, out: str | Mapping[str, str], scan: str | None = None
) -> Callable[[Callable[..., Any]], Declaration]:
    """Decorator form of :func:`declare`; ``attncc.op`` also binds the methods that run things."""

    def wrap(fn: Callable[..., Any]) -> Declaration:
        return declare(fn, out=out, scan=scan)

    return wrap
