"""Analysis objects: folds, masks and the affine form. They point at nodes and rewrite nothing.

Two forms cover what a body can be. The *score form* folds a history with a softmax; the *affine
form* carries a state whose update is affine in it. A body that is neither keeps the sequential
kernel, and its :class:`Refusal` says which line stands in the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from attncc.dsl.ir import Contract, Node, Softmax
from attncc.dsl.loc import NOWHERE, Loc


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a form does not apply, and the line that says so."""

    reason: str
    loc: Loc = field(default=NOWHERE, compare=False)

    def __str__(self) -> str:
        return f"{self.reason} ({self.loc.short()})" if self.loc.line else self.reason


# --- masks
# -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """``t * T + s * S + offset >= 0`` over absolute positions; it bounds loops.

    ``offset`` is a whole-number expression without T or S axes.
    """

    t: int
    s: int
    offset: Node


@dataclass(frozen=True, slots=True)
class Clause:
    """A conjunction: bands, and predicates that are evaluated per element."""

    bands: tuple[Band, ...]
    residual: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MaskForm:
    """A disjunction of clauses that equals ``node``."""

    node: Node
    clauses: tuple[Clause, ...]


# --- score form
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dot:
    """A contraction inside a score that becomes a matrix product: query side times key side."""

    node: Contract
    query: tuple[Node, ...]
    key: tuple[Node, ...]
    over: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SoftmaxFold:
    """One softmax-weighted sum over a history axis.

    Attributes:
        node: the contraction that closes the history (what the fold's result stands for).
        softmax: the softmax inside it.
        over: the history axis.
        dots: matrix products inside the score.
        mask: the visible positions, or None for all.
        value: factors of the weighted sum besides the softmax.
        batch_axes: axes that query, key and value share; one program instance per point.
        row_axes: axes only the query has (T, G): rows of the score tile.
        value_axes: axes only the value has (E).
    """

    node: Contract
    softmax: Softmax
    over: str
    dots: tuple[Dot, ...]
    mask: MaskForm | None
    value: tuple[Node, ...]
    batch_axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    value_axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SoftmaxForm:
    """``S += a (x) (const + coef * (b . S_read))``, contracted along the active axis."""

    folds: tuple[SoftmaxFold, ...]


# --- affine form
# -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """``S += a (x) (const + coef * (b . S_read))``, the contraction along the active axis.

    ``a`` and ``b`` live on system and active axes, ``coef`` on system axes, ``const`` on system and
    passive axes. A slot counts the decays passed within the token; ``rows_visible`` the rows of the
    same token that the read sees. ``const`` None is 0; ``coef`` None with ``b`` given is 1; ``b``
    None is no read.
    """

    a: Node
    const: Node | None
    coef: Node | None
    b: Node | None
    read_slot: int
    write_slot: int
    rows_visible: int
    loc: Loc = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Read:
    """A read-out ``vector . S`` along the active axis; outputs see it as the input ``name``."""

    name: str
    vector: Node
    slot: int
    rows_visible: int
    loc: Loc = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class AffineForm:
    """One token of an affine state as a flat table.

    Attributes:
        state: name of the state.
        active: axes that corrections contract.
        passive: state axes that no decay, row vector or coefficient has: columns that never mix.
        system: axes along which transitions differ; one chunk system per point.
        decays: transition factors in the order a token passes them (values, not logarithms); each
            on system axes, possibly with active axes.
        rows: updates in order.
        reads: read-outs that the outputs use.
        outputs: output expressions over ``Input(read.name)`` and state-free nodes, in output order.
    """

    state: str
    active: tuple[str, ...]
    passive: tuple[str, ...]
    system: tuple[str, ...]
    decays: tuple[Node, ...]
    rows: tuple[Row, ...]
    reads: tuple[Read, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was found for a program: one of the forms, or the reasons why neither applies."""

    softmax: SoftmaxForm | None = None
    affine: AffineForm | None = None
    refusals: tuple[Refusal, ...] = ()
