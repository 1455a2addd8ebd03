"""Self-checks: compiled kernels held to the reference once per artifact and model of GPU.

An artifact is checked when it is first loaded and its toolchain is known to have miscompiled
kernels of its kind (:func:`suspicion`): a small call of the same kind as the one that needs it
(:mod:`attncc.runtime.trial`) runs before that one is launched. The result is a file beside the
manifest, ``verified.<gpu>.json``, of a bundle's entry in the writable store; later processes only
read it. ``attncc verify`` checks what it is asked to, whatever built it. While a CUDA graph is
captured nothing is checked, and nothing on the path of a call that has run before.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attncc.codegen.forms import Analysis
from attncc.codegen.plan import KernelPlan, Spec
from attncc.codegen.plan_scan import ScanPlan
from attncc.codegen.plan_softmax import TiledPlan
from attncc.dsl.errors import MiscompiledError
from attncc.dsl.graph import walk
from attncc.dsl.ir import Fn, Map
from attncc.runtime import arrivals
from attncc.runtime.call import Call
from attncc.runtime.entry import Entry, write_file
from attncc.runtime.key import key_of
from attncc.runtime.store import Store, current, set_aside

if TYPE_CHECKING:
    from attncc.runtime.trial import Finding

SEEDS = (0, 1)
"""A kernel is wrong if it is on each of these draws: one may sit at the edge of the tolerance."""
CUT = 2
"""Ranges or segments of a trial of the kernels that only cut sequences have."""
_CARRYING = ("state", "summary", "step", "running", "running_local")
_SELECTING = ("triton/select_score.py.jinja", "triton/select_fold.py.jinja")
"""Tiles of products beside those of the softmax family, without an import of their plans."""
_CUT_PHASES = ("split", "merge", "summary", "start", "local")
VERIFIED = ".verified"


class SelfCheckWarning(RuntimeWarning):
    """A kernel that should have been checked and could not be."""


@dataclass(frozen=True, slots=True)
class KindOfCall:
    """What is needed to make another call of the same kind."""

    call: Call
    analysis: Analysis
    spec: Spec
    phase: str


@dataclass(slots=True)
class _Running:
    """A check under way: the entries that it has loaded."""

    entries: list[tuple[Entry, KernelPlan]] = field(default_factory=list)


_KIND: ContextVar[KindOfCall | None] = ContextVar("attncc_kind", default=None)
_RUNNING: ContextVar[_Running | None] = ContextVar("attncc_check", default=None)
_TRIED: ContextVar[KernelPlan | None] = ContextVar("attncc_tried", default=None)


@contextmanager
def running(call: Call, analysis: Analysis, spec: Spec, phase: str) -> Iterator[None]:
    """While a call's kernels are launched: what a check of them would have to run."""
    token = _KIND.set(KindOfCall(call, analysis, spec, phase))
    try:
        yield
    finally:
        _KIND.reset(token)


def under_way() -> bool:
    """Whether this is the trial of a check, which launches what is not trusted yet."""
    return _RUNNING.get() is not None


def checked() -> KernelPlan | None:
    """The plan of the kernel that this trial is about; None where there is no such trial."""
    tried = _TRIED.get()
    if tried is not None:
        return tried
    check = _RUNNING.get()
    return check.entries[0][1] if check is not None and check.entries else None


@contextmanager
def trying(plan: KernelPlan | None) -> Iterator[None]:
    """Within this, calls are trials of a kernel that small calls do not take; None for any."""
    token = _TRIED.set(plan)
    try:
        yield
    finally:
        _TRIED.reset(token)


# --- what is checked unasked ---------------------------------------------------------------------


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def suspicion(entry: Entry, plan: KernelPlan) -> str | None:
    """Why an artifact is not trusted unseen, or None.

    Triton 3.4 to 3.7.0 miscompiles gated kernels on Hopper (flash-linear-attention issue 640).
    The assembler of CUDA 12.8 miscompiled a tile of the softmax family, so tiles of a selection, of
    its scores and of the rows that it picks, are not trusted either. Of the kernels that work on
    one call together the one that carries the state asks for the check, which runs them all.
    """
    versions = entry.manifest.versions
    triton = _version(versions.get("triton", ""))
    carries = isinstance(plan, ScanPlan) and plan.phase in _CARRYING
    if carries and entry.manifest.family.startswith("sm_90"):
        gated = any(isinstance(n, Map) and n.fn is Fn.EXP for n in walk(*plan.program.roots))
        if gated and (3, 4) <= triton < (3, 7, 1):
            return f"Triton {versions['triton']} miscompiles gated kernels on Hopper"
    tiles = isinstance(plan, TiledPlan) or plan.template in _SELECTING
    if tiles and _version(versions.get("ptxas", ""))[:2] == (12, 8):
        return f"ptxas {versions['ptxas']} miscompiled a softmax tile"
    return None


