"""A composed layer as a torch module: its parameters, and its nodes in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from attncc.dsl.axes import Pattern
from attncc.dsl.composition import Composition, check_settings
from attncc.dsl.errors import (
    ArgumentError,
    BackendError,
    CacheError,
    CacheInTrainingError,
    RefusedError,
    SizeError,
    UnknownSizeError,
)
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Layer, LayerNode, LayerObject, NodeKind
from attncc.runtime import checks, registry
from attncc.runtime.caches import Storage
from attncc.runtime.nn.kept import Kept, fixed, keeping
from attncc.runtime.nn.nodes import RUNNERS, Run, positions, run_node

PHASES = ("prefill", "decode")


class LayerModule(torch.nn.Module):
    """Runs a :class:`Composition`: whole sequences, prefill into caches, decode.

        layer = attncc.nn.LayerModule(composition, {"M": 1024, "Hkv": 4, "G": 2, "D": 128})
        y = layer(h)                                        # [B, T, M], whole sequences
        kept = layer.allocate(batch=8, capacity=4096)
        y = layer(h, kept=kept)                             # prefill
        y = layer(h_t, kept=kept, phase="decode")           # one token or a few

    Packed sequences come as ``[T, M]`` with ``cu_seqlens``. Parameters have the names of the
    layer's objects and the layout of their patterns, a group being one dimension: a projection's
    is ``[out, in]``, as a linear layer's.

    Without ``kept`` gradients flow: calls that need them take the torch lowering, the only one
    that has a backward here. With it they are refused: a cache outlives the step that autograd
    would go back through.

    Attributes:
        composition: what is run.
        sizes: of every axis but B, T and S.
        rope_base: of rotations, where a node has no other.
        rope_interleaved: rotate neighbours instead of halves.
        eps: of norms, where a node has no other; vectors of length 1 have 1e-6.
        settings: host numbers of nodes by name.
        backend: of the ops.
        fuse: run several nodes as one op where the composition names one.
        ops: of nodes, by name.
        keeping: its ops that keep something, as :func:`attncc.runtime.nn.kept.keeping` finds them.
        keeps: names of what :class:`Kept` has for it: nodes with caches, objects in pools.
    """

    def __init__(
        self, composition: Composition, sizes: Mapping[str, int], *,
        dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
        rope_base: float = 10000.0, rope_interleaved: bool = False, eps: float = 1e-6,
        backend: str = "auto", fuse: bool = True,
        settings: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:  # fmt: skip
        """Allocate parameters and draw them as usual for their kinds.

        Args:
            composition: the layer.
            sizes: of its axes; those that a reshape gives may be left out.
            dtype: of parameters; those of a decay are fp32.
            device: where they live.
            rope_base: see the attributes, as the rest.
            rope_interleaved: as there.
            eps: as there.
            backend: as there.
            fuse: as there.
            settings: host numbers of nodes by name, before the composition's own.

        Raises:
            UnknownSizeError, SizeError: a size is missing, or two do not fit.
            RefusedError: a node of a kind that does not run.
            LayerError: a setting that no node takes.
        """
        super().__init__()
        self.composition, self.backend, self.fuse = composition, backend, fuse
        own = {name: dict(numbers) for name, numbers in composition.settings}
        for name, given in (settings or {}).items():
            own[name] = {**own.get(name, {}), **given}
        check_settings(self.layer.nodes, own, self.layer.name)
        self.settings = own
        self.rope_base, self.rope_interleaved, self.eps = rope_base, rope_interleaved, eps
        every = (*self.layer.nodes, *(group.by for group in composition.fused))
        self.ops = {n.name: registry.of(n.op) for n in every if n.op is not None}
        for node in self.layer.nodes:
            if node.kind is not NodeKind.OP and node.kind not in RUNNERS:
                raise RefusedError(
                    f"no module runs a node of kind {node.kind.value}",
                    op=self.layer.name, argument=node.name, loc=node.loc,
                )  # fmt: skip
        self.keeping = tuple(keeping(self.layer))
        self.keeps = (
            tuple(node.name for node, grows, _ in self.keeping if grows),
            tuple(name for _, _, pools in self.keeping for name in pools.values()),
        )
        self.sizes = _settled(self.layer, sizes)
        missing = [a for a in composition.axes if a not in self.sizes]
        if missing:
            raise UnknownSizeError(
                "a size is missing", op=self.layer.name, axis=missing[0],
                expected="an entry in sizes=",
            )  # fmt: skip
        for found in self._owned():
            wide = any(n.kind is NodeKind.GATE for n in self.layer.consumers(found.name))
            shape = [self.extent(dim) for dim in found.pattern.dims]
            data = torch.empty(shape, dtype=torch.float32 if wide else dtype, device=device)
            self.register_parameter(found.name, torch.nn.Parameter(data))
        self.reset_parameters()

    @property
    def layer(self) -> Layer:
        """Nodes and objects: what the ledger and the sharding plan read."""
        return self.composition.layer

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: that of the first parameter that is a matrix."""
        found = next((p for p in self.parameters() if p.dim() > 1), None)
        return torch.float32 if found is None else found.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.parameters()).device

    def extra_repr(self) -> str:
        """Name and sizes."""
        return f"{self.layer.name}, {', '.join(f'{a}={n}' for a, n in self.sizes.items())}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters: linear maps and filters by fan-in, norms 1, decays as Mamba-2's."""
        for found in self._owned():
            p: Tensor = getattr(self, found.name)
            node = next(self.layer.consumers(found.name))
            if node.kind is NodeKind.GATE and found.name == node.params[0]:
                p.uniform_(1, 16).log_()
            elif node.kind is NodeKind.GATE:
                step = p.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
                p.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
            elif p.dim() > 1:
                p.uniform_(-(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5)
            else:
                p.fill_(1)

    # --- running

    def forward(
        self, x: Tensor, *, kept: Kept | None = None, cu_seqlens: Tensor | None = None,
        phase: str = "prefill",
    ) -> Tensor:  # fmt: skip
        """The layer's output, laid out as its input.

        Args:
            x: ``[B, T, M]``, or ``[T, M]`` with ``cu_seqlens``.
            kept: caches and pools that this call reads, appends to and updates; without them the
                sequences are whole and nothing is kept.
            cu_seqlens: where packed sequences start, int32 or int64 ``[sequences + 1]``.
            phase: ``prefill``, or ``decode`` for a few tokens a sequence.

        Raises:
            CacheInTrainingError: ``kept`` in a call that autograd records.
            BackendError: gradients are wanted of a backend that has none.
            RankError, SizeError, DtypeError, DeviceError: ``x`` is another tensor than the layer's.
            CacheError: ``kept`` is another layer's.
            ArgumentError: another phase.
            CallError: an argument does not fit; see the ops.
        """
        if phase not in PHASES:
            raise ArgumentError(
                "no such phase", op=self.layer.name, argument="phase",
                expected=" or ".join(PHASES), found=phase,
            )  # fmt: skip
        run = Run(self, phase, self._backend(x, kept), kept, cu_seqlens)
        if kept is not None:
            self._holds(kept)
        layer = self.layer
        given = [o for o in layer.objects if o.source]
        for found in given:
            if found.lifetime is not Lifetime.CONTROL:
                run.values[found.name] = self._input(found, x, packed=run.packed)
        run.values |= {o.name: positions(run, x) for o in given if o.name not in run.values}
        count = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        nodes = self.composition.running(
            phase, sequences=count, fuse=self.fuse, settings=self.settings
        )
        for node, flags in nodes:
            run_node(run, node, flags)
        return run.values[next(o.name for o in layer.objects if o.lifetime is Lifetime.OUTPUT)]

    def decode(self, x: Tensor, kept: Kept, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """One token or a few of every sequence; see :meth:`forward`."""
        found: Tensor = self(x, kept=kept, cu_seqlens=cu_seqlens, phase="decode")
        return found

    def allocate(
        self, batch: int, capacity: int = 0, *, page: int | None = None,
        dtype: Storage | Mapping[str, Storage] | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> Kept:  # fmt: skip
        """Everything the layer keeps for a fixed set of sequences, empty.

        Args:
            batch: sequences.
            capacity: tokens that each has room for, where something grows.
            page: rows of a page; None for dense caches.
            dtype: storage of histories and windows (by the ops' names); the module's if None.
            state_dtype: of states.

        Raises:
            CacheError: a storage or a block does not fit.
        """
        return fixed(self, batch, capacity, page, dtype, state_dtype)

    def _input(self, found: LayerObject, x: Tensor, *, packed: bool) -> Tensor:
        """The layer's input, checked against its pattern."""
        pattern = found.pattern.without("B") if packed else found.pattern
        checks.rank(self.layer.name, found.name, x, pattern)
        checks.device(self.layer.name, found.name, x, self.device)
        if not torch.is_autocast_enabled(x.device.type):
            checks.dtype(self.layer.name, found.name, x, (self.dtype,), "not the parameters' dtype")
        for dim, extent in zip(pattern.dims, x.shape, strict=True):
            if all(a in self.sizes for a in dim) and self.extent(dim) != extent:
                raise SizeError(
                    "the input has another size", op=self.layer.name, argument=found.name,
                    axis=" ".join(dim), expected=self.extent(dim), found=extent,
                )  # fmt: skip
        return x

    def _holds(self, kept: Kept) -> None:
        """What is kept is this layer's: an op without its history would see this call alone."""
        for expected, there in zip(self.keeps, (kept.caches, kept.pools), strict=True):
            if set(expected) != set(there):
                raise CacheError(
                    "what is kept is another layer's", op=self.layer.name, argument="kept",
                    expected=" ".join(sorted(expected)) or "nothing",
                    found=" ".join(sorted(there)) or "nothing",
                )  # fmt: skip

    def _backend(self, x: Tensor, kept: Kept | None) -> str:
        wanted = x.requires_grad or any(p.requires_grad for p in self.parameters())
        if not (torch.is_grad_enabled() and wanted):
            return self.backend
        if kept is not None:
            raise CacheInTrainingError(
                "a cache in a call that autograd records", op=self.layer.name, argument="kept",
                help="call it under torch.no_grad() or torch.inference_mode()",
            )  # fmt: skip
        if self.backend not in ("auto", "torch"):
            raise BackendError(
                "only the torch lowering has a backward", op=self.layer.name, argument="backend",
                expected="auto or torch", found=self.backend,
            )  # fmt: skip
        return "torch"

    # --- what nodes ask

    def setting(self, node: LayerNode, name: str, usual: float) -> float:
        """A host number of a node."""
        return self.settings.get(node.name, {}).get(name, usual)

    def numbers(self, node: LayerNode) -> dict[str, float]:
        """Host numbers of an op's node, or of the nodes that it stands for."""
        assert node.op is not None
        found: dict[str, float] = {}
        for t in node.op.tensors:
            if t.scalar and t.name == "eps":
                found[t.name] = self.eps
        own = self.settings.get(node.name.split("+")[-1], {})
        found |= {t.name: own[t.name] for t in node.op.tensors if t.scalar and t.name in own}
        return found

    def sizes_of(self, node: LayerNode) -> dict[str, int]:
        """Sizes of an op's axes, by the op's names."""
        assert node.op is not None
        renamed = dict(node.axes)
        axes = {a for t in node.op.tensors for a in t.pattern.axes}
        names = {a: renamed.get(a, a) for a in axes}
        return {a: self.sizes[b] for a, b in names.items() if b in self.sizes}

    def _owned(self) -> list[LayerObject]:
        return [o for o in self.layer.objects if o.lifetime is Lifetime.PARAMETER]

    def extent(self, dim: tuple[str, ...]) -> int:
        """Elements along a memory axis."""
        return prod([self.sizes[a] for a in dim])  # a list: torch.compile traces it


def _settled(layer: Layer, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, with those that a reshape gives.

    Raises:
        SizeError: two sides of a reshape have other numbers of elements.
    """
    found = dict(sizes)
    for node in layer.nodes:
        if node.kind is not NodeKind.RESHAPE or len(node.outputs) != 1:
            continue
        sides = [_own_axes(layer.object(n).pattern) for n in (*node.inputs, *node.outputs)]
        for one, other in (sides, sides[::-1]):
            unknown = [a for a in one if a not in found]
            if len(unknown) == 1 and all(a in found for a in other):
                rest = prod(found[a] for a in one if a != unknown[0])
                found[unknown[0]] = prod(found[a] for a in other) // rest
        if all(a in found for side in sides for a in side):
            counts = [prod(found[a] for a in side) for side in sides]
            if counts[0] != counts[1]:
                raise SizeError(
                    f"{node.name} reshapes other numbers of elements", op=layer.name,
                    axis=sides[0][-1], expected=counts[1], found=counts[0], loc=node.loc,
                )  # fmt: skip
    return found


def _own_axes(pattern: Pattern) -> list[str]:
    return [a for a in pattern.axes if a not in ("B", "T")]
