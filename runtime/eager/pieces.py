"""A call as dense problems: sequences of one length are taken together.

A dense call without a cache is one piece, without any copy. Packed sequences and histories of
different lengths are grouped by their lengths, so that each piece has plain sizes and no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attncc.dsl.axes import Pattern, history_dim
from attncc.dsl.errors import RefusedError
from attncc.dsl.facts import query_offset
from attncc.dsl.interp import Env, Named, unpack
from attncc.dsl.ir import Index, Kind, Lifetime
from attncc.runtime.bind import window_axes
from attncc.runtime.call import Call
from attncc.runtime.eager.append import append, starts
from attncc.runtime.eager.named import narrow, upcast, view


def compute_dtype(call: Call) -> torch.dtype:
    """What a call computes and accumulates in: fp32, or fp64 where its inputs are."""
    return torch.float64 if call.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Span:
    """Where one sequence lies: rows of T and of S."""

    t: int
    tokens: int
    s: int
    history: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some sequences of a call as one dense problem.

    Attributes:
        call: the call.
        members: the sequences and where they lie; None for all of a dense call.
        sizes: every axis; B counts the members.
        inputs: the piece of each given tensor, in its stored dtype.
        offset: absolute position of the first token.
    """

    call: Call
    members: tuple[tuple[int, Span], ...] | None
    sizes: dict[str, int]
    inputs: dict[str, Named]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return compute_dtype(self.call)

    def env(self) -> Env:
        """Everything of the piece, in the compute dtype."""
        inputs = {name: upcast(value, self.dtype) for name, value in self.inputs.items()}
        return Env(self.sizes, inputs, self.dtype, self.call.device, query_offset=self.offset)

    def tokens_env(self, axis: str, start: int, count: int) -> Env:
        """A range of a scan's tokens, vectorised: T is one more axis of every value."""
        cut = {n: upcast(narrow(v, axis, start, count), self.dtype) for n, v in self.inputs.items()}
        env = Env({**self.sizes, axis: count}, cut, self.dtype, self.call.device)
        at = torch.arange(start, start + count, device=self.call.device)
        env.memo[Index(axis, scalar=True)] = Named(at, (axis,))
        return env

    def held(self, name: str) -> Named:
        """A state or window as the piece starts, in the compute dtype; zeros if none was given."""
        if name in self.inputs:
            return upcast(self.inputs[name], self.dtype)
        axes = self.call.patterns[name].axes
        window = window_axes(self.call.program).get(name)
        shape = [self.sizes[a] - (a == window) for a in axes]
        return Named(torch.zeros(shape, dtype=self.dtype, device=self.call.device), axes)

    def store(self, target: torch.Tensor, pattern: Pattern, value: Named, start: int = 0) -> None:
        """Write a value into a tensor of the call, rounded to its dtype.

        Args:
            target: an output, a final state or the lse.
            pattern: its memory axes.
            value: the piece's value; axes it lacks are repeated.
            start: the piece's token that the value's T begins with.
        """
        sizes = dict(zip(value.axes, value.data.shape, strict=True))
        whole = view(target, pattern, {**self.call.sizes, **_windows(self.call, sizes)})
        axis = self.call.program.scan or "T"
        count = sizes.get(axis, self.sizes.get(axis, 0) - start)
        if self.members is None:
            _write(narrow(whole, axis, start, count), value)
            return
        for i, (b, span) in enumerate(self.members):
            first = span.t if self.call.packed else 0
            own = narrow(whole.select("B", b), axis, first + start, count)
            _write(own, value.select("B", i))


def _windows(call: Call, sizes: dict[str, int]) -> dict[str, int]:
    """Window axes as a value has them: a kept window is one row shorter than the body's."""
    return {a: sizes[a] for a in window_axes(call.program).values() if a in sizes}


def _write(target: Named, value: Named) -> None:
    target.data.copy_(value.aligned(target.axes).expand(target.data.shape))


def pieces(call: Call) -> Iterator[Piece]:
    """The dense problems of a call; its caches receive their new rows first.

    Raises:
        CacheError: a cache has no room; nothing is written.
        RefusedError: a cache in blocks, with lengths.
    """
    append(call)
    named = _inputs(call)
    if not call.packed and call.lengths is None:
        sizes = dict(call.sizes)
        yield Piece(call, None, sizes, named, query_offset(call.program, sizes))
        return
    groups: dict[tuple[int, int], list[tuple[int, Span]]] = {}
    for b, span in enumerate(_spans(call)):
        groups.setdefault((span.tokens, span.history), []).append((b, span))
    for (tokens, history), members in groups.items():
        sizes = {**call.sizes, "B": len(members), "T": tokens}
        if "S" in sizes:
            sizes["S"] = history
        cut = {name: _gather(call, name, value, members) for name, value in named.items()}
        yield Piece(call, tuple(members), sizes, cut, query_offset(call.program, sizes))


def _inputs(call: Call) -> dict[str, Named]:
    named = {}
    windows = window_axes(call.program)
    for name, tensor in call.tensors.items():
        sizes = dict(call.sizes)
        if name in windows:
            sizes[windows[name]] -= 1
        named[name] = unpack(tensor, call.patterns[name], sizes)
    for name, value in call.scalars.items():
        whole = call.program.tensor(name).kind is Kind.INT
        dtype = torch.int64 if whole else compute_dtype(call)
        named[name] = Named(torch.tensor(value, dtype=dtype, device=call.device), ())
    return named


def _spans(call: Call) -> list[Span]:
    """Where each sequence lies, read by the host."""
    tokens = starts(call)
    if call.lengths is not None:
        for t in call.program.tensors:
            if t.lifetime is Lifetime.CACHE and history_dim(t.pattern) != ("S",):
                raise RefusedError(
                    "the torch lowering has no caches in blocks",
                    op=call.program.name, argument=t.name, expected="S", found=str(t.pattern),
                )  # fmt: skip
        lengths = call.lengths.tolist()
        return [Span(t, n, 0, held + n) for (t, n), held in zip(tokens, lengths, strict=True)]
    if call.cu_seqlens_k is None:
        return [Span(t, n, t, n) for t, n in tokens]
    keys = starts(replace(call, cu_seqlens=call.cu_seqlens_k))
    return [Span(t, n, s, m) for (t, n), (s, m) in zip(tokens, keys, strict=True)]


def _gather(call: Call, name: str, value: Named, members: list[tuple[int, Span]]) -> Named:
    """The members' parts of a tensor, side by side along B."""
    if not {"B", "T", "S"} & set(value.axes) or not (call.packed or "B" in value.axes):
        return value
    parts = [_part(call, name, value, b, span) for b, span in members]
    if len(parts) == 1:
        return Named(parts[0].data.unsqueeze(0), ("B", *parts[0].axes))
    return Named(torch.stack([p.data for p in parts]), ("B", *parts[0].axes))


def _part(call: Call, name: str, value: Named, b: int, span: Span) -> Named:
    rows = call.packed and "B" not in value.axes
    part = value.select("B", b)
    if rows:
        part = narrow(part, "T", span.t, span.tokens)
    if rows or call.program.tensor(name).lifetime is Lifetime.CACHE:
        part = narrow(part, "S", span.s if rows else 0, span.history)
    return part
