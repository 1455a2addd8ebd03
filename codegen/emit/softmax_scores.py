"""Prints the scores of a block of keys: operands, matrix products, inner sums, intervals, mask."""

from __future__ import annotations

from attncc.codegen.emit.functions import constant
from attncc.codegen.emit.quantised import Piece, dot_pieces, in_units, scale_lines, unit_query
from attncc.codegen.emit.softmax_rows import (
    Loads,
    Texts,
    page_of,
    page_places,
    row_of_key,
    stream,
    widened,
)
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.forms import Dot
from attncc.codegen.plan_gathered import GatherPlan
from attncc.codegen.plan_softmax import SoftmaxPlan, TiledPlan
from attncc.codegen.softmax_checks import betweens, inner_sums
from attncc.codegen.terms import mul
from attncc.dsl.graph import axes_of, children
from attncc.dsl.ir import Between, Contract, Input, Lit, Node, Reduce, Take

DIALECT = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}
TILE = ("m", "n")
WIDE, PIECE = 256, 64
"""fp32 rows that are wider are summed in pieces of so many columns."""

Places = list[list[Piece]]
"""The columns of each dot, in one piece or several."""


def options(dtype: str) -> str:
    """Further arguments of a dot of operands of this type."""
    return ', input_precision="tf32x3"' if dtype == "fp32" else ""


def product(queries: str, keys: str, dtype: str, width: int) -> str:
    """Text of the products of rows ``[m, k]`` with rows ``[n, k]``.

    Tensor cores truncate as they accumulate, at every step alike: fp32 rows of the width of a
    latent are summed in pieces, and the pieces in fp32 that rounds.
    """
    if dtype != "fp32" or width <= WIDE:
        return f"tl.dot({queries}, tl.trans({keys}){options(dtype)})"
    parts = f"{width // PIECE}, {PIECE}"
    left = f"tl.permute(tl.reshape({queries}, ({queries}.shape[0], {parts})), (1, 0, 2))"
    right = f"tl.permute(tl.reshape({keys}, ({keys}.shape[0], {parts})), (1, 2, 0))"
    return f"tl.sum(tl.dot({left}, {right}{options(dtype)}), 0)"


def summed_axes(plan: TiledPlan, dot: Dot) -> set[str]:
    """Axes of the inner sum around a dot that its operands have."""
    around = {a for n in inner_sums(plan.fold) for a in n.over}
    return around & {a for n in (*dot.query, *dot.key) for a in axes_of(n)}


def contracted(p: Printer, plan: TiledPlan) -> Places:
    """Define the contracted axes of each dot; gives back where they are."""
    return [dot_pieces(p, plan, i, dot) for i, dot in enumerate(plan.fold.dots)]


def query_tiles(p: Printer, plan: TiledPlan, places: Places) -> None:
    """Load the query tiles of the dots that are not inside an inner sum."""
    for i, dot in enumerate(plan.fold.dots):
        if not summed_axes(plan, dot):
            _query(p, plan, i, places[i])


def _query(p: Printer, plan: TiledPlan, i: int, pieces: list[Piece]) -> None:
    for piece in pieces:
        shape = (plan.block_m, piece.block)
        inner, name = p.child(**piece.places), f"query{i}{piece.mark}"
        nodes, dims = plan.fold.dots[i].query, ("m", "k")
        if piece.scaled is not None and in_units(p, nodes, plan.operand[i]):
            p.lines += unit_query(name, operand(inner, nodes, dims, "fp32", shape))
            continue
        p.lines.append(f"{name} = {operand(inner, nodes, dims, plan.operand[i], shape)}  # [m, k]")


def operand(
    p: Printer, nodes: tuple[Node, ...], dims: tuple[str, ...], dtype: str, shape: tuple[int, int]
) -> str:
    """An operand of a dot in its storage dtype; a plain input is not touched on its way."""
    if len(nodes) == 1 and isinstance(nodes[0], Input):
        p.tell(nodes[0])
        arg = p.tensors[nodes[0].name]
        var, stored = p.load(arg, raw=True), arg.dtype
    else:
        var, stored = p.emit(mul(*nodes)), ""
    text = p.lift(var, dims)
    if var.dims != dims:
        text = f"tl.broadcast_to({text}, [{shape[0]}, {shape[1]}])"
    return text if stored == dtype else f"({text}){widened(stored, DIALECT[dtype])}"


def hoist(p: Printer, plan: SoftmaxPlan, *roots: Node | None) -> None:
    """Emit the largest parts of score and mask that do not depend on keys."""
    stack = [r for r in reversed(roots) if r is not None]
    while stack:
        node = stack.pop()
        if (
            isinstance(node, (Contract, Reduce, Between, Take))
            or constant(node, p.sizes) is not None
        ):
            continue
        if plan.fold.over in axes_of(node):
            stack.extend(reversed(children(node)))
        else:
            p.emit(node)


