"""The commands that want a GPU: ``attncc verify`` and ``attncc tune``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from attncc.codegen.plan_table import TableEntry
from attncc.runtime import ops, tune, tune_report, tuned, verify
from attncc.runtime.bundle import check_request, samples_of
from attncc.runtime.cli_arguments import UsageError, op_of
from attncc.runtime.compile import capability_of
from attncc.runtime.console import (
    FAILED,
    NO_GPU,
    OK,
    Dtypes,
    Forms,
    Jobs,
    Json,
    OpName,
    Pages,
    Phases,
    Sizes,
    With,
    Without,
    compile_work,
    complain,
    emit,
    progress,
    request_of,
)
from attncc.runtime.jobs import usual_jobs
from attncc.runtime.kernels import has_gpu
from attncc.runtime.store import current


def verify_command(
    op: Annotated[list[str] | None, typer.Argument(help="Ops; every library op if none.")] = None,
    sizes: Sizes = None,
    dtype: Dtypes = None,
    phase: Phases = None,
    form: Forms = None,
    page: Pages = None,
    without: Without = None,
    also: With = None,
    jobs: Jobs = 0,
    json: Json = False,
) -> int:
    """Hold the kernels of ops to the reference, on the GPU or in Triton's interpreter.

    Exit code 1: an answer is wrong, or a kernel could not be run; 3: nothing could be run without a
    GPU. On a GPU the result is kept with the artifacts, and those that are wrong are set aside.
    """
    declarations = [op_of(name).declaration for name in dict.fromkeys(op or ops.__all__)]
    device = verify.choose_device()
    interpreted = device.type == "cpu"
    if interpreted:
        if dtype and any(d.split("=")[-1] != "fp32" for d in ",".join(dtype).split(",")):
            return complain("Triton's interpreter is wrong for 16 bits: they need a GPU", NO_GPU)
        dtype = ["fp32"]
        print("no GPU: in Triton's interpreter, fp32 only", file=sys.stderr)
    request = request_of(sizes, None, dtype, phase, form, page, without, also=also)
    check_request(declarations, request)
    if not interpreted:
        compile_work(verify.kernels_of(declarations, request, device), current().root, jobs)
    with progress("verifying", None) as done:
        verdicts = verify.verify(declarations, request, device, lambda v: done(_line(v)))
    if json:
        where = "interpreter" if interpreted else torch.cuda.get_device_name(device)
        emit({"where": where, "verdicts": [verify.as_dict(v) for v in verdicts]})
    else:
        _show(verdicts)
    if all(v.right for v in verdicts):
        return OK
    lost = interpreted and all(v.problem is not None for v in verdicts)
    return NO_GPU if lost else FAILED


def _line(v: verify.Verdict) -> str:
    state = "right" if v.right else v.problem or "WRONG"
    return f"{v.op} {v.sample.phase} {v.sample.dtype} {verify.form_of(v.sample)}: {state}"


def _show(verdicts: list[verify.Verdict]) -> None:
    table = Table("call", "kernel", "result", "error", "allowed", "state", box=None)
    for v in verdicts:
        call = f"{v.op} {v.sample.phase} {v.sample.dtype} {verify.form_of(v.sample)}"
        kernels = "\n".join(v.kernels)
        if v.problem is not None:
            table.add_row(call, kernels, "-", "-", "-", f"not run: {v.problem}")
        for f in v.findings:
            state = "right" if f.judged.right else "WRONG"
            errors = f"{f.judged.error:.2e}", f"{f.judged.budget:.2e}"
            table.add_row(call, kernels, f.output, *errors, state)
            call = kernels = ""
    Console(width=None if sys.stdout.isatty() else 200).print(table)


_FAMILIES = {f.value: f for f in tune.TUNED}


def tune_command(
    op: OpName,
    sizes: Sizes = None,
    dtype: Dtypes = None,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    form: Annotated[str, typer.Option(help="The kind of call, such as plain or cache.")] = "plain",
    page: Annotated[int, typer.Option(min=1, help="Rows of a page, for paged calls.")] = 16,
    family: Annotated[str, typer.Option(help="Whose choices: " + ", ".join(_FAMILIES))] = "",
    target: Annotated[str, typer.Option(help="The GPU; the present one's if not given.")] = "",
    jobs: Jobs = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compile, time nothing.")] = False,
    write_table: Annotated[
        bool, typer.Option("--write-table", help="Into codegen/plans of the checkout.")
    ] = False,
    json: Json = False,
) -> int:
    """Try choices of an op's kernels on the GPU and keep the fastest with a right answer.

    Give the sizes that matter, B, T and S among them. The result goes into the store's own table,
    which is looked at before the package's. With --dry-run the candidates are compiled and listed
    with their resources, which needs no GPU. Exit code 3: there is no GPU, or one of another kind.
    """
    target, present = _target_of(target)
    capability_of(target)
    if not dry_run and present != target:
        found = f"this one is {present}" if present else "there is none here"
        return complain(f"tuning for {target} needs such a GPU, {found}; see --dry-run", NO_GPU)
    folder = tuned.committed_folder() if write_table else current().root / tuned.FOLDER
    request = request_of(sizes, [target], dtype, [phase], [form], [str(page)], None)
    declaration = op_of(op).declaration
    check_request([declaration], request)
    if len(request.sizes) != 1 or len(request.dtypes) != 1:
        raise UsageError("tune one set of sizes and one dtype at a time")
    sample = next(samples_of(declaration, request), None)
    if sample is None:
        raise UsageError(f"{declaration.name} cannot be called as {form}")
    usual = {"B": 1} if "B" not in request.sizes[0] else {}
    usual |= {} if "T" in request.sizes[0] or phase == "decode" else {"T": 4096}
    sample = replace(sample, sizes={**sample.sizes, **usual})
    if family and family not in _FAMILIES:
        raise UsageError(f"no family {family}: {', '.join(_FAMILIES)}")
    work = tune.plan_tuning(declaration, sample, target, _FAMILIES.get(family))
    kernels = {s.entry for c in work.candidates for s in c.sources}
    with progress("compiling", len(kernels)) as done:
        work = tune.compile_all(work, current().root, jobs or usual_jobs(), done)
    best = path = None
    if not dry_run:
        device = torch.device("cuda", torch.cuda.current_device())
        with progress("timing", len(work.candidates)) as done:
            work = tune.measure(work, device, lambda c: done(_told(c)))
        best, path = _kept(work, device, folder)
    _report(work, best, path, json=json)
    usable = best is not None if not dry_run else any(c.problem is None for c in work.candidates)
    return OK if usable else FAILED


def _target_of(given: str) -> tuple[str, str]:
    """The target that is meant, and the present GPU's (empty without one)."""
    present = ""
    if has_gpu():
        major, minor = torch.cuda.get_device_capability()
        present = f"sm_{major}{minor}"
    return given or present or "sm_90", present


