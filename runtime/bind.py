"""From the arguments of a call to a checked :class:`Call`: names, axes, sizes, dtypes, outputs.

Everything that can be wrong with a call is found here, before anything is launched or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from attncc.dsl.axes import Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError
from attncc.dsl.graph import children, walk
from attncc.dsl.ir import (
    COMPARISONS,
    AtQuery,
    Contract,
    Input,
    Lifetime,
    Map,
    Program,
    Push,
    Select,
    Take,
    Tensor,
    TopK,
)
from attncc.dsl.memo import once_a_program
from attncc.runtime import bind_caches, checks
from attncc.runtime.arguments import Options, arguments, read_options
from attncc.runtime.bind_quantised import check_scales, selecting
from attncc.runtime.bind_seqlens import seqlens
from attncc.runtime.call import Call
from attncc.runtime.outputs import Result, given_outputs, lse_pattern, pick_counts, shape_of, take
from attncc.runtime.partials import without_sinks
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import E4M3, QuantisedTensor

HISTORY = (Lifetime.CACHE, Lifetime.MEMORY)
HELD = (Lifetime.STATE, Lifetime.WINDOW)


def bind(
    decl: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Call, Options]:
    """Check a call and make it complete.

    Args:
        decl: the declaration.
        args: positional arguments, in the signature's order.
        kwargs: keyword arguments and options.

    Returns:
        The call, with outputs allocated, and its options.

    Raises:
        CallError: one subclass for each mistake; nothing has been written.
    """
    rest = dict(kwargs)
    options = read_options(decl.name, rest)
    return _Binder(decl, arguments(decl, args, rest), options).call(), options


class _Binder:
    """Carries the half-checked call from step to step."""

    def __init__(self, decl: Declaration, given: dict[str, Any], options: Options) -> None:
        self.decl = decl
        self.op = decl.name
        self.options = options
        self.pools = {k: v for k, v in given.items() if isinstance(v, StatePool)}
        named = {**given, **{k: v.pool for k, v in self.pools.items()}}
        stored = {k: v for k, v in given.items() if isinstance(v, QuantisedTensor)}
        self.scales = {k: v.scales for k, v in stored.items()}
        named |= {k: v.data for k, v in stored.items()}
        self.tensors = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
        self.scalars = {
            k: v for k, v in named.items() if not isinstance(v, (torch.Tensor, bool))
        }  # a flag decided which program runs
        present = frozenset(given)
        self.program = decl.trace(present)
        self.present = present
        self.patterns = {t.name: self._pattern(t) for t in decl.tensors if not t.scalar}

    def call(self) -> Call:
        """Run the checks in order and build the call."""
        self._layouts()
        sizes = self._sizes()
        self.program = self.decl.trace(self.present, sizes.found)
        if self.options.return_partial:
            self.program = without_sinks(self.program)
        dtype = self._dtypes()
        device = next(iter(self.tensors.values())).device
        cu, cu_k = seqlens(self.op, self.options, sizes.found, histories=bool(self._histories()))
        histories, new_rows, lengths = self._cache(sizes.found, dtype, device)
        tensors = {**self.tensors, **histories}
        if self.pools:
            tokens, batch = self._tokens(sizes.found), sizes.found["B"]
            bind_caches.check_pools(self.op, self.pools, self.patterns, tensors, tokens, batch)
        outputs, finals = self._outputs(sizes.found, dtype, device, tensors)
        lse = lse_axes = None
        if self.options.return_lse or self.options.return_partial:
            lse_axes = lse_pattern(self.program, self.patterns[self.program.outputs[0].name])
            lse = torch.empty(shape_of(lse_axes, sizes.found), dtype=torch.float32, device=device)
        call = Call(
            program=self.program, tensors=tensors, scalars=self.scalars, patterns=self.patterns,
            sizes=sizes.found, dtype=dtype, device=device, outputs=outputs, final_states=finals,
            cu_seqlens=cu, cu_seqlens_k=cu_k, lengths=lengths, new_rows=new_rows,
            block_table=getattr(self.options.cache, "block_table", None), pools=self.pools,
            lse=lse, lse_axes=lse_axes,
        )  # fmt: skip
        cached = {} if self.options.cache is None else self.options.cache.scales
        given = {**self.scales, **cached}
        scales = check_scales(call, given, self.decl.tensors) if given else {}
        return replace(call, scales=scales) if scales else call

    # -- layouts and sizes

    def _pattern(self, t: Tensor) -> Pattern:
        """Memory axes as passed: packed calls have no B beside T or S."""
        rows = {"T", self.program.scan, *self._histories()}
        if self.options.cu_seqlens is not None and rows & set(t.pattern.axes):
            return t.pattern.without("B")
        return t.pattern

    def _histories(self) -> set[str]:
        held = {a for t in self.decl.tensors if t.lifetime in HISTORY for a in t.pattern.axes}
        return held & {"S"}

    def _new_pattern(self, pattern: Pattern) -> Pattern:
        """A history's pattern for this call's own rows: T in place of S."""
        return Pattern(tuple(tuple("T" if a == "S" else a for a in dim) for dim in pattern.dims))

    def _appended(self, name: str) -> bool:
        return self.options.cache is not None and self.decl_tensor(name).lifetime is Lifetime.CACHE

    def decl_tensor(self, name: str) -> Tensor:
        """The signature's tensor of that name."""
        return next(t for t in self.decl.tensors if t.name == name)

    def _layouts(self) -> None:
        if not self.tensors:
            raise ArgumentError("a call needs at least one tensor", op=self.op)
        for name in self.scales:
            if self._appended(name):
                raise ArgumentError(
                    "new rows are quantised as they are appended", op=self.op, argument=name,
                    expected="a tensor of the queries' dtype", found="QuantisedTensor",
                )  # fmt: skip
        if self.options.cu_seqlens is not None:
            for t in self.decl.tensors:
                bind_caches.whole(self.op, t)
        first = next(iter(self.tensors.values()))
        for name, tensor in self.tensors.items():
            checks.rank(self.op, name, tensor, self.patterns[name])
            checks.dense(self.op, name, tensor)
            checks.device(self.op, name, tensor, first.device)
        for name in ("cu_seqlens", "cu_seqlens_k"):
            value = getattr(self.options, name)
            if value is not None:
                checks.device(self.op, name, value, first.device)

    def _sizes(self) -> checks.Sizes:
        sizes = checks.Sizes(self.op, self.options.sizes)
        if self.options.cu_seqlens is not None:
            sizes.found["B"] = self.options.cu_seqlens.numel() - 1
            sizes.by["B"] = "cu_seqlens"
        windows = window_axes(self.program)
        for name, tensor in self.tensors.items():
            pattern = self.patterns[name]
            if self._appended(name):
                pattern = self._new_pattern(pattern)
            shape = list(tensor.shape)
            if name in windows:  # W rows in the body, W - 1 kept
                shape[pattern.dim_of(windows[name])] += 1
            if name in self.pools:
                del shape[pattern.dim_of("B")]
                pattern = self._pool_pattern(name, sizes)
            sizes.add(name, shape, pattern)
        if self.options.cache is not None:
            bind_caches.add_sizes(self.op, self.decl.tensors, self.options.cache, sizes)
        sizes.settle()
        sizes.found |= pick_counts(self.program)
        if self.options.cache is not None:
            bind_caches.capacity(self.options.cache, sizes)
        wanted = [a for n in self.tensors for a in self.patterns[n].axes]
        wanted += [a for o in self.program.outputs for a in o.pattern.axes]
        wanted += [a for n in self.program.state_names for a in self.patterns[n].axes]
        sizes.need(dict.fromkeys(wanted))
        sizes.found.setdefault("B", 1)
        return sizes

    def _pool_pattern(self, name: str, sizes: checks.Sizes) -> Pattern:
        packed, scan = self.options.cu_seqlens is not None, self.program.scan or "T"
        pool, pattern = self.pools[name], self.patterns[name]
        return bind_caches.add_pool(self.op, name, pool, pattern, scan, sizes, packed=packed)

    # -- dtypes

    def _dtypes(self) -> torch.dtype:
        """One dtype for the operands of contractions; gates fp32 or that; states by themselves."""
        operands, labels = contracted(self.program), _labels(self.program)
        plain = {n for n in selecting(self.program) if self.tensors[n].dtype == E4M3}
        lead = next(
            (
                n
                for n in self.tensors
                if n in operands
                and n not in self.scales
                and n not in plain
                and self.decl_tensor(n).lifetime not in HELD
            ),
            next(iter(self.tensors)),
        )
        main = self.tensors[lead].dtype
        checks.dtype(self.op, lead, self.tensors[lead], checks.REAL)
        for name, tensor in self.tensors.items():
            t = self.decl_tensor(name)
            if name in self.scales or name in plain:
                continue
            if t.lifetime in HELD:
                checks.dtype(self.op, name, tensor, checks.REAL)
            elif name in operands:
                checks.dtype(self.op, name, tensor, (main,), f"dtype differs from that of {lead}")
            elif t.lifetime is Lifetime.PARAMETER:
                whole = checks.WHOLE if name in labels else ()
                checks.dtype(self.op, name, tensor, (*checks.REAL, *whole))
            else:
                whole = checks.WHOLE if name in labels else ()
                checks.dtype(self.op, name, tensor, (torch.float32, main, *whole))
        return main

    # -- packed sequences and caches

    def _tokens(self, sizes: dict[str, int]) -> torch.Tensor | int:
        """Tokens that each sequence brings: one number, or one a sequence."""
        cu = self.options.cu_seqlens
        return sizes.get("T", 0) if cu is None else cu[1:] - cu[:-1]

    def _cache(
        self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor | None]:
        cache = self.options.cache
        if cache is None:
            return {}, {}, None
        bind_caches.no_gradients(self.op, self.tensors.values())
        held = bind_caches.histories(self.op, self.decl.tensors)
        dtypes = {
            t.name: (E4M3,) if t.name in cache.scales else (dtype, self.tensors[t.name].dtype)
            for t in held
        }
        bind_caches.check_cache(self.op, cache, sizes, dtypes, device, self._tokens(sizes))
        self.patterns |= {t.name: cache.pattern(self.op, t) for t in held}
        new = {name: self.tensors[name] for name in dtypes}
        return {name: cache.tensors[name] for name in dtypes}, new, cache.lengths

    # -- outputs

    def _results(self, sizes: dict[str, int], dtype: torch.dtype) -> Iterator[tuple[Result, bool]]:
        windows = window_axes(self.program)
        for name in self.program.state_names:
            if name in self.pools:
                continue
            full = dict(sizes)
            if name in windows:
                full[windows[name]] -= 1
            stored = self.tensors[name].dtype if name in self.tensors else torch.float32
            pattern = self.patterns[name]
            yield Result(name, pattern, shape_of(pattern, full), stored), True
        packed = self.options.cu_seqlens is not None
        for o in self.program.outputs:
            pattern = o.pattern.without("B") if packed and "T" in o.pattern.axes else o.pattern
            wide = torch.float32 if self.options.return_partial else dtype  # never rounded between
            stored = torch.int32 if isinstance(o.value, TopK) else wide
            yield Result(o.name, pattern, shape_of(pattern, sizes), stored), False

    def _outputs(
        self,
        sizes: dict[str, int],
        dtype: torch.dtype,
        device: torch.device,
        inputs: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        given = given_outputs(self.program, self.options.out)
        outputs: dict[str, torch.Tensor] = {}
        finals: dict[str, torch.Tensor] = {}
        for result, held in self._results(sizes, dtype):
            self.patterns[result.name] = result.pattern
            others = {f"out[{n}]": t for n, t in {**outputs, **finals}.items()}
            tensor = take(self.op, result, given.get(result.name), device, {**inputs, **others})
            (finals if held else outputs)[result.name] = tensor
        return outputs, finals


@once_a_program
def contracted(program: Program) -> frozenset[str]:
    """Names of the inputs that a contraction takes as they are stored."""
    found = set()
    for node in walk(*program.roots):
        if isinstance(node, Contract):
            found |= {a.name for a in node.args if isinstance(a, Input)}
    return frozenset(found)


@once_a_program
def window_axes(program: Program) -> Mapping[str, str]:
    """The axis along which each window is pushed."""
    found = {}
    for node in walk(*program.roots):
        if isinstance(node, Push) and isinstance(node.window, Input):
            found[node.window.name] = node.over
    return found


@once_a_program
def _labels(program: Program) -> frozenset[str]:
    """Names of the inputs that are only compared or looked up with: they may hold whole numbers."""
    labels: set[str] = set()
    numbers: set[str] = set()
    for node in walk(*program.roots):
        compares = isinstance(node, Map) and node.fn in COMPARISONS
        for child in children(node):
            while isinstance(child, (AtQuery, Select)):
                child = child.arg
            if isinstance(child, Input) and not isinstance(node, (AtQuery, Select)):
                picks = isinstance(node, Take) and child is node.index
                (labels if compares or picks else numbers).add(child.name)
    return frozenset(labels - numbers)
