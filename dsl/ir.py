"""The intermediate representation: a closed union of mathematical nodes over named axes.

Nodes are frozen, carry the place in the user's file that made them (outside equality), and are
shared: the builder keeps one object per distinct expression. No node knows a device, a dtype of
storage or a layout; those belong to the :class:`Program`'s tensors. ``dsl.interp`` is the meaning
of every node.

    node   = Input | Lit | Size | Index | Map | Contract | Reduce | Softmax | Cumulative
           | TopK | Gather | Take | Select | AtQuery | Between | Push
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from functools import partial

from attncc.dsl.axes import Pattern
from attncc.dsl.loc import NOWHERE, Loc


class Lifetime(enum.Enum):
    """How long an object lives; each tensor of an op has exactly one per phase."""

    ACTIVATION = "activation"
    CACHE = "cache"
    MEMORY = "memory"  # a CACHE that belongs to another sequence and does not grow
    STATE = "state"
    WINDOW = "window"
    BOUNDARY = "boundary"
    CONTROL = "control"
    WORKSPACE = "workspace"
    PARAMETER = "parameter"
    OUTPUT = "output"
    GRADIENT = "gradient"


class Kind(enum.Enum):
    """What a value is: a number, a whole number, a truth value."""

    REAL = "real"
    INT = "int"
    BOOL = "bool"


class Fn(enum.Enum):
    """Element-wise functions (closed)."""

    ADD, SUB, MUL, DIV, MOD = "add", "sub", "mul", "div", "mod"
    NEG, ABS, MIN, MAX = "neg", "abs", "min", "max"
    EXP, LOG, SQRT, RSQRT = "exp", "log", "sqrt", "rsqrt"
    TANH, SIGMOID, RELU, SILU, SOFTPLUS = "tanh", "sigmoid", "relu", "silu", "softplus"
    LT, LE, GT, GE, EQ, NE = "lt", "le", "gt", "ge", "eq", "ne"
    AND, OR, NOT = "and", "or", "not"
    WHERE = "where"


COMPARISONS = frozenset({Fn.LT, Fn.LE, Fn.GT, Fn.GE, Fn.EQ, Fn.NE})
LOGIC = frozenset({Fn.AND, Fn.OR, Fn.NOT})


class Red(enum.Enum):
    """Reductions over an axis."""

    SUM, MAX, MIN = "sum", "max", "min"


@dataclass(frozen=True, slots=True, eq=False)
class NodeBase:
    """Structural equality with a cached hash, so that sharing makes comparison cheap."""

    loc: Loc = field(default=NOWHERE, kw_only=True, repr=False)
    _hash: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((type(self).__name__, *self._key())))

    def _key(self) -> tuple[object, ...]:
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("loc", "_hash"))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return _same(self, other) if isinstance(other, NodeBase) else NotImplemented

    def __reduce__(self) -> tuple[object, ...]:
        # Strings hash differently in another process, so the cached hash is not carried there.
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return (partial(type(self), **parts), ())


def _same(one: object, other: object) -> bool:
    """Equality of two shared expressions, each pair looked at once and without a deep stack."""
    seen: set[tuple[int, int]] = set()
    stack = [(one, other)]
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        if isinstance(a, NodeBase) and isinstance(b, NodeBase):
            if type(a) is not type(b) or a._hash != b._hash:
                return False
            seen.add((id(a), id(b)))
            stack.extend(zip(a._key(), b._key(), strict=True))
        elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            stack.extend(zip(a, b, strict=True))
        elif a != b:
            return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Input(NodeBase):
    """A tensor or host scalar of the signature, or a named intermediate a later stage reads."""

    name: str
    axes: tuple[str, ...]
    lifetime: Lifetime
    kind: Kind = Kind.REAL


@dataclass(frozen=True, slots=True, eq=False)
class Lit(NodeBase):
    """A literal; 1, 1.0 and True are three of them, and so are 0.0 and -0.0."""

    value: float | int | bool

    def _key(self) -> tuple[object, ...]:
        return (type(self.value), repr(self.value))


@dataclass(frozen=True, slots=True, eq=False)
class Size(NodeBase):
    """The number of elements of an axis."""

    axis: str


@dataclass(frozen=True, slots=True, eq=False)
class Index(NodeBase):
    """The absolute position along an axis (for T and S: in the history).

    ``scalar`` in a scan's body, where the token has no axis of its own.
    """

    axis: str
    scalar: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Map(NodeBase):
    """An element-wise function; operands broadcast by axis name."""

    fn: Fn
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Contract(NodeBase):
    """Product of the operands, summed over axes (n-ary)."""

    args: tuple[Node, ...]
    over: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reduce(NodeBase):
    """Sum, max or min over axes."""

    red: Red
    arg: Node
    over: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Softmax(NodeBase):
    """exp(score - lse) over an axis; a masked element, or a row that sees nothing, is 0.

    ``sink`` is one more logit in the sum of exponentials, without a value. ``beside`` are the other
    histories of a cascade (each without a sink): their exponentials belong to the sum as well.
    """

    score: Node
    over: str
    where: Node | None = None
    sink: Node | None = None
    beside: tuple[Softmax, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Cumulative(NodeBase):
    """Running sum along an axis, inclusive of the element itself."""

    arg: Node
    over: str


@dataclass(frozen=True, slots=True, eq=False)
class TopK(NodeBase):
    """Indices of the k largest visible scores in the contract's order, on a new axis; -1 pads."""

    score: Node
    over: str
    axis: str
    k: int
    where: Node | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gather(NodeBase):
    """Rows of a history tensor at the indices of a TopK (0 where the index is -1)."""

    arg: Node
    index: Node
    over: str


