"""The ``attncc`` command: looks at ops, builds and checks kernels, looks after their store."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attncc.dsl.errors import AttnccError, CallError, RefusedError
from attncc.runtime import commands_gpu, commands_ledger
from attncc.runtime.backends import sources
from attncc.runtime.bundle import Outcome, plan_bundle
from attncc.runtime.cli_arguments import UsageError, dtypes_of, op_of, phases_of, sizes_of
from attncc.runtime.compile import capability_of
from attncc.runtime.console import (
    FAILED,
    OK,
    USAGE,
    Dialects,
    Dtypes,
    Forms,
    Jobs,
    Json,
    OpName,
    Pages,
    Phases,
    Sizes,
    Targets,
    With,
    Without,
    compile_work,
    complain,
    emit,
    plain,
    request_of,
)
from attncc.runtime.store import current
from attncc.runtime.sweep import list_store, sweep
from attncc.runtime.tuned import copy_tables

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
cache = typer.Typer(no_args_is_help=True, help="The store of compiled kernels.")
app.add_typer(cache, name="cache")
app.command("ledger")(commands_ledger.ledger_command)
app.command("verify")(commands_gpu.verify_command)
app.command("tune")(commands_gpu.tune_command)


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code; errors are one message, without a traceback."""
    try:
        code = app(args=arguments, prog_name="attncc", standalone_mode=False)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        return FAILED
    except (UsageError, CallError) as wrong:
        return complain(str(wrong), USAGE)
    except AttnccError as failed:
        return complain(str(failed), FAILED)
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        error.show()  # type: ignore[attr-defined]  # what the parser says of a wrong command line
        return int(error.exit_code)
    return code if isinstance(code, int) else OK


@app.command()
def show(
    op: OpName,
    graph: Annotated[
        commands_ledger.Drawn | None, typer.Option(help="The dataflow of an op or layer instead.")
    ] = None,
    source: Annotated[
        bool, typer.Option("--source", help="The text of the kernels instead, for these sizes.")
    ] = False,
    sizes: Sizes = None,
    target: str = "sm_90",
    phase: str = "prefill",
    dtype: str = "bf16",
    json: Json = False,
) -> None:
    """Print an op's program text or its kernels, or draw the dataflow of an op or layer."""
    if graph is None and op in commands_ledger.layers():
        graph = commands_ledger.Drawn.TEXT  # a layer has no program of its own
    capability_of(target)
    shown: str | dict[str, str]
    if source:
        kind, shown = "kernels", op_of(op).source(**_compiled_for(sizes, target, phase, dtype))
    elif graph is not None:
        kind, shown = "graph", commands_ledger.drawn(op, graph)
    else:
        kind, shown = "program", op_of(op).text()
    if json:
        emit({"op": op, kind: shown})
    else:
        plain(shown if isinstance(shown, str) else "\n".join(shown.values()))


def _compiled_for(sizes: list[str] | None, target: str, phase: str, dtype: str) -> dict[str, Any]:
    """What kernels are made for, as ``op.source`` takes it."""
    phases_of([phase])
    (name,), _ = dtypes_of([dtype])
    given = sizes_of(",".join(sizes or []))
    return {"sizes": given, "target": target, "phase": phase, "dtype": name}


@app.command()
def explain(
    op: OpName,
    sizes: Sizes = None,
    target: str = "sm_90",
    phase: str = "prefill",
    dtype: str = "bf16",
    json: Json = False,
) -> int:
    """Say what the compiler found in an op; with sizes also its kernels (1: there are none)."""
    chosen = op_of(op)
    capability_of(target)
    options = _compiled_for(sizes, target, phase, dtype) if sizes else {}
    text = chosen.explain(**options)
    kernels: list[str] | None = None
    decided: dict[str, str] = {}
    if sizes:
        try:
            kernels = list(chosen.source(**options))
            found = sources(chosen.declaration, **options)
            decided = {s.entry: s.plan.chosen for s in found}
        except RefusedError:
            kernels = []
    if json:
        emit({"op": op, "text": text, "kernels": kernels, "chosen": decided})
    else:
        plain(text)
    return FAILED if kernels == [] else OK


@app.command()
def build(
    op: Annotated[list[str], typer.Argument(help="Library ops by name, or module:attribute.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the bundle.")],
    sizes: Sizes = None,
    target: Targets = None,
    dtype: Dtypes = None,
    phase: Phases = None,
    form: Forms = None,
    page: Pages = None,
    without: Without = None,
    also: With = None,
    dialect: Dialects = None,
    jobs: Jobs = 0,
    json: Json = False,
) -> int:
    """Compile kernels ahead of time, without a GPU, into a folder that can be carried.

    Each --sizes is a set of its own. Put the folder behind the writable one in the variable that
    names the store. Exit code 1: a kernel did not compile, or an op has none.
    """
    declarations = [op_of(name).declaration for name in dict.fromkeys(op)]
    request = request_of(sizes, target, dtype, phase, form, page, without, dialect, also)
    outcomes = compile_work(plan_bundle(declarations, request), out, jobs)
    copy_tables(out, tuple(request.targets))
    failed = [o for o in outcomes if o.error is not None]
    if json:
        emit({"folder": str(out), "kernels": [_described(o) for o in outcomes]})
    else:
        made = sum(o.compiled and o.error is None for o in outcomes)
        print(f"{out}: {len(outcomes)} kernels, {made} compiled now, {len(failed)} failed")
    for outcome in failed:
        print(
            f"{outcome.work.source.entry} {outcome.work.target}: {outcome.error}", file=sys.stderr
        )
    return FAILED if failed else OK


def _described(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kernel": outcome.work.source.entry, "target": outcome.work.target,
        "compiled": outcome.compiled, "seconds": round(outcome.seconds, 3), "error": outcome.error,
    }  # fmt: skip
    if outcome.entry is not None:
        manifest = outcome.entry.manifest
        found |= {
            "entry": outcome.entry.folder.name, "family": manifest.family,
            "registers": manifest.registers, "spill_bytes": manifest.spill_bytes,
            "shared_bytes": manifest.shared_bytes,
        }  # fmt: skip
    return found


@cache.command("path")
def cache_path(json: Json = False) -> None:
    """Print the folder that is written to, then the bundles beneath it."""
    store = current()
    if json:
        emit({"root": str(store.root), "bundles": [str(b) for b in store.bundles]})
    else:
        for folder in (store.root, *store.bundles):
            print(folder)


@cache.command("ls")
def cache_ls(json: Json = False) -> int:
    """List the entries (1: some are damaged and will not be loaded)."""
    held = list(list_store(current()))
    if json:
        emit([asdict(h) for h in held])
    else:
        table = Table("kernel", "target", "bytes", "state", box=None)
        for h in held:
            state = h.problem or ("current" if h.current else "of another version")
            table.add_row(h.kernel, h.target, str(h.size), state + " (bundle)" * h.bundled)
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    return FAILED if any(h.problem is not None for h in held) else OK


@cache.command("sweep")
def cache_sweep(
    everything: Annotated[bool, typer.Option("--all", help="Good entries too.")] = False,
    json: Json = False,
) -> None:
    """Remove what is damaged, unfinished or of another version; bundles are left alone."""
    removed = sweep(current(), everything=everything)
    if json:
        emit({"removed": removed})
    else:
        print(f"removed {len(removed)}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> int:
    """Measure beside the peers: python -m benchmarks with the same arguments."""
    if not Path("benchmarks/__main__.py").is_file():
        raise UsageError("no benchmarks here: run it in a checkout of the repository")
    return subprocess.run([sys.executable, "-m", "benchmarks", *context.args]).returncode
