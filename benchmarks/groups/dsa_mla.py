"""Latent attention over rows that are known already: the second stage of sparse attention alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attncc import ops
from attncc.codegen.forms import SelectedForm
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.runtime import selected
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.call import Call
from attncc.runtime.recorder import Recorder
from attncc.runtime.replay import replay_of
from benchmarks.case import Case, Inputs, Part, Work, generator, nan_like
from benchmarks.peers import sparse

BF16 = torch.bfloat16
SHAPES = [(1, 65536), (32, 32768)]
K = 2048
SCALE = 0.1


@dataclass(frozen=True, slots=True)
class _Stage:
    """The fold over picked rows of one call, ready to be launched."""

    call: Call
    form: SelectedForm
    spec: Spec
    places: torch.Tensor
    out: torch.Tensor

    def __call__(self) -> dict[str, torch.Tensor]:
        selected.attend(self.call, self.form, self.spec, "decode", self.places)
        return {"o": self.out}


def _stage(inputs: Inputs, backend: str) -> _Stage:
    """The second stage alone, its picks given; other backends have none."""
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
    return _Stage(call, form, spec_of(call), x["places"], out)


def _ours(inputs: Inputs, backend: str) -> Work:
    stage = _stage(inputs, backend)
    return Work(stage, {"o": stage.out})


def _prepared(inputs: Inputs, backend: str) -> Work:
    """The same, laid out once, as a prepared call of an op is."""
    stage = _stage(inputs, backend)
    held = {id(t): t for t in (*stage.call.tensors.values(), stage.out, stage.places)}
    tensors = list(held.values())
    recorder = Recorder(stage.call.program.name, tensors, strict=True)
    with recorder.active():
        found = stage()
    replay = replay_of(recorder.finish(found, (), partial=False))
    pointers = [t.data_ptr() for t in tensors]
    pointers += [0] * (replay.recording.registers - len(tensors))
    frame = replay.frame(tensors)

    def fn() -> dict[str, torch.Tensor]:
        replay.bind(pointers, [])
        replay.run(frame.copy())
        return found

    return Work(fn, found)


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
    """The two shapes of the peers' table: the kernels alone, and called once.

    A call between two events holds what the host takes to launch it, where that is longer than the
    kernels: so the peers' table was measured.
    """
    alone = [case(*shape) for shape in SHAPES]
    called = [replace(c, name=f"{c.name}, called", ours=_prepared, timing="events") for c in alone]
    return alone + called
