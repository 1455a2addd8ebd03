"""What the compiler found in a declaration, as text."""

from __future__ import annotations

from attncc.codegen.affine_checks import chunk_refusal
from attncc.codegen.forms import (
    AcrossForm,
    AffineForm,
    Analysis,
    Carry,
    DiagonalForm,
    FoldKind,
    MaskForm,
    Refusal,
    Selection,
    SoftmaxFold,
    WindowForm,
)
from attncc.codegen.passes.split_rows import SplitRows
from attncc.codegen.pipeline import analyse
from attncc.codegen.rows_apart import numbers_ahead, rows_behind
from attncc.dsl.graph import axes_of, children
from attncc.dsl.ir import Contract, Fn, Index, Input, Lit, Map, Node, Program, Size, Softmax
from attncc.dsl.text import INFIX, program_text


def expression(node: Node | None) -> str:  # noqa: C901 - one arm a node kind
    """A node as a formula."""
    match node:
        case None:
            return "-"
        case Input(name=name):
            return name
        case Lit(value=value):
            return f"{value:g}" if isinstance(value, float) else str(value)
        case Size(axis=axis):
            return f"|{axis}|"
        case Index(axis=axis):
            return axis.lower()
        case Map(fn=Fn.NEG, args=(a,)):
            return f"-{_atom(a)}"
        case Map(fn=fn, args=args) if fn in INFIX:
            return f" {INFIX[fn]} ".join(_atom(a) for a in args)
        case Map(fn=fn, args=args):
            return f"{fn.value}({', '.join(map(expression, args))})"
        case Contract(args=args, over=over):
            return f"sum_{','.join(over)}({' * '.join(_atom(a) for a in args)})"
        case Softmax(score=score, over=over):
            return f"softmax_{over}({expression(score)})"
        case _:
            name = type(node).__name__.lower()
            return f"{name}({', '.join(expression(c) for c in children(node))})"


def _atom(node: Node) -> str:
    text = expression(node)
    infix = isinstance(node, Map) and node.fn in INFIX
    return f"({text})" if infix else text


def explain_program(program: Program, analysis: Analysis) -> str:
    """Canonical text, then the fold with its table, then what was refused and why."""
    lines = [program_text(program).rstrip(), ""]
    if analysis.softmax is not None:
        lines += _folds(analysis.softmax.folds)
    if analysis.selected is not None:
        lines += _selection(analysis.selected.selection)
        lines += _folds(analysis.selected.folds, analysis.selected.selection.node.axis)
    if analysis.carries is not None:
        for form in analysis.carries.forms:
            lines += _carry(form)
        lines += [f"  output: {expression(o)}" for o in analysis.carries.outputs]
    if analysis.affine is not None:
        lines += _prefill(program, analysis.affine)
    if analysis.across is not None:
        lines += _across(analysis.across)
    if analysis.pointwise:
        lines.append("no fold: rows that need nothing of each other")
        lines += [f"  output: {expression(o.value)}" for o in program.outputs]
    lines += [f"refused: {r}" for r in analysis.refusals]
    return "\n".join(lines) + "\n"


def _prefill(program: Program, form: AffineForm) -> list[str]:
    """What keeps a prompt from being all of it in chunks, and what becomes of it then."""
    refused, ahead = chunk_refusal(program, form), numbers_ahead(program)
    lines = []
    if isinstance(ahead, SplitRows) and refused is None:
        lines.append("  what Gluon's kernels of chunks take as inputs:")
        lines += [f"    {o.name} = {expression(o.value)}" for p in ahead.ahead for o in p.outputs]
    if refused is None:
        return lines
    parts = rows_behind(program)
    parts = ahead if isinstance(parts, Refusal) or isinstance(ahead, SplitRows) else parts
    if isinstance(parts, Refusal):
        return [f"  prompts are stepped: {refused}"]
    lines = [f"  prompts in parts: {refused}"]
    lines += [
        f"    ahead: {o.name} = {expression(o.value)}" for p in parts.ahead for o in p.outputs
    ]
    held = analyse(parts.core).affine
    for out, value in zip(parts.core.outputs, held.outputs if held else (), strict=True):
        lines.append(f"    chunks: {out.name} [{out.pattern}] = {expression(value)}")
    rows = () if parts.rows is None else parts.rows.outputs
    return lines + [f"    rows: {o.name} = {expression(o.value)}" for o in rows]


