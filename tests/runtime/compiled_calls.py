"""Calls of many structures, each drawn anew for a number of tokens: what custom ops must carry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import attncc as ac
from attncc.runtime import torch_ops, torch_schema
from attncc.runtime.arguments import arguments, read_options
from attncc.runtime.caches import Cache
from attncc.runtime.quantised import Quantised, QuantisedTensor
from attncc.runtime.torch_schema import CacheKind, Structure
from tests.runtime import eager_ops, state_ops

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
SIZES = {"Hkv": 2, "D": 16, "E": 16}


@dataclass(frozen=True)
class Drawn:
    """One call: an op, a phase, arguments by position and by name."""

    op: ac.Op
    phase: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        """The call as a user writes it."""
        return getattr(self.op, self.phase)(*self.args, **self.kwargs)


def overload_of(call: Drawn) -> tuple[Any, tuple[Any, ...]]:
    """The custom op of a call, and its flat arguments."""
    decl, rest, args = call.op.declaration, dict(call.kwargs), list(call.args)
    if isinstance(args[-1], Cache):
        rest["cache"] = args.pop()
    options = read_options(decl.name, rest)
    given = arguments(decl, tuple(args), rest)
    (phase, cache, *fields), flat = torch_schema.flatten(decl, call.phase, given, options)
    structure = Structure(phase, CacheKind(cache), *fields)
    return torch_ops.define(call.op, structure).overload, tuple(flat)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor of an argument or a result, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for name in sorted(value) for t in tensors_in(value[name])]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [t for part in value for t in tensors_in(part)]
    names = getattr(value, "__dataclass_fields__", ())
    return [t for name in names for t in tensors_in(getattr(value, name))]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qkv(batch: int, tokens: int, past: int = 0) -> list[torch.Tensor]:
    shapes = [(tokens, 4), (past + tokens, 2), (past + tokens, 2)]
    return [torch.randn(batch, rows, heads, 16) for rows, heads in shapes]


def delta(batch: int, tokens: int) -> list[torch.Tensor]:
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(batch, tokens, 2, 16), dim=-1) for _ in range(2))
    v, g = torch.randn(batch, tokens, 4, 8), -torch.rand(batch, tokens, 4)
    return [q, k, v, g, torch.rand(batch, tokens, 4)]


def dense(batch: int, tokens: int, dtype: Any = torch.float32, op: ac.Op = ATTENTION) -> Any:
    sizes = {**SIZES, "B": batch}
    cache = ac.DenseCache.allocate(op, sizes=sizes, capacity=40 + tokens, dtype=dtype)
    cache.lengths.copy_(torch.arange(batch))
    return cache


def paged(batch: int, tokens: int, dtype: Any = torch.float32, **options: Any) -> Any:
    """Its number of pages grows with the tokens, and so does the table's width."""
    cache = ac.PagedCache.allocate(
        ATTENTION, sizes={**SIZES, "B": batch}, capacity=32 + 16 * tokens, page=16,
        dtype=dtype, **options,
    )  # fmt: skip
    cache.lengths.copy_(torch.arange(batch) + 5)
    return cache


def interleaved(tokens: int) -> Any:
    """Keys and values as views of one allocation."""
    both = torch.zeros(tokens + 2, 2, 16, 2, 16)
    table = torch.arange(tokens + 2, dtype=torch.int32)[None]
    return ac.PagedCache({"k": both[:, 0], "v": both[:, 1]}, table, ints(3))


def one_sequence(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t[0] for t in tensors]


