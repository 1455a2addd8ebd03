"""The index of sparse attention and its exact top-k, one query token a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from attncc import ops
from benchmarks.case import Case, Inputs, Part, Work, generator
from benchmarks.groups import attend
from benchmarks.peers import sparse

BF16 = torch.bfloat16
SHAPES = [(1, 65536), (32, 32768)]
K = 2048


class Picked(Mapping[str, torch.Tensor]):
    """What was picked, as the scores of it: computed when somebody looks, never while timing.

    ``o`` are the exact scores of the picks, greatest first, or NaN where a row was picked twice.
    """

    def __init__(self, inputs: Inputs, places: torch.Tensor) -> None:
        self.inputs = inputs
        self.places = places

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != "o":
            raise KeyError(name)
        rows = self.places.reshape(self.places.shape[0], -1).long()
        found = [scores(self.inputs, b, torch.float64)[rows[b]] for b in range(rows.shape[0])]
        values = torch.stack(found).sort(descending=True).values
        order = rows.sort().values
        twice = (order[:, 1:] == order[:, :-1]).any(1)
        return torch.where(twice[:, None], torch.nan, values)

    def __iter__(self) -> Iterator[str]:
        return iter(("o",))

    def __len__(self) -> int:
        return 1


def scores(inputs: Inputs, b: int, dtype: torch.dtype) -> torch.Tensor:
    """Scores of one sequence's history [S]."""
    q, w, k = (inputs[n][b].to(dtype) for n in ("qi", "w", "ki"))
    return torch.cat([(w[0] @ (q[0] @ part.T).relu()) for part in k.split(8192)])


def parts(inputs: Inputs) -> Iterator[Part]:
    """The greatest scores of every sequence."""
    for b in range(inputs["qi"].shape[0]):
        exact, rough = (scores(inputs, b, d) for d in (torch.float64, torch.float32))
        eager = exact[rough.topk(K).indices].sort(descending=True).values
        yield Part("o", (slice(b, b + 1),), exact.topk(K).values[None], eager[None], BF16)


def _ours(inputs: Inputs, backend: str) -> Work:
    x = inputs
    out = torch.full((x["qi"].shape[0], 1, K), -7, dtype=torch.int32, device=x["qi"].device)

    def fn() -> Picked:
        ops.lightning_indexer.decode(x["qi"], x["w"], x["ki"], out=out, backend=backend)
        return Picked(x, out)

    return Work(fn, reset=lambda: out.fill_(-7))


def _build(B: int, T: int, H: int, D: int, *, quantised: bool) -> attend.Build:
    def build(device: torch.device) -> Inputs:
        rng = generator(device)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, device=device)

        w = draw(B, 1, H).to(BF16)
        found: Inputs = {"qi": draw(B, 1, H, D).to(BF16), "w": w, "ki": draw(B, T, D).to(BF16)}
        if quantised:
            found["stored"] = sparse.stored(found["ki"])
            found["ki"] = sparse.meant(found["stored"])
        return found

    return build


def _ours_e4m3(inputs: Inputs, backend: str) -> Work:
    x = {**inputs, "ki": inputs["stored"]}
    out = torch.full((x["qi"].shape[0], 1, K), -7, dtype=torch.int32, device=x["qi"].device)

    def fn() -> Picked:
        ops.lightning_indexer.decode(x["qi"], x["w"], x["ki"], out=out, backend=backend)
        return Picked(inputs, out)

    return Work(fn, reset=lambda: out.fill_(-7))


def case(B: int, T: int, H: int = 64, D: int = 128, *, quantised: bool = False) -> Case:
    """B sequences with T tokens each; the bytes are those of the keys, read once."""
    each = D + 4 if quantised else 2 * D
    return Case(
        group="dsa_index",
        name=f"B{B} T{T} Hidx{H} D{D} topk{K}" + (" e4m3" if quantised else ""),
        build=_build(B, T, H, D, quantised=quantised),
        ours=_ours_e4m3 if quantised else _ours,
        peers={"torch eager": sparse.index(K), "torch.compile": sparse.index(K, compiled=True)},
        parts=parts,
        bytes=B * T * each,
        flops=2.0 * B * T * H * (D + 1),
        timing="graph",
        reads=True,
    )


def cases() -> list[Case]:
    """The two shapes of the peers' table, with keys in bf16 and in e4m3."""
    return [case(*shape, quantised=q) for q in (False, True) for shape in SHAPES]
