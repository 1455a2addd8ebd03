"""Tensors that a call writes: taken from ``out=`` after checks, or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import ArgumentError, SizeError
from attncc.dsl.facts import cascade
from attncc.dsl.graph import walk
from attncc.dsl.ir import Program, Softmax, TopK
from attncc.runtime import checks


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a call: its memory axes, shape and dtype."""

    name: str
    pattern: Pattern
    shape: tuple[int, ...]
    dtype: torch.dtype


def extent(dim: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Number of elements of one memory axis."""
    n = 1
    for axis in dim:
        n *= sizes[axis]
    return n


def shape_of(pattern: Pattern, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a tensor with these memory axes."""
    return tuple(extent(dim, sizes) for dim in pattern.dims)


def given_outputs(program: Program, out: Any) -> dict[str, torch.Tensor]:
    """``out=`` as a mapping by result name.

    Raises:
        ArgumentError: neither a tensor nor a mapping, or a name the op does not return.
    """
    if out is None:
        return {}
    if isinstance(out, torch.Tensor):
        return {program.outputs[0].name: out}
    names = [*program.state_names, *(o.name for o in program.outputs)]
    if not isinstance(out, Mapping):
        raise ArgumentError(
            "out= is a tensor or a mapping by name",
            op=program.name,
            argument="out",
            found=type(out).__name__,
        )
    for name in out:
        if name not in names:
            raise ArgumentError(
                "out= names something the op does not return",
                op=program.name,
                argument=f"out[{name}]",
                expected=", ".join(names),
            )
    return dict(out)


def take(
    op: str,
    result: Result,
    given: torch.Tensor | None,
    device: torch.device,
    others: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """The tensor of a result: the caller's after checks, or a new one."""
    if given is None:
        return torch.empty(result.shape, dtype=result.dtype, device=device)
    label = f"out[{result.name}]"
    checks.rank(op, label, given, result.pattern)
    checks.dense(op, label, given)
    checks.device(op, label, given, device)
    checks.dtype(op, label, given, (result.dtype,))
    for dim, want, have in zip(result.pattern.dims, result.shape, given.shape, strict=True):
        if want != have:
            raise SizeError(
                "the output has another size",
                op=op,
                argument=label,
                axis=" ".join(dim),
                expected=want,
                found=have,
            )
    checks.overlap(op, label, given, others)
    return given


def pick_counts(program: Program) -> dict[str, int]:
    """Sizes of the axes that selections open."""
    return {n.axis: n.k for n in walk(*program.roots) if isinstance(n, TopK)}


def lse_pattern(program: Program, layout: Pattern) -> Pattern:
    """Memory axes of the lse: the output's without the value's.

    Raises:
        ArgumentError: the op has not exactly one softmax and one output.
    """
    from attncc.codegen.passes.associate import typical
    from attncc.codegen.pipeline import analyse  # the whole generator: imported when it is asked

    own = typical(program)
    found = analyse(own)
    form = found.softmax or found.selected
    softmaxes = set() if form is None else {f.weight for f in form.folds}
    sums = {cascade(w) for w in softmaxes if isinstance(w, Softmax)}
    others = [w for w in softmaxes if not isinstance(w, Softmax)]
    if form is None or others or len(sums) != 1 or len(program.outputs) != 1:
        raise ArgumentError(
            "lse is offered for ops with one softmax and one output",
            op=program.name,
            argument="return_lse",
        )
    fold = form.folds[0]
    kept = {*fold.batch_axes, *fold.row_axes}
    if not kept - {"B"} <= set(layout.axes):  # products behind the fold have summed some
        rows = own.outputs[0].pattern
        layout = rows if "B" in layout.axes else rows.without("B")
    dims = (tuple(a for a in dim if a in kept) for dim in layout.dims)
    return Pattern(tuple(d for d in dims if d))
