"""A tiny evaluator of the flat table: what its rows and reads mean, one token at a time."""

from collections.abc import Callable, Mapping

import torch

from attncc.codegen.forms import AffineForm
from attncc.dsl.axes import union
from attncc.dsl.interp import Env, Named, evaluate, pack, unpack
from attncc.dsl.ir import Node, Program

Round = Callable[[torch.Tensor], torch.Tensor]


def times(x: Named, y: Named) -> Named:
    axes = union(x.axes, y.axes)
    return Named(x.aligned(axes) * y.aligned(axes), axes)


def plus(x: Named, y: Named) -> Named:
    axes = union(x.axes, y.axes)
    return Named(x.aligned(axes) + y.aligned(axes), axes)


def over(x: Named, axes: tuple[str, ...]) -> Named:
    kept = tuple(a for a in x.axes if a not in axes)
    return Named(x.data.sum([x.axes.index(a) for a in axes]), kept)


class Token:
    """One token: decays are passed one by one, rows written and read at their slots."""

    def __init__(self, form: AffineForm, env: Env, state: Named, rounded: Round) -> None:
        self.form, self.env, self.rounded = form, env, rounded
        self.state = state
        self.us: list[Named] = []

    def value(self, node: Node) -> Named:
        return evaluate(node, self.env)

    def operand(self, x: Named) -> Named:
        return Named(self.rounded(x.data), x.axes)

    def at(self, slot: int, rows: int) -> Named:
        """The state after ``slot`` decays with only the first ``rows`` rows of the token added."""
        state = self.state
        for passed in range(slot + 1):
            if passed:
                state = times(state, self.value(self.form.decays[passed - 1]))
            for row, u in zip(self.form.rows[:rows], self.us, strict=False):
                if row.write_slot == passed:
                    added = times(self.operand(self.value(row.a)), self.operand(u))
                    state = plus(state, added)
        return state

    def read(self, vector: Node, slot: int, rows: int) -> Named:
        held = times(self.operand(self.at(slot, rows)), self.operand(self.value(vector)))
        return over(held, self.form.active)

    def run(self) -> None:
        for row in self.form.rows:
            u = Named(torch.zeros((), dtype=self.env.dtype), ())
            if row.const is not None:
                u = plus(u, self.value(row.const))
            if row.b is not None:
                seen = self.read(row.b, row.read_slot, row.rows_visible)
                u = plus(u, seen if row.coef is None else times(seen, self.value(row.coef)))
            self.us.append(u)
        for read in self.form.reads:
            self.env.inputs[read.name] = self.read(read.vector, read.slot, read.rows_visible)  # type: ignore[index]


def run_table(
    program: Program,
    form: AffineForm,
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    dtype: torch.dtype = torch.float64,
    rounded: Round = lambda x: x,
) -> dict[str, torch.Tensor]:
    """States and outputs of a dense call, as ``interpret`` lays them out."""
    named = {n: unpack(t.to(dtype), program.tensor(n).pattern, sizes) for n, t in tensors.items()}
    axes = program.tensor(form.state).pattern.axes
    state = named.pop(form.state)
    steps: dict[str, list[torch.Tensor]] = {o.name: [] for o in program.outputs}
    patterns = {o.name: o.pattern.without("T") for o in program.outputs}
    for t in range(sizes["T"]):
        inputs = {n: x.select("T", t) for n, x in named.items()}
        token = Token(form, Env(sizes, inputs, dtype, torch.device("cpu"), token=t), state, rounded)
        token.run()
        for o, node in zip(program.outputs, form.outputs, strict=True):
            value = token.value(node)
            out = patterns[o.name].axes
            steps[o.name].append(value.aligned(out).expand([sizes[a] for a in out]))
        last = token.at(len(form.decays), len(form.rows))
        state = Named(last.aligned(axes), axes)
    found = {form.state: pack(state, program.tensor(form.state).pattern, sizes)}
    for o in program.outputs:
        out = patterns[o.name].axes
        rows = steps[o.name]
        data = torch.stack(rows) if rows else torch.zeros([0, *(sizes[a] for a in out)])
        found[o.name] = pack(Named(data, ("T", *out)), o.pattern, sizes)
    return found
