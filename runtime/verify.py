"""``attncc verify``: kernels held to the reference, on the GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from attncc.codegen.affine_plans import Part
from attncc.codegen.plan import KernelPlan
from attncc.codegen.plan_gathered import GatherPlan
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.render import Source
from attncc.codegen.specialise import runtime_axes
from attncc.dsl.build import Declaration
from attncc.dsl.errors import AttnccError, MiscompiledError, RefusedError, ToolchainError
from attncc.runtime import knobs, selfcheck
from attncc.runtime.backends import spec_of, target_for
from attncc.runtime.bundle import Request, Work, samples_of
from attncc.runtime.compile import artifact
from attncc.runtime.kernels import has_gpu, load
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.sources import call_sources, spec_for
from attncc.runtime.stages import fold_of
from attncc.runtime.trial import Finding, compare, trial_call, trial_spec

WIDTH, GROUP = 64, 2
"""Sizes of head dims and of groups where none are given."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one kind of call.

    Attributes:
        op: the op's name.
        sample: the kind of call.
        kernels: names of the kernels that it launches.
        chosen: who made their choices.
        findings: each result beside its oracle.
        problem: why it was not run, or None.
        seconds: what the check took.
    """

    op: str
    sample: Sample
    kernels: tuple[str, ...]
    chosen: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    problem: str | None = None
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether it was run and every result is within the tolerance."""
        return self.problem is None and all(f.judged.right for f in self.findings)


def choose_device() -> torch.device:
    """The GPU; without one the CPU, where Triton's interpreter runs the kernels.

    Raises:
        ToolchainError: there is no GPU, and Triton was imported as a compiler already.
    """
    if knobs.interpreting():
        return torch.device("cpu")
    if has_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    if "triton" in sys.modules:
        raise ToolchainError(
            "no GPU, and Triton compiles in this process", help="set TRITON_INTERPRET=1 before"
        )
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    return torch.device("cpu")


def usual_sizes(declaration: Declaration, *, interpreted: bool) -> dict[str, int]:
    """Sizes for what kernels compile in, and few heads."""
    loose = runtime_axes(declaration.trace())
    widths = {t.pattern.axes[-1] for t in declaration.tensors if t.pattern.rank > 3}
    axes = [a for t in declaration.tensors for a in t.pattern.axes]
    sizes = {a: WIDTH if a in widths else GROUP for a in axes if a not in loose}
    heads = [a for a in axes if a in loose and a not in ("B", "T", "S")]
    return sizes | dict.fromkeys(heads, 1 if interpreted else GROUP)


def kernels_of(
    declarations: Sequence[Declaration], request: Request, device: torch.device
) -> list[Work]:
    """The kernels of the calls that ``verify`` makes with the same arguments, each once.

    Those of a small call may be others; calls without a kernel are left to ``verify``.
    """
    target = target_for(device)
    found: dict[str, Work] = {}
    for declaration in declarations:
        for sample in _samples(declaration, request, device):
            with suppress(RefusedError):
                call = fold_of(sample_call(declaration, sample), sample.phase)
                sources = call_sources(call, sample.phase, spec=spec_for(call, target))
                found |= {s.entry: Work(s, target) for s in sources}
    return list(found.values())


def _samples(declaration: Declaration, request: Request, device: torch.device) -> Iterator[Sample]:
    usual = usual_sizes(declaration, interpreted=device.type == "cpu")
    full = replace(request, sizes=[{**usual, **s} for s in request.sizes])
    return samples_of(declaration, full)