def _kept(
    work: tune.Tuning, device: torch.device, folder: Path
) -> tuple[TableEntry | None, Path | None]:
    gpu = torch.cuda.get_device_name(device)
    best = tune.ranked(work)
    if not best:
        return None, None
    entry = tune_report.entry_of(work, gpu)
    new = [entry]
    cut = tune.measure_segments(work, best[0][1], device)
    if cut is not None and len(cut[1]) > 1:
        new.append(tune_report.segments_entry(work, *cut, gpu))
    return entry, tuned.write_entries(folder, work.target, tuple(new))


def _told(c: tune.Candidate) -> str:
    result = c.problem or (f"{c.ms:.4f} ms" if c.ms is not None else "not timed")
    return f"{tune_report.text_of(c.choices)}: {result}"


def _report(work: tune.Tuning, best: TableEntry | None, path: Path | None, *, json: bool) -> None:
    if json:
        document = tune_report.as_dict(work)
        document["entry"] = None if best is None else tuned.as_dict(best)
        document["table"] = None if path is None else str(path)
        emit(document)
        return
    table = Table("choices", "registers", "spills", "shared", "ms", "graph", "state", box=None)
    for c in work.candidates:
        costs = (c.registers, c.spill_bytes, c.shared_bytes)
        shown = ["-" if n is None else str(n) for n in costs]
        times = ["-" if t is None else f"{t:.4f}" for t in (c.ms, c.graph_ms)]
        state = c.problem or ("compiled" if c.ms is None else "right")
        table.add_row(tune_report.text_of(c.choices), *shown, *times, state)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if best is not None:
        print(f"{best.id}: written to {path}")
