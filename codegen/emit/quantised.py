"""Prints what quantised histories add to the kernels: scales of keys, of values, and of new rows.

A score or a weighted sum is linear in each row, so a row's scale multiplies the dot's fp32 result
(keys) or the weight (values), and e4m3 itself goes into the matrix product, widened exactly. Scales
of blocks cut the contraction, or the columns of the sum, into parts with one scale each: nothing is
ever rounded to the operand's dtype after it was scaled but the weights, which are rounded anyway.
Keys meet the query in fp16, since e4m3 becomes that in one instruction for two elements; rows of a
bf16 query are brought into its range by powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.codegen.emit.softmax_rows import Loads, Texts, columns_of, spread, stream
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.forms import Dot
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_passes import Columns
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.quantised import Scaled, pieces, quantised_input
from attncc.codegen.tiles import padded
from attncc.dsl.axes import block_axis
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Node


@dataclass(frozen=True, slots=True)
class Piece:
    """All of an operand's columns, or a part of them with one scale.

    Attributes:
        mark: ends the names of its variables.
        block: its columns, padded to a power of two.
        places: where the axes of its columns are.
        scaled: the quantised history, or None.
        at: where the axes of its scale are.
    """

    mark: str
    block: int
    places: dict[str, Place]
    scaled: Scaled | None = None
    at: dict[str, Place] | None = None


def dot_pieces(p: Printer, plan: TiledPlan, i: int, dot: Dot) -> list[Piece]:
    """Define the contracted columns of a dot."""
    own = quantised_input(plan.quantised, dot.key[0]) if len(dot.key) == 1 else None
    width, block = plan.widths_k[i], plan.blocks_k[i]
    if pieces(own, width) == 1:
        lines, places = spread(f"d{i}", "k", dot.over, p.sizes, width, block)
        p.lines += lines
        return [Piece("", block, places, own, _scale_at(p, own, dot.over, 0))]
    assert own is not None
    return _parts(p, own, f"d{i}", "k", dot.over, width)


def value_pieces(p: Printer, plan: TiledPlan, name: str, column: Columns) -> list[Piece]:
    """The columns of a weighted sum; the places of a whole one are defined already."""
    own, axes = value_scales(plan, column), column.fold.value_axes
    if pieces(own, column.width) == 1:
        places = columns_of(p, plan, column)[1]
        if plan.paired:
            at = _scale_at(p, own, axes, 0)
            return [Piece(f"_{i}", column.block // 2, places, own, at) for i in range(2)]
        return [Piece("", column.block, places, own, _scale_at(p, own, axes, 0))]
    assert own is not None
    return _parts(p, own, f"{name}_e", "e", axes, column.width)


def value_scales(plan: TiledPlan, column: Columns) -> Scaled | None:
    """The quantised history that a sum's values are, if they are one."""
    value = column.fold.value
    return quantised_input(plan.quantised, value[0]) if len(value) == 1 else None


def _parts(
    p: Printer, own: Scaled, name: str, dim: str, axes: tuple[str, ...], width: int
) -> list[Piece]:
    found, block = [], padded(own.block)
    for b in range(pieces(own, width)):
        lines, places = spread(
            f"{name}_{b}", dim, axes, p.sizes, own.block, block, first=b * own.block
        )
        p.lines += [text for text in lines if text not in p.lines]
        found.append(Piece(f"_{b}", block, places, own, _scale_at(p, own, axes, b)))
    return found


def _scale_at(
    p: Printer, own: Scaled | None, axes: tuple[str, ...], piece: int
) -> dict[str, Place] | None:
    """Where a piece's scale is: the piece's number taken apart, the scaled axis fastest."""
    if own is None:
        return None
    places = {}
    for axis in reversed(axes):
        last = axis == own.axis
        size = int(p.sizes[axis]) // own.block if last else int(p.sizes[axis])
        places[block_axis(axis) if last else axis] = Place(Var(str(piece % size)))
        piece //= size
    return places


def scale_lines(p: Printer, piece: Piece, name: str) -> None:
    """Define ``name``: the scale of each key's row, fp32 [n], for one piece of its columns."""
    own, at = piece.scaled, piece.at
    assert own is not None and at is not None
    found = p.child(**at).load(p.tensors[own.scales], raw=True)
    text = found.text
    if own.dtype == "u8":  # 2^(e - 127): 0 is fp32's subnormal 2^-127, 255 is NaN
        e = p.name(f"{text}.to(tl.int32)", found.dims, f"{own.name}_e").text
        text = f"tl.maximum(({e} << 23) | (({e} + 1) >> 8 << 22), 0x400000)"
        text += ".to(tl.float32, bitcast=True)"
    p.lines.append(f"{name} = {text}  # [n] scale of {own.name}")


