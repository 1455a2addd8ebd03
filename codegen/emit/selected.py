"""Prints the kernels of a selection: ordered scores, counting, picking, sorting.

Tile dimensions of the scores: ``n`` positions of the history, ``m`` columns (tokens times heads),
``t`` tokens, ``k`` a dot's contraction.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.bounds import Bounds, bounds
from attncc.codegen.emit.quantised import Piece, scale_lines, unit_query
from attncc.codegen.emit.softmax_rows import Texts, about, section, spread
from attncc.codegen.emit.softmax_scores import operand, options
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.forms import Dot
from attncc.codegen.plan import ScalarArg, TensorArg
from attncc.codegen.plan_selected import ScorePlan, SelectPlan
from attncc.codegen.quantised import quantised_input
from attncc.codegen.softmax_checks import TOKENS
from attncc.codegen.terms import mul
from attncc.dsl.axes import PAGE, PAGES, block_axis
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Contract, Input, Lit, Node, Reduce

COLUMNS = ("n", "m")
SCORES = ("n", "t")


@dataclass(frozen=True, slots=True)
class ScoreCode:
    """Printed pieces of the scores.

    Attributes:
        about: the file's docstring.
        columns: a tile's columns taken apart.
        setup: query tiles, and what does not depend on the history.
        bounds: ranges of positions, as text.
        paging: lines that find a block's pages.
        keys: key tiles of a block.
        scores: the score ``x`` [n, t].
        mask: ``visible`` [n, t].
    """

    about: Texts
    columns: Texts
    setup: Texts
    bounds: Bounds
    paging: Texts
    keys: Texts
    scores: Texts
    mask: Texts


@dataclass(frozen=True, slots=True)
class StageCode:
    """Printed pieces of counting and picking: the docstring."""

    about: Texts


@dataclass(frozen=True, slots=True)
class SortCode:
    """Printed pieces of sorting.

    Attributes:
        about: the file's docstring.
        store: lines that store ``index`` [k].
    """

    about: Texts
    store: Texts


def stage_code(plan: SelectPlan) -> StageCode:
    """Print counting, or picking."""
    return StageCode(about(plan))


def sort_code(plan: SelectPlan) -> SortCode:
    """Print sorting."""
    target = plan.tensor("picked")
    axis = target.pattern.axes[-1]
    places = {
        "B": Place(Var("at_B")),
        TOKENS: Place(Var("first + t" if plan.packed else "t")),
        axis: Place(Var("j", ("k",)), Var("stored", ("k",))),
    }
    p = Printer(("k",), {target.name: target}, places)
    p.store(target, Var("index", ("k",)))
    return SortCode(about(plan), tuple(p.lines))


# --- scores ----------------------------------------------------------------------------------


def score_code(plan: ScorePlan) -> ScoreCode:
    """Print the scores of a tile of tokens."""
    own, node = plan.selection, plan.selection.node
    inner, outer = _printers(plan)
    lines = section(inner)
    outer.lines = lines
    columns, heads = _columns(inner, plan)
    inner.places = {**inner.places, **heads}
    pieces = [_piece(inner, plan, i, dot) for i, dot in enumerate(own.dots)]
    for i, dot in enumerate(own.dots):
        _query(inner, plan, i, dot, pieces[i])
    _hoist(inner, plan, node.score)
    limits = bounds(own.mask, lambda band: _offset(outer, band.offset))
    setup = tuple(lines)
    keys = section(inner)
    for i, dot in enumerate(own.dots):
        name, shape = f"keys{i}", (plan.block_n, plan.blocks_k[i])
        at = inner.child(**pieces[i].places)
        text = operand(at, dot.key, ("n", "k"), plan.operand[i], shape)
        keys.append(f"{name} = {text}  # [n, k]")
        if pieces[i].scaled is not None:
            scale_lines(inner, pieces[i], f"{name}_scale")
    scores = _scores(inner, outer, plan, pieces)
    mask = outer.lines = []
    mask.append(f"visible = {_visible(outer, plan)}")
    return ScoreCode(
        about(plan), columns, setup, limits, _paging(plan), tuple(keys), scores, tuple(mask)
    )


def _printers(plan: ScorePlan) -> tuple[Printer, Printer]:
    """For columns [n, m] and for scores [n, t]; both know where the history's rows are."""
    over = plan.selection.node.over
    row = "key_row" if plan.packed and not plan.lengths else "key"
    known = Var("key_valid", ("n",))
    history = {over: Place(Var(row, ("n",)), known), "B": Place(Var("at_B"))}
    if plan.page:
        history[PAGES] = Place(Var("page", () if one_page(plan) else ("n",)), known)
        history[PAGE] = Place(Var("page_at", ("n",)))
    tensors = {a.name: a for a in plan.args if isinstance(a, TensorArg)}
    scalars = {a.name[2:]: a.name for a in plan.args
               if isinstance(a, ScalarArg) and a.name.startswith("p_")}  # fmt: skip
    axes = {a for t in plan.program.tensors for a in t.pattern.axes}
    sizes = {a: f"n_{a}" for a in axes} | {a: str(n) for a, n in plan.static}
    sizes |= {TOKENS: "T", over: "S"}
    made = []
    for mark, dims in (("m", COLUMNS), ("t", SCORES)):
        token = f"row_{mark}" if plan.packed else f"token_{mark}"
        places = {**history, TOKENS: Place(Var(token, (mark,)), Var(f"valid_{mark}", (mark,)))}
        positions = {over: Var("key", ("n",)), TOKENS: Var(f"at_{mark}", (mark,)), "B": Var("at_B")}
        made.append(
            Printer(
                (*dims, "k"), tensors, places, positions, sizes, scalars=scalars,
                exact=plan.precision != "ieee", prefix="x" if mark == "m" else "y",
            )
        )  # fmt: skip
    return made[0], made[1]


