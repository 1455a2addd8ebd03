"""``attncc tune``: candidates are compiled in parallel, checked and timed; the best is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_table import (
    Family,
    Wanted,
)
from attncc.codegen.render import Source
from attncc.dsl.build import Declaration
from attncc.dsl.errors import AttnccError, RefusedError
from attncc.runtime import selfcheck
from attncc.runtime.backends import run_kernels
from attncc.runtime.call import Call
from attncc.runtime.candidates import Asking, Choices, candidates, rule_of, table_of
from attncc.runtime.compile import build_artifact
from attncc.runtime.jobs import in_processes
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.sources import call_sources, spec_for
from attncc.runtime.stages import fold_of
from attncc.runtime.store import Store
from attncc.runtime.trial import compare, trial_call, trial_spec

TUNED = (Family.SOFTMAX, Family.AFFINE, Family.PICKED, Family.SCORES)
"""Whose choices are tried; of a call with several, those of the first one unless another is named.
"""
SEGMENTS = (1, 2, 4, 8, 16)
"""Segments a sequence that are timed."""
FINALISTS = 3
"""So many of the fastest are timed again, in turns with the rule's own choice."""
REPETITIONS = 40
"""Ms of repetitions of a measurement."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice and what is known of it.

    Attributes:
        choices: by name.
        sources: its kernels.
        registers: most of any kernel; None where the store did not say.
        spill_bytes: of all kernels.
        shared_bytes: most of any kernel.
        problem: why it is out: it does not compile, spills or gives a wrong answer.
        ms: median ms of a call between events; None before it is timed.
        graph_ms: of a finalist, median ms of a call replayed from a CUDA graph.
    """

    choices: Choices
    sources: tuple[Source, ...]
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    problem: str | None = None
    ms: float | None = None
    graph_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is tuned: one kind of call on one target.

    Attributes:
        call: with its full sizes; its tensors hold nothing.
        spec: of the call, for the target.
        phase: ``prefill`` or ``decode``.
        target: ``sm_90`` and the like.
        wanted: what its kernels ask a table for.
        candidates: what is tried, the rule's own choice first.
    """

    call: Call
    spec: Spec
    phase: str
    target: str
    wanted: Wanted
    candidates: tuple[Candidate, ...]


def plan_tuning(
    declaration: Declaration, sample: Sample, target: str, family: Family | None = None
) -> Tuning:
    """The candidates of a kind of call, with their generated sources.

    Args:
        declaration: the op.
        sample: the kind of call.
        target: ``sm_90`` and the like.
        family: whose choices, where its kernels are of several: of a selection the fold over what
            is picked, or the scores.

    Raises:
        RefusedError: the call has no kernels, or none with free choices (of the family).
        CallError: the sample does not fit the op.
    """
    call = fold_of(sample_call(declaration, sample), sample.phase)
    asking = Asking(())
    # Only Triton's tiles are tried: where Gluon is the default, no other choice would be taken.
    spec = replace(spec_for(call, target), tuned=asking, dialect=Dialect.TRITON)
    sources = call_sources(call, sample.phase, spec=spec)
    asked = {w.family: w for w in reversed(asking.asked)}
    wanted = next((asked[f] for f in TUNED if f in asked and family in (None, f)), None)
    if wanted is None:
        raise RefusedError(
            "its kernels have no such choices to tune", op=declaration.name,
            expected=", ".join(f.value for f in TUNED if f in asked) or None,
            found=None if family is None else family.value,
        )  # fmt: skip
    found = []
    for choices in candidates(wanted.family, [s.plan for s in sources], target):
        fixed = tuple(sorted(choices.items()))
        own = replace(spec, tuned=table_of(wanted, fixed))
        made = tuple(call_sources(call, sample.phase, spec=own))
        if rule_of(wanted.family, [s.plan for s in made]) == choices:
            found.append(Candidate(fixed, made))  # else the plan could not take them as they are
    return Tuning(call, spec, sample.phase, target, wanted, tuple(found))


# --- compiling -----------------------------------------------------------------------------------


def _compile(given: tuple[str, Source, str]) -> tuple[int | None, int | None, int]:
    root, source, target = given
    entry = build_artifact(source, target, Store(Path(root)), measure=True)
    manifest = entry.manifest
    return manifest.registers, manifest.spill_bytes, manifest.shared_bytes


def compile_all(
    tuning: Tuning, root: Path, jobs: int, done: Callable[[str], None] = lambda _: None
) -> Tuning:
    """Compile every candidate's kernels into a store, each once, in processes of their own.

    Args:
        tuning: what is tuned.
        root: of the store.
        jobs: processes; 1 compiles in this one.
        done: called with a kernel's name after each.

    Returns:
        The tuning with resources and problems filled in. What spills more than the rule's own
        choice is out.
    """
    each = {s.entry: (str(root), s, tuning.target) for c in tuning.candidates for s in c.sources}
    found: dict[str, tuple[int | None, int | None, int] | str] = {}
    for name, result in in_processes(_compile, each, jobs):
        found[name] = _result(result)
        done(name)
    new = [_measured(c, found) for c in tuning.candidates]
    allowed = new[0].spill_bytes or 0
    for i, c in enumerate(new):
        if c.problem is None and (c.spill_bytes or 0) > allowed:
            new[i] = replace(c, problem=f"spills {c.spill_bytes} bytes")
    return replace(tuning, candidates=tuple(new))


def _result(
    get: Callable[[], tuple[int | None, int | None, int]],
) -> tuple[int | None, int | None, int] | str:
    try:
        return get()
    except Exception as error:  # whatever a compiler raises is a finding about this candidate
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _measured(
    c: Candidate, found: dict[str, tuple[int | None, int | None, int] | str]
) -> Candidate:
    results = [found[s.entry] for s in c.sources]
    failed = [r for r in results if isinstance(r, str)]
    if failed:
        return replace(c, problem=failed[0])
    good = [r for r in results if not isinstance(r, str)]
    registers = [r[0] for r in good if r[0] is not None]
    spills = [r[1] for r in good if r[1] is not None]
    return replace(
        c, registers=max(registers, default=None), shared_bytes=max(r[2] for r in good),
        spill_bytes=sum(spills) if spills else None,
    )  # fmt: skip


# --- checking and timing -------------------------------------------------------------------------


def measure(
    tuning: Tuning, device: torch.device, done: Callable[[Candidate], None] = lambda _: None
) -> Tuning:
    """Check each candidate's answer, then time it; the fastest are timed again in turns.

    Args:
        tuning: what is tuned, compiled.
        device: a CUDA device of the target.
        done: called after each candidate.

    Returns:
        The tuning with times and problems filled in.
    """
    from attncc.runtime.timing import events_ms

    full = trial_call(tuning.call, device, small=False)
    found = []
    for c in tuning.candidates:
        if c.problem is None:
            why = _wrong(tuning, c, device)
            ms = None if why else events_ms(_runner(tuning, c, full), REPETITIONS)
            c = replace(c, problem=why, ms=ms)
        found.append(c)
        done(c)
    return replace(tuning, candidates=_again(tuning, found, full))


def _spec(tuning: Tuning, c: Candidate) -> Spec:
    spec = trial_spec(tuning.call, tuning.spec)
    return replace(spec, tuned=table_of(tuning.wanted, c.choices))


def _wrong(tuning: Tuning, c: Candidate, device: torch.device) -> str | None:
    try:
        findings = compare(trial_call(tuning.call, device), _spec(tuning, c), tuning.phase)
    except AttnccError as error:
        return str(error).splitlines()[0]
    why = selfcheck.wrong(findings)
    return f"wrong answer: {why}" if why else None


def _runner(tuning: Tuning, c: Candidate, full: Call) -> Callable[[], dict[str, torch.Tensor]]:
    analysis, spec = analyse(full.program), _spec(tuning, c)

    def run() -> dict[str, torch.Tensor]:
        run_kernels(full, analysis, spec, tuning.phase)
        return {**full.outputs, **full.final_states}

    run()
    return run


def _again(tuning: Tuning, found: Sequence[Candidate], full: Call) -> tuple[Candidate, ...]:
    """Times of the finalists and of the rule's choice from CUDA graphs, where they can be."""
    from attncc.runtime.timing import CaptureError, graphs_ms

    timed = [i for i, c in enumerate(found) if c.ms is not None]
    best = sorted(timed, key=lambda i: found[i].ms or 0.0)[:FINALISTS]
    chosen = sorted({*best, *(i for i in timed if i == 0)})
    new = list(found)
    if len(chosen) > 1:
        runners = [_runner(tuning, found[i], full) for i in chosen]
        slowest = max(found[i].ms or 0.0 for i in chosen)
        try:
            again = graphs_ms(runners, max(3, min(20, round(2 / max(slowest, 1e-3)))), 5)
        except CaptureError:
            return tuple(new)
        for i, ms in zip(chosen, again, strict=True):
            new[i] = replace(found[i], graph_ms=ms)
    return tuple(new)


