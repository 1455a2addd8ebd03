"""Latent attention over rows that are known already: the second stage of sparse attention alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.case import Case, Inputs, Part, Work, generator, nan_like
from benchmarks.peers import sparse

BF16 = torch.bfloat16
SHAPES = [(1, 65536), (32, 32768)]
K = 2048
SCALE = 0.1


def _ours(inputs: Inputs, backend: str) -> Work:
    """The fold over picked rows, its picks given; other backends have no such stage."""
    from attncc import ops
    from attncc.codegen.pipeline import analyse
    from attncc.runtime import selected
    from attncc.runtime.backends import spec_of
    from attncc.runtime.bind import bind

    x = inputs
    q, kv, device = x["q"], x["kv"], x["q"].device
    out = nan_like(*q.shape[:-1], x["R"], dtype=q.dtype, device=device)
    index = {
        "qi": torch.zeros(q.shape[0], 1, 1, 16, dtype=BF16, device=device),
        "w": torch.zeros(q.shape[0], 1, 1, dtype=BF16, device=device),
        "ki": torch.zeros(*kv.shape[:2], 16, dtype=BF16, device=device),
    }
    rows = {"qc": q[..., : x["R"]], "qr": q[..., x["R"] :]}
    rows |= {"c": kv[..., : x["R"]], "r": kv[..., x["R"] :]}
    call, _ = bind(ops.sparse_mla.declaration, (), {**index, **rows, "scale": SCALE, "out": out})
    form = analyse(call.program).selected
    assert form is not None and backend in ("triton", "auto")
    places, spec = x["places"], spec_of(call)

    def fn() -> dict[str, torch.Tensor]:
        selected.attend(call, form, spec, "decode", places)
        return {"o": out}

    return Work(fn, {"o": out})


def attention(inputs: Inputs, b: int, dtype: torch.dtype) -> torch.Tensor:
    """Attention of one sequence to its picked rows [1, 1, H, R]."""
    q, R = inputs["q"][b, 0].to(dtype), inputs["R"]
    rows = inputs["kv"][b][inputs["places"][b, 0].long()].to(dtype)
    return ((q @ rows.T * SCALE).softmax(-1) @ rows[:, :R])[None, None]


def parts(inputs: Inputs) -> Iterator[Part]:
    """The whole output, a sequence at a time."""
    for b in range(inputs["q"].shape[0]):
        exact, rough = (attention(inputs, b, d) for d in (torch.float64, torch.float32))
        yield Part("o", (slice(b, b + 1),), exact, rough.to(BF16), BF16)


def case(B: int, T: int, H: int = 128, R: int = 512, P: int = 64) -> Case:
    """B tokens that read K rows each; the bytes are those of the rows, read once."""

    def build(device: torch.device) -> Inputs:
        rng = generator(device)
        q = torch.randn(B, 1, H, R + P, generator=rng, device=device, dtype=BF16)
        kv = torch.randn(B, T, R + P, generator=rng, device=device, dtype=BF16)
        order = torch.rand(B, 1, T, generator=rng, device=device).argsort(-1)
        return {"q": q, "kv": kv, "places": order[..., :K].int().contiguous(), "R": R}

    return Case(
        group="dsa_mla",
        name=f"B{B} T{T} H{H} topk{K}",
        build=build,
        ours=_ours,
        peers={
            "torch gather": sparse.gathered(SCALE),
            "torch.compile": sparse.gathered(SCALE, compiled=True),
        },
        parts=parts,
        bytes=B * K * (R + P) * 2,
        flops=2.0 * B * H * K * (2 * R + P),
        timing="graph",
        reads=True,
    )


def cases() -> list[Case]:
    """The two shapes of the peers' table."""
    return [case(*shape) for shape in SHAPES]