def check_first(entry: Entry, plan: KernelPlan, device: int) -> None:
    """Check a freshly loaded artifact if it has to be, before its first launch.

    Args:
        entry: what was loaded.
        plan: its plan.
        device: index of the CUDA device.

    Raises:
        MiscompiledError: it gives wrong answers, now or in an earlier process; it is set aside.
    """
    check = _RUNNING.get()
    if check is not None:
        check.entries.append((entry, plan))
        return
    kind = _KIND.get()
    if kind is None or suspicion(entry, plan) is None or torch.cuda.is_current_stream_capturing():
        return
    gpu = torch.cuda.get_device_name(device)
    known = read_record(entry, gpu)
    if known is not None and known["right"]:
        return
    if known is not None:
        raise _miscompiled([(entry, plan)], str(known["why"]))
    # In a context of its own: nothing of it is recorded as part of the user's call.
    Context().run(_check, kind, entry, plan, gpu)


def _check(kind: KindOfCall, entry: Entry, plan: KernelPlan, gpu: str) -> None:
    from attncc.runtime.trial import compare, trial_call, trial_spec

    arrivals.forget()  # the call that waits has counters that no trial touches
    check = _Running([(entry, plan)])
    _RUNNING.set(check)
    parts = CUT if any(p in plan.phase for p in _CUT_PHASES) else None
    why = ""
    for seed in SEEDS:
        try:
            call = trial_call(kind.call, kind.call.device, seed=seed)
            found = compare(call, trial_spec(kind.call, kind.spec), kind.phase, parts)
        except MiscompiledError:
            raise
        except Exception as error:
            arrivals.forget()
            text = f"{plan.kernel} was not checked: {type(error).__name__}: {error}"
            warnings.warn(SelfCheckWarning(text), stacklevel=2)
            return
        why = wrong(found)
        if not why:
            break
    if why:
        check.entries += _others(kind, check.entries)
    settle(check.entries, gpu, why)


def _others(
    kind: KindOfCall, held: Sequence[tuple[Entry, KernelPlan]]
) -> list[tuple[Entry, KernelPlan]]:
    """The store's other kernels of the same kind of call: any of them may be the wrong one."""
    from attncc.runtime.sources import call_sources

    known, target = {p.kernel for _, p in held}, kind.spec.target
    sources = call_sources(kind.call, kind.phase, spec=kind.spec)
    found = [(current().find(key_of(s, target)), s) for s in sources if s.entry not in known]
    return [(entry, s.plan) for entry, s in found if entry is not None]


def wrong(found: Iterable[Finding]) -> str:
    """What is wrong among findings, on one line; empty where all is right."""
    return "; ".join(
        f"{f.output} errs by {f.judged.error:.2e}, allowed {f.judged.budget:.2e}"
        for f in found
        if not f.judged.right
    )


def settle(entries: Sequence[tuple[Entry, KernelPlan]], gpu: str, why: str) -> None:
    """Record a check's result with each entry that took part.

    Args:
        entries: them and their plans.
        gpu: name of the device.
        why: what is wrong; empty if nothing is.

    Raises:
        MiscompiledError: something is wrong; the entries that are not a bundle's are set aside.
    """
    for entry, _ in entries:
        write_record(entry, gpu, why)
    if not why:
        return
    arrivals.forget()  # a wrong kernel may have left them other than zero
    for entry, _ in entries:
        if not entry.bundled:
            with suppress(OSError):
                set_aside(entry.folder)
    raise _miscompiled(entries, why)


def _miscompiled(entries: Sequence[tuple[Entry, KernelPlan]], why: str) -> MiscompiledError:
    first, plan = entries[0]
    return MiscompiledError(
        tuple(dict.fromkeys(e.manifest.entry for e, _ in entries)),
        plans=tuple(dict.fromkeys(p.chosen for _, p in entries)),
        versions={**first.manifest.versions, "torch": torch.__version__},
        why=why,
        op=plan.op,
        help="another compiler, or backend='torch', gives the right answer; `attncc verify` "
        "checks again",
    )


# --- records -------------------------------------------------------------------------------------


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def record_path(entry: Entry, gpu: str, store: Store | None = None) -> Path:
    """Where a check's result lies: beside the manifest, or (bundles are only read) in the store."""
    name = f"verified.{_slug(gpu)}.json"
    if not entry.bundled:
        return entry.folder / name
    return (store or current()).base / VERIFIED / entry.folder.name / name


def read_record(entry: Entry, gpu: str) -> dict[str, object] | None:
    """The result of an earlier check of this very artifact, or None."""
    try:
        found = json.loads(record_path(entry, gpu).read_text(encoding="utf-8"))
        same = found["artifact"] == entry.manifest.files[entry.manifest.artifact]
        return {"right": found["right"] is True, "why": str(found["why"])} if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(entry: Entry, gpu: str, why: str) -> None:
    """Record a result; the rename is atomic. What cannot be written is checked again next time."""
    document = {
        "artifact": entry.manifest.files[entry.manifest.artifact],
        "gpu": gpu,
        "right": not why,
        "why": why,
        "versions": {**entry.manifest.versions, "torch": torch.__version__},
    }
    path = record_path(entry, gpu)
    made = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, made = tempfile.mkstemp(prefix=f".new-{path.name}.", dir=path.parent)
        os.close(handle)
        write_file(Path(made), (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())
        Path(made).replace(path)
    except OSError as error:
        if made is not None:
            with suppress(OSError):
                Path(made).unlink()
        text = f"the check of {entry.manifest.entry} cannot be recorded: {error}"
        warnings.warn(SelfCheckWarning(text), stacklevel=2)