def verify(
    declarations: Sequence[Declaration],
    request: Request,
    device: torch.device,
    done: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Run every kind of call that a request names, each set of kernels once.

    Args:
        declarations: the ops.
        request: the calls; sizes that it lacks are usual ones. Its targets are not looked at.
        device: where to run.
        done: called after each.

    Returns:
        The verdicts. On a GPU each is also recorded with the artifacts, and those of a wrong
        answer are set aside.
    """
    found = []
    for declaration in declarations:
        seen: set[tuple[str, ...]] = set()
        for sample in _samples(declaration, request, device):
            verdict = _verdict(declaration, sample, device, seen)
            if verdict is not None:
                found.append(verdict)
                done(verdict)
    return found


def _verdict(
    declaration: Declaration, sample: Sample, device: torch.device, seen: set[tuple[str, ...]]
) -> Verdict | None:
    start = time.perf_counter()
    call = sample_call(declaration, sample)
    try:
        call = fold_of(call, sample.phase)
        spec = spec_of(call) if device.type == "cpu" else spec_for(call, target_for(device))
        sources = call_sources(call, sample.phase, spec=spec)
    except RefusedError as refused:
        return Verdict(declaration.name, sample, (), (), problem=f"no kernel: {refused.message}")
    names = tuple(s.entry for s in sources)
    if names in seen:
        return None
    seen.add(names)
    chosen = tuple(s.plan.chosen for s in sources)
    verdict = Verdict(declaration.name, sample, names, chosen)
    trial = trial_call(call, device)
    findings: list[Finding] = []
    try:
        for plan, parts in _trials(sources, device):
            with selfcheck.trying(plan):
                findings += compare(trial, trial_spec(call, spec), sample.phase, parts)
            trial = trial_call(call, device, seed=1)
        if device.type == "cuda":
            _record(sources, device, findings)
    except MiscompiledError as wrong:
        problem = None if findings else wrong.why
        return replace(verdict, findings=tuple(findings), problem=problem)
    except Exception as error:  # whatever an interpreter or a compiler raises is a finding
        text = str(error) if isinstance(error, AttnccError) else f"{type(error).__name__}: {error}"
        return replace(verdict, problem=text.splitlines()[0])
    seconds = time.perf_counter() - start
    return replace(verdict, findings=tuple(findings), seconds=seconds)


def _trials(
    sources: Sequence[Source], device: torch.device
) -> Iterator[tuple[KernelPlan | None, int | None]]:
    """Whole, with kernels beside each other, and cut, where there are kernels for it.

    The interpreter as shipped has the first alone. Each is the kernel that it is about, where a
    small call would not take it by itself, and the cuts.
    """
    yield None, None
    if device.type == "cuda":
        waits = (s.plan for s in sources if isinstance(s.plan, WarpStatePlan))
        yield from ((plan, None) for plan in waits if plan.awaited)
    splits = any(isinstance(s.plan, (TiledPlan, GatherPlan)) and s.plan.split for s in sources)
    if device.type == "cuda" and (splits or any(s.plan.phase == "start" for s in sources)):
        leads = (s.plan for s in sources if isinstance(s.plan, WarpStatePlan))
        yield next((plan for plan in leads if plan.part is Part.LEAD), None), selfcheck.CUT


def _record(sources: Sequence[Source], device: torch.device, findings: list[Finding]) -> None:
    """Record with each artifact that was loaded here what was found; calls may take others."""
    ran = [s for s in sources if any(at == (device.index or 0) for at, _ in load(s).launchers)]
    entries = [(artifact(s, target_for(device)), s.plan) for s in ran]
    selfcheck.settle(entries, torch.cuda.get_device_name(device), selfcheck.wrong(findings))


def as_dict(verdict: Verdict) -> Mapping[str, object]:
    """A verdict as JSON shows it."""
    sample = verdict.sample
    return {
        "op": verdict.op, "phase": sample.phase, "dtype": sample.dtype, "form": form_of(sample),
        "sizes": dict(sample.sizes), "kernels": list(verdict.kernels),
        "chosen": list(verdict.chosen), "right": verdict.right, "problem": verdict.problem,
        "seconds": round(verdict.seconds, 3),
        "results": [
            {"output": f.output, "error": f.judged.error, "allowed": f.judged.budget}
            for f in verdict.findings
        ],
    }  # fmt: skip


def form_of(sample: Sample) -> str:
    """The traits of a kind of call, as the command line writes them."""
    return "+".join(sorted(t.value for t in sample.traits)) or "plain"
