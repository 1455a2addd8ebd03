"""Two evaluators of the flat table: one token at a time, and in chunks with rounded operands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from attncc.codegen.forms import AffineForm
from attncc.codegen.terms import number
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

    def __init__(self, form: AffineForm, env: Env, state: Named) -> None:
        self.form, self.env = form, env
        self.state = state
        self.us: list[Named] = []

    def value(self, node: Node) -> Named:
        return evaluate(node, self.env)

    def at(self, slot: int, rows: int) -> Named:
        """The state after ``slot`` decays with only the first ``rows`` rows of the token added."""
        state = self.state
        for passed in range(slot + 1):
            if passed:
                state = times(state, self.value(self.form.decays[passed - 1]))
            for row, u in zip(self.form.rows[:rows], self.us, strict=False):
                if row.write_slot == passed:
                    state = plus(state, times(self.value(row.a), u))
        return state

    def read(self, vector: Node, slot: int, rows: int) -> Named:
        return over(times(self.at(slot, rows), self.value(vector)), self.form.active)

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
) -> dict[str, torch.Tensor]:
    """States and outputs of a dense call, as ``interpret`` lays them out."""
    named = {n: unpack(t.to(dtype), program.tensor(n).pattern, sizes) for n, t in tensors.items()}
    axes = program.tensor(form.state).pattern.axes
    state = named.pop(form.state)
    steps: dict[str, list[torch.Tensor]] = {o.name: [] for o in program.outputs}
    patterns = {o.name: o.pattern.without("T") for o in program.outputs}
    for t in range(sizes["T"]):
        inputs = {n: x.select("T", t) for n, x in named.items()}
        token = Token(form, Env(sizes, inputs, dtype, torch.device("cpu"), token=t), state)
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


@dataclass
class Chunks:
    """The table in chunks, in fp32, operands of products rounded where the kernel rounds them."""

    program: Program
    form: AffineForm
    sizes: Mapping[str, int]
    rounded: Round

    def __post_init__(self) -> None:
        axes = self.program.tensor(self.form.state).pattern.axes
        self.active, self.passive = self.form.active[0], self.form.passive[-1]
        self.batch = tuple(a for a in axes if a not in (self.active, self.passive))

    def full(self, node: Node | None, env: Env, *last: str, fill: float = 0.0) -> torch.Tensor:
        """A value as [batch..., T, last...]."""
        axes = (*self.batch, "T", *last)
        shape = [self.sizes[a] for a in axes]
        if node is None:
            return torch.full(shape, fill)
        return evaluate(node, env).aligned(axes).expand(shape).float()

    def stacked(self, nodes: Sequence[Node | None], env: Env, *last: str) -> torch.Tensor:
        """A value per row as [batch..., T * rows, last...], token-major."""
        parts = torch.stack([self.full(n, env, *last) for n in nodes], len(self.batch) + 1)
        return parts.flatten(len(self.batch), len(self.batch) + 1)

    def weights(self, decay: torch.Tensor, late: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        """Products of decays between writes (columns) and reads (rows); -1 is the chunk's start."""
        count = decay.shape[-1]
        token = torch.arange(count)
        inside = torch.ones(*decay.shape[:-1], len(late), len(early))
        for t in range(count):
            after = (t > early[:, 0]) | ((t == early[:, 0]) & (early[:, 1] == 0))
            before = (t < late[:, 0]) | ((t == late[:, 0]) & (late[:, 1] == 1))
            passed = before[:, None] & after[None, :]
            inside = torch.where(passed, inside * decay[..., token[t], None, None], inside)
        return inside

    def run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        form, r = self.form, self.rounded
        named = {
            n: unpack(t.float(), self.program.tensor(n).pattern, self.sizes)
            for n, t in tensors.items()
        }
        state = named.pop(form.state).aligned((*self.batch, self.active, self.passive))
        env = Env(self.sizes, named, torch.float32, torch.device("cpu"))
        one = number(1)
        a = r(self.stacked([w.a for w in form.rows], env, self.active))
        b = r(self.stacked([w.b for w in form.rows], env, self.active))
        coef = self.stacked([w.coef or (one if w.b else None) for w in form.rows], env)
        const = self.stacked([w.const for w in form.rows], env, self.passive)
        decay = self.full(form.decays[0] if form.decays else one, env)
        reads = [r(self.full(x.vector, env, self.active)) for x in form.reads]
        found: list[list[torch.Tensor]] = [[] for _ in form.reads]
        per, size = len(form.rows), 64 // len(form.rows)
        for start in range(0, self.sizes["T"], size):
            n = min(size, self.sizes["T"] - start)
            rows = slice(start * per, (start + n) * per)
            at = torch.tensor([[t, k] for t in range(n) for k in range(per)])
            write = torch.tensor([[t, w.write_slot] for t in range(n) for w in form.rows])
            read = torch.tensor([[t, w.read_slot] for t in range(n) for w in form.rows])
            begin = torch.tensor([[-1, 1]])
            d = decay[..., start : start + n]
            seen = torch.tensor([w.rows_visible for w in form.rows]).repeat(n)
            same = (at[:, None, 0] == at[None, :, 0]) & (at[None, :, 1] < seen[:, None])
            visible = (at[:, None, 0] > at[None, :, 0]) | same
            lower = coef[..., rows, None] * (b[..., rows, :] @ a[..., rows, :].mT)
            lower = torch.where(visible, lower * self.weights(d, read, write), 0.0)
            eye = torch.eye(n * per).expand_as(lower)
            inverse = torch.linalg.solve_triangular(eye - lower, eye, upper=False)
            inverse = r(inverse)
            held = r(state)
            prefix = self.weights(d, read, begin)
            u = const[..., rows, :] + coef[..., rows, None] * prefix * (b[..., rows, :] @ held)
            if any(w.b is not None for w in form.rows):
                u = inverse @ r(u)
            for x, vector, out in zip(form.reads, reads, found, strict=True):
                when = torch.tensor([[t, x.slot] for t in range(n)])
                own = when[:, None, 0] == at[None, :, 0]
                sees = (when[:, None, 0] > at[None, :, 0]) | (
                    own & (at[None, :, 1] < x.rows_visible)
                )
                mix = vector[..., start : start + n, :] @ a[..., rows, :].mT
                mix = r(torch.where(sees, mix * self.weights(d, when, write), 0.0))
                value = self.weights(d, when, begin) * (vector[..., start : start + n, :] @ held)
                out.append(value + mix @ r(u))
            end = torch.tensor([[n, 0]])
            suffix = self.weights(d, end, write)[..., 0, :, None]
            total = self.weights(d, end, begin)
            state = total * state + a[..., rows, :].mT @ r(suffix * u)
        return self.results(state, found, named)

    def results(
        self, state: torch.Tensor, found: list[list[torch.Tensor]], named: dict[str, Named]
    ) -> dict[str, torch.Tensor]:
        pattern = self.program.tensor(self.form.state).pattern
        axes = (*self.batch, self.active, self.passive)
        results = {self.form.state: pack(Named(state, axes), pattern, self.sizes)}
        axes = (*self.batch, "T", self.passive)
        shape = [self.sizes[a] for a in axes]
        reads = {
            x.name: Named(torch.cat(out, -2) if out else torch.zeros(shape), axes)
            for x, out in zip(self.form.reads, found, strict=True)
        }
        env = Env(self.sizes, {**named, **reads}, torch.float32, torch.device("cpu"))
        for o, node in zip(self.program.outputs, self.form.outputs, strict=True):
            results[o.name] = pack(evaluate(node, env), o.pattern, self.sizes)
        return results