def seqlens(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def pool(tokens: int, *slots: int, out: torch.Tensor | None = None) -> Any:
    return ac.StatePool(torch.randn(8 + tokens, 4, 16, 8), ints(*slots), out)


def each_token(tokens: int) -> Any:
    return pool(tokens, 2, out=torch.arange(3, 3 + tokens, dtype=torch.int32)[None])


def quantised(x: torch.Tensor) -> Any:
    return QuantisedTensor.of(x, ATTENTION.declaration.tensors[1].pattern, Quantised())


@ac.op(scan="T", out="B T H V")
def two_writes(
    k=ac.Activation("B (T N) H K"), v=ac.Activation("B (T N) H V"), s=ac.State("B H K V")
):
    """Nothing but ``sizes=`` tells T and N apart."""
    for kj, vj in ac.unroll("N", k, v):
        s = s + kj * vj
    return s, ac.dot(s, kj, "K")


def _whole(n: int) -> Drawn:
    q, k, v = qkv(2, n, past=3)
    return Drawn(ATTENTION, "prefill", (q, quantised(k), quantised(v)))


def _speculative(n: int) -> Drawn:
    return Drawn(GDR, "decode", tuple(delta(1, n)), {"s": each_token(n)})


CALLS: dict[str, Callable[[int], Drawn]] = {
    "attention": lambda n: Drawn(ATTENTION, "prefill", tuple(qkv(2, n))),
    "attention lse": lambda n: Drawn(
        ATTENTION, "decode", tuple(qkv(2, n, 4)), {"return_lse": True}
    ),
    "attention partial": lambda n: Drawn(
        ATTENTION, "prefill", tuple(qkv(2, n, 4)), {"return_partial": True}
    ),
    "attention packed": lambda n: Drawn(
        ATTENTION, "prefill", tuple(one_sequence(qkv(1, n))), {"cu_seqlens": seqlens(1, n - 1)}
    ),
    "attention out": lambda n: Drawn(
        ATTENTION, "prefill", tuple(qkv(2, n)), {"out": torch.empty(2, n, 4, 16)}
    ),
    "attention dense": lambda n: Drawn(ATTENTION, "decode", (*qkv(2, n), dense(2, n))),
    "attention paged": lambda n: Drawn(ATTENTION, "decode", (*qkv(2, n), paged(2, n))),
    "attention pages": lambda n: Drawn(
        ATTENTION, "prefill", tuple(qkv(2, n)),
        {"cache": paged(2, n, layouts={"k": "pages Hkv page D"}), "return_lse": True},
    ),
    "attention interleaved": lambda n: Drawn(ATTENTION, "decode", (*qkv(1, n), interleaved(n))),
    "attention paged packed": lambda n: Drawn(
        ATTENTION, "prefill", tuple(one_sequence(qkv(1, n))),
        {"cu_seqlens": seqlens(1, n - 1), "cache": paged(2, n), "out": torch.empty(n, 4, 16)},
    ),
    "attention scaled": lambda n: Drawn(
        ATTENTION, "decode", (*qkv(2, n), dense(2, n, Quantised()))
    ),
    "attention scaled pages": lambda n: Drawn(
        ATTENTION, "decode",
        (*qkv(2, n), paged(2, n, {"k": Quantised(), "v": torch.float32})),
    ),
    "attention quantised": _whole,
    "sink window": lambda n: Drawn(
        eager_ops.sink_window, "prefill", (*qkv(2, n), torch.randn(4), 3)
    ),
    "soft cap": lambda n: Drawn(
        eager_ops.soft_cap, "decode", (*qkv(2, n), 2.0, dense(2, n, op=eager_ops.soft_cap))
    ),
    "cross": lambda n: Drawn(
        eager_ops.cross, "prefill", tuple(torch.randn(3, 2, n, 2, 16))
    ),
    "delta": lambda n: Drawn(GDR, "prefill", tuple(delta(2, n))),
    "delta state": lambda n: Drawn(
        GDR, "decode", tuple(delta(2, n)), {"s": torch.randn(2, 4, 16, 8).bfloat16()}
    ),
    "delta absent": lambda n: Drawn(GDR, "prefill", tuple(delta(2, n)[:3])),
    "delta packed": lambda n: Drawn(
        GDR, "prefill", tuple(one_sequence(delta(1, n))), {"cu_seqlens": seqlens(1, n - 1)}
    ),
    "delta pool": lambda n: Drawn(GDR, "decode", tuple(delta(3, n)), {"s": pool(n, 2, 5, 1)}),
    "delta pool packed": lambda n: Drawn(
        GDR, "prefill", tuple(one_sequence(delta(1, n))),
        {"cu_seqlens": seqlens(1, n - 1), "s": pool(n, 2, 5, out=ints(2, 6))},
    ),
    "delta each token": _speculative,
    "delta out": lambda n: Drawn(
        GDR, "prefill", tuple(delta(2, n)), {"out": {"o": torch.empty(2, n, 4, 8)}}
    ),
    "delta all out": lambda n: Drawn(
        GDR, "prefill", tuple(delta(2, n)),
        {"out": {"o": torch.empty(2, n, 4, 8), "s": torch.empty(2, 4, 16, 8)}},
    ),
    "window": lambda n: Drawn(
        state_ops.short_convolution, "prefill",
        (torch.randn(2, n, 6), torch.randn(6, 4), None, torch.randn(2, 6, 3)),
    ),
    "two windows": lambda n: Drawn(
        state_ops.stacked, "prefill", (torch.randn(2, n, 6), torch.randn(4, 6), torch.randn(3, 6))
    ),
    "two states": lambda n: Drawn(
        state_ops.normalised, "prefill", tuple(torch.randn(3, 2, n, 3, 4))
    ),
    "two pools": lambda n: Drawn(
        state_ops.normalised, "decode", tuple(torch.randn(3, 1, n, 3, 4)),
        {
            "s": ac.StatePool(torch.randn(n + 2, 3, 4, 4), ints(1)),
            "z": ac.StatePool(torch.randn(n + 2, 3, 4), ints(0)),
        },
    ),
    "unrolled": lambda n: Drawn(
        eager_ops.delta_product, "prefill",
        (torch.randn(1, n, 2, 4), *0.2 * torch.randn(2, 1, 2 * n, 2, 4)),
    ),
    "sizes": lambda n: Drawn(
        two_writes, "prefill", tuple(torch.randn(2, 1, 3 * n, 1, 4)), {"sizes": {"N": 3}}
    ),
    "named": lambda n: Drawn(
        ATTENTION, "prefill", tuple(qkv(2, n)), {"backend": "torch"}
    ),
}  # fmt: skip
"""By name, a call with that number of tokens (two at least)."""
