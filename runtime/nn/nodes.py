"""How a composed layer's nodes run: one function for each kind, on tensors by object name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from attncc.dsl.axes import parse
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Dtype, LayerNode, NodeKind
from attncc.runtime import ops
from attncc.runtime.nn.kept import Kept, capacity
from attncc.runtime.quantised import quantise, scale_values

if TYPE_CHECKING:
    from attncc.runtime.api import Op
    from attncc.runtime.nn.module import LayerModule

_SILU, _TURN_HALVES, _TURN_NEIGHBOURS = ops.silu, ops.rope, ops.rope_interleaved
_QUANTISED = parse("T D")
LEAST_POSITIONS = 4096
"""Rows of the smallest table of rotations; larger ones are powers of two."""


@dataclass(slots=True)
class Run:
    """One call under way.

    Attributes:
        module: the layer.
        phase: ``prefill`` or ``decode``.
        backend: of its ops.
        kept: what it keeps between calls, or None: everything is in this call.
        cu_seqlens: of packed sequences.
        values: tensors by object; of a history, the rows that this call brings.
        room: tokens that a sequence may come to hold, once a node has asked.
    """

    module: LayerModule
    phase: str
    backend: str
    kept: Kept | None
    cu_seqlens: Tensor | None
    values: dict[str, Tensor] = field(default_factory=dict)
    room: int | None = None

    @property
    def packed(self) -> bool:
        """Whether tokens lie end to end, without a batch axis."""
        return self.cu_seqlens is not None

    def param(self, name: str) -> Tensor:
        """A parameter of the model."""
        found: Tensor = getattr(self.module, name)
        return found

    def lead(self, one: str, other: str) -> int:
        """How many leading dimensions two objects' tensors share."""
        a, b = (self.module.layer.object(n).pattern.dims for n in (one, other))
        same = [x == y for x, y in zip(a, b, strict=False)]
        count = same.index(False) if False in same else len(same)
        return count - self.packed

    def extents(self, name: str, lead: int) -> list[int]:
        """Extents of an object's memory axes behind its first ones."""
        dims = self.module.layer.object(name).pattern.dims[lead + self.packed :]
        return [self.module.extent(dim) for dim in dims]


# --- plain tensor code ----------------------------------------------------------------------------


def _project(run: Run, node: LayerNode) -> None:
    (x,), (y,) = node.inputs, node.outputs
    weight, *bias = (run.param(p) for p in node.params)
    lead = run.lead(x, y)
    if weight.dim() == 3:  # a matrix for each head
        run.values[y] = torch.einsum("...hi,hoi->...ho", run.values[x], weight)
        return
    value = functional.linear(run.values[x].flatten(lead), weight, *bias)
    run.values[y] = torch.unflatten(value, -1, run.extents(y, lead))


def _reshape(run: Run, node: LayerNode) -> None:
    (x,) = node.inputs
    if len(node.outputs) == 1:
        (y,) = node.outputs
        lead = run.lead(x, y)
        value = run.values[x]
        run.values[y] = value.reshape(*value.shape[:lead], *run.extents(y, lead))
        return
    last = [run.extents(y, run.values[x].dim() - 1)[0] for y in node.outputs]
    run.values |= dict(zip(node.outputs, torch.split(run.values[x], last, -1), strict=True))


def _gate(run: Run, node: LayerNode) -> None:
    (a,), (g,) = node.inputs, node.outputs
    log, *bias = (run.param(p).float() for p in node.params)
    x = run.values[a].float()
    run.values[g] = -log.exp() * functional.softplus(x + bias[0] if bias else x)


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Run, LayerNode], None]:
    def run_it(run: Run, node: LayerNode) -> None:
        (x,), (y,) = node.inputs, node.outputs
        wide = run.module.layer.object(y).dtype is Dtype.FP32
        value = run.values[x]
        run.values[y] = function(value.float() if wide else value)

    return run_it


def _scale(run: Run, node: LayerNode) -> None:
    first, *others = (run.values[x] for x in node.inputs)
    value = first.float() * run.module.setting(node, "by", 1.0)
    for other in others:
        value = value * other
    run.values[node.outputs[0]] = value.to(first.dtype)


