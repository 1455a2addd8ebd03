"""Analysis objects: folds, masks and the affine form. They point at nodes and rewrite nothing.

Two forms cover what a body can be. The *score form* folds a history with a softmax; the *affine
form* carries a state whose update is affine in it. A body that is neither keeps the sequential
kernel, and its :class:`Refusal` says which line stands in the way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from attncc.dsl.ir import Contract, Fn, Lit, Map, Node, Program, Push, Softmax, TopK
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


class FoldKind(enum.Enum):
    """What a fold over a history carries."""

    SOFTMAX = "softmax"  # (m, l, u): rescale to the larger m, add
    SUM = "sum"  # u: add


@dataclass(frozen=True, slots=True)
class SoftmaxFold:
    """One weighted sum over a history axis.

    Attributes:
        node: the contraction that closes the history (what the fold's result stands for).
        weight: the softmax inside it, or the weight of a plain sum.
        over: the history axis.
        dots: matrix products inside the score.
        mask: the visible positions, or None for all.
        value: factors of the weighted sum besides the weight.
        batch_axes: axes that query, key and value share; one program instance per point.
        row_axes: axes only the query has (T, G): rows of the score tile.
        value_axes: axes only the value has (E).
    """

    node: Contract
    weight: Node
    over: str
    dots: tuple[Dot, ...]
    mask: MaskForm | None
    value: tuple[Node, ...]
    batch_axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    value_axes: tuple[str, ...]

    @property
    def kind(self) -> FoldKind:
        """A softmax-weighted or a plain sum."""
        return FoldKind.SOFTMAX if isinstance(self.weight, Softmax) else FoldKind.SUM

    @property
    def score(self) -> Node:
        """What is computed of a query and a key: logits, or the weight of a plain sum itself."""
        if isinstance(self.weight, Softmax):
            return self.weight.score
        masked = masked_weight(self.weight)
        return self.weight if masked is None else masked[1]

    @property
    def where(self) -> Node | None:
        """The mask's expression, or None where everything is visible."""
        if isinstance(self.weight, Softmax):
            return self.weight.where
        masked = masked_weight(self.weight)
        return None if masked is None else masked[0]

    @property
    def sink(self) -> Node | None:
        """One more logit in a softmax's sum."""
        return self.weight.sink if isinstance(self.weight, Softmax) else None

    @property
    def beside(self) -> tuple[Softmax, ...]:
        """The other histories of a cascade."""
        return self.weight.beside if isinstance(self.weight, Softmax) else ()


def masked_weight(weight: Node) -> tuple[Node, Node] | None:
    """``where(mask, weight, 0)`` as mask and weight."""
    match weight:
        case Map(fn=Fn.WHERE, args=(mask, value, Lit(value=0))):
            return mask, value
        case _:
            return None


@dataclass(frozen=True, slots=True)
class SoftmaxForm:
    """Element-wise code over folds of histories.

    Attributes:
        folds: every fold.
        program: the program with its folds expanded; ``folds`` point into it.
    """

    folds: tuple[SoftmaxFold, ...]
    program: Program

    @property
    def passes(self) -> tuple[tuple[SoftmaxFold, ...], ...]:
        """Folds that share score and mask, and so one pass over the history."""
        found: dict[Node, list[SoftmaxFold]] = {}
        for fold in self.folds:
            found.setdefault(fold.weight, []).append(fold)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True, slots=True)
class Selection:
    """A top-k: it closes a history and opens an axis of its own.

    Attributes:
        node: the top-k.
        dots: matrix products inside its score.
        heads: axes that the score's inner sums close, before the top-k does the history.
        mask: the visible positions, or None for all.
    """

    node: TopK
    dots: tuple[Dot, ...]
    heads: tuple[str, ...]
    mask: MaskForm | None


@dataclass(frozen=True, slots=True)
class SelectedForm:
    """A selection, and folds over the rows of the history that it picks.

    Attributes:
        selection: the stage that finds the rows.
        folds: the stage that reads them, without the gathers: ``over`` is the history's axis, and
            where a row of it lies is what the selection says. None where the picks are the result.
        program: the program with its folds expanded; ``selection`` and ``folds`` point into it.
    """

    selection: Selection
    folds: tuple[SoftmaxFold, ...]
    program: Program


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
class DiagonalForm:
    """An element-wise state (active = none): ``S' = decay * S + add``.

    Attributes:
        state: name of the state.
        decay: a value without this state; None is 1.
        add: a value without this state; None is 0.
    """

    state: str
    decay: Node | None
    add: Node | None


@dataclass(frozen=True, slots=True)
class WindowForm:
    """A window whose rows do not depend on what comes later in the order of carries.

    Attributes:
        state: name of the window.
        push: the window with the token's row; what the body gives back.
    """

    state: str
    push: Push


@dataclass(frozen=True, slots=True)
class AcrossForm:
    """An affine state whose outputs read it across: along a passive axis, not the active one.

    Attributes:
        core: the scan without its outputs.
        form: its flat table, which has no reads.
        over: the passive axis that the outputs sum over.
        reads: of the state behind all of a token's updates, ``vector . S`` along ``over``.
        outputs: output expressions over ``Input(read.name)`` and state-free nodes.
    """

    core: Program
    form: AffineForm
    over: str
    reads: tuple[Read, ...]
    outputs: tuple[Node, ...]


Carry = AffineForm | DiagonalForm | WindowForm


@dataclass(frozen=True, slots=True)
class Carries:
    """Every carried object of a scan, each derived from those before it.

    What a later form or an output needs of an earlier one is: reads of an affine state (inputs by
    name), all values of an element-wise state, the pushed windows.

    Attributes:
        forms: one per carried object, in an order in which they can be computed.
        outputs: output expressions over reads, element-wise states, windows and tokens.
    """

    forms: tuple[Carry, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was found for a program: one of the forms, or the reasons why none applies.

    ``affine`` is there where one affine state is all that is carried: what the chunk kernels take.
    ``carries`` is there where every token can be computed without a loop over tokens of the body.
    ``selected`` is there where a top-k picks the rows that a fold reads.
    ``across`` is there where one affine state is all that is carried, and outputs read it across.
    ``pointwise`` says that nothing is carried and no history is there: rows need nothing of each
    other.
    """

    softmax: SoftmaxForm | None = None
    affine: AffineForm | None = None
    refusals: tuple[Refusal, ...] = ()
    carries: Carries | None = None
    selected: SelectedForm | None = None
    pointwise: bool = False
    across: AcrossForm | None = None