def _selection(own: Selection) -> list[str]:
    node = own.node
    lines = [
        f"selection: {node.k} of {node.over}, carry (visible, score, position), commutes",
        f"  opens           {node.axis}, -1 where there are fewer; equal scores by position",
        f"  added up first  {' '.join(own.heads) or 'nothing'}",
        f"  score           {expression(node.score)}",
    ]
    return [*lines, *_visible(own.mask)]


def _visible(mask: MaskForm | None) -> list[str]:
    if mask is None:
        return ["  visible         everything"]
    lines = []
    for clause in mask.clauses:
        bands = [f"{b.t}*t + {b.s}*s + {expression(b.offset)} >= 0" for b in clause.bands]
        rest = [expression(r) for r in clause.residual]
        lines.append(f"  visible where   {' and '.join(bands + rest) or 'true'}")
    return lines


def _folds(folds: tuple[SoftmaxFold, ...], picked: str = "") -> list[str]:
    lines = []
    for fold in folds:
        over = f"{picked}, rows of {fold.over}" if picked else fold.over
        if fold.kind is FoldKind.SUM:
            lines.append(f"fold: plain sum over {fold.over}, carry u, commutes")
        else:
            lines.append(f"fold: softmax-weighted sum over {over}, carry (m, l, u), commutes")
        if fold.beside:
            others = " ".join(b.over for b in fold.beside)
            lines.append(f"  shares its sum with {others}")
        lines.append(f"  programs over   {' '.join(fold.batch_axes)}")
        lines.append(f"  rows of a tile  {' '.join(fold.row_axes)}")
        lines.append(f"  value axes      {' '.join(fold.value_axes)}")
        lines.append(f"  score           {expression(fold.score)}")
        lines += _visible(fold.mask)
    return lines


def _carry(form: Carry) -> list[str]:
    match form:
        case AffineForm():
            return _affine(form)
        case DiagonalForm(state=name, decay=decay, add=add):
            kept = name if decay is None else f"{_atom(decay)} * {name}"
            more = "" if add is None else f" + {_atom(add)}"
            return [
                f"fold: element-wise state {name}, carry (a, b) with s' = a s + b, ordered",
                f"  {name} = {kept}{more}",
            ]
        case WindowForm(state=name, push=push):
            return [
                f"fold: window {name} along {push.over}, carry the last rows, ordered",
                f"  row: {expression(push.row)}",
            ]


def _across(across: AcrossForm) -> list[str]:
    """A state that outputs read across the axis of its updates."""
    lines, along = _affine(across.form), f"along {across.over}"
    for read in across.reads:
        lines.append(f"  {read.name} = {expression(read.vector)} . S {along}   [behind all rows]")
    return lines + [f"  output: {expression(o)}" for o in across.outputs]


def _affine(form: AffineForm) -> list[str]:
    lines = [
        f"fold: affine state {form.state}, carry (A, B) with S' = A S + B, ordered",
        f"  active  {' '.join(form.active)}   passive {' '.join(form.passive)}"
        f"   system {' '.join(form.system)}",
    ]
    for i, decay in enumerate(form.decays):
        shape = " per " + " ".join(form.active) if set(form.active) & set(axes_of(decay)) else ""
        lines.append(f"  decay {i}: S *= {expression(decay)}{shape}")
    for i, row in enumerate(form.rows):
        read = ""
        if row.b is not None:
            coef = "1" if row.coef is None else expression(row.coef)
            read = f" + {coef} * ({expression(row.b)} . S)"
        where = (
            f"read slot {row.read_slot}, write slot {row.write_slot}, sees {row.rows_visible} rows"
        )
        lines.append(
            f"  row {i}: S += {expression(row.a)} (x) ({expression(row.const)}{read})   [{where}]"
        )
    for read_out in form.reads:
        lines.append(
            f"  {read_out.name} = {expression(read_out.vector)} . S   [slot {read_out.slot}]"
        )
    return lines