def measure_segments(
    tuning: Tuning, best: Candidate, device: torch.device
) -> tuple[Wanted, tuple[tuple[int, float], ...]] | None:
    """Times of the winner with sequences cut into segments, and what a table would be asked.

    Returns:
        None where nothing can be cut: no chunked scan. Else the request, and number and ms of each
        cut whose answer is right, 1 among them.
    """
    from attncc.runtime.timing import events_ms

    if tuning.wanted.family is not Family.AFFINE:
        return None
    full = trial_call(tuning.call, device, small=False)
    analysis, spec = analyse(full.program), _spec(tuning, best)
    assert spec.tuned is not None
    asking = Asking(spec.tuned.entries)
    run_kernels(full, analysis, replace(spec, tuned=asking), tuning.phase)
    wanted = next((w for w in asking.asked if w.family is Family.SEGMENTS), None)
    if wanted is None:
        return None
    found = []
    for parts in SEGMENTS:
        trial = trial_call(tuning.call, device)
        if selfcheck.wrong(compare(trial, spec, tuning.phase, min(parts, selfcheck.CUT))):
            continue
        run = partial(run_kernels, full, analysis, spec, tuning.phase, parts=parts)
        run()
        found.append((parts, events_ms(run, REPETITIONS)))
    return wanted, tuple(found)


def ranked(tuning: Tuning) -> list[tuple[float, Candidate]]:
    """Times and candidates with right answers, the fastest first, by one clock.

    Finalists by their graphs where there are any: events count the host's time too.
    """
    right = [c for c in tuning.candidates if c.problem is None]
    graphs = [(c.graph_ms, c) for c in right if c.graph_ms is not None]
    events = [(c.ms, c) for c in right if c.ms is not None]
    return sorted(graphs or events, key=lambda t: t[0])