def _columns(p: Printer, plan: ScorePlan) -> tuple[Texts, dict[str, Place]]:
    """A tile's columns taken apart, and where the heads are."""
    lines = [
        f"column = tl.arange(0, {plan.block_m})  # [m] tokens, then heads",
        f"token_m = start + column // {plan.block_h}",
        f"head = column % {plan.block_h}",
    ]
    inside = "token_m < T"
    if plan.heads != plan.block_h:
        inside += f") & (head < {plan.heads}"
    lines.append(f"valid_m = ({inside})")
    lines += [
        "at_m = token_m + (S - T)  # [m] position of the query",
        f"token_t = start + tl.arange(0, {plan.block_t})  # [t]",
        "valid_t = token_t < T",
        "at_t = token_t + (S - T)",
    ]
    if plan.packed:
        lines += [f"row_{m} = first.to(tl.int64) + token_{m}  # row of memory" for m in ("m", "t")]
    axes, places = plan.selection.heads, {}
    for i, axis in enumerate(axes):
        below = " * ".join(p.sizes[a] for a in axes[i + 1 :])
        text = f"head // ({below})" if below else "head"
        lines.append(f"at_{axis} = ({text}) % {p.sizes[axis]}")
        places[axis] = Place(Var(f"at_{axis}", ("m",)), Var("valid_m", ("m",)))
    return tuple(lines), places


def _piece(p: Printer, plan: ScorePlan, i: int, dot: Dot) -> Piece:
    lines, places = spread(f"d{i}", "k", dot.over, p.sizes, plan.widths_k[i], plan.blocks_k[i])
    p.lines += lines
    own = quantised_input(plan.quantised, dot.key[0]) if len(dot.key) == 1 else None
    at = None if own is None else {block_axis(own.axis): Place(Var("0"))}
    return Piece("", plan.blocks_k[i], places, own, at)


def _in_units(p: Printer, plan: ScorePlan, i: int) -> bool:
    """Whether a query comes to an fp16 product from a type with more range."""
    if plan.operand[i] != "fp16":
        return False
    nodes = walk(*plan.selection.dots[i].query)
    types = {p.tensors[n.name].dtype for n in nodes if isinstance(n, Input) and n.axes}
    return bool(types & {"bf16", "fp32"})


def _query(p: Printer, plan: ScorePlan, i: int, dot: Dot, piece: Piece) -> None:
    inner, name = p.child(**piece.places), f"query{i}"
    shape = (plan.block_m, piece.block)
    if _in_units(p, plan, i):
        p.lines += unit_query(name, operand(inner, dot.query, ("m", "k"), "fp32", shape))
        return
    text = operand(inner, dot.query, ("m", "k"), plan.operand[i], shape)
    p.lines.append(f"{name} = {text}  # [m, k]")


