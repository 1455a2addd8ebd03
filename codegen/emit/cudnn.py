"""Describes a cuDNN graph from a flat table: pure data, built and run by ``runtime.cudnn_graph``.

cuDNN's frontend (1.29 and later) has a node for chains of gated Householder updates
(:mod:`attncc.codegen.passes.find_updates`).

Layouts there: q ``[T, Hq, K]``; k and v ``[T * N, H, .]`` or ``[T, N, H, .]``; gates at the larger
of the two head counts; states ``[sequences, heads, V, K]``; sequences end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.passes.find_updates import Unlike, Updates, find_updates, need, number_of
from attncc.dsl.axes import Pattern
from attncc.dsl.ir import Program

ONES = "ones"
"""Source of a port that the call has no tensor for: a gate that is 1 everywhere."""
SEQLENS = "cu_seqlens"
Place = tuple[tuple[int, ...], tuple[int, ...], str]
"""Dims, strides and dtype of a tensor."""
Port = tuple[str, str, Place]
"""The node's name for a tensor, the call's, and where it lies."""


@dataclass(frozen=True, slots=True)
class Laid:
    """How a tensor of a call lies in memory.

    Attributes:
        pattern: names of its memory axes.
        dims: their sizes.
        strides: in elements.
        dtype: ``bf16``, ``fp16``, ``fp32``, ``i32``.
    """

    pattern: Pattern
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """One tensor of a graph.

    Attributes:
        port: the node's name for it.
        source: the call's name for it (``ONES`` for none; results by name, behind ``final ``
            for states).
        uid: its number in the graph.
        dims: sizes, outermost first.
        strides: in elements.
        dtype: as :class:`Laid`.
    """

    port: str
    source: str
    uid: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A graph of one node.

    Attributes:
        node: the frontend's method that adds it.
        inputs: what it reads.
        outputs: what it writes, in the method's order.
        attributes: its other arguments, where they are not the node's own defaults.
    """

    node: str
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    attributes: tuple[tuple[str, bool | int | float | str], ...]


def describe_graph(
    program: Program,
    form: AffineForm,
    laid: Mapping[str, Laid],
    sizes: Mapping[str, int],
    scalars: Mapping[str, float],
    *,
    pool: bool = False,
) -> GraphPlan | Refusal:
    """The graph of a packed call.

    Args:
        program: the scan.
        form: its flat table.
        laid: the call's tensors by name: inputs (a given state among them), outputs,
            ``cu_seqlens``, ``final NAME`` for each state that is written, ``NAME.slots``.
        sizes: every axis.
        scalars: host numbers.
        pool: the state is a pool whose named slots are read and written in place.

    Returns:
        The graph, or why there is none.
    """
    found = find_updates(program, form)
    if isinstance(found, Refusal):
        return found
    if SEQLENS not in laid:
        return Refusal("cuDNN's node takes packed sequences (cu_seqlens)", program.loc)
    try:
        return _Graph(program, form, found, laid, sizes, pool).plan(scalars)
    except Unlike as unlike:
        return Refusal(f"cuDNN's node: {unlike}", program.loc)


