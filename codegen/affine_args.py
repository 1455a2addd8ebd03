"""Parameters of the chunk kernels that no tensor of the program stands behind."""

from __future__ import annotations

from collections.abc import Iterator

from attncc.codegen.forms import AffineForm
from attncc.codegen.plan import Arg, ScalarArg, TensorArg
from attncc.codegen.plan_scan import flat_arg

CUT: tuple[Arg, ...] = (ScalarArg("segments", "i32"), ScalarArg("ahead", "i32"))
"""Into how many segments a sequence is cut, and how much of it is ahead of them, in 1024ths."""


def place_args(table: str, *, packed: bool) -> list[Arg]:
    """Where sequences lie, and the chunks of packed ones: the table of that name says it."""
    if packed:
        return [flat_arg("cu_seqlens", "i32"), flat_arg(table, "i32")]
    return [ScalarArg("tokens_given", "i32"), ScalarArg("chunks_each", "i32")]


def summary_args(form: AffineForm, *, solve: bool, written: bool) -> Iterator[TensorArg]:
    """The (A, B) of the segments, A apart where it is a number."""
    yield flat_arg("summaries", "fp32", written=written)
    if form.decays and not solve:
        yield flat_arg("kept", "fp32", written=written)
