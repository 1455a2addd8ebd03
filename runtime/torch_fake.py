"""Results of a call from its declaration alone: shapes, dtypes and strides, sizes symbolic or not.

What ``bind`` finds from numbers is found here from patterns without asking a size anything, so
that a traced graph is not specialised on a length: no comparison, no check of an extent. Those are
made when the graph runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from attncc.dsl.axes import PAGE, Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.ir import Lifetime, Program, TopK
from attncc.runtime import checks
from attncc.runtime.arguments import Options
from attncc.runtime.bind import contracted, window_axes
from attncc.runtime.bind_caches import histories
from attncc.runtime.caches import Cache, PagedCache
from attncc.runtime.outputs import lse_pattern, pick_counts
from attncc.runtime.partials import without_sinks
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import QuantisedTensor
from attncc.runtime.torch_schema import HELD, Structure, new_names, unflatten

Extent = Any
"""A size: an int or a ``torch.SymInt``."""


def fake_results(
    decl: Declaration, structure: Structure, flat: Sequence[Any]
) -> list[torch.Tensor]:
    """What a call returns, uninitialised (inside a fake mode: fake).

    Args:
        decl: the declaration.
        structure: the call's structure.
        flat: its flat arguments; tensors may be fake, sizes symbolic.

    Raises:
        RankError: a tensor with more or fewer axes than its pattern.
        UnknownSizeError: no argument fixes an axis of a result.
    """
    given, options = unflatten(decl, structure, flat)
    return _Fake(decl, structure, given, Options(**options)).results()


class _Extents(checks.Sizes):
    """Axis sizes solved without comparing them."""

    def __init__(self, op: str, given: Mapping[str, Extent]) -> None:
        super().__init__(op, given)
        self.dims: dict[tuple[str, ...], Extent] = {}

    def add(self, name: str, shape: Sequence[Extent], pattern: Pattern) -> None:  # type: ignore[override]
        """Note the extents of one argument's memory axes."""
        super().add(name, shape, pattern)
        for names, extent in zip(pattern.dims, shape, strict=True):
            self.dims.setdefault(names, extent)

    def settle(self) -> None:
        """Solve for every axis; a group with one unknown axis is divided by the others."""
        self._divide()
        while self._quotient() or self._shared():
            self._divide()

    def _open(self) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Groups that are numbers: what is symbolic is not compared."""
        plain = [(n, names, x) for n, names, x in self.pending if type(x) is int]
        for name, names, extent in plain:
            unknown = tuple(n for n in names if n not in self.found)
            rest = self._product(names)
            if unknown and type(rest) is int and rest and extent % rest == 0:
                yield name, unknown, extent // rest

    def _divide(self) -> None:
        progress = True
        while progress:
            progress = False
            for name, names, extent in self.pending:
                unknown = [n for n in names if n not in self.found]
                rest = self._product(names)
                if len(unknown) != 1 or (type(rest) is int and rest == 0):
                    continue
                self.found[unknown[0]], self.by[unknown[0]] = extent // rest, name
                progress = True

    def of(self, dim: tuple[str, ...]) -> Extent:
        """Size of a memory axis: as some argument has it, else the product of its axes."""
        if dim in self.dims:
            return self.dims[dim]
        self.need(dim)
        return self._product(dim)


class _Fake:
    """One call, with what its results are made of."""

    def __init__(
        self, decl: Declaration, structure: Structure, given: dict[str, Any], options: Options
    ) -> None:
        self.decl, self.structure, self.options = decl, structure, options
        self.pools = {n: v for n, v in given.items() if isinstance(v, StatePool)}
        self.quantised = {n: v for n, v in given.items() if isinstance(v, QuantisedTensor)}
        named = {**given, **{n: v.pool for n, v in self.pools.items()}}
        named |= {n: v.data for n, v in self.quantised.items()}
        self.tensors = {n: v for n, v in named.items() if isinstance(v, torch.Tensor)}
        program = decl.trace(frozenset(given))
        self.program = without_sinks(program) if structure.return_partial else program
        self.cu_seqlens = options.cu_seqlens
        self.packed = options.cu_seqlens is not None
        self.windows = window_axes(self.program)

    def results(self) -> list[torch.Tensor]:
        """The tensors that come back, in order."""
        sizes = self._sizes()
        dtype, device = self._dtype(), next(iter(self.tensors.values())).device
        shapes: dict[str, tuple[list[Extent], torch.dtype]] = {}
        for name in self.program.state_names:
            stored = self.tensors[name].dtype if name in self.tensors else torch.float32
            shapes[name] = (self._state_shape(name, sizes), stored)
        wide = torch.float32 if self.structure.return_partial else dtype
        layouts = {o.name: self._row_pattern(o.pattern) for o in self.program.outputs}
        picks = {o.name for o in self.program.outputs if isinstance(o.value, TopK)}
        for name, pattern in layouts.items():
            stored = torch.int32 if name in picks else wide
            shapes[name] = ([sizes.of(dim) for dim in pattern.dims], stored)
        if self.structure.return_lse or self.structure.return_partial:
            axes = lse_pattern(self.program, next(iter(layouts.values())))
            shapes["lse"] = ([sizes.of(dim) for dim in axes.dims], torch.float32)
        wanted = (shapes[name] for name in new_names(self.decl, self.structure))
        return [torch.empty(shape, dtype=stored, device=device) for shape, stored in wanted]

    def _state_shape(self, name: str, sizes: _Extents) -> list[Extent]:
        window = self.windows.get(name)
        dims = self._pattern(self.program, name).dims
        return [sizes.of(dim) - (1 if window in dim else 0) for dim in dims]

    def _dtype(self) -> torch.dtype:
        """The dtype of the contractions' operands, else of the first tensor."""
        operands = contracted(self.program)
        other = {t.name for t in self.decl.tensors if t.lifetime in HELD} | self.quantised.keys()
        lead = (n for n in self.tensors if n in operands and n not in other)
        return self.tensors[next(lead, next(iter(self.tensors)))].dtype

    # -- layouts

    def _row_pattern(self, pattern: Pattern) -> Pattern:
        return pattern.without("B") if self.packed and "T" in pattern.axes else pattern

    def _pattern(self, program: Program, name: str) -> Pattern:
        """Memory axes as passed: packed calls have no B beside T or S."""
        kept = (Lifetime.CACHE, Lifetime.MEMORY)
        histories = {a for t in program.tensors if t.lifetime in kept for a in t.pattern.axes}
        pattern = program.tensor(name).pattern
        if self.packed and {"T", program.scan, *(histories & {"S"})} & set(pattern.axes):
            return pattern.without("B")
        return pattern

    # -- sizes

    def _sizes(self) -> _Extents:
        sizes = _Extents(self.decl.name, self.options.sizes)
        cache = self.options.cache
        if self.cu_seqlens is not None:
            sizes.found["B"] = sizes.dims[("B",)] = self.cu_seqlens.shape[0] - 1
        for name, tensor in self.tensors.items():
            self._add(sizes, name, tensor, cache)
        if cache is not None:
            self._add_cache(sizes, cache)
        sizes.settle()
        if isinstance(cache, PagedCache):
            sizes.found["S"] = sizes.found[PAGE] * cache.block_table.shape[1]
        sizes.found |= pick_counts(self.program)
        sizes.found.setdefault("B", 1)
        return sizes

    def _add(self, sizes: _Extents, name: str, tensor: torch.Tensor, cache: Cache | None) -> None:
        pattern = self._pattern(self.program, name)
        if cache is not None and self.program.tensor(name).lifetime is Lifetime.CACHE:
            rows = (tuple("T" if a == "S" else a for a in dim) for dim in pattern.dims)
            pattern = Pattern(tuple(rows))
        checks.rank(self.decl.name, name, tensor, pattern)
        shape: list[Extent] = list(tensor.shape)
        if name in self.windows:  # W rows in the body, W - 1 kept
            shape[pattern.dim_of(self.windows[name])] += 1
        if name in self.pools:
            del shape[pattern.dim_of("B")]
            pattern = pattern.without("B")
            self._add_slots(sizes, name)
        sizes.add(name, shape, pattern)

    def _add_slots(self, sizes: _Extents, name: str) -> None:
        slots = self.pools[name].slots
        checks.rank(self.decl.name, f"{name}.slots", slots, _PER_SEQUENCE)
        sizes.add(f"{name}.slots", slots.shape, _PER_SEQUENCE)

    def _add_cache(self, sizes: _Extents, cache: Cache) -> None:
        for t in histories(self.decl.name, self.decl.tensors):
            held, pattern = cache.tensors[t.name], cache.pattern(self.decl.name, t)
            checks.rank(self.decl.name, f"cache.{t.name}", held, pattern)
            sizes.add(f"cache.{t.name}", held.shape, pattern)


_PER_SEQUENCE = Pattern((("B",),))