def streams(p: Printer, plan: TiledPlan, places: Places) -> dict[str, Loads]:
    """Addresses of plain key tiles, so that a block costs one scalar step each."""
    found = {}
    for i, dot in enumerate(plan.fold.dots):
        plain = len(dot.key) == 1 and isinstance(dot.key[0], Input)
        if plain and not _varies(plan, dot):
            key = dot.key[0]
            assert isinstance(key, Input)
            for piece in places[i]:
                name, cast = f"keys{i}{piece.mark}", DIALECT[plan.operand[i]]
                found[name] = stream(p, plan, key, name, piece.places, cast)
    return found


def _varies(plan: TiledPlan, dot: Dot) -> bool:
    """Whether the keys differ along the axis of an inner sum."""
    return bool(summed_axes(plan, dot) & {a for n in dot.key for a in axes_of(n)})


def key_tiles(p: Printer, plan: TiledPlan, places: Places, found: dict[str, Texts]) -> None:
    """Load a block's key tiles."""
    for i, dot in enumerate(plan.fold.dots):
        if not _varies(plan, dot):
            _key(p, plan, i, places[i], found)


def _key(p: Printer, plan: TiledPlan, i: int, pieces: list[Piece], found: dict[str, Texts]) -> None:
    """A dot's key tiles, each with the scales of its rows where it is quantised."""
    for piece in pieces:
        name, shape = f"keys{i}{piece.mark}", (plan.block_n, piece.block)
        if name in found:
            p.lines += found[name]
        else:
            inner = p.child(**piece.places)
            text = operand(inner, plan.fold.dots[i].key, ("n", "k"), plan.operand[i], shape)
            p.lines.append(f"{name} = {text}")
        if piece.scaled is not None:
            scale_lines(p, piece, f"{name}_scale")


def products(p: Printer, plan: TiledPlan, places: Places) -> None:
    """The dots, then the inner sums over them, then the intervals: each a known value [m, n]."""
    direct: list[str] = []
    for i, dot in enumerate(plan.fold.dots):
        p.known[dot.node] = Var(f"s{i}", TILE)
        if not summed_axes(plan, dot):
            direct += _product(p, plan, i, places[i])
    p.lines += products_apart(plan, direct, "hi") if plan.turned else direct
    for i, node in enumerate(inner_sums(plan.fold)):
        _inner_sum(p, plan, node, f"inner{i}", places)
    for i, gap in enumerate(betweens(plan.fold)):
        _between(p, plan, gap, f"gap{i}")


def products_apart(
    plan: TiledPlan | GatherPlan, products: list[str], end: str
) -> list[str]:  # fmt: skip
    """Products in a region of their own, with a second one that is never entered.

    Triton gives a product whose result reaches another one in the same region to all warps by rows:
    of 64 rows two warpgroups would do the same work. The other region reads those key tiles again
    that nothing else reads; of a tile with one reader Triton keeps one buffer more.
    """
    shape = f"[{plan.block_m}, {plan.block_n}]"
    again = {c.shared for c in plan.passes[0].columns}
    never = [
        f"s{i} = tl.zeros({shape}, tl.float32)" if i in again else f"{text} + 1.0"
        for i, text in enumerate(products)
    ]
    return [
        f"if n0 < {end}:  # always: in a region of their own the products are cut by columns too",
        *(f"    {text}" for text in products),
        "else:",
        *(f"    {text}" for text in never),
    ]


def _product(p: Printer, plan: TiledPlan, i: int, pieces: list[Piece]) -> list[str]:
    """A dot, or the sum of its pieces, each scaled in fp32."""
    lines: list[str] = []
    for piece in pieces:
        keys = f"keys{i}{piece.mark}"
        text = product(f"query{i}{piece.mark}", keys, plan.operand[i], piece.block)
        tail = f" * {keys}_scale[None, :]" if piece.scaled is not None else ""
        if piece.scaled is not None and in_units(p, plan.fold.dots[i].query, plan.operand[i]):
            tail = f" * query{i}{piece.mark}_unit[:, None]{tail}"
        lines.append(f"s{i} {'+=' if lines else '='} {text}{tail}")
    return lines


