"""Every mistake a user can make, one class each.

An error says what was expected and what was found, shows the user's own line with a caret where
there is one, and carries its parts as fields. Each class also subclasses the matching builtin, and
pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attncc.dsl.loc import Loc


class AttnccError(Exception):
    """Base of all errors of this package.

    Attributes:
        message: what is wrong, in one line.
        op: name of the op, if known.
        argument: the argument concerned.
        axis: the axis concerned.
        expected: what would have been right.
        found: what came.
        loc: the place in the user's file.
        help: one line that says how to mend it.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        argument: str | None = None,
        axis: str | None = None,
        expected: object = None,
        found: object = None,
        loc: Loc | None = None,
        help: str | None = None,
    ) -> None:
        self.message = message
        self.op = op
        self.argument = argument
        self.axis = axis
        self.expected = expected
        self.found = found
        self.loc = loc
        self.help = help
        super().__init__(self.render())

    def _fields(self) -> dict[str, Any]:
        names = ("op", "argument", "axis", "expected", "found", "loc", "help")
        return {n: getattr(self, n) for n in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (type(self), self.message, self._fields(), dict(self.__dict__)))

    def render(self) -> str:
        """The message with its parts, the user's line and a caret."""
        where = [self.op and f"op {self.op}", self.argument and f"argument {self.argument}"]
        where.append(self.axis and f"axis {self.axis}")
        head = ", ".join(w for w in where if w)
        lines = [f"{head}: {self.message}" if head else self.message]
        parts = [("expected", self.expected), ("found", self.found)]
        told = ", ".join(f"{label} {value}" for label, value in parts if value is not None)
        if told:
            lines[0] += f" ({told})"
        if self.loc is not None and self.loc.line:
            lines.append(f"  --> {self.loc}")
            source = self.loc.text()
            if source:
                lines.append(f"    {source}")
                if self.loc.col:
                    width = max(1, (self.loc.end_col or self.loc.col + 1) - self.loc.col)
                    lines.append("    " + " " * (self.loc.col - 1) + "^" * width)
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


def _restore(
    cls: type[AttnccError], message: str, parts: dict[str, Any], state: dict[str, Any]
) -> AttnccError:
    error = cls.__new__(cls)
    AttnccError.__init__(error, message, **parts)
    error.__dict__.update(state)
    return error


# --- while declaring ------------------------------------------------------------


class DeclarationError(AttnccError, ValueError):
    """A declaration that has no meaning."""


class SeveralErrors(DeclarationError):
    """More than one mistake in one declaration; ``errors`` holds them all."""

    def __init__(self, errors: tuple[AttnccError, ...], *, op: str | None = None) -> None:
        self.errors = errors
        text = "\n".join(e.render() for e in errors)
        super().__init__(f"{len(errors)} mistakes\n{text}", op=op)


class PatternError(DeclarationError):
    """An axis pattern that cannot be read."""

    def __init__(self, pattern: str, why: str, **parts: Any) -> None:
        self.why = why
        super().__init__(f"cannot read the pattern {pattern!r}: {why}", **parts)


class UnknownAxisError(DeclarationError):
    """An axis that no tensor of the signature declares, or that the operand does not have."""


class FreeAxisError(DeclarationError):
    """An axis left over: ``out=`` does not name it (often an outer product over heads)."""


class MissingAxisError(DeclarationError):
    """An output that lacks an axis its ``out=`` pattern names."""


class StateNotReturnedError(DeclarationError):
    """A body that does not give back one value for each state and output, states first."""


class StateAxesError(DeclarationError):
    """A state given back with other axes than it was declared with."""


class FoldClosedTwiceError(DeclarationError):
    """A history axis reduced again after it was already reduced."""


class SelectionError(DeclarationError):
    """A top-k over something that is no history, or rows picked of another history than its own."""


class MaskError(DeclarationError):
    """A mask that is not a truth value, or has no meaning here (causal over a foreign memory)."""


class KindError(DeclarationError, TypeError):
    """A truth value where a number is needed, or the other way round."""


class LifetimeError(DeclarationError):
    """An object whose lifetime does not fit the op (a State without ``scan=``, a Cache in one)."""


class LayerError(DeclarationError):
    """A layer whose nodes and objects do not fit together."""


class SignatureError(DeclarationError, TypeError):
    """A function signature that does not declare each argument as a tensor or parameter."""


class ReservedNameError(SignatureError):
    """An argument named like one of the options every call takes."""


class ClosureError(DeclarationError, TypeError):
    """A torch tensor captured by the body; it must be an input or a ``Param``."""


class SymbolicError(DeclarationError, TypeError):
    """Python's ``and``, ``if``, ``==`` or ``@``, ``math.*`` or ``torch.*`` on a symbolic value."""


