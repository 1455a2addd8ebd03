"""Scans in parts: numbers of rows ahead, the scan in chunks, rows behind its read-outs.

What lies between the parts is fp32: what follows may be any function of it, so a rounding to 16
bits could grow beyond the contract's tolerance.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.affine_checks import chunk_refusal
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.passes.split_ahead import split_ahead
from attncc.codegen.passes.split_rows import SplitRows, split_rows
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.dsl.ir import Program
from attncc.dsl.memo import once_a_program

BETWEEN = "fp32"
"""Element type of what the parts leave each other."""


@once_a_program
def rows_behind(program: Program) -> SplitRows | Refusal:
    """A scan in chunks and the rows behind it, or why it is one program."""
    form = _form(program)
    return form if isinstance(form, Refusal) else _whole(split_rows(program, form))


@once_a_program
def numbers_ahead(program: Program) -> SplitRows | Refusal:
    """The same with sums of a row found ahead, or why there are none."""
    form = _form(program)
    if isinstance(form, Refusal):
        return form
    parts = split_ahead(program, form)
    if parts is None:
        return Refusal("no number of a row is a sum", program.loc)
    ahead, core = parts
    held = _form(core)
    if isinstance(held, Refusal):
        return held
    if chunk_refusal(core, held) is None:
        return SplitRows(core, None, (), ahead=ahead)
    found = _whole(split_rows(core, held))
    return found if isinstance(found, Refusal) else replace(found, ahead=ahead)


def _form(program: Program) -> AffineForm | Refusal:
    form = analyse(program).affine if program.scan is not None else None
    return Refusal("no affine state", program.loc) if form is None else form


def _whole(parts: SplitRows | Refusal) -> SplitRows | Refusal:
    if isinstance(parts, SplitRows) and analyse(parts.core).affine is None:
        return Refusal("what is left of the scan has no flat table", parts.core.loc)
    return parts


def core_spec(parts: SplitRows, spec: Spec) -> Spec:
    """What selects the kernels of the scan: the call's, and what lies between the parts."""
    found = _with_between(parts, spec)
    return replace(found, static=tuple(x for x in found.static if x[0] not in parts.spread))


def rows_spec(parts: SplitRows, spec: Spec) -> Spec:
    """What selects a kernel of rows; no choice of it depends on a length or a state."""
    own = replace(
        spec, buckets=(), given_states=frozenset(), pools=frozenset(), token_slots=frozenset(),
        dialect=None, tuned=None,
        chained=spec.chained and dict(spec.buckets).get("tokens") == 1,
    )  # fmt: skip
    return _with_between(parts, own)


def _with_between(parts: SplitRows, spec: Spec) -> Spec:
    """The spec with what lies between: new and dense, so its innermost axis says how it lies."""
    sizes = {**dict(spec.static), **dict(parts.sizes)}
    layouts = {t.name: t.pattern for t in parts.between}
    even = {n for n, p in layouts.items() if sizes.get(p.axes[-1], 1) % 16 == 0}
    dtypes = {**dict(spec.dtypes), **dict.fromkeys(layouts, BETWEEN)}
    return replace(
        spec, dtypes=tuple(sorted(dtypes.items())), static=tuple(sorted(sizes.items())),
        aligned=spec.aligned | even,
    )  # fmt: skip