def _inner_sum(
    p: Printer, plan: TiledPlan, node: Contract | Reduce, name: str, places: Places
) -> None:
    """A loop over the summed axes, unrolled by the compiler."""
    p.tell(node)
    p.lines.append(f"{name} = tl.zeros([{plan.block_m}, {plan.block_n}], tl.float32)")
    loop = {axis: Place(Var(f"at_{axis}")) for axis in node.over}
    inner = p.child(**loop)
    inner.lines = []
    inner.known = {n: v for n, v in p.known.items() if not set(node.over) & set(axes_of(n))}
    for i, dot in enumerate(plan.fold.dots):
        if set(node.over) & summed_axes(plan, dot):
            inner.known[dot.node] = Var(f"s{i}", TILE)
            if _varies(plan, dot):
                _key(inner, plan, i, places[i], {})
            _query(inner, plan, i, places[i])
            inner.lines += _product(p, plan, i, places[i])
    value = inner.emit(mul(*node.args) if isinstance(node, Contract) else node.arg)
    inner.lines.append(f"{name} += {p.lift(value, TILE)}")
    ranges = "static_range" if plan.unrolled else "range"
    for depth, axis in enumerate(node.over):
        p.lines.append("    " * depth + f"for at_{axis} in tl.{ranges}({p.sizes[axis]}):")
    p.lines += ["    " * len(node.over) + text for text in inner.lines]
    p.known[node] = Var(name, TILE)


# --- sums over the positions between key and query -------------------------------------------


def _after(p: Printer, plan: TiledPlan, gap: Between) -> Var:
    """The summand of the position after each key."""
    over, keys = plan.fold.over, ("n",)
    valid = Var("after_valid", keys)
    first = "first_key + " if row_of_key(plan) == "key_row" else ""
    p.lines += ["after = key + 1", "after_valid = after < S"]
    places = {over: Place(Var(f"{first}after", keys), valid)}
    if plan.page:
        p.lines += page_of(plan, "after", "after_page", "after_valid")
        places |= page_places(plan, "after_page", keys, valid)
    return p.child(**places).emit(gap.arg)


def _between(p: Printer, plan: TiledPlan, gap: Between, name: str) -> None:
    """Sums within the block, ending at the query, plus what later blocks hold.

    Blocks are visited from the last to the first, so each sum grows and nothing is subtracted.
    """
    p.tell(gap)
    value = _after(p, plan, gap)
    before_query = "(after[None, :] <= t_abs[:, None])"
    p.lines += [
        f"{name}_step = tl.where({before_query}, {p.lift(value, TILE)}, 0.0)  # [m, n]",
        f"{name} = tl.cumsum({name}_step, 1, reverse=True) + {name}_later[:, None]",
        f"{name}_later += tl.sum({name}_step, 1)",
    ]
    p.known[gap] = Var(name, TILE)


def later_lines(p: Printer, plan: TiledPlan) -> Texts:
    """What lies between the last block of keys and each query, summed up before the loop."""
    gaps = betweens(plan.fold)
    if not gaps:
        return ()
    block, wide = plan.block_n, max(plan.block_n, 4096 // plan.block_m)
    outer, known = p.lines, p.known
    p.lines, p.known = [f"key = n0 + tl.arange(0, {wide})"], {}
    for i, gap in enumerate(gaps):
        value = _after(p, plan, gap)
        inside = "(after[None, :] <= t_abs[:, None])"
        step = f"tl.where({inside}, {p.lift(value, TILE)}, 0.0)"
        p.lines.append(f"gap{i}_later += tl.sum({step}, 1)")
    body = p.lines
    p.lines, p.known = outer, known
    start = f"lo + tl.cdiv(hi - lo, {block}) * {block}"
    return (
        *(
            f"gap{i}_later = tl.zeros([{plan.block_m}], tl.float32)  # [m]"
            for i in range(len(gaps))
        ),
        f"for n0 in tl.range({start}, t_last.to(tl.int32), {wide}):",
        *(f"    {text}" for text in body),
    )


# --- score and mask --------------------------------------------------------------------------


def tile_of(
    p: Printer, plan: TiledPlan | GatherPlan, value: Var, tail: str, whole: bool
) -> str:  # fmt: skip
    """``x``: the score as an fp32 tile [m, n]."""
    text = p.lift(value, TILE)
    if not value.dims:
        text = f"tl.full([{plan.block_m}, {plan.block_n}], {text}, tl.float32)"
    elif value.dims != TILE:
        text = f"tl.broadcast_to({text}, [{plan.block_m}, {plan.block_n}])"
    if whole and value.dims:
        text = f"({text}).to(tl.float32)"
    return f"x = {text}{tail}"


def mask_text(p: Printer, where: Node | None) -> str:
    """What is visible of a tile."""
    inside = p.lift(Var("key_valid", ("n",)), TILE)
    if where is None or isinstance(where, Lit):
        return f"tl.broadcast_to({inside}, x.shape)"
    mask = p.lift(p.emit(where), TILE)
    if p.known[where].dims == TILE:
        return f"{inside} & {mask}"
    return f"tl.broadcast_to({inside} & {mask}, x.shape)"