# --- while calling --------------------------------------------------------------


class CallError(AttnccError, ValueError):
    """A call that does not fit the declaration; raised before anything is launched or written."""


class ArgumentError(CallError, TypeError):
    """A missing, unknown or doubly given argument, or one of the wrong Python type."""


class RankError(CallError):
    """A tensor with another number of axes than its pattern."""


class SizeError(CallError):
    """Two different sizes for one axis name, or a group its known axes do not divide."""


class UnknownSizeError(CallError):
    """An axis whose size no argument fixes."""


class DtypeError(CallError, TypeError):
    """A dtype outside the contract's list."""


class DeviceError(CallError):
    """Arguments on different devices, or a device the backend cannot use."""


class StrideError(CallError):
    """A tensor whose innermost axis is not dense."""


class OverlapError(CallError):
    """An output that shares memory with an input it must not share it with."""


class SeqlensError(CallError):
    """``cu_seqlens`` of the wrong shape or dtype, or (checked on request) with wrong values."""


class CacheError(CallError):
    """A cache that does not fit the op, or has no room for the new tokens."""


class CacheInTrainingError(CacheError):
    """A cache asked for in a training phase, where nothing outlives a forward and its backward."""


class TokenIndexError(CacheError):
    """A state asked for the row of a token: it holds all of them together and none by itself."""


class ExhaustedError(CacheError):
    """An owner without enough free pages or slots; nothing was taken and nothing written.

    Attributes:
        unit: what is missing: ``page`` or ``slot``.
        missing: how many more would have been enough.
        free: how many are free.
        wanted: how many were asked for.
    """

    def __init__(self, unit: str, *, wanted: int, free: int, **parts: Any) -> None:
        self.unit, self.wanted, self.free = unit, wanted, free
        self.missing = wanted - free
        plural = "s are" if self.missing != 1 else " is"
        parts = {"expected": f"{wanted} free", "found": free, **parts}
        super().__init__(f"{self.missing} {unit}{plural} missing", **parts)


class PageError(CallError):
    """A block table without the pages a call needs, or with a page that is not its own to write."""


class SlotError(CallError):
    """A slot outside its pool, or one that two sequences of a call would write (or race for)."""


class ValueRangeError(CallError):
    """A tensor with an element outside the range that its meaning allows (checked on request)."""


class LogBaseError(CallError, TypeError):
    """Partials of a softmax whose logarithms have different bases."""


class BackendError(AttnccError, NotImplementedError):
    """A backend named explicitly that cannot run this op here; the message says why."""


class RefusedError(AttnccError, NotImplementedError):
    """A form the compiler will not derive from this declaration; the message says why."""


class EvictionError(RefusedError):
    """Rows of a history that may not be dropped: a later query can still read them."""


class ToolchainError(AttnccError, RuntimeError):
    """A compiler tool that is missing or failed."""


class MiscompiledError(ToolchainError):
    """A compiled kernel whose answer is wrong; it is set aside.

    Attributes:
        kernels: names of the kernels that took part.
        plans: who made their choices (``rule``, or an entry of a table).
        versions: of what built and ran them.
        why: output, error and what is allowed.
    """

    def __init__(
        self,
        kernels: tuple[str, ...],
        *,
        plans: tuple[str, ...],
        versions: Mapping[str, str],
        why: str,
        **parts: Any,
    ) -> None:
        self.kernels, self.plans, self.versions, self.why = kernels, plans, dict(versions), why
        built = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{' '.join(kernels)} gives a wrong answer: {why}"]
        lines += [f"  plan: {' '.join(plans)}", f"  built with {built}"]
        super().__init__("\n".join(lines), **parts)


class MissingArtifactError(AttnccError, LookupError):
    """No ahead-of-time kernel where one was demanded; ``differences`` compares the nearest entry.

    Attributes:
        kernel: name of the kernel that is missing.
        differences: key parts that differ: name, value wanted, value of the nearest entry.
    """

    def __init__(
        self,
        kernel: str,
        differences: tuple[tuple[str, str, str], ...] = (),
        *,
        nearest: str | None = None,
        unusable: tuple[str, ...] = (),
        **parts: Any,
    ) -> None:
        self.kernel = kernel
        self.differences = differences
        lines = [f"the store has no compiled {kernel}, and nothing may be compiled"]
        if nearest is None:
            lines.append("  no entry comes near it")
        else:
            lines.append(f"  nearest entry: {nearest}")
        lines += [f"    {n}: wanted {a}, it has {b}" for n, a, b in differences]
        lines += [f"  not usable: {reason}" for reason in unusable]
        super().__init__("\n".join(lines), **parts)