def unit_lines(name: str) -> Texts:
    """Scales relative to the block's largest, times 2^15: weights use all of fp16's range.

    What falls below it is under 2^-39 of the row's largest weight.
    """
    return (
        f"{name}_unit = tl.max({name}, 0)",
        f"{name} = tl.where({name}_unit > 0, {name} / {name}_unit * 32768.0, {name})",
        f"{name}_unit = {name}_unit * {2.0**-15!r}",
    )


def in_units(p: Printer, query: tuple[Node, ...], operand: str) -> bool:
    """Whether a query reaches an fp16 product from a type with more range."""
    names = {n.name for n in walk(*query) if isinstance(n, Input) and n.axes}
    types = {p.tensors[name].dtype for name in names}
    return operand == "fp16" and types != {"fp16"}


def unit_query(name: str, text: str) -> Texts:
    """A query tile in fp16, its rows divided by powers of two that bring them into [2^14, 2^15).

    Exact for every element above 2^-28 of its row's largest; what is lost of smaller ones is under
    2^-39 of that, below the rounding of the product's fp32 sum.
    """
    wide, e = f"{name}_x", f"{name}_e"
    return (
        f"{wide} = {text}  # [m, k]",
        f'{e} = tl.max(tl.where(tl.abs({wide}) < float("inf"), tl.abs({wide}), 0.0), 1)',
        f"{e} = tl.maximum({e}.to(tl.int32, bitcast=True) >> 23, 15)  # [m] exponent of the row",
        f"{name}_unit = (({e} - 14) << 23).to(tl.float32, bitcast=True)",
        f"{name} = {wide} * ((268 - {e}) << 23).to(tl.float32, bitcast=True)[:, None]",
        f"{name} = {name}.to(tl.float16)",
    )


@dataclass(frozen=True, slots=True)
class PairArg(TensorArg):
    """A tensor of e4m3 as one of 16-bit elements, two of the innermost axis each."""

    dtype: str = "i16"

    @property
    def pointer(self) -> str:
        """The pointer parameter, as one to such elements."""
        return f"{self.name}_ptr.to(tl.pointer_type(tl.int16))"

    @property
    def strides(self) -> tuple[str, ...]:
        """In such elements: strides are multiples of 16."""
        return tuple(f"({self.name}_s{i} // 2)" for i in range(self.pattern.rank - 1))


def pair_stream(p: Printer, plan: TiledPlan, column: Columns) -> Loads:
    """Addresses of values that are read in pairs of columns."""
    [node], [axis] = column.fold.value, column.fold.value_axes
    assert isinstance(node, Input)
    arg = p.tensors[node.name]
    p.lines.append(f"pair = tl.arange(0, {column.block // 2})  # [e] two columns each")
    view = {**p.tensors, node.name: PairArg(arg.name, arg.pattern)}
    places = {axis: Place(Var("pair", ("e",)))}
    return stream(replace(p, tensors=view), plan, node, "pairs", places, "tl.int16")


def pair_lines(name: str, piece: Piece, loads: Loads, cast: str) -> Texts:
    """The even or the odd columns of a block's values, in the dtype of their product."""
    first = piece.mark == "_0"
    convert = "" if cast.endswith("float16") and "bfloat" not in cast else f".to({cast})"
    apart = (*loads.each, "even, odd = pulled_apart(pairs)  # [n, e] fp16")
    return (*(apart if first else ()), f"{name} = {'even' if first else 'odd'}{convert}")


def interleaved(acc: str, rows: int, columns: int) -> str:
    """Accumulators of even and odd columns in their order again."""
    return f"{acc} = tl.reshape(tl.join({acc}_0, {acc}_1), [{rows}, {columns}])"


def joined(acc: str, count: int, rows: int, block: int, columns: int) -> Texts:
    """Accumulators of pieces side by side again: ``acc`` [m, e] of ``acc_0``, ``acc_1``, ..."""
    lines = [
        f"{acc}_{i} = tl.zeros([{rows}, {block}], tl.float32)"
        for i in range(count, columns // block)
    ]
    texts = [f"{acc}_{i}" for i in range(columns // block)]
    depth = 0
    while len(texts) > 1:  # each join adds a last dimension of 2, the lowest bit first
        texts = [f"tl.join({a}, {b})" for a, b in zip(texts[::2], texts[1::2], strict=True)]
        depth += 1
    order = ", ".join(map(str, (0, *range(depth + 1, 0, -1))))
    lines.append(f"{acc} = tl.reshape(tl.permute({texts[0]}, ({order})), [{rows}, {columns}])")
    return tuple(lines)
