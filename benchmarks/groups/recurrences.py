"""What the groups of the library's recurrences share: one long prompt, from a zero state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import oracles
from benchmarks.case import Case, Inputs, Part, Work, generator, nan_like

BF16 = torch.bfloat16
T, H, K, V, CHUNK = 32768, 16, 128, 128, 64


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One op and its peers.

    Attributes:
        group: the group's name.
        op: the library's name of it.
        gate: axes of the decay beside ``[1, T, H]``: none, one a head (1) or one a key element.
        rate: whether it corrects, at rates ``[1, T, H]`` in bf16.
        peers: by name.
        patterns: layouts other than the op's own.
    """

    group: str
    op: str
    peers: Mapping[str, Callable[[Inputs], Work]]
    gate: int = 0
    rate: bool = False
    patterns: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Arguments of our op, in order."""
        return ("q", "k", "v", *["g"] * bool(self.gate), *["beta"] * self.rate)

    def case(self, tokens: int = T, heads: int = H, k: int = K, v: int = V) -> Case:
        """One sequence of ``tokens``."""
        chunked = 4 * k * CHUNK + 2 * v * CHUNK + 4 * k * v
        solved = (2 * v * CHUNK + 2 * CHUNK**2 / 3 + 2 * k * v) * self.rate
        return Case(
            group=self.group,
            name=f"T{tokens} H{heads} K{k} V{v}",
            build=partial(self._inputs, (tokens, heads, k, v)),
            ours=self._ours,
            peers=self.peers,
            parts=parts,
            bytes=tokens * heads * ((2 * k + 2 * v) * 2 + 4 * self.gate),
            flops=tokens * heads * (chunked + solved),
        )

    def _inputs(self, sizes: tuple[int, int, int, int], device: torch.device) -> Inputs:
        tokens, heads, width, values = sizes
        rng = generator(device)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(1, tokens, heads, *shape, generator=rng, device=device)

        x: Inputs = {n: F.normalize(draw(width), dim=-1).to(BF16) for n in ("q", "k")}
        x["v"] = draw(values).to(BF16)
        if self.gate:
            g = F.logsigmoid(draw(self.gate if self.gate == 1 else width) + 3)
            x["g"] = g[..., 0] if self.gate == 1 else g
        if self.rate:
            x["beta"] = draw().sigmoid().to(BF16)
        return x

    def _ours(self, inputs: Inputs, backend: str) -> Work:
        from attncc import ops

        x, op = inputs, getattr(ops, self.op)
        if self.patterns:
            op = op.with_patterns(**self.patterns)
        heads, device = x["q"].shape[2], x["q"].device
        state = (1, heads, x["k"].shape[3], x["v"].shape[3])
        out = {
            "s": nan_like(*state, dtype=torch.float32, device=device),
            "o": nan_like(*x["v"].shape, dtype=BF16, device=device),
        }

        def fn() -> dict[str, torch.Tensor]:
            op.prefill(*(x[n] for n in self.names), out=out, backend=backend)
            return out

        return Work(fn, out)


def parts(inputs: Inputs) -> Iterator[Part]:
    """All of o and s, token by token; the eps of both is the call's dtype's (as in ``recur``)."""
    x = {n: inputs[n] for n in ("q", "k", "v", "g", "beta") if n in inputs}
    s, o = oracles.recurrence(**x)
    es, eo = oracles.recurrence(**x, dtype=torch.float32)
    yield Part("o", (slice(None),), o, eo.to(BF16), BF16)
    yield Part("s", (slice(None),), s, es.to(BF16), BF16)
