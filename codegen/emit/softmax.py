"""Prints the pieces of the softmax family's kernels, and renders them.

Tile dimensions: ``m`` query rows, ``n`` keys, ``k`` a dot's contraction, ``e`` value columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attncc.codegen.emit.append import append_code
from attncc.codegen.emit.bounds import Bounds, bounds
from attncc.codegen.emit.scale import fold_constants, gather
from attncc.codegen.emit.softmax_rows import (
    Texts,
    about,
    atom,
    finish,
    grid,
    points,
    printer,
    row_lines,
    section,
    sizes_of,
    spread,
    stream,
)
from attncc.codegen.emit.triton import Place, Printer, Var, constant
from attncc.codegen.forms import Band, Refusal, SoftmaxForm
from attncc.codegen.plan import KernelPlan, Spec
from attncc.codegen.plan_softmax import (
    AppendPlan,
    MergePlan,
    SoftmaxPlans,
    TiledPlan,
    plan_softmax,
)
from attncc.codegen.render import Source, render
from attncc.codegen.softmax_checks import TOKENS
from attncc.codegen.terms import mul
from attncc.dsl.errors import RefusedError
from attncc.dsl.graph import axes_of, children, kind_of
from attncc.dsl.ir import Contract, Input, Kind, Lit, Node, Program

DIALECT = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}


@dataclass(frozen=True, slots=True)
class TiledCode:
    """Printed pieces of the tiled fold.

    Attributes:
        about: the file's docstring.
        grid: axes and sizes, fastest first.
        points: number of points of the grid axes.
        group: rows a token.
        rows: row indices taken apart.
        setup: query tiles, values that do not depend on keys, addresses of the first keys.
        bounds: ranges of keys, as text.
        limits: lines that ``bounds`` needs.
        keys: key tiles of a block.
        scores: dots and the score ``x`` [m, n].
        mask: ``visible`` [m, n].
        scale: factor from ``x`` to base-2 logits where it is a positive constant, else empty.
        values: the value tile of a block.
        dot_options: further arguments of the second dot.
        finish: what follows the loops.
    """

    about: Texts
    grid: tuple[tuple[str, str], ...]
    points: str
    group: str
    rows: Texts
    setup: Texts
    bounds: Bounds
    limits: Texts
    keys: Texts
    scores: Texts
    mask: Texts
    scale: str
    values: Texts
    dot_options: str
    finish: Texts


@dataclass(frozen=True, slots=True)
class MergeCode:
    """Printed pieces of the merge: as in :class:`TiledCode`, for one row."""

    about: Texts
    grid: tuple[tuple[str, str], ...]
    rows_apart: Texts
    columns: Texts
    columns_valid: str
    finish: Texts


def source(plan: KernelPlan) -> Source:
    """The generated file of a plan of this family."""
    if isinstance(plan, TiledPlan):
        return render(plan, tiled_code(plan))
    if isinstance(plan, MergePlan):
        return render(plan, merge_code(plan))
    assert isinstance(plan, AppendPlan)
    return render(plan, append_code(plan))


def softmax_sources(program: Program, form: SoftmaxForm, spec: Spec, phase: str) -> list[Source]:
    """Every kernel that a call of this kind may launch, in launch order.

    Raises:
        RefusedError: the family does not cover the program; the message says why and where.
    """
    plans = plan_softmax(program, form, spec, phase)
    if isinstance(plans, Refusal):
        raise RefusedError(plans.reason, op=program.name, loc=plans.loc)
    assert isinstance(plans, SoftmaxPlans)
    found = (plans.append, plans.whole, plans.split, plans.merge)
    return [source(plan) for plan in found if plan is not None]


# --- the tiled fold --------------------------------------------------------------------------


def tiled_code(plan: TiledPlan) -> TiledCode:
    """Print the tiled fold."""
    p = printer(plan, ("m",))
    fold, softmax = plan.fold, plan.fold.softmax
    setup = section(p)
    places = _queries(p, plan)
    folded = fold_constants(softmax.score, p.sizes)
    _hoist(p, fold.over, softmax.score if folded is None else folded, softmax.where)
    x, scale = _scaled(p, plan, folded)
    limits = bounds(fold.mask, lambda band: _offset(p, band))
    streams = _streams(p, plan, places)
    p.known |= {d.node: Var(f"s{i}", ("m", "n")) for i, d in enumerate(fold.dots)}
    hoisted = dict(p.known)
    keys, values = _loads(p, plan, places, streams)
    scores = section(p)
    for i in range(len(fold.dots)):
        scores.append(f"s{i} = tl.dot(query{i}, tl.trans(keys{i}){_options(plan.operand[i])})")
    value = p.emit(x)
    scores += _tile_of(p, plan, value, "" if scale else " * scale", kind_of(x) is Kind.INT)
    mask = section(p)
    mask.append(f"visible = {_mask(p, softmax.where)}")
    p.known = hoisted
    return TiledCode(
        about(plan), grid(plan), points(plan), _group(plan), row_lines(plan), tuple(setup), limits,
        _limit_lines(plan, limits), tuple(keys), tuple(scores), tuple(mask), scale, tuple(values),
        _options(plan.value_type), _partial(plan) if plan.split else finish(p, plan, ("m",)),
    )  # fmt: skip


def _options(dtype: str) -> str:
    return ', input_precision="tf32x3"' if dtype == "fp32" else ""


def _group(plan: TiledPlan) -> str:
    sizes = sizes_of(plan)
    return atom(" * ".join(sizes[a] for a in plan.tile_axes if a != TOKENS) or "1")


def _queries(p: Printer, plan: TiledPlan) -> list[dict[str, Place]]:
    """Load each dot's query tile; gives back where the contracted axes are."""
    found = []
    for i, dot in enumerate(plan.fold.dots):
        lines, places = spread(f"d{i}", "k", dot.over, p.sizes, plan.widths_k[i], plan.blocks_k[i])
        p.lines += lines
        text = _operand(p.child(**places), dot.query, ("m", "k"), plan.operand[i],
                        (plan.block_m, plan.blocks_k[i]))  # fmt: skip
        p.lines.append(f"query{i} = {text}  # [m, k]")
        found.append(places)
    lines, places = spread("e", "e", plan.fold.value_axes, p.sizes, plan.width_e, plan.block_e)
    p.lines += lines
    return [*found, places]


