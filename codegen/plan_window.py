"""Plan of bodies that carry windows only (short convolutions): all tokens at once.

A window's rows are values of the tokens before, so no program waits for another: each takes a tile
of tokens, one group after another, and reads the rows before its first token from memory again.
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

TOKENS = 32
"""Tokens of one program: the rows before them, read once more, are few beside them."""
GROUP = 4
"""Tokens whose rows are loaded before the first of them is stored: what is in flight a thread."""
AHEAD = 3
"""Stages of the loop over groups: up to two are on their way to shared memory while one is worked
on, so that memory is busy while element-wise functions are computed. (Triton does so where no token
looks back beyond the group before its own.)"""
VECTOR = 8
"""Elements of a thread: 16 bytes of a 16-bit row."""
REGISTERS = 96
"""Of a thread, for weights, rows before a token and rows in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan(ScanPlan):
    """All tokens of a body of windows.

    Attributes:
        body: what a token does, its windows row by row.
        rows: the value that is pushed into each window, by name.
        tokens: tokens of a program, groups of them; never fewer than the rows that one looks back
            on.
        group: tokens that are worked on together.
        kept: rows that the widest window keeps, padded to a power of two.
        ahead: stages of the loop over groups, 1 where there is one group.
    """

    body: Body
    rows: tuple[tuple[str, Node], ...]
    tokens: int
    group: int
    kept: int
    ahead: int


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
    back = sum(len(w.old) for w in body.windows)
    each = 2 * back + len(body.windows)  # weights and rows that a token looks back on
    whole = VECTOR * 128
    if fixed * each > 4 * REGISTERS * 128:
        return Refusal("a token's windows do not fit a program's registers", program.loc)
    tile = tiled.tile
    if blocked:
        width = power(spec.size(blocked))
        most = REGISTERS * 128 // (fixed * (each + GROUP))
        while width > 32 and width > min(whole // fixed, most):
            width //= 2
        tile = tiled.cut(width)
    elements = largest(body.roots, {t.axis: t.block for t in tile})
    vector = VECTOR if VECTOR * each <= REGISTERS else VECTOR // 2
    warps = min(4, power(max(1, elements // (32 * vector))))
    one = dict(spec.buckets).get("T") == 1
    group = 1 if one else GROUP
    tokens = power(max(1 if one else TOKENS, back))
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
        args=tuple(args), static=spec.static, num_stages=1, num_warps=warps, precision="ieee",
        tile=tile, blocked=blocked, grid_axes=grid, packed=spec.packed, body=body, rows=pushed,
        given=states_in(program, spec.given_states), pooled=states_in(program, spec.pools),
        tokens=tokens, group=group, kept=power(max(len(w.old) for w in body.windows)),
        ahead=1 if one else AHEAD,
    )  # fmt: skip
