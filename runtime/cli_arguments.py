"""Reading the command line's values: ops by name, sizes, dtypes and forms."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any

from attncc.dsl.build import Declaration
from attncc.runtime import ops
from attncc.runtime.api import Op
from attncc.runtime.samples import DTYPES, Trait

REAL = tuple(n for n in DTYPES if n != "i32")
PHASES = ("prefill", "decode")


class UsageError(Exception):
    """A value on the command line that cannot be read; the message is one line."""


def op_of(name: str) -> Op:
    """A library op by name, or ``module:attribute`` of the user's own.

    Raises:
        UsageError: there is none.
    """
    if ":" in name:
        found = named(name)
    else:
        found = getattr(ops, name, None) if name in ops.__all__ else None
        if found is None:
            known = ", ".join(ops.__all__)
            raise UsageError(f"no op {name!r}: the library has {known}; or give module:attribute")
    if isinstance(found, Declaration):
        return Op(found)
    if not isinstance(found, Op):
        raise UsageError(f"{name!r} is a {type(found).__name__}, not an op")
    return found


def named(name: str) -> Any:
    """What ``module:attribute`` names; modules are looked for in the current folder first.

    What the module prints goes to standard error: standard output is the command's own.

    Raises:
        UsageError: there is none.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with redirect_stdout(sys.stderr):
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"no op {name!r}: {error}") from error
    finally:
        sys.path.pop(0)


def listed(values: Iterable[str]) -> list[str]:
    """Comma-separated values, of all occurrences of an option, without repeats."""
    parts = [part.strip() for value in values for part in value.split(",")]
    return list(dict.fromkeys(p for p in parts if p))


def sizes_of(value: str) -> dict[str, int]:
    """``D=128,G=4`` as sizes by axis.

    Raises:
        UsageError: it is not of that form.
    """
    found = {}
    for part in listed([value]):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not size.isdigit() or int(size) < 1:
            raise UsageError(f"a size is AXIS=NUMBER, for instance D=128; found {part!r}")
        found[axis] = int(size)
    return found


def dtypes_of(values: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """``bf16,fp16,g=fp32`` as the dtypes of all tensors, and those of single ones.

    Raises:
        UsageError: a dtype that is none.
    """
    common, single = [], {}
    for part in listed(values):
        name, equals, dtype = part.rpartition("=")
        if dtype not in (DTYPES if equals else REAL):
            raise UsageError(f"no dtype {dtype!r}: {', '.join(DTYPES if equals else REAL)}")
        if equals:
            single[name] = dtype
        else:
            common.append(dtype)
    return common or ["bf16"], single


def phases_of(values: Sequence[str]) -> list[str]:
    """Phases by name.

    Raises:
        UsageError: a phase that is none.
    """
    found = listed(values)
    for name in found:
        if name not in PHASES:
            raise UsageError(f"no phase {name!r}: {', '.join(PHASES)}")
    return found


def forms_of(values: Sequence[str]) -> list[frozenset[Trait]] | None:
    """``plain,packed+paged`` as traits of calls; None where nothing is said.

    Raises:
        UsageError: a trait that is none.
    """
    found = []
    for form in listed(values):
        traits = [t for t in form.split("+") if t != "plain"]
        try:
            found.append(frozenset(Trait(t) for t in traits))
        except ValueError as error:
            known = ", ".join(["plain", *(t.value for t in Trait)])
            raise UsageError(f"no form {form!r}: {known}, joined by +") from error
    return found or None
