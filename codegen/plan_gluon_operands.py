"""What copies bring of a chunk to a state pass by specialised warps, and what they cannot bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attncc.codegen.affine_checks import plain_split, split_row
from attncc.codegen.affine_choices import BLOCK
from attncc.codegen.affine_plans import StatePlan
from attncc.codegen.affine_rows import row_groups, unpicked
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.plan import Spec, TensorArg
from attncc.codegen.plan_gluon_mixing import SCALE
from attncc.codegen.plan_gluon_systems import HEIGHTS, MOST_READS, STORED, TARGETS
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Lit, Map, Node, Select, Size

COLUMNS = 64
"""Columns of one warpgroup: the rows of one instruction, as the state is kept as [v, k]."""
ROWS_A_TOKEN = (1, 2)
"""Rows of a token that fill blocks, and leave each chunk's tokens 128 bytes of fp32 numbers: the
places of a ring are multiples of that, or a copy faults. Rows that follow each other may be any
number of a token.
"""
ELEMENT_WISE = (Map, Input, Lit, Size, Select)


@dataclass(frozen=True, slots=True)
class Operands:
    """Names of inputs, as in the plan."""

    a: str
    b: str
    const: str
    vectors: tuple[str, ...]


def consts_of(plan: StatePlan) -> list[Node | None]:
    """The rows' constants, without what a line holds of them."""
    plain = not plan.solve and SCALE in plan.lines
    split = plain_split if plain else split_row
    return [split(r, plan.form.passive).const for r in plan.form.rows]


def lone_const(plan: StatePlan) -> int | None:
    """The row of a token that alone has constants, as they are loaded; None where others do too.

    Rows have to fill a chunk, so that a copy brings them with the other rows between them.
    """
    consts = consts_of(plan)
    given = [i for i, c in enumerate(consts) if c is not None]
    if len(consts) == 1 or len(given) != 1 or BLOCK % len(consts):
        return None
    return given[0] if isinstance(consts[given[0]], Input) else None


def shown_const(plan: StatePlan) -> str:
    """The rows' constants, where an output takes them as they lie in shared memory; "" for none."""
    if len(plan.form.rows) != 1 or not plan.form.outputs:
        return ""
    const = consts_of(plan)[0]
    name = const.name if isinstance(const, Input) else ""
    shown = {n.name for n in walk(*plan.form.outputs) if isinstance(n, Input)}
    return name if name in shown else ""


def operands_of(
    plan: StatePlan,
    spec: Spec,
    counts: Sequence[int] = ROWS_A_TOKEN,
    *,
    wide: bool = False,
) -> Operands | Refusal:
    """The inputs that copies bring, or the first reason why there are none.

    Args:
        plan: the Triton plan.
        spec: of the call.
        counts: numbers of rows a token that the dialect's copies can bring.
        wide: an output may be fp32 too, and constants may be those of one row of several.
    """
    form, loc = plan.form, plan.program.loc
    reason = next(_problems(plan, spec, counts, wide=wide), None)
    if reason is not None:
        return Refusal(reason, loc)
    [active], rows = form.active, len(form.rows)
    wanted: list[tuple[str, list[Node | None], str, int]] = []
    if not plan.each:
        wanted.append(("a", [r.a for r in form.rows], active, rows))
    if plan.solve and not plan.each:
        wanted.append(("b", [r.b for r in form.rows], active, rows))
    consts = consts_of(plan)
    lone = lone_const(plan) if wide else None
    if lone is not None:
        wanted.append(("const", [consts[lone]], plan.blocked, 1))
    elif any(c is not None for c in consts):
        wanted.append(("const", consts, plan.blocked, rows))
    reads = () if plan.each else form.reads
    wanted += [(read.name, [read.vector], active, 1) for read in reads]
    names = _inside(plan) if plan.each else {}
    for role, nodes, axis, each in wanted:
        name = _loaded(nodes)
        reason = _map_problem(plan, name, axis, each)
        if name is None or reason is not None:
            return Refusal(reason or _computed(role), loc)
        names[role] = name
    vectors = tuple(names[read.name] for read in form.reads)
    return Operands(names["a"], names.get("b", ""), names.get("const", ""), vectors)