def _operand(
    p: Printer, nodes: tuple[Node, ...], dims: tuple[str, ...], dtype: str, shape: tuple[int, int]
) -> str:
    """An operand of a dot in its storage dtype; a plain input is not touched on its way."""
    if len(nodes) == 1 and isinstance(nodes[0], Input):
        p.tell(nodes[0])
        arg = p.tensors[nodes[0].name]
        var, same = p.load(arg, raw=True), arg.dtype == dtype
    else:
        var, same = p.emit(mul(*nodes)), False
    text = p.lift(var, dims)
    if var.dims != dims:
        text = f"tl.broadcast_to({text}, [{shape[0]}, {shape[1]}])"
    return text if same else f"({text}).to({DIALECT[dtype]})"


def _hoist(p: Printer, over: str, *roots: Node | None) -> None:
    """Emit the largest parts of score and mask that do not depend on keys."""
    stack = [r for r in reversed(roots) if r is not None]
    while stack:
        node = stack.pop()
        if isinstance(node, Contract) or constant(node, p.sizes) is not None:
            continue
        if over in axes_of(node):
            stack.extend(reversed(children(node)))
        else:
            p.emit(node)


def _streams(
    p: Printer, plan: TiledPlan, places: list[dict[str, Place]]
) -> dict[str, tuple[str, ...]]:
    """Addresses of plain key and value tiles, so that a block costs one scalar step each."""
    found = {}
    fold = plan.fold
    for i, dot in enumerate(fold.dots):
        if len(dot.key) == 1 and isinstance(dot.key[0], Input):
            cast = plan.operand[i]
            found[f"keys{i}"] = stream(p, plan, dot.key[0], f"keys{i}", places[i], DIALECT[cast])
    if plan.shared < 0 and len(fold.value) == 1 and isinstance(fold.value[0], Input):
        cast = DIALECT[plan.value_type]
        found["values"] = stream(p, plan, fold.value[0], "values", places[-1], cast)
    return found


def _loads(
    p: Printer, plan: TiledPlan, places: list[dict[str, Place]], streams: dict[str, tuple[str, ...]]
) -> tuple[list[str], list[str]]:
    """Lines that load a block's key tiles and its value tile."""
    fold = plan.fold
    keys = section(p)
    for i, dot in enumerate(fold.dots):
        name = f"keys{i}"
        if name in streams:
            keys += streams[name]
            continue
        text = _operand(p.child(**places[i]), dot.key, ("n", "k"), plan.operand[i],
                        (plan.block_n, plan.blocks_k[i]))  # fmt: skip
        keys.append(f"{name} = {text}")
    values = section(p)
    if plan.shared >= 0:
        values.append(f"values = keys{plan.shared}  # one tile is both key and value")
    elif "values" in streams:
        values += streams["values"]
    else:
        text = _operand(p.child(**places[-1]), fold.value, ("n", "e"), plan.value_type,
                        (plan.block_n, plan.block_e))  # fmt: skip
        values.append(f"values = {text}")
    return keys, values