def _hoist(p: Printer, plan: ScorePlan, root: Node) -> None:
    """Values of the columns that do not depend on the history, once a tile."""
    own = plan.selection
    products, heads = {d.node for d in own.dots}, set(own.heads)
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if node in products or node in seen:
            continue
        seen.add(node)
        axes = set(axes_of(node))
        if own.node.over in axes or isinstance(node, (Contract, Reduce)):
            stack.extend(reversed(_below(node)))
        elif axes & heads:
            p.emit(node)


def _below(node: Node) -> list[Node]:
    return list(getattr(node, "args", ())) or [n for n in (getattr(node, "arg", None),) if n]


def _offset(p: Printer, node: Node) -> str | None:
    value = p.emit(node)
    return None if value.dims else value.text


def _scores(inner: Printer, outer: Printer, plan: ScorePlan, pieces: list[Piece]) -> Texts:
    """Dots, the inner sums over heads, then what is computed of them."""
    own, node = plan.selection, plan.selection.node
    lines = section(inner)
    outer.lines = lines
    for i, dot in enumerate(own.dots):
        text = f"tl.dot(keys{i}, tl.trans(query{i}){options(plan.operand[i])})"
        if pieces[i].scaled is not None:
            text += f" * keys{i}_scale[:, None]"
        if _in_units(inner, plan, i):
            text += f" * query{i}_unit[None, :]"
        lines.append(f"s{i} = {text}  # [n, m]")
        inner.known[dot.node] = Var(f"s{i}", COLUMNS)
    if not own.heads:  # a column is a token
        outer.known.update({d.node: Var(f"s{i}", SCORES) for i, d in enumerate(own.dots)})
    for i, total in enumerate(_sums(plan)):
        inner.tell(total)
        value = inner.emit(mul(*total.args) if isinstance(total, Contract) else total.arg)
        text = inner.lift(value, COLUMNS)
        shape = f"[{plan.block_n}, {plan.block_t}, {plan.block_h}]"
        if plan.heads != plan.block_h:
            text = f"tl.where((head < {plan.heads})[None, :], {text}, 0.0)"
        lines.append(f"sum{i} = tl.sum(tl.reshape({text}, {shape}), 2)  # [n, t]")
        outer.known[total] = Var(f"sum{i}", SCORES)
    found = outer.emit(node.score)
    text = outer.lift(found, SCORES)
    if found.dims != SCORES:
        text = f"tl.broadcast_to({text}, [{plan.block_n}, {plan.block_t}])"
    lines.append(f"x = {text}")
    return tuple(lines)


def _visible(p: Printer, plan: ScorePlan) -> str:
    """What is visible of a block [n, t]."""
    text = "key_valid[:, None]"
    where = plan.selection.node.where
    if where is not None and not isinstance(where, Lit):
        text += f" & ({p.lift(p.emit(where), SCORES)})"
    return f"tl.broadcast_to({text}, x.shape)"


def _sums(plan: ScorePlan) -> list[Contract | Reduce]:
    own = plan.selection
    products = {d.node for d in own.dots}
    return [
        n
        for n in walk(own.node.score)
        if isinstance(n, (Contract, Reduce)) and n not in products
        and own.node.over in axes_of(n) and any(c in products for c in walk(n))
    ]  # fmt: skip


# --- pages -----------------------------------------------------------------------------------


def one_page(plan: ScorePlan) -> bool:
    """Whether each block of positions lies within one page."""
    return bool(plan.page) and plan.page % plan.block_n == 0


def _paging(plan: ScorePlan) -> Texts:
    if not plan.page:
        return ()
    table = "block_table_ptr + at_B * block_table_s0"
    if one_page(plan):
        return (
            f"page = tl.load({table} + n0 // {plan.page}).to(tl.int64)  # the block lies in it",
            f"page_at = n0 % {plan.page} + offs_n",
        )
    return page_lines(plan.page, "key", "key_valid")


def page_lines(page: int, position: str, valid: str) -> Texts:
    """The page of each position and the row of it; 64-bit from here on."""
    at = f"block_table_ptr + at_B * block_table_s0 + {position} // {page}"
    return (
        f"page = tl.load({at}, mask={valid}, other=0).to(tl.int64)",
        f"page_at = {position} % {page}",
    )
