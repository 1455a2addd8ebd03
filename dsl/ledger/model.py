"""What a ledger holds: entries, the peak's items, and the choices that numbers depend on."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import ArgumentError, CacheInTrainingError, TokenIndexError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Dtype, Layer

if TYPE_CHECKING:
    from sympy import Expr


class Phase(enum.Enum):
    """What a step is part of."""

    PREFILL, DECODE, TRAIN = "prefill", "decode", "train"


def phase_of(name: str | Phase) -> Phase:
    """A phase by name.

    Raises:
        ArgumentError: there is none of this name.
    """
    try:
        return Phase(name)
    except ValueError:
        known = ", ".join(p.value for p in Phase)
        raise ArgumentError(
            "no such phase", argument="phase", expected=known, found=repr(name)
        ) from None


class Held(enum.Enum):
    """Whether an object lies in memory by itself."""

    MEMORY = "in memory"
    FUSED = "fused"  # in a kernel's registers and shared memory only
    VIEW = "view"  # the memory of another object


class Growth(enum.Enum):
    """How an object's bytes grow with the context (T tokens of a pass, S of history)."""

    FIXED, BOUNDED, LINEAR, QUADRATIC = "fixed", "bounded", "O(T)", "O(T^2)"


def lives(lifetime: Lifetime, phase: Phase) -> Lifetime:
    """An object's lifetime in a phase, from the one that its declaration gives.

    Nothing outlives a training step: histories and windows are activations of the batch, a state
    is kept where chunks begin.
    """
    if phase is not Phase.TRAIN:
        return lifetime
    match lifetime:
        case Lifetime.CACHE | Lifetime.MEMORY | Lifetime.WINDOW:
            return Lifetime.ACTIVATION
        case Lifetime.STATE:
            return Lifetime.BOUNDARY
        case _:
            return lifetime


@dataclass(frozen=True, slots=True)
class Formula:
    """Bytes as a formula, and as a number where the sizes are known.

    Attributes:
        text: as it is read, factors in the order of the layout.
        expr: the same for sympy.
        bytes: its value; None without sizes.
    """

    text: str
    expr: Expr = field(compare=False)
    bytes: int | None = None

    @property
    def number(self) -> int:
        """The value, 0 where it is not known."""
        return self.bytes or 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a ledger.

    Attributes:
        name: the code's name.
        symbol: the name in formulas.
        row: title of its row in the table; None for what the table passes over.
        formula: what it is.
        pattern: its layout.
        shape: extents as the phase has them, by memory axis: ``("B", "1", "Hkv*G", "D")``.
        dtype: of its elements.
        producers: labels of the operations that lead to it from the last row.
        consumers: labels of the operations that read it.
        declared: its lifetime in inference.
        lifetime: in this phase.
        held: whether it lies in memory.
        growth: with the context.
        size: bytes of one layer's.
        times: how many layers have theirs at once.
        read: bytes read in a decode step, of one layer; None in other phases.
        note: what else is to be said.
        at: of a workspace, the operation that has it.
        token: of a history, bytes of one sequence's token.
    """

    name: str
    symbol: str
    row: str | None
    formula: str
    pattern: Pattern
    shape: tuple[str, ...]
    dtype: Dtype
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    declared: Lifetime
    lifetime: Lifetime
    held: Held
    growth: Growth
    size: Formula
    times: int = 1
    read: Formula | None = None
    note: str = ""
    at: str = ""
    token: Formula | None = None

    @property
    def bytes(self) -> int:
        """Bytes that it takes in memory, of all layers that have theirs at once."""
        return self.size.number * self.times if self.held is Held.MEMORY else 0

    @property
    def persistent(self) -> bool:
        """Whether it outlives the step."""
        table = self.lifetime is Lifetime.CONTROL and self.name in TABLES
        return table or self.lifetime in (*KEPT, Lifetime.MEMORY)


LAST_ROWS = ("Parameters", "Tables", "Saved lse", "Gradients")
"""Rows that stand behind those of a layer's objects."""

TABLES = ("lengths", "block_table", "slots")
"""Names of the control objects that caches and pools carry."""


