"""What the commands of ``attncc`` share: exit codes, options, JSON and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attncc.codegen.plan import Dialect
from attncc.runtime.bundle import Outcome, Request, Work, build_bundle
from attncc.runtime.cli_arguments import (
    UsageError,
    dtypes_of,
    forms_of,
    listed,
    phases_of,
    sizes_of,
)

OK, FAILED, USAGE, NO_GPU = 0, 1, 2, 3
"""Done; a finding or a failure; a wrong command line; it needs a GPU (of another kind)."""

OpName = Annotated[str, typer.Argument(help="A library op by name, or module:attribute.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Sizes = Annotated[list[str] | None, typer.Option(help="Head dims and groups: D=128,E=128,G=4.")]
Targets = Annotated[list[str] | None, typer.Option(help="GPUs: sm_90,sm_100.")]
Dtypes = Annotated[list[str] | None, typer.Option(help="bf16,fp16,fp32; of one tensor: g=fp32.")]
Phases = Annotated[list[str] | None, typer.Option(help="prefill,decode.")]
Forms = Annotated[
    list[str] | None,
    typer.Option(help="Calls: plain,packed,cache,paged,pool,lse, or several at once by +."),
]
Pages = Annotated[list[str] | None, typer.Option(help="Rows of a page, for paged calls.")]
Dialects = Annotated[
    Dialect | None, typer.Option("--dialect", help="Language of tiled prefills, if not the usual.")
]
Without = Annotated[list[str] | None, typer.Option(help="Optional inputs that are not given.")]
Jobs = Annotated[
    int, typer.Option(min=0, help="Processes that compile; 0: what the kernels are worth.")
]
With = Annotated[
    list[str] | None, typer.Option("--with", help="Flags that are on; a scale that is given.")
]


def request_of(
    sizes: list[str] | None,
    target: list[str] | None,
    dtype: list[str] | None,
    phase: list[str] | None,
    form: list[str] | None,
    page: list[str] | None,
    without: list[str] | None,
    dialect: Dialect | None = None,
    also: list[str] | None = None,
) -> Request:
    """The options of a command as kinds of calls.

    Raises:
        UsageError: a value that cannot be read.
    """
    common, single = dtypes_of(dtype or [])
    rows = listed(page or ["16"])
    if not all(r.isdigit() and int(r) > 0 for r in rows):
        raise UsageError(f"--page takes numbers of rows; found {','.join(rows)}")
    return Request(
        sizes=[sizes_of(s) for s in sizes or [""]],
        targets=listed(target or ["sm_90"]),
        dtypes=common,
        single=single,
        phases=phases_of(phase or ["prefill,decode"]),
        forms=forms_of(form or []),
        pages=[int(r) for r in rows],
        without=frozenset(listed(without or [])),
        also=frozenset(listed(also or [])),
        dialect=dialect,
    )


def complain(text: str, code: int) -> int:
    """An error on standard error; returns the exit code."""
    print(f"attncc: {text}", file=sys.stderr)
    return code


def emit(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, indent=1))


def plain(text: str) -> None:
    """A text on standard output, with one newline at its end."""
    print(text, end="" if text.endswith("\n") else "\n")


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; where that is no terminal, a line for each thing that is done.

    Args:
        what: shown at first.
        total: number of things; None where it is not known.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden
    ) as bar:
        task = bar.add_task(what, total=total)

        def done(text: str) -> None:
            if hidden and text:
                console.print(text, highlight=False, markup=False, soft_wrap=True)
            bar.update(task, advance=1, description=text or what)

        yield done


def compile_work(work: list[Work], folder: Path, jobs: int) -> list[Outcome]:
    """Compile what a folder lacks, with progress.

    Args:
        work: the kernels.
        folder: a root of the store.
        jobs: processes; 0 takes what the kernels are worth.
    """
    with progress("compiling", len(work)) as told:

        def done(outcome: Outcome) -> None:
            name = f"{outcome.work.source.entry} {outcome.work.target}"
            told(f"{name} {outcome.seconds:.1f} s" if outcome.compiled else "")

        return build_bundle(work, folder, done, jobs)
