"""Layers as data: named nodes between named objects, from the layer's input to its output.

``attncc.nn`` composes layers and produces this; the ledger, the dataflow pictures and the sharding
plan read it. Nothing here computes anything: a node says what kind of operation stands where, which
objects it reads and writes, and where the user wrote it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from attncc.dsl.axes import Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.ir import Lifetime
from attncc.dsl.loc import NOWHERE, Loc

CARRIED = (Lifetime.STATE, Lifetime.WINDOW)
"""Lifetimes of what a step changes as a whole."""

KEPT = (Lifetime.CACHE, *CARRIED)
"""Lifetimes of what outlives a decode step."""


class Dtype(enum.Enum):
    """What an object's elements are stored as (closed; the contract's list)."""

    FP32, BF16, FP16 = "fp32", "bf16", "fp16"
    E4M3, UE8M0 = "e4m3", "ue8m0"
    INT32, INT64 = "int32", "int64"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return _BYTES[self.value]


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1, "ue8m0": 1, "int32": 4, "int64": 8}


class NodeKind(enum.Enum):
    """What a node does (closed)."""

    PROJECT = "project"  # a matrix product with a parameter
    RESHAPE = "reshape"  # split or merge axes: a view
    ROPE = "rope"
    RMSNORM = "rmsnorm"
    GATED_RMSNORM = "gated_rmsnorm"
    LAYERNORM = "layernorm"
    L2NORM = "l2norm"
    SILU = "silu"
    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"
    SCALE = "scale"  # times a host number or another activation
    GATE = "gate"  # a decay's parametrisation: -exp(A_log) * softplus(a + dt_bias)
    QUANTISE = "quantise"
    APPEND = "append"  # new rows to a history
    CONTRACT = "contract"  # a product of activations, summed over axes
    MASK = "mask"
    SOFTMAX = "softmax"
    SUM = "sum"  # a reduction over an axis that is no history
    TOPK = "topk"
    GATHER = "gather"
    UPDATE = "update"  # a state's new value
    PUSH = "push"  # a window's new rows
    ELEMENTWISE = "elementwise"  # anything else that looks at one element at a time
    OP = "op"  # a declared op; :attr:`LayerNode.op` says which


@dataclass(frozen=True, slots=True)
class LayerObject:
    """One thing that nodes hand on.

    Attributes:
        name: the code's name for it, unique in its layer: ``k_cache``.
        symbol: the name in formulas: ``K_cache``.
        pattern: its layout, in the layer's axes: B, T tokens of this call, S tokens of history.
        lifetime: in inference; :func:`attncc.dsl.ledger.lives` says what training makes of it.
        dtype: as it is stored; None for the call's own dtype.
        row: title of its row in the object table, objects of one title share a row. None: it has no
            row and is part of the way between its neighbours (a query before its RoPE).
        formula: what it is, one line: ``softmax(a_t, S)``.
        note: what else the row says.
        source: the producer where no node makes it: ``previous sublayer``.
        sink: the consumer where no node reads it: ``next sublayer``.
        fused: inside an op: it need not lie in memory.
        rows: of a window, the axis of its rows: one less is kept than the pattern's size.
        reach: of a history, the last rows among which are all that a query sees (a number, or a sum
            of host numbers and numbers); None where any of them may be.
    """

    name: str
    symbol: str
    pattern: Pattern
    lifetime: Lifetime = Lifetime.ACTIVATION
    dtype: Dtype | None = None
    row: str | None = None
    formula: str = ""
    note: str = ""
    source: str = ""
    sink: str = ""
    fused: bool = False
    rows: str = ""
    reach: int | str | None = None

    @property
    def given(self) -> bool:
        """Whether it is there before the layer's first node: kept, the model's, or from outside."""
        outside = (*KEPT, Lifetime.MEMORY, Lifetime.PARAMETER)
        return bool(self.source) or self.lifetime in outside


@dataclass(frozen=True, slots=True)
class Inner:
    """What a layer calls an object inside one of its ops.

    Attributes:
        name: the object in the op's own ledger (:func:`attncc.dsl.ledger.op_layer`): the body's
            variable, or a derived name.
        symbol: its name in formulas, None to keep the op's.
        row: title of its row in the layer's table.
        formula: None to keep the op's.
    """

    name: str
    symbol: str | None = None
    row: str | None = None
    formula: str | None = None


@dataclass(frozen=True, slots=True)
class LayerNode:
    """One operation.

    Attributes:
        name: unique in its layer: ``q_proj``.
        kind: what it does.
        inputs: objects it reads, in order. A history, state or window that it writes as well stands
            in both ``inputs`` and ``outputs``: an object is one thing that is kept, not a version.
        outputs: objects it writes, in order.
        params: objects of lifetime PARAMETER that it reads.
        label: what tables and pictures call it (``W_Q``); the name if empty.
        op: the declared op of a node of kind OP.
        binds: for an op, (argument or result of the op, object of the layer), each once. A state's
            argument is bound once. Arguments that are not bound are absent (optional ones).
        axes: for an op, (the op's axis, the layer's axis) where they differ.
        inner: for an op, what the layer calls objects inside it.
        loc: where the user wrote it.
    """

    name: str
    kind: NodeKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[str, ...] = ()
    label: str = ""
    op: Declaration | None = None
    binds: tuple[tuple[str, str], ...] = ()
    axes: tuple[tuple[str, str], ...] = ()
    inner: tuple[Inner, ...] = ()
    loc: Loc = field(default=NOWHERE, compare=False)

    @property
    def shown(self) -> str:
        """What tables and pictures call it."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class Layer:
    """A composition: nodes in an order in which they can run, and every object between them.

    Attributes:
        name: of the layer.
        nodes: each after those that make what it reads (a kept object is there from the start).
        objects: in the order of their rows; parameters too.
        doc: one line.
        sizes: sizes the declaration fixes: ``W`` of a convolution, ``topk`` places.
        rows: titles of the object table in their order; others follow in the order of objects.
        loc: where the user wrote it.
    """

    name: str
    nodes: tuple[LayerNode, ...]
    objects: tuple[LayerObject, ...]
    doc: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    rows: tuple[str, ...] = ()
    loc: Loc = field(default=NOWHERE, compare=False)

    def object(self, name: str) -> LayerObject:
        """The object of that name.

        Raises:
            KeyError: there is none.
        """
        for found in self.objects:
            if found.name == name:
                return found
        raise KeyError(name)

    def producers(self, name: str) -> Iterator[LayerNode]:
        """Nodes that write an object."""
        return (n for n in self.nodes if name in n.outputs)

    def consumers(self, name: str) -> Iterator[LayerNode]:
        """Nodes that read an object."""
        return (n for n in self.nodes if name in n.inputs or name in n.params)
