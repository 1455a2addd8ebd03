"""What is known of translated CuTe-DSL code: types of numbers, statements, stores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import wrap

from attncc.codegen.emit.softmax_rows import Texts

NUMBERS = {
    "bool": "Boolean", "u8": "Uint8", "i32": "Int32", "i64": "Int64", "fp32": "Float32",
    "bf16": "BFloat16", "fp16": "Float16",
}  # fmt: skip
"""CuTe-DSL's name of each type; numbers of the source text are ``int`` and ``float`` here."""
SIZES = {"u8": 1, "bf16": 2, "fp16": 2, "i32": 4, "fp32": 4, "i64": 8}
ELEMENT_TYPES = {"bf16": 10, "fp16": 6}
"""``elemtype`` of ``tensormap.replace`` (PTX ISA, "Data Movement and Conversion")."""
REAL = frozenset({"fp32", "bf16", "fp16", "float"})
"""Types that are no whole numbers."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a name or an expression.

    Attributes:
        type: of ``NUMBERS``, ``int`` or ``float`` for a number of the text, ``*`` and a type for a
            pointer.
        dims: tile dimensions that it varies along.
    """

    type: str
    dims: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """One translated statement.

    Attributes:
        name: what it defines; empty for a store or a loop.
        text: the expression for one element; of a store, its arguments.
        known: of the value.
        used: names that it reads.
        notes: comment lines in front of it.
        body: steps of a loop, whose head is ``text``.
    """

    name: str
    text: str
    known: Known
    used: frozenset[str]
    notes: Texts = ()
    body: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A translated ``tl.store``.

    Attributes:
        type: element type in memory.
        address: of the element, in bytes.
        value: what is stored.
        mask: whether it is.
    """

    type: str
    address: str
    value: str
    mask: str


def joined(a: str, b: str) -> str:
    """The type of a sum of two: real beats whole, wide beats narrow, any beats a plain number."""
    if a == b:
        return a
    if a in REAL or b in REAL:
        return "float" if {a, b} <= {"int", "float"} else "fp32"
    order = ("int", "bool", "u8", "i32", "i64")
    wide = max(a, b, key=order.index)
    return "i32" if wide == "bool" else wide


def listed(steps: Iterable[Step], index: str, over: str) -> Texts:
    """Statements whose vectors are lists of what a thread has of them."""
    lines: list[str] = []
    for step in steps:
        lines += step.notes
        if step.body:
            lines.append(step.text)
            lines += [f"    {line}" for line in listed(step.body, index, over)]
        elif step.known.dims:
            lines.append(f"{step.name} = [{step.text} for {index} in {over}]")
        else:
            lines.append(f"{step.name} = {step.text}")
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class Function:
    """Element-wise code as a function of the generated file.

    Attributes:
        parameters: what it reads, in lines.
        rows: lines before the loops.
        outer: lines for one key or column.
        inner: lines for one row of it.
    """

    parameters: Texts
    rows: Texts
    outer: Texts
    inner: Texts


def host_type(kind: str) -> str:
    """CuTe-DSL's type of a parameter; pointers are addresses."""
    return "Int64" if kind.startswith("*") else NUMBERS[kind]


def wrapped(names: Iterable[str]) -> Texts:
    """Names with commas, in lines."""
    text = " ".join(f"{name}," for name in (n.replace(" ", "\0") for n in names))
    return tuple(line.replace("\0", " ") for line in wrap(text, 80))


def plain(steps: Iterable[Step]) -> Texts:
    """Statements for the element at hand."""
    return tuple(line for s in steps for line in (*s.notes, f"{s.name} = {s.text}"))