@dataclass(frozen=True, slots=True)
class Item:
    """One addend of the peak.

    Attributes:
        name: ``M_model_state`` and so on.
        formula: what it is a sum of.
        bytes: None without sizes.
        of: names of the objects, or of the node where the maximum is.
    """

    name: str
    formula: str
    bytes: int | None
    of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peak:
    """``M_peak`` of one device, item by item, in the order of the source document's formula."""

    items: tuple[Item, ...]

    @property
    def bytes(self) -> int | None:
        """The sum; None without sizes."""
        known = [i.bytes for i in self.items if i.bytes is not None]
        return sum(known) if len(known) == len(self.items) else None

    def __getitem__(self, name: str) -> Item:
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Every object of an op or layer in one phase.

    Attributes:
        name: of the op or layer.
        phase: what the step is part of.
        layers: how many layers there are.
        sizes: sizes of every axis; None where only formulas were asked for.
        entries: objects in the order of the table.
        peak: the most memory at any time.
        graph: operations and objects, ops taken apart.
    """

    name: str
    phase: Phase
    layers: int
    sizes: Mapping[str, int] | None
    entries: tuple[Entry, ...]
    peak: Peak
    graph: Layer

    def entry(self, name: str) -> Entry:
        """An object by the code's name.

        Raises:
            ArgumentError: there is none of that name.
        """
        for found in self.entries:
            if found.name == name:
                return found
        known = ", ".join(e.name for e in self.entries)
        raise ArgumentError(
            "the ledger has no such object", op=self.name, argument=name, expected=known
        )

    def text(self) -> str:
        """The tables for a terminal."""
        from attncc.dsl.ledger.show import text

        return text(self)

    def markdown(self) -> str:
        """The tables as Markdown."""
        from attncc.dsl.ledger.show import markdown

        return markdown(self)

    def data(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        from attncc.dsl.ledger.show import data

        return data(self)

    def kept(self) -> tuple[Entry, ...]:
        """What outlives a step: caches, states, windows and what finds them.

        Raises:
            CacheInTrainingError: in training nothing does.
        """
        if self.phase is Phase.TRAIN:
            raise in_training(self.name, "kept")
        return tuple(e for e in self.entries if e.persistent)

    def bytes_of(self, *lifetimes: Lifetime) -> int:
        """Bytes in memory of all objects of these lifetimes, in all layers."""
        return sum(e.bytes for e in self.entries if e.lifetime in lifetimes)

    @property
    def read(self) -> int:
        """Bytes that a decode step reads, in all layers; 0 in other phases."""
        return sum(e.read.number for e in self.entries if e.read is not None) * self.layers

    def token_bytes(self, name: str) -> int:
        """Bytes that one token of one sequence adds to a history, in one layer.

        Raises:
            TokenIndexError: the object is a state: no part of it belongs to a token.
            CacheInTrainingError: in training there are no histories.
            ArgumentError: it is no history, or sizes are missing.
        """
        found = self.entry(name)
        if found.declared is Lifetime.STATE:
            raise not_by_token(self.name, name)
        if self.phase is Phase.TRAIN:
            raise in_training(self.name, name)
        if found.token is None or found.token.bytes is None:
            raise ArgumentError(
                "bytes of a token are asked of a history, with sizes",
                op=self.name, argument=name, found=found.declared.value,
            )  # fmt: skip
        return found.token.bytes

    def rows(self) -> Iterator[tuple[str, tuple[Entry, ...]]]:
        """Rows of the table: a title, and the objects that share it."""
        there = dict.fromkeys(e.row for e in self.entries if e.row is not None)
        first = [r for r in self.graph.rows if r in there]
        last = [r for r in LAST_ROWS if r in there]
        for title in dict.fromkeys((*first, *(r for r in there if r not in last), *last)):
            yield title, tuple(e for e in self.entries if e.row == title)


def in_training(op: str, argument: str) -> CacheInTrainingError:
    """The refusal of a cache in a training phase, with its reason."""
    return CacheInTrainingError(
        "there is no cache in training", op=op, argument=argument, found="phase train",
        expected="phase prefill or decode",
        help="all tokens of a batch are known at once and end with its backward: k and v are "
        "activations; a cache that grows across forwards has no place in autograd",
    )  # fmt: skip


def not_by_token(op: str, argument: str) -> TokenIndexError:
    """The refusal of a token's row in a state, with its reason."""
    return TokenIndexError(
        "a state cannot be indexed by token", op=op, argument=argument,
        expected="a history (ac.Cache)", found="a state",
        help="every token changes all of it, so no part of it is the row of one token",
    )  # fmt: skip