def _inside(plan: StatePlan) -> dict[str, str]:
    """The operands that the kernel before has left with decays along the active axis inside."""
    names = {"a": "late_a"} | ({"b": "early_b"} if plan.solve else {})
    return names | {read.name: f"early_{read.name}" for read in plan.form.reads}


def _computed(role: str) -> str:
    return f"operand {role} is computed, so that no tensor map can load it"


def _problems(plan: StatePlan, spec: Spec, counts: Sequence[int], *, wide: bool) -> Iterator[str]:
    form, key, value = plan.form, plan.axis(plan.form.active[0]), plan.axis(plan.blocked)
    rows = len(form.rows)
    if spec.target not in TARGETS:
        yield f"it is written for {', '.join(TARGETS)}, not {spec.target}"
    if plan.storage not in STORED:
        yield f"operands of {plan.storage}, not of 16 bits"
    if rows not in counts:
        yield f"{rows} rows a token do not fill blocks of {BLOCK} that a copy can bring"
    if key.size not in HEIGHTS:
        yield f"{key.axis} of {key.size} is not {' or '.join(map(str, HEIGHTS))}"
    if value.size % COLUMNS:
        yield f"{value.axis} of {value.size} is no multiple of {COLUMNS}"
    if len(form.reads) > MOST_READS:
        yield f"{len(form.reads)} read-outs"
    yield from _output_problems(plan, form, (plan.storage, "fp32") if wide else (plan.storage,))


def _output_problems(plan: StatePlan, form: AffineForm, dtypes: tuple[str, ...]) -> Iterator[str]:
    if len(form.outputs) != 1:
        yield f"{len(form.outputs)} outputs"
        return
    [out], [value] = plan.program.outputs, form.outputs
    arg = plan.tensor(out.name)
    problem = _box_problem(plan, arg, plan.blocked, 1, dtypes)
    lacking = [a for a in plan.grid_axes if a not in arg.pattern.axes]
    if problem is not None or lacking:
        yield problem or f"output {out.name} has no axis {lacking[0]}"
    names = {r.name for r in form.reads}
    nodes = list(walk(value))
    if not any(isinstance(n, Input) and n.name in names for n in nodes):
        yield f"output {out.name} reads no state"
    if not all(isinstance(n, ELEMENT_WISE) for n in nodes):
        yield f"output {out.name} is not computed element by element"
    beside = (n for n in nodes if isinstance(n, Input) and n.name not in names)
    along = [n.name for n in beside if plan.blocked in n.axes and n.name != shown_const(plan)]
    if along:  # the skeleton has indices of columns beside the state's rows only
        yield f"output {out.name} loads {along[0]} along {plan.blocked}"


def _loaded(nodes: list[Node | None]) -> str | None:
    """The input that the rows of an operand are, or None."""
    first, *others = row_groups(nodes)
    node = unpicked(first.node, 0)
    if others or first.shift or not isinstance(node, Input) or node.lifetime is Lifetime.STATE:
        return None
    return node.name


def _map_problem(plan: StatePlan, name: str | None, axis: str, rows: int) -> str | None:
    if name is None:
        return None
    return _box_problem(plan, plan.tensor(name), axis, rows, (plan.storage,))


def _box_problem(
    plan: StatePlan, arg: TensorArg, axis: str, rows: int, dtypes: tuple[str, ...]
) -> str | None:
    """Why no tensor map brings rows of tokens (``rows`` a token) and a column of ``axis``."""
    scan = plan.program.scan or "T"
    if arg.dtype not in dtypes:
        return f"{arg.name} is {arg.dtype}, not {' or '.join(dtypes)}"
    if not arg.aligned:
        return f"{arg.name} is not aligned to 16 bytes"
    if arg.pattern.dims[-1] != (axis,) or scan not in arg.pattern.axes:
        return f"no tensor map for {arg.name} [{arg.pattern}]"
    inner = arg.pattern.dims[arg.pattern.dim_of(scan)][1:]
    held = 1
    for a in inner:
        held *= dict(plan.static).get(a, 0)
    if held != rows or len(inner) > 1:
        return f"{arg.name} has {held} rows a token along {scan}, not {rows}"
    return None