def _quantise(run: Run, node: LayerNode) -> None:
    """e4m3 numbers, in the dtype of what is quantised, and the scale of each row or block.

    A history is quantised once more when it is appended: its rows are given dequantised, which
    with scales that are powers of two changes no bit of what is stored.
    """
    x, (y, scale) = run.values[node.inputs[0]], node.outputs
    block = int(run.module.setting(node, "block", 0)) or x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    power = run.module.layer.object(scale).dtype is Dtype.UE8M0
    dtype = torch.uint8 if power else torch.float32
    sizes = dict(zip(("T", "D"), rows.shape, strict=True))
    data, found = quantise(rows, _QUANTISED, "D", block, dtype, sizes)
    factor = scale_values(found.T).reshape(*x.shape[:-1], x.shape[-1] // block)
    values = data.view(x.shape).float()
    if run.module.setting(node, "dequantised", 0.0):
        values = (torch.unflatten(values, -1, (-1, block)) * factor[..., None]).flatten(-2)
    run.values[y] = values.to(x.dtype)
    run.values[scale] = factor.squeeze(-1) if block == x.shape[-1] else factor


def _append(run: Run, node: LayerNode) -> None:
    rows, history = node.inputs
    run.values[history] = run.values[rows]  # the op that reads the history appends them


# --- ops without a carry --------------------------------------------------------------------------


def _rows(run: Run, op: Op, node: LayerNode, **more: Any) -> Tensor:
    """An op over ``[B, T, H, V]`` on a node's inputs, whatever heads they have."""
    tensors = [_four(run.values[x], run.packed) for x in node.inputs]
    names = [t.name for t in op.declaration.tensors]
    given = dict(zip(names, tensors, strict=False)) | more
    found: Tensor = op(**given, backend=run.backend)
    return found.view(run.values[node.inputs[0]].shape)


def _four(x: Tensor, packed: bool) -> Tensor:
    x = x.unsqueeze(0) if packed else x
    return x.unsqueeze(2) if x.dim() == 3 else x


def _norm(op: Op, usual: float | None = None) -> Callable[[Run, LayerNode], None]:
    def run_it(run: Run, node: LayerNode) -> None:
        eps = run.module.setting(node, "eps", run.module.eps if usual is None else usual)
        more: dict[str, Any] = dict(zip(("w", "bias"), map(run.param, node.params), strict=False))
        if run.module.setting(node, "gate_first", 0.0):
            more["gate_first"] = True
        run.values[node.outputs[0]] = _rows(run, op, node, eps=eps, **more)

    return run_it


def _silu(run: Run, node: LayerNode) -> None:
    run.values[node.outputs[0]] = _rows(run, _SILU, node)


def _rope(run: Run, node: LayerNode) -> None:
    x, at = node.inputs
    value, position = run.values[x], run.values[at]
    turned = int(run.module.setting(node, "rotated", 0)) or value.shape[-1]
    value, rest = value[..., :turned], value[..., turned:]
    pairs = turned // 2
    base = run.module.setting(node, "base", run.module.rope_base)
    if run.room is None:
        run.room = 0 if run.kept is None else capacity(run.module, run.kept)
    rows = max(run.room, position.shape[-1], LEAST_POSITIONS)
    tables = rotations if type(value) is Tensor else _turns  # a tracer's are not to be kept
    cos, sin = tables(pairs, base, 1 << (rows - 1).bit_length(), value.device)
    near = run.module.setting(node, "interleaved", float(run.module.rope_interleaved))
    found: Tensor = (_TURN_NEIGHBOURS if near else _TURN_HALVES)(
        _four(value, run.packed), position, cos, sin, sizes={"R": 2}, backend=run.backend
    )
    found = found.view(value.shape)
    run.values[node.outputs[0]] = torch.cat([found, rest], -1) if rest.shape[-1] else found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rotations(pairs: int, base: float, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[rows, pairs]`` of ``position * base^(-d / pairs)``, fp32.

    Angles are computed in fp64: at position 100,000 one in fp32 would be off by 4e-3.
    """
    return _rotations(pairs, base, rows, device)


@cache  # a captured graph reads its table for as long as it lives
def _rotations(pairs: int, base: float, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a later call may want gradients beside it
        return _turns(pairs, base, rows, device)


def _turns(pairs: int, base: float, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    steps = torch.arange(pairs, dtype=torch.float64, device=device)
    angle = torch.arange(rows, device=device)[:, None] * base ** (-steps / pairs)
    return angle.cos().float(), angle.sin().float()


# --- ops with a carry -----------------------------------------------------------------------------


def _op(run: Run, node: LayerNode, flags: tuple[str, ...]) -> None:
    declaration = node.op
    assert declaration is not None
    binds = dict(node.binds)
    given: dict[str, Any] = dict.fromkeys(flags, True)
    kept = run.kept
    for t in declaration.tensors:
        if t.name not in binds:
            continue
        target = binds[t.name]
        if t.lifetime in (Lifetime.STATE, Lifetime.WINDOW):
            if kept is not None:
                given[t.name] = kept.pools[target]
        elif t.lifetime is Lifetime.PARAMETER:
            given[t.name] = run.param(target)
        else:
            given[t.name] = run.values[target]
    if kept is not None:
        held = next((kept.caches[n] for n in node.name.split("+") if n in kept.caches), None)
        given |= {} if held is None else {"cache": held}
    given |= run.module.numbers(node)
    if run.cu_seqlens is not None:
        given["cu_seqlens"] = run.cu_seqlens
    op = run.module.ops[node.name]
    result = (op.decode if run.phase == "decode" else op.prefill)(**given, backend=run.backend)
    for name, _ in declaration.outputs:
        value = result if isinstance(result, Tensor) else getattr(result, name)
        run.values[binds[name]] = value


RUNNERS: Mapping[NodeKind, Callable[[Run, LayerNode], None]] = {
    NodeKind.PROJECT: _project,
    NodeKind.RESHAPE: _reshape,
    NodeKind.GATE: _gate,
    NodeKind.SIGMOID: _elementwise(torch.sigmoid),
    NodeKind.SOFTPLUS: _elementwise(functional.softplus),
    NodeKind.SCALE: _scale,
    NodeKind.APPEND: _append,
    NodeKind.ROPE: _rope,
    NodeKind.RMSNORM: _norm(ops.rms_norm),
    NodeKind.LAYERNORM: _norm(ops.layer_norm),
    NodeKind.QUANTISE: _quantise,
    NodeKind.GATED_RMSNORM: _norm(ops.gated_rms_norm),
    NodeKind.L2NORM: _norm(ops.l2_norm, 1e-6),  # the contract's, as where an op norms q and k
    NodeKind.SILU: _silu,
}
"""Kinds of nodes that run; those of kind OP run their op."""


def run_node(run: Run, node: LayerNode, flags: tuple[str, ...]) -> None:
    """Run one node on the values that are there."""
    if node.kind is NodeKind.OP:
        _op(run, node, flags)
    else:
        RUNNERS[node.kind](run, node)


def positions(run: Run, x: Tensor) -> Tensor:
    """Each token's place in its sequence, int32 ``[B, T]`` (packed: ``[1, T]``), on the device."""
    lengths = None if run.kept is None else run.kept.lengths
    if run.kept is not None and lengths is None:
        raise RefusedError(
            "nothing that is kept says how many tokens came before", op=run.module.layer.name,
            argument="positions", help="a layer with positions needs a history",
        )  # fmt: skip
    if run.cu_seqlens is None:
        at = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
        start = torch.zeros_like(at[:1]).expand(x.shape[0]) if lengths is None else lengths
        return start[:, None] + at
    at = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    ends = run.cu_seqlens[1:].to(torch.int32)
    row = torch.searchsorted(ends, at, right=True).clamp(max=max(len(ends) - 1, 0))
    start = -run.cu_seqlens[:-1].to(torch.int32)
    if lengths is not None:
        start = start + lengths
    return (at + start[row])[None]
