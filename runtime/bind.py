"""From the arguments of a call to a checked :class:`Call`: names, axes, sizes, dtypes, outputs.

Everything that can be wrong with a call is found here, before anything is launched or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attncc.dsl.axes import Pattern
from attncc.dsl.build import RESERVED, Declaration
from attncc.dsl.errors import ArgumentError, CacheError, SizeError
from attncc.dsl.graph import walk
from attncc.dsl.ir import Contract, Input, Kind, Lifetime, Program, Push, Tensor
from attncc.runtime import checks
from attncc.runtime.caches import DenseCache
from attncc.runtime.call import Call

HISTORY = (Lifetime.CACHE, Lifetime.MEMORY)
HELD = (Lifetime.STATE, Lifetime.WINDOW)


@dataclass(frozen=True, slots=True)
class Options:
    """The options that every call takes, read from its keywords."""

    cache: DenseCache | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    out: Any = None
    return_lse: bool = False
    backend: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


KNOWN = tuple(Options.__dataclass_fields__)


def read_options(op: str, kwargs: dict[str, Any]) -> Options:
    """Take the options out of a call's keywords.

    Raises:
        ArgumentError: an option of the reserved list that this version does not offer.
    """
    taken = {k: kwargs.pop(k) for k in KNOWN if k in kwargs}
    for name in RESERVED & set(kwargs):
        raise ArgumentError(
            "the option is not offered", op=op, argument=name, expected=" ".join(KNOWN)
        )
    if taken.get("cache") is not None and not isinstance(taken["cache"], DenseCache):
        raise ArgumentError(
            "not a cache", op=op, argument="cache", expected="DenseCache", found=type(taken["cache"])
        )
    return Options(**taken)


def arguments(decl: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Match positional and keyword arguments with the signature; absent optional ones are left out.

    Raises:
        ArgumentError: too many, unknown, doubly given or missing arguments, or of the wrong Python type.
    """
    names = [t.name for t in decl.tensors]
    if len(args) > len(names):
        raise ArgumentError(
            "too many arguments", op=decl.name, expected=f"at most {len(names)}", found=len(args)
        )
    found = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise ArgumentError(
                "unknown argument", op=decl.name, argument=name, expected=", ".join(names)
            )
        if name in found:
            raise ArgumentError("given twice", op=decl.name, argument=name)
        found[name] = value
    found = {k: v for k, v in found.items() if v is not None}
    for t in decl.tensors:
        if t.name not in found and not t.optional:
            raise ArgumentError(
                "missing argument", op=decl.name, argument=t.name, expected=f"[{t.pattern}]", loc=t.loc
            )
        if t.name in found:
            _python_type(decl.name, t, found[t.name])
    return found


def _python_type(op: str, t: Tensor, value: Any) -> None:
    if t.scalar:
        whole = t.kind is Kind.INT
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ArgumentError(
                "a host number is wanted",
                op=op,
                argument=t.name,
                expected="int" if whole else "float",
                found=type(value).__name__,
            )
    elif not isinstance(value, torch.Tensor):
        raise ArgumentError(
            "a tensor is wanted",
            op=op,
            argument=t.name,
            expected=f"a tensor [{t.pattern}]",
            found=type(value).__name__,
        )


