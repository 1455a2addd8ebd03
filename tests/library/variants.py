"""The library's attention variants: arguments, and each one's formula a query at a time in fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.strategies import randn

Tensors = dict[str, Any]
ALL = torch.ones((), dtype=torch.bool)


@dataclass(frozen=True)
class Heads:
    """Sizes of one call: queries of ``hkv * g`` heads over a history of ``s`` keys."""

    b: int = 2
    t: int = 4
    s: int = 9
    hkv: int = 2
    g: int = 2
    d: int = 6
    e: int = 5

    @property
    def hq(self) -> int:
        return self.hkv * self.g


@dataclass(frozen=True)
class Query:
    """What a query knows: its sequence, its head, its position, the keys' positions."""

    b: int
    head: int
    at: int
    keys: torch.Tensor


Score = Callable[[torch.Tensor, Query, Tensors], torch.Tensor]
Visible = Callable[[Query, Tensors], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One op: further arguments, what is done to scaled scores, which keys are seen."""

    name: str
    more: Callable[[int, Heads], Tensors] = lambda seed, h: {}
    score: Score = lambda x, query, args: x
    visible: Visible = lambda query, args: query.keys <= query.at
    memory: bool = False

    def __repr__(self) -> str:
        return self.name


def arguments(v: Variant, seed: int, h: Heads) -> Tensors:
    """Arguments in fp64."""
    return {
        "q": randn(seed, h.b, h.t, h.hq, h.d),
        "k": randn(seed + 1, h.b, h.s, h.hkv, h.d),
        "v": randn(seed + 2, h.b, h.s, h.hkv, h.e),
        **v.more(seed + 3, h),
    }


def softmax(score: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, sink: Any) -> Any:
    """``sum_s exp(score_s) value_s / (exp(sink) + sum_s exp(score_s))`` over the visible keys."""
    seen = seen.expand(score.shape)
    if not seen.any():
        return torch.zeros(values.shape[-1], dtype=torch.float64)
    score = score[seen]
    top = score.max() if sink is None else torch.maximum(score.max(), sink)
    weight = (score - top).exp()
    below = weight.sum() + (0.0 if sink is None else (sink - top).exp())
    return weight @ values[seen] / below


def exact(v: Variant, args: Tensors) -> torch.Tensor:
    """The formula's output, fp64 ``[B, T, Hq, E]``; queries are the last of the history."""
    x = {n: y.double() if isinstance(y, torch.Tensor) else y for n, y in args.items()}
    q, k, values = x["q"], x["k"], x["v"]
    b, t, hq, d = q.shape
    s, group = k.shape[1], hq // k.shape[2]
    scale, keys = args.get("scale", d**-0.5), torch.arange(s)
    out = torch.zeros(b, t, hq, values.shape[-1], dtype=torch.float64)
    for i in range(b):
        for h in range(hq):
            mine = slice(None), h // group
            for row in range(t):
                query = Query(i, h, row if v.memory else row + s - t, keys)
                score, seen = k[i][mine] @ q[i, row, h] * scale, v.visible(query, x)
                score, value = v.score(score, query, x), values[i][mine]
                if "pk" in x:  # a prefix before them, seen whole
                    score = torch.cat([x["pk"][mine] @ q[i, row, h] * scale, score])
                    seen = torch.cat([torch.ones(len(x["pk"]), dtype=torch.bool), seen])
                    value = torch.cat([x["pv"][mine], value])
                sink = x["sink"][h] if "sink" in x else None
                out[i, row, h] = softmax(score, seen, value, sink)
    return out


def _documents(seed: int, h: Heads) -> Tensors:
    ids = torch.randint(0, 3, (h.b, h.s), generator=torch.Generator().manual_seed(seed))
    return {"document": ids.sort(-1).values.int()}


VARIANTS = (
    Variant("attention"),
    Variant(
        "sliding_window", lambda seed, h: {"w": 1 + seed % 5},
        visible=lambda y, x: (y.keys <= y.at) & (y.at - y.keys < x["w"]),
    ),
    Variant(
        "soft_cap", lambda seed, h: {"cap": 1.5},
        lambda score, y, x: x["cap"] * torch.tanh(score / x["cap"]),
    ),
    Variant(
        "alibi", lambda seed, h: {"slopes": 2.0 ** -torch.arange(1, h.hq + 1).double()},
        lambda score, y, x: score - x["slopes"][y.head] * (y.at - y.keys),
    ),
    Variant("sink_attention", lambda seed, h: {"sink": randn(seed, h.hq)}),
    Variant(
        "document_attention", _documents,
        visible=lambda y, x: (y.keys <= y.at)
        & (x["document"][y.b] == x["document"][y.b, y.at]),
    ),
    Variant(
        "prefix_lm", lambda seed, h: {"prefix": (torch.arange(h.b).int() * 3 + seed % 4)},
        visible=lambda y, x: (y.keys <= y.at) | (y.keys < x["prefix"][y.b]),
    ),
    Variant("cross_attention", visible=lambda y, x: ALL.expand(y.keys.shape), memory=True),
    Variant(
        "cascade", lambda seed, h: {
            "pk": randn(seed, 7, h.hkv, h.d), "pv": randn(seed + 1, 7, h.hkv, h.e)
        },
    ),
)  # fmt: skip
BY_NAME = {v.name: v for v in VARIANTS}
