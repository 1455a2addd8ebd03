"""Times variants of the chunked gated delta rule on one GPU, kernel by kernel.

    PYTHONPATH=.pkg python -m benchmarks.tune_gdn [VARIANT ...]

A variant is a comma-separated list of fields of ``Choice``, such as ``width=64,transposed=1``, and
of ``segments``; without arguments, those of ``VARIANTS``. Each is checked against the fp64 oracle
on a short call before it is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from statistics import median

import torch

from attncc import ops
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan_affine import Choice
from attncc.runtime import affine
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.kernels import Kernel
from benchmarks.answers import judge
from benchmarks.case import Inputs
from benchmarks.groups import recur

DEVICE = "cuda"
SHAPES = [(32768, 16, 32, 1), (32768, 16, 32, 16), (8192, 16, 32, 1), (32768, 4, 8, 1)]
VARIANTS = [
    "", "width=32", "width=64", "width=128,warps=8", "width=64,transposed=1",
    "width=128,transposed=1,warps=8", "width=64,transposed=1,stages=2", "width=64,stages=2",
    "system_warps=1", "system_warps=2", "system_warps=4", "inverse_precision=tf32",
    "segments=1", "segments=4", "segments=8", "segments=16", "width=32,segments=4",
]  # fmt: skip


def parse(text: str) -> tuple[Choice, int | None]:
    """A choice and a number of segments from ``name=value,...``."""
    known = {"segments", *(f.name for f in fields(Choice))}
    found: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, value = part.split("=")
        if name not in known:
            raise SystemExit(f"{name} is not a field of Choice: {', '.join(sorted(known))}")
        found[name] = int(value) if value.isdigit() else value
    segments = found.pop("segments", None)
    return Choice(**found), segments  # type: ignore[arg-type,return-value]


Runner = Callable[[Choice, int | None], None]


def prepared(shape: tuple[int, int, int, int]) -> tuple[Runner, dict[str, torch.Tensor]]:
    """A call of a shape that takes a choice, and its inputs with the outputs it writes."""
    tokens, hq, hv, sequences = shape
    device = torch.device(DEVICE)
    x = recur.inputs_of(1, tokens, hq, hv, 128, 128, device)
    packed = sequences > 1
    args = [x[n][0] if packed else x[n] for n in recur.NAMES]
    extra: dict[str, torch.Tensor] = {"s": torch.zeros(sequences, hv, 128, 128, device=device)}
    if packed:
        step = tokens // sequences
        extra["cu_seqlens"] = torch.arange(sequences + 1, device=device, dtype=torch.int32) * step
    call, _ = bind(ops.gated_delta_rule.declaration, tuple(args), extra)
    analysis, spec = analyse(call.program), spec_of(call)

    def run(choice: Choice, segments: int | None) -> None:
        affine.run(call, analysis, spec, "prefill", choice, segments=segments)

    results = {**call.outputs, **call.final_states}
    return run, x | {f"found_{n}": t.fill_(torch.nan) for n, t in results.items()}


def wrong(choice: Choice, segments: int | None) -> str:
    """What is wrong with a variant's answer; empty if it is right."""
    for shape in [(320, 2, 4, 1), (640, 2, 4, 5)]:
        run, held = prepared(shape)
        run(choice, segments)
        state = torch.zeros(shape[3], shape[2], 128, 128, device=DEVICE)
        inputs = {n: held[n] for n in recur.NAMES} | {"s": state}
        problem = unlike({n: held[f"found_{n}"] for n in ("o", "s")}, inputs)
        if problem:
            return f"{shape}: {problem}"
    return ""


def unlike(results: Mapping[str, torch.Tensor], inputs: Inputs) -> str:
    """What of a prefill's results is not the oracle's; empty if nothing is."""
    for part in recur.prefill_parts(inputs):
        answer = judge({part.output: results[part.output].reshape(part.oracle.shape)}, [part])
        if not answer.right:
            return f"{answer.output} errs by {answer.error:.2e}, allowed {answer.budget:.2e}"
    return ""


def kernel_times(run: Callable[[], None], calls: int = 5) -> dict[str, float]:
    """Median ms of each kernel of a call by phase."""
    found: dict[str, list[float]] = {}
    launch = Kernel.launch

    def timed(self: Kernel, *args: object) -> None:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(self, *args)  # type: ignore[arg-type]
        stop.record()
        torch.cuda.synchronize()
        found.setdefault(self.plan.phase, []).append(start.elapsed_time(stop))

    Kernel.launch = timed  # type: ignore[method-assign,assignment]
    try:
        for _ in range(calls + 1):
            run()
    finally:
        Kernel.launch = launch  # type: ignore[method-assign]
    return {phase: median(times[1:]) for phase, times in found.items()}


def main(variants: list[str]) -> None:
    """Print a line per variant and shape."""
    from triton.testing import do_bench

    right = []
    for text in variants:
        problem = wrong(*parse(text))
        print(f"{text or 'plan':40} {problem or 'right'}", flush=True)
        right += [] if problem else [text]
    for shape in SHAPES:
        run, _ = prepared(shape)
        print(f"\nT{shape[0]} Hq{shape[1]} Hv{shape[2]}, {shape[3]} sequence(s)")
        for text in right:
            call = partial(run, *parse(text))
            call()
            total = do_bench(call, warmup=10, rep=60, return_mode="median")
            parts = " ".join(f"{k} {v:.3f}" for k, v in kernel_times(call).items())
            print(f"{text or 'plan':40} {total:.3f} ms: {parts}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or VARIANTS)