def bind(decl: Declaration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Options]:
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
        self.tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        self.scalars = {k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}
        present = frozenset(given)
        self.program = decl.trace(present)
        self.present = present
        self.patterns = {t.name: self._pattern(t) for t in decl.tensors if not t.scalar}

    def call(self) -> Call:
        """Run the checks in order and build the call."""
        self._layouts()
        sizes = self._sizes()
        self.program = self.decl.trace(self.present, sizes.found)
        dtype = self._dtypes()
        device = next(iter(self.tensors.values())).device
        cu, cu_k = self._seqlens(sizes.found)
        histories, new_rows, lengths = self._cache(sizes.found, dtype, device)
        tensors = {**self.tensors, **histories}
        outputs, finals = self._outputs(sizes.found, dtype, device, tensors)
        lse, lse_axes = self._lse(sizes.found, device)
        return Call(
            program=self.program, tensors=tensors, scalars=self.scalars, patterns=self.patterns,
            sizes=sizes.found, dtype=dtype, device=device, outputs=outputs, final_states=finals,
            cu_seqlens=cu, cu_seqlens_k=cu_k, lengths=lengths, new_rows=new_rows,
            lse=lse, lse_axes=lse_axes,
        )  # fmt: skip

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
        windows = self._window_axes()
        for name, tensor in self.tensors.items():
            pattern = self.patterns[name]
            if self._appended(name):
                pattern = self._new_pattern(pattern)
            shape = list(tensor.shape)
            if name in windows:  # W rows in the body, W - 1 kept
                shape[pattern.dim_of(windows[name])] += 1
            sizes.add(name, shape, pattern)
        if self.options.cache is not None:
            self._cache_sizes(self.options.cache, sizes)
        sizes.settle()
        wanted = [a for n in self.tensors for a in self.patterns[n].axes]
        wanted += [a for o in self.program.outputs for a in o.pattern.axes]
        wanted += [a for n in self.program.state_names for a in self.patterns[n].axes]
        sizes.need(dict.fromkeys(wanted))
        sizes.found.setdefault("B", 1)
        return sizes

    def _cache_sizes(self, cache: DenseCache, sizes: checks.Sizes) -> None:
        for t in self.decl.tensors:
            if t.lifetime is not Lifetime.CACHE:
                continue
            if t.name not in cache.tensors:
                raise CacheError("the cache lacks a history", op=self.op, argument=t.name)
            held = cache.tensors[t.name]
            checks.rank(self.op, f"cache.{t.name}", held, t.pattern)
            checks.dense(self.op, f"cache.{t.name}", held)
            sizes.add(f"cache.{t.name}", held.shape, t.pattern)

    def _window_axes(self) -> dict[str, str]:
        found = {}
        for node in walk(*self.program.roots):
            if isinstance(node, Push) and isinstance(node.window, Input):
                found[node.window.name] = node.over
        return found

    # -- dtypes

    def _dtypes(self) -> torch.dtype:
        """One dtype for the operands of contractions; gates fp32 or that; states by themselves."""
        operands = _operands(self.program)
        lead = next(
            (n for n in self.tensors if n in operands and self.decl_tensor(n).lifetime not in HELD),
            next(iter(self.tensors)),
        )
        main = self.tensors[lead].dtype
        checks.dtype(self.op, lead, self.tensors[lead], checks.REAL)
        for name, tensor in self.tensors.items():
            t = self.decl_tensor(name)
            if t.lifetime in HELD:
                checks.dtype(self.op, name, tensor, checks.REAL)
            elif name in operands:
                checks.dtype(self.op, name, tensor, (main,), f"dtype differs from that of {lead}")
            elif t.lifetime is Lifetime.PARAMETER:
                checks.dtype(self.op, name, tensor, (*checks.REAL, *checks.WHOLE))
            else:
                checks.dtype(self.op, name, tensor, (torch.float32, main, *checks.WHOLE))
        return main

    # -- packed sequences and caches

    def _seqlens(self, sizes: dict[str, int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        o = self.options
        if o.cu_seqlens is None:
            if o.cu_seqlens_k is not None:
                raise ArgumentError("cu_seqlens_k without cu_seqlens", op=self.op, argument="cu_seqlens_k")
            return None, None
        cu = checks.seqlens(self.op, "cu_seqlens", o.cu_seqlens, sizes.get("T", 0))
        if not self._histories() or o.cache is not None:
            return cu, None
        if o.cu_seqlens_k is None:
            if sizes["S"] != sizes["T"]:
                raise SizeError(
                    "packed histories longer than the tokens need cu_seqlens_k",
                    op=self.op, axis="S", expected=sizes["T"], found=sizes["S"],
                )  # fmt: skip
            return cu, cu
        cu_k = checks.seqlens(self.op, "cu_seqlens_k", o.cu_seqlens_k, sizes["S"])
        if cu_k.numel() != cu.numel():
            raise SizeError(
                "cu_seqlens_k counts other sequences",
                op=self.op, argument="cu_seqlens_k", expected=cu.numel(), found=cu_k.numel(),
            )  # fmt: skip
        return cu, cu_k

    def _cache(
        self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor | None]:
        cache = self.options.cache
        if cache is None:
            return {}, {}, None
        names = [t.name for t in self.decl.tensors if t.lifetime is Lifetime.CACHE]
        if not names:
            raise CacheError("the op has no Cache argument", op=self.op, argument="cache")
        for name in names:
            held = cache.tensors[name]
            checks.device(self.op, f"cache.{name}", held, device)
            checks.dtype(self.op, f"cache.{name}", held, (dtype, self.tensors[name].dtype))
            self.patterns[name] = self.decl_tensor(name).pattern
        checks.device(self.op, "cache.lengths", cache.lengths, device)
        if cache.lengths.dtype != torch.int32 or cache.lengths.shape != (sizes["B"],):
            raise CacheError(
                "lengths must be one int32 a sequence",
                op=self.op, argument="cache.lengths", expected=f"int32 [{sizes['B']}]",
                found=f"{cache.lengths.dtype} {tuple(cache.lengths.shape)}",
            )  # fmt: skip
        cu = self.options.cu_seqlens
        cache.check_room(self.op, sizes["T"] if cu is None else cu[1:] - cu[:-1], sizes["S"])
        new = {name: self.tensors[name] for name in names}
        return {name: cache.tensors[name] for name in names}, new, cache.lengths

    # -- outputs

    def _wanted(self) -> list[tuple[str, Pattern, bool]]:
        states = [(n, self.patterns[n], True) for n in self.program.state_names]
        rows = {"T"} if self.options.cu_seqlens is not None else set()
        outs = [
            (o.name, o.pattern.without("B") if rows & set(o.pattern.axes) else o.pattern, False)
            for o in self.program.outputs
        ]
        return states + outs

    def _outputs(
        self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device,
        inputs: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
        given = self._given_outputs()
        outputs: dict[str, torch.Tensor] = {}
        finals: dict[str, torch.Tensor] = {}
        windows = self._window_axes()
        for name, pattern, held in self._wanted():
            self.patterns[name] = pattern
            full = dict(sizes)
            if name in windows:
                full[windows[name]] -= 1
            shape = [_extent(dim, full) for dim in pattern.dims]
            want = dtype
            if held:
                want = self.tensors[name].dtype if name in self.tensors else torch.float32
            label = f"out[{name}]"
            tensor = given.pop(name, None)
            if tensor is None:
                tensor = torch.empty(shape, dtype=want, device=device)
            else:
                self._check_output(label, tensor, pattern, shape, want, device)
                others = {**inputs, **{f"out[{n}]": t for n, t in {**outputs, **finals}.items()}}
                checks.overlap(self.op, label, tensor, others)
            (finals if held else outputs)[name] = tensor
        if given:
            raise ArgumentError(
                "out= names something the op does not return",
                op=self.op, argument=f"out[{next(iter(given))}]",
                expected=", ".join(n for n, _, _ in self._wanted()),
            )  # fmt: skip
        return outputs, finals

    def _given_outputs(self) -> dict[str, torch.Tensor]:
        out = self.options.out
        if out is None:
            return {}
        if isinstance(out, torch.Tensor):
            return {self.program.outputs[0].name: out}
        if not isinstance(out, Mapping):
            raise ArgumentError(
                "out= is a tensor or a mapping by name", op=self.op, argument="out", found=type(out)
            )
        return dict(out)

    def _check_output(
        self, label: str, tensor: torch.Tensor, pattern: Pattern, shape: list[int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        checks.rank(self.op, label, tensor, pattern)
        checks.dense(self.op, label, tensor)
        checks.device(self.op, label, tensor, device)
        checks.dtype(self.op, label, tensor, (dtype,))
        for dim, want, have in zip(pattern.dims, shape, tensor.shape, strict=True):
            if want != have:
                raise SizeError(
                    "the output has another size",
                    op=self.op, argument=label, axis=" ".join(dim), expected=want, found=have,
                )  # fmt: skip

    def _lse(
        self, sizes: dict[str, int], device: torch.device
    ) -> tuple[torch.Tensor | None, Pattern | None]:
        if not self.options.return_lse:
            return None, None
        from attncc.codegen.pipeline import analyse

        form = analyse(self.program).softmax
        if form is None or len(form.folds) != 1 or len(self.program.outputs) != 1:
            raise ArgumentError(
                "lse is offered for ops with one softmax and one output", op=self.op, argument="return_lse"
            )
        fold = form.folds[0]
        kept = set(fold.batch_axes) | set(fold.row_axes)
        layout = self.patterns[self.program.outputs[0].name]
        dims = tuple(tuple(a for a in dim if a in kept) for dim in layout.dims)
        pattern = Pattern(tuple(d for d in dims if d))
        shape = [_extent(dim, sizes) for dim in pattern.dims]
        return torch.empty(shape, dtype=torch.float32, device=device), pattern


def _extent(dim: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    n = 1
    for axis in dim:
        n *= sizes[axis]
    return n


def _operands(program: Program) -> set[str]:
    """Names of the inputs that a contraction takes as they are stored."""
    found = set()
    for node in walk(*program.roots):
        if isinstance(node, Contract):
            found |= {a.name for a in node.args if isinstance(a, Input)}
    return found