@dataclass(frozen=True, slots=True, eq=False)
class Take(NodeBase):
    """Element-wise look-up in a table along one of its axes (indices are clamped to the table)."""

    table: Node
    over: str
    index: Node


@dataclass(frozen=True, slots=True, eq=False)
class Select(NodeBase):
    """One position of an axis, fixed at trace time (what ``unroll`` yields)."""

    arg: Node
    over: str
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class AtQuery(NodeBase):
    """A history tensor's value at the query's own position."""

    arg: Node
    over: str


@dataclass(frozen=True, slots=True, eq=False)
class Between(NodeBase):
    """Sum of a history tensor over the positions after s up to and including the query's."""

    arg: Node
    over: str


@dataclass(frozen=True, slots=True, eq=False)
class Push(NodeBase):
    """A bounded window with one more row: the last W rows, newest last."""

    window: Node
    row: Node
    over: str


Node = (
    Input | Lit | Size | Index | Map | Contract | Reduce | Softmax | Cumulative
    | TopK | Gather | Take | Select | AtQuery | Between | Push
)  # fmt: skip
"""The closed union of node kinds."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One object of the signature: what the caller passes."""

    name: str
    pattern: Pattern
    lifetime: Lifetime
    kind: Kind = Kind.REAL
    default: float | Node | None = None  # a missing argument is this: a literal, or of sizes
    optional: bool = False
    scalar: bool = False  # a host number, not a tensor
    loc: Loc = field(default=NOWHERE, compare=False)

    @property
    def usual(self) -> bool:
        """Whether a usual call gives it: no flag is on, what follows from sizes is left out."""
        return self.kind is not Kind.BOOL and not isinstance(self.default, NodeBase)


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """The value a body gives back for one of its states or windows."""

    name: str
    value: Node


@dataclass(frozen=True, slots=True)
class Output:
    """One named output: layout and value."""

    name: str
    pattern: Pattern
    value: Node


@dataclass(frozen=True, slots=True)
class Program:
    """One traced declaration: what a call with these inputs present computes.

    ``scan`` names the axis the body is one step of (``"T"``), or is None for an op over a whole
    history.
    """

    name: str
    tensors: tuple[Tensor, ...]
    states: tuple[StateUpdate, ...]
    outputs: tuple[Output, ...]
    scan: str | None = None
    given: frozenset[str] = frozenset()  # optional inputs that are present
    sizes: tuple[tuple[str, int], ...] = ()  # sizes fixed at trace time (unroll)
    loc: Loc = field(default=NOWHERE, compare=False)

    @property
    def roots(self) -> tuple[Node, ...]:
        """Every value that leaves the program."""
        return (*(s.value for s in self.states), *(o.value for o in self.outputs))

    def tensor(self, name: str) -> Tensor:
        """The signature's tensor of that name.

        Raises:
            KeyError: there is none.
        """
        for t in self.tensors:
            if t.name == name:
                return t
        raise KeyError(name)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of states and windows, in declaration order."""
        held = (Lifetime.STATE, Lifetime.WINDOW)
        return tuple(t.name for t in self.tensors if t.lifetime in held)

    @property
    def history_axis(self) -> str | None:
        """The axis of the op's own cache (S), if it has one."""
        for t in self.tensors:
            if t.lifetime is Lifetime.CACHE:
                return "S"
        return None
