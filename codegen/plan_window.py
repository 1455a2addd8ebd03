"""Plan of bodies that carry windows only (short convolutions): all tokens at once.

A window's rows are values of the tokens before, so no program waits for another: each takes a tile
of tokens and reads the rows before its own from memory again.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.forms import Carries, Refusal, WindowForm
from attncc.codegen.passes.expand_windows import Body
from attncc.codegen.plan import Arg, ScalarArg, Spec
from attncc.codegen.plan_scan import (
    ScanPlan,
    flat_arg,
    input_args,
    output_args,
    size_args,
    slot_args,
    state_args,
    states_in,
)
from attncc.codegen.scan_tiles import largest, power, tile_body
from attncc.dsl.ir import Node, Program

WINDOW_TILE = 2048
"""Elements of one program's tile: 16 a thread at 4 warps, so that many rows are in flight."""
LEAST_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan(ScanPlan):
    """All tokens of a body of windows.

    Attributes:
        body: what a token does, its windows row by row.
        rows: the value that is pushed into each window, by name.
        tokens: tokens of a tile; never fewer than the rows that a token looks back on.
        kept: rows that the widest window keeps, padded to a power of two.
    """

    body: Body
    rows: tuple[tuple[str, Node], ...]
    tokens: int
    kept: int


def plan_window(program: Program, carries: Carries, spec: Spec) -> WindowPlan | Refusal:
    """The kernel of a body that carries windows only.

    Args:
        program: the scan.
        carries: what it carries.
        spec: dtypes and static sizes.

    Returns:
        The plan, or why the body is none of these.
    """
    if not all(isinstance(f, WindowForm) for f in carries.forms):
        return Refusal("the body carries more than windows", program.loc)
    if spec.token_slots:
        return Refusal("a window stored after every token is stepped", program.loc)
    tiled = tile_body(program, spec)
    if isinstance(tiled, Refusal):
        return tiled
    body, blocked, grid, fixed = tiled.body, tiled.blocked, tiled.grid, tiled.narrow
    least = max(LEAST_TOKENS, power(sum(len(w.old) for w in body.windows)))
    if fixed * least > 4 * WINDOW_TILE:
        return Refusal(f"a tile of {least} tokens does not fit a program's registers", program.loc)
    tile = tiled.tile
    if blocked:
        width = min(power(spec.size(blocked)), 128, power(max(8, WINDOW_TILE // (fixed * least))))
        tile = tiled.cut(width)
    elements = largest(body.roots, {t.axis: t.block for t in tile})
    tokens = max(least, min(64, power(max(1, WINDOW_TILE // elements))))
    args: list[Arg] = [*input_args(body.roots, program, spec), *state_args(program, spec)]
    args += [*slot_args(program, spec), *output_args(program, spec)]
    if spec.packed:
        args += [flat_arg("cu_seqlens", "i32"), flat_arg("tiles", "i32")]
    else:
        args += [ScalarArg("tokens_given", "i32"), ScalarArg("tiles_each", "i32")]
    args += size_args(args, tile, grid, spec)
    pushed = tuple((w.name, w.new[-1]) for w in body.windows if w.new)
    return WindowPlan(
        op=program.name, phase="window", template="triton/window.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=4, num_stages=1, precision="ieee",
        tile=tile, blocked=blocked, grid_axes=grid, packed=spec.packed, body=body, rows=pushed,
        given=states_in(program, spec.given_states), pooled=states_in(program, spec.pools),
        tokens=tokens, kept=power(max(len(w.old) for w in body.windows)),
    )  # fmt: skip