def _tile_of(p: Printer, plan: TiledPlan, value: Var, tail: str, whole: bool) -> list[str]:
    """``x``: the score as an fp32 tile [m, n]."""
    dims = ("m", "n")
    text = p.lift(value, dims)
    if not value.dims:
        text = f"tl.full([{plan.block_m}, {plan.block_n}], {text}, tl.float32)"
    elif value.dims != dims:
        text = f"tl.broadcast_to({text}, [{plan.block_m}, {plan.block_n}])"
    if whole and value.dims:
        text = f"({text}).to(tl.float32)"
    return [f"x = {text}{tail}"]


def _mask(p: Printer, where: Node | None) -> str:
    dims = ("m", "n")
    inside = p.lift(Var("key_valid", ("n",)), dims)
    if where is None or isinstance(where, Lit):
        return f"tl.broadcast_to({inside}, x.shape)"
    mask = p.lift(p.emit(where), dims)
    return f"{inside} & {mask}" if p.known[where].dims == dims else (
        f"tl.broadcast_to({inside} & {mask}, x.shape)"
    )  # fmt: skip


# --- scale and bounds ------------------------------------------------------------------------


def _scaled(p: Printer, plan: TiledPlan, score: Node) -> tuple[Node, str]:
    """The score without its uniform factor, and that factor as text if it is a positive constant.

    Otherwise a variable ``scale`` holds the factor, log2(e) included.
    """
    factor, rest = gather(score, p.sizes)
    uniform = {*plan.grid_axes, *(("B",) if plan.packed else ())}
    fixed = [n for n in rest if set(axes_of(n)) <= uniform]
    x = mul(*(n for n in rest if not set(axes_of(n)) <= uniform))
    base2 = factor * math.log2(math.e)
    if not fixed and factor > 0 and math.isfinite(base2):
        return x, repr(base2)
    texts = [repr(base2), *(p.emit(n).text for n in fixed)]
    p.lines.append(f"scale = {' * '.join(texts)}  # log2(e) included")
    return x, ""


def _offset(p: Printer, band: Band) -> str | None:
    """Text of a band's offset if it is one number for the whole tile."""
    value = p.emit(band.offset)
    return None if value.dims else value.text


def _limit_lines(plan: TiledPlan, limits: Bounds) -> Texts:
    """Absolute positions of the tile's first and last token, if a bound uses them."""
    texts = " ".join((limits.lo, limits.hi, limits.inner_lo, limits.inner_hi))
    if "t_" not in texts:
        return ()
    group = _group(plan)
    shift = " + (S - T)" if plan.aligned_end else ""
    last = f"tl.minimum(start + {plan.block_m}, T * {group}) - 1"
    return (
        f"t_first = (start // {group}{shift}).to(tl.int64)",
        f"t_last = (({last}) // {group}{shift}).to(tl.int64)",
    )


def _partial(plan: TiledPlan) -> Texts:
    """Store a partial: base-2 maximum, sum, and the weighted sum that is not yet normalised."""
    row = f"first.to(tl.int64) * {_group(plan)} + row" if plan.packed else "row"
    valid = "row_valid[:, None]"
    if plan.width_e != plan.block_e:
        valid += " & e_valid[None, :]"
    return (
        f"place = (point.to(tl.int64) * rows + {row}) * splits + cut",
        "tl.store(part_m_ptr + place, m, mask=row_valid)",
        "tl.store(part_l_ptr + place, l, mask=row_valid)",
        f"at_u = part_u_ptr + place[:, None] * {plan.width_e} + e[None, :]",
        f"tl.store(at_u, acc, mask={valid})",
    )


# --- the merge ------------------------------------------------------------------------


def merge_code(plan: MergePlan) -> MergeCode:
    """Print the merge."""
    p = printer(plan, ())
    lines, _ = spread("e", "e", plan.fold.value_axes, p.sizes, plan.width_e, plan.block_e)
    valid = " & e_valid[None, :]" if plan.width_e != plan.block_e else ""
    return MergeCode(
        about(plan), grid(plan), row_lines(plan), tuple(lines), valid, finish(p, plan, ())
    )
