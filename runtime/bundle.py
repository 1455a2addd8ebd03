"""Bundles: the kernels of chosen ops, compiled ahead of time into a folder that can be carried.

A bundle is a root of the store. It is listed behind the writable folder wherever kernels are
looked for, and is only read there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from attncc.codegen.plan import Dialect
from attncc.codegen.render import Source
from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError, AttnccError, RefusedError
from attncc.dsl.ir import Lifetime
from attncc.runtime.call import Call
from attncc.runtime.compile import build_artifact, capability_of, compilations
from attncc.runtime.entry import Entry
from attncc.runtime.jobs import in_processes, jobs_for
from attncc.runtime.key import key_of
from attncc.runtime.samples import Sample, Trait, sample_call
from attncc.runtime.sources import long_sources
from attncc.runtime.store import Store

USUAL = {
    "prefill": ((8, 4), (1, 64), (64, 64), (1, 4096), (8, 4096)),
    "decode": ((1, 1), (8, 1), (64, 1)),
}
"""Sequences and tokens of the calls whose kernels are built: plans differ between few and many."""
STATES = {
    "prefill": ((2048, 4), (512, 64), (2, 4096), (4, 4096), (32, 4096)),
    "decode": ((2048, 1),),
}
"""Further ones of scans, whose tables and tiles look at the number of states."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to build: every combination of the parts.

    Attributes:
        sizes: sets of sizes; each op takes the axes it has. B and T are data: unless they are
            given, the kernels for few and for many are built.
        targets: ``sm_90`` and the like.
        dtypes: of every tensor but states (fp32).
        single: dtypes of single tensors by name.
        phases: ``prefill``, ``decode``.
        forms: traits of calls; None for plain calls, and decoding with a cache where there is one.
        pages: rows of a page, for paged calls.
        without: optional inputs that calls leave out. Prompts are also built for without states.
        also: flags that are on, and numbers that are given although they follow from sizes.
        dialect: of tiled prefills; None leaves it to the tables of plans.
    """

    sizes: Sequence[Mapping[str, int]]
    targets: Sequence[str] = ("sm_90",)
    dtypes: Sequence[str] = ("bf16",)
    single: Mapping[str, str] = field(default_factory=dict)
    phases: Sequence[str] = ("prefill", "decode")
    forms: Sequence[frozenset[Trait]] | None = None
    pages: Sequence[int] = (16,)
    without: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    dialect: Dialect | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel to build for one target."""

    source: Source
    target: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one kernel: its entry, or why there is none."""

    work: Work
    seconds: float
    compiled: bool
    entry: Entry | None = None
    error: str | None = None


def applies(declaration: Declaration, form: frozenset[Trait]) -> bool:
    """Whether an op can be called that way."""
    lifetimes = {t.lifetime for t in declaration.tensors}
    scans = declaration.trace().scan is not None
    needs = {
        Trait.CACHE: Lifetime.CACHE in lifetimes,
        Trait.PAGED: Lifetime.CACHE in lifetimes and Trait.CACHE not in form,
        Trait.POOL: bool(lifetimes & {Lifetime.STATE, Lifetime.WINDOW}),
        Trait.LSE: not scans,
        Trait.PACKED: True,
    }
    return all(needs[trait] for trait in form)


def plan_bundle(declarations: Sequence[Declaration], request: Request) -> list[Work]:
    """The kernels of a request, each once.

    Raises:
        ArgumentError: an axis or a form that none of the ops has.
        UnknownSizeError: an axis that kernels compile in has no size.
        RefusedError: an op has no kernel; the message says why.
        ToolchainError: a target that is none.
    """
    for target in request.targets:
        capability_of(target)
    check_request(declarations, request)
    found: dict[str, Work] = {}
    for declaration in declarations:
        for sample in samples_of(declaration, request):
            call = sample_call(declaration, sample)
            for target in request.targets:
                for source in _kernels(call, sample.phase, target, request.dialect):
                    found.setdefault(key_of(source, target).digest, Work(source, target))
    return list(found.values())


def _kernels(call: Call, phase: str, target: str, dialect: Dialect | None) -> list[Source]:
    """A call's kernels; of scans also those that the tables leave to Triton at other sizes.

    The number of heads is data there, so a bundle serves every number.
    """
    found = long_sources(call, phase, target, dialect=dialect)
    if dialect is not None or call.program.scan is None:
        return found
    if all(s.plan.dialect is Dialect.TRITON for s in found):
        return found
    with suppress(RefusedError):
        found += long_sources(call, phase, target, dialect=Dialect.TRITON)
    return found


def check_request(declarations: Sequence[Declaration], request: Request) -> None:
    """Refuse what fits none of the ops.

    Raises:
        ArgumentError: an axis, an input or a form that none of them has.
    """
    known = {"B", "T", "S"} | {a for d in declarations for a in _axes(d)}
    unknown = sorted({a for sizes in request.sizes for a in sizes} - known)
    if unknown:
        raise ArgumentError(
            "none of the ops has such an axis",
            expected=" ".join(sorted(known)),
            found=" ".join(unknown),
        )
    optional = {t.name for d in declarations for t in d.tensors if t.optional}
    if needed := sorted((request.without | request.also) - optional):
        raise ArgumentError("not an optional input of any of the ops", found=" ".join(needed))
    for form in request.forms or ():
        if not any(applies(d, form) for d in declarations):
            raise ArgumentError(
                "none of the ops can be called so", found="+".join(sorted(t.value for t in form))
            )


def _axes(declaration: Declaration) -> set[str]:
    return {a for t in declaration.tensors for a in t.pattern.axes}


def _forms(declaration: Declaration, phase: str, request: Request) -> Iterable[frozenset[Trait]]:
    if request.forms is not None:
        return [f for f in request.forms if applies(declaration, f)]
    cached = frozenset({Trait.CACHE})
    plain: list[frozenset[Trait]] = [frozenset()]
    return [*plain, cached] if phase == "decode" and applies(declaration, cached) else plain


def samples_of(declaration: Declaration, request: Request) -> Iterator[Sample]:
    """The kinds of calls of an op that a request names."""
    own = _axes(declaration) | {"B", "T", "S"}
    names = {t.name for t in declaration.tensors}
    single = {n: d for n, d in request.single.items() if n in names}
    for phase, dtype, sizes in product(request.phases, request.dtypes, request.sizes):
        kept = {a: n for a, n in sizes.items() if a in own}
        usual = USUAL[phase] + (STATES[phase] if declaration.trace().scan else ())
        for form, (batch, tokens) in product(_forms(declaration, phase, request), usual):
            base = Sample({"B": batch, "T": tokens, **kept}, phase, dtype, single, form)
            pages = request.pages if Trait.PAGED in form else request.pages[:1]
            for page, given in product(pages, _given(declaration, phase, form, request)):
                yield replace(base, page=page, given=given)


def _given(
    declaration: Declaration, phase: str, form: frozenset[Trait], request: Request
) -> list[frozenset[str]]:
    """Inputs that usual calls give: all that are wanted, and for a fresh prompt no state."""
    given = (t.name for t in declaration.tensors if t.usual or t.name in request.also)
    wanted = frozenset(given) - request.without
    held = (Lifetime.STATE, Lifetime.WINDOW)
    fresh = wanted - {t.name for t in declaration.tensors if t.optional and t.lifetime in held}
    both = phase == "prefill" and Trait.POOL not in form and fresh != wanted
    return [wanted, fresh] if both else [wanted]


def build_bundle(
    work: Iterable[Work],
    folder: Path,
    done: Callable[[Outcome], None] = lambda _: None,
    jobs: int = 1,
) -> list[Outcome]:
    """Compile what a folder lacks.

    Args:
        work: the kernels.
        folder: the bundle; made if it is not there.
        done: called after each kernel.
        jobs: processes that compile; 1 compiles in this one, 0 takes what the kernels are worth.

    Returns:
        What became of each; a kernel that does not compile stops none of the others.
    """
    store = Store(folder)
    each = {i: (item, folder) for i, item in enumerate(work)}
    keys = [key_of(item.source, item.target) for item, _ in each.values()] if not jobs else []
    jobs = jobs or jobs_for(sum(store.find(key) is None for key in keys))
    found: dict[int, Outcome] = {}
    for i, result in in_processes(_build, each, jobs):
        found[i] = result()
        done(found[i])
    return [found[i] for i in each]


def _build(given: tuple[Work, Path]) -> Outcome:
    item, folder = given
    before, start = compilations(), time.perf_counter()
    entry = error = None
    try:
        entry = build_artifact(item.source, item.target, Store(folder), measure=True)
    except AttnccError as failed:
        error = str(failed)
    except Exception as failed:  # whatever a compiler raises is a finding about this kernel
        error = f"{type(failed).__name__}: {failed}"
    return Outcome(item, time.perf_counter() - start, compilations() > before, entry, error)