@dataclass(frozen=True, slots=True)
class _Graph:
    """Arranges a call's tensors for the node's ports."""

    program: Program
    form: AffineForm
    found: Updates
    laid: Mapping[str, Laid]
    sizes: Mapping[str, int]
    pool: bool

    def plan(self, scalars: Mapping[str, float]) -> GraphPlan:
        found, sizes, state = self.found, self.sizes, self.form.state
        self._dtypes()
        inputs = [*self._operands(), *self._gates(), (SEQLENS, SEQLENS, self._as_is(SEQLENS))]
        if state in self.laid:
            inputs.append(("initial_state", state, self._state(state)))
        if self.pool:
            inputs.append(("state_indices", f"{state}.slots", self._as_is(f"{state}.slots")))
        name = self.program.outputs[0].name
        outputs = [("O", name, self._rows(name, per_row=False))]
        outputs.append(("final_state", f"final {state}", self._state(f"final {state}")))
        scale = math.prod(number_of(f, sizes, scalars) for f in found.scale)
        attributes: dict[str, bool | int | float | str] = {
            "num_householder": found.rows, "scale": scale, "output_final_state": True,
        }  # fmt: skip
        if found.unit:
            attributes["use_qk_l2norm"] = True
        if not found.log_gate:  # nor is a decay of 1, where there is no gate
            attributes["gate_domain"] = "linear"
        if self.pool:
            attributes["overwrite_initial_state"] = True
        ports = enumerate([*inputs, *outputs], 1)
        made = [GraphTensor(port, source, uid, *place) for uid, (port, source, place) in ports]
        split = len(inputs)
        return GraphPlan("gdp", tuple(made[:split]), tuple(made[split:]), tuple(attributes.items()))

    # -- heads

    def _heads(self, name: str) -> tuple[str, ...]:
        """Head axes of an input, those of size 1 left out."""
        own = {*self.form.active, self._value, "B", "T", *self._unrolled()}
        axes = self.laid[name].pattern.axes
        return tuple(a for a in axes if a not in own and self.sizes[a] != 1)

    @property
    def _value(self) -> str:
        """The axis of a value's elements; other passive axes are heads that share transitions."""
        axes = self.laid[self.found.v].pattern.dims[-1]
        need(len(axes) == 1 and axes[0] in self.form.passive, "values have no axis of their own")
        return axes[0]

    def _unrolled(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.program.sizes)

    def _every_head(self) -> tuple[str, ...]:
        return self._heads(f"final {self.form.state}")

    # -- ports

    def _dtypes(self) -> None:
        found = self.found
        kinds = {self.laid[n].dtype for n in (found.q, found.k, found.v)}
        need(len(kinds) == 1, "q, k and v differ in dtype")
        (kind,) = kinds
        need(kind in ("bf16", "fp16"), f"q, k and v are {kind}, not bf16 or fp16")
        if found.beta is not None:
            beta = self.laid[found.beta].dtype
            need(beta in ("fp32", kind), f"beta is {beta}, neither fp32 nor {kind}")

    def _operands(self) -> Iterator[Port]:
        found, every = self.found, self._every_head()
        for port, name in (("q", found.q), ("k", found.k), ("v", found.v)):
            heads = self._heads(name)
            need(every[: len(heads)] == heads, f"{name}'s heads are shared in another order")
            yield port, name, self._rows(name, per_row=port != "q")
        q, k, v = (self._heads(n) for n in (found.q, found.k, found.v))
        need(k in (q, v), "keys have neither the queries' heads nor the values'")
        need(every in (q, v), "states have more heads than queries and values")

    def _gates(self) -> Iterator[Port]:
        rows, every = self.found.rows, self._every_head()
        heads = math.prod(self.sizes[a] for a in every)
        for port, name, each in (("g", self.found.gate, 1), ("beta", self.found.beta, rows)):
            if name is None:
                yield port, ONES, ((self.sizes["T"] * each, heads), (heads, 1), "fp32")
                continue
            need(self._heads(name) == every, f"{name} has not the states' heads")
            yield port, name, self._rows(name, per_row=port == "beta", inner=False)

    def _as_is(self, name: str) -> Place:
        laid = self.laid[name]
        return laid.dims, laid.strides, laid.dtype

    def _rows(self, name: str, *, per_row: bool, inner: bool = True) -> Place:
        """A tensor as ``[rows, heads, inner]``, or with a token's rows apart."""
        laid = self.laid[name]
        unrolled = self._unrolled() if per_row else ()
        lead = [("T", *unrolled)] if ("T", *unrolled) in laid.pattern.dims else [("T",)]
        lead += [(a,) for a in unrolled if lead == [("T",)]]
        dims = [d for d in laid.pattern.dims if d not in lead]
        tail = 1 if inner else 0
        ordered = [*lead, *dims]
        one = len(dims) == 1 + tail and all(d in laid.pattern.dims for d in lead)
        need(one, f"{name} is laid out as [{laid.pattern}]")
        held = {*self.form.active, self._value}
        need(not inner or set(dims[-1]) <= held, f"{name} is laid out as [{laid.pattern}]")
        return self._arranged(laid, ordered)

    def _state(self, name: str) -> Place:
        laid = self.laid[name]
        (active,), passive = self.form.active, self._value
        tail = laid.pattern.dims[-2:]
        need(tail == ((passive,), (active,)), f"states are [{passive}, {active}], {active} dense")
        heads = [d for d in laid.pattern.dims if d not in (("B",), (passive,), (active,))]
        need(len(heads) == 1, f"{name} is laid out as [{laid.pattern}]")
        return self._arranged(laid, [("B",), heads[0], (passive,), (active,)])

    def _arranged(self, laid: Laid, order: list[tuple[str, ...]]) -> Place:
        at = [laid.pattern.dims.index(dim) for dim in order]
        return tuple(laid.dims[i] for i in at), tuple(laid.strides[i] for i in at), laid.dtype
