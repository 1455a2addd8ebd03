"""Calls on made-up data, to be held to the reference: for self-checks, tuning and ``verify``.

A trial keeps what kernels are compiled for (dtypes, head dims, layouts, options) and has few and
short sequences, so that the interpreter in fp64 is the oracle, on the device of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from attncc.codegen.affine_choices import vectors_of
from attncc.codegen.forms import AffineForm, Analysis, WindowForm
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.specialise import runtime_axes
from attncc.codegen.terms import depends_on
from attncc.dsl.axes import PAGE, PAGES, Pattern
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Contract, Fn, Input, Kind, Lifetime, Map, Node, Program
from attncc.runtime.arrivals import forget
from attncc.runtime.backends import run_kernels
from attncc.runtime.bind import window_axes
from attncc.runtime.call import Call
from attncc.runtime.eager.run import run as run_eager
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import Scales
from attncc.runtime.recorder import plain
from attncc.runtime.reference import run_reference
from attncc.runtime.tolerance import Judged, judge

FEW = 8
"""Up to this many tokens a trial keeps a call's own number: the kernels may depend on it."""
TOKENS, HELD, SEQUENCES = 80, 48, 2
"""Of a trial: tokens, rows of history before them (multiples of 16, not of 64), sequences."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a trial beside its oracle."""

    output: str
    judged: Judged


def trial_call(
    call: Call, device: torch.device | str, *, seed: int = 0, small: bool = True
) -> Call:
    """A call of the same kind on a device, with data.

    Args:
        call: any bound call; its tensors are not read.
        device: where the new one's tensors live.
        seed: of the data.
        small: with few and short sequences; else of the call's own sizes.
    """
    sizes = _small(call) if small else dict(call.sizes)
    draw = _Draw(call, sizes, torch.Generator().manual_seed(seed), even=not small)
    with torch.device("cpu"):  # whatever the caller's default device is
        made = draw.call()
    return moved(made, torch.device(device))


def moved(call: Call, device: torch.device) -> Call:
    """A copy of a call in other memory."""

    def copy(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device, copy=True)

    def copies(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: copy(t) for n, t in held.items()}

    def maybe(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else copy(t)

    tensors = copies(call.tensors)
    pools = {
        n: StatePool(tensors[n], copy(p.slots), maybe(p.out_slots)) for n, p in call.pools.items()
    }
    return replace(
        call, tensors=tensors, outputs=copies(call.outputs), pools=pools,
        final_states=copies(call.final_states), new_rows=copies(call.new_rows), device=device,
        cu_seqlens=maybe(call.cu_seqlens), cu_seqlens_k=maybe(call.cu_seqlens_k),
        lengths=maybe(call.lengths), block_table=maybe(call.block_table), lse=maybe(call.lse),
        scales={n: replace(own, tensor=copy(own.tensor)) for n, own in call.scales.items()},
    )  # fmt: skip


def as_kernels(analysis: Analysis) -> Analysis:
    """The analysis with which the torch lowering takes the kernels' way.

    It loops over tokens where the kernels step, so that both round alike.
    """
    carries = analysis.carries
    if analysis.affine is not None or carries is None:
        return analysis
    windows = all(isinstance(f, WindowForm) for f in carries.forms)
    return analysis if windows else replace(analysis, carries=None)


def results_of(call: Call) -> dict[str, torch.Tensor]:
    """What a call has written, by name; of pools the sequences' states."""
    found = {**call.final_states, **call.outputs}
    if call.lse is not None:
        found["lse"] = call.lse
    for name, pool in call.pools.items():
        last = pool.written[:, -1] if pool.each_token else pool.written
        found[name] = StatePool(pool.pool, last).read(call.patterns[name])
    return found


def compare(call: Call, spec: Spec, phase: str, parts: int | None = None) -> list[Finding]:
    """Run a call's kernels on NaN-filled results and judge every one of them.

    Args:
        call: a trial; its caches and pools change.
        spec: what selects its kernels.
        phase: ``prefill`` or ``decode``.
        parts: ranges of keys or segments that sequences are cut into; None leaves it to the call.

    Raises:
        RefusedError: no kernel covers the call.
    """
    analysis = analyse(call.program)
    plain = moved(call, call.device)
    exact = run_reference(plain)
    run_eager(plain, as_kernels(analysis), round_operands=True)
    rough = results_of(plain)
    for tensor in (*call.outputs.values(), *call.final_states.values(), call.lse):
        if tensor is not None and tensor.is_floating_point():
            tensor.fill_(float("nan"))
    try:
        run_kernels(call, analysis, spec, phase, parts=parts)
        if call.device.type == "cuda":
            torch.cuda.synchronize(call.device)
    except Exception:
        forget()
        raise
    found = [
        Finding(name, judge(tensor, exact[name], rough[name], tensor.dtype))
        for name, tensor in results_of(call).items()
    ]
    copied = call.new_rows.keys() - call.scales.keys()  # e4m3 is judged by what is read from it
    found += [_appended(call, plain, name) for name in sorted(copied)]
    if not all(f.judged.right for f in found):
        forget()  # what counted wrong must not make the next trial wrong
    return found


def _appended(call: Call, plain: Call, name: str) -> Finding:
    """A history after the call: rows are copied, so they are equal bit for bit."""
    got, want = call.tensors[name], plain.tensors[name]
    same = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    return Finding(f"{name} (appended)", Judged(0.0 if same else float("inf"), 0.0))


# --- sizes -----------------------------------------------------------------------------------


def _small(call: Call) -> dict[str, int]:
    """The call's sizes with few sequences, tokens and rows of history."""
    sizes = dict(call.sizes)
    shown = {a for o in call.program.outputs for a in o.pattern.axes}
    states = {a for n in call.program.state_names for a in call.program.tensor(n).pattern.axes}
    for axis in runtime_axes(call.program):
        if axis in sizes and axis not in {*shown, *states, "B", "T", "S"}:
            sizes[axis] = min(sizes[axis], TOKENS)
    sizes["B"] = min(call.sizes["B"], SEQUENCES)
    tokens = call.sizes.get("T", 1)
    each = tokens / max(call.sizes["B"], 1) if call.packed else tokens
    few = each <= FEW
    if "T" in sizes:
        sizes["T"] = max(int(each), 1) * (sizes["B"] if call.packed else 1) if few else TOKENS
    if "S" in sizes:
        own = int(each) if few and call.packed else sizes.get("T", 1)
        sizes["S"] = -(-own // 16) * 16 + HELD
        if call.lengths is None and call.packed:
            sizes["S"] = sizes["T"] if call.cu_seqlens_k is None else sizes["S"] * sizes["B"]
        elif call.lengths is None and call.sizes["S"] == tokens:
            sizes["S"] = sizes["T"]
    if call.block_table is not None:
        each_row = -(-sizes["S"] // sizes[PAGE])
        sizes[PAGES] = sizes["B"] * each_row + 2
        sizes["S"] = each_row * sizes[PAGE]
    return sizes


def _cuts(total: int, count: int, *, even: bool) -> torch.Tensor:
    """Offsets of sequences: of equal lengths, or the first one shorter."""
    steps = [total * i // max(count, 1) for i in range(count + 1)]
    if not even and count > 1:
        steps[1] -= steps[1] // 5
    return torch.tensor(steps, dtype=torch.int32)


# --- data ------------------------------------------------------------------------------------


def _under(root: Node) -> set[str]:
    return {n.name for n in walk(root) if isinstance(n, Input)}


def roles(program: Program, form: AffineForm | None) -> dict[str, str]:
    """What an input's values have to look like for a scan to stay finite.

    ``gate``: a logarithm below 0; ``unit``: vectors of length 1; ``coef``: between 0 and 1.
    """
    found = _stepped(program) if form is None else {}
    if form is not None:
        for node in (*form.decays, *(r.coef for r in form.rows if r.coef is not None)):
            found |= dict.fromkeys(_under(node), "coef")
        active = set(form.active)
        for vector in vectors_of(form):
            inputs = (n for n in walk(vector) if isinstance(n, Input))
            found |= {n.name: "unit" for n in inputs if active & set(axes_of(n))}
    for node in walk(*program.roots):
        if isinstance(node, Map) and node.fn is Fn.EXP and program.scan is not None:
            found |= {n: "gate" for n in _under(node) if found.get(n) != "unit"}
    return found


def _stepped(program: Program) -> dict[str, str]:
    """Without a table: a vector is what a state is read with, a coefficient has no such axis."""
    states = frozenset(t.name for t in program.tensors if t.lifetime is Lifetime.STATE)
    nodes = list(walk(*program.roots))
    products = (n for n in nodes if isinstance(n, Contract))
    reads = [n for n in products if any(depends_on(a, states) for a in n.args)]
    along = {a for n in reads for a in n.over}
    inputs = {n.name: n for n in nodes if isinstance(n, Input) and n.name not in states}
    found = {name: "coef" for name, n in inputs.items() if reads and not along & {*n.axes}}
    for read in reads:
        taken = (a for a in read.args if isinstance(a, Input) and a.name in inputs)
        found |= {a.name: "unit" for a in taken if {*read.over} & {*a.axes}}
    return found


class _Draw:
    """Makes one call's tensors."""

    def __init__(
        self, call: Call, sizes: Mapping[str, int], rng: torch.Generator, *, even: bool
    ) -> None:
        self.even = even  # full histories, sequences of one length
        self.like = call
        self.sizes = sizes
        self.rng = rng
        self.roles = roles(call.program, analyse(call.program).affine)
        self.kinds = {t.name: t.kind for t in call.program.tensors}

    def call(self) -> Call:
        """The call on the CPU."""
        like, sizes = self.like, self.sizes
        tensors, pools = {}, {}
        for name, t in like.tensors.items():
            if name in like.pools:
                pools[name] = self._pool(name, t)
                tensors[name] = pools[name].pool
            else:
                tensors[name] = self._tensor(name, like.patterns[name], t.dtype)
        places = dict(self._places())
        return replace(
            like, tensors=tensors, pools=pools, sizes=dict(sizes), device=torch.device("cpu"),
            outputs={n: self._empty(n, t) for n, t in like.outputs.items()},
            final_states={n: self._empty(n, t) for n, t in like.final_states.items()},
            new_rows={n: self._row(n, t) for n, t in like.new_rows.items()},
            lse=None if like.lse is None or like.lse_axes is None
            else torch.empty(self._shape(like.lse_axes), dtype=torch.float32),
            cu_seqlens=places.get("cu_seqlens"), cu_seqlens_k=places.get("cu_seqlens_k"),
            lengths=places.get("lengths"), block_table=places.get("block_table"),
            scalars={n: plain(v) for n, v in like.scalars.items()},  # a recorded call's are marked
            scales={n: replace(own, tensor=self._scales(own)) for n, own in like.scales.items()},
        )  # fmt: skip

    def _shape(self, pattern: Pattern, name: str = "", **other: int) -> list[int]:
        """Extents; a window (by its name) holds one row less than its axis counts."""
        sizes, kept = {**self.sizes, **other}, window_axes(self.like.program).get(name)
        return [prod(sizes[a] - (a == kept) for a in dim) for dim in pattern.dims]

    def _values(self, name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn(shape, generator=self.rng, dtype=torch.float32)
        if self.kinds.get(name) is Kind.INT or not dtype.is_floating_point:
            return x.gt(0.3).to(dtype)
        match self.roles.get(name):
            case "unit":
                x = torch.nn.functional.normalize(x, dim=-1)
            case "coef":
                x = x.sigmoid()
            case "gate":
                x = -x.abs()
        return x.to(dtype)

    def _scales(self, own: Scales) -> torch.Tensor:
        """Factors of e4m3 numbers: about 1, as fp32 or (uint8) as powers of two."""
        sizes = own.sizes(self.sizes)
        shape = [prod(sizes[a] for a in dim) for dim in own.pattern.dims]
        if own.tensor.dtype.is_floating_point:
            return torch.rand(shape, generator=self.rng, dtype=torch.float32) + 0.5
        return torch.randint(126, 129, shape, generator=self.rng).to(own.tensor.dtype)

    def _tensor(self, name: str, pattern: Pattern, dtype: torch.dtype) -> torch.Tensor:
        return self._values(name, self._shape(pattern, name), dtype)

    def _empty(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(self._shape(self.like.patterns[name], name), dtype=like.dtype)

    def _row(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """New rows of a history: T in place of S; packed, without B."""
        pattern = self.like.program.tensor(name).pattern
        dims = tuple(tuple("T" if a == "S" else a for a in d) for d in pattern.dims)
        pattern = Pattern(dims).without("B") if self.like.packed else Pattern(dims)
        return self._values(name, self._shape(pattern), like.dtype)

    def _pool(self, name: str, like: torch.Tensor) -> StatePool:
        """One slot more than sequences, in another order."""
        old, batch = self.like.pools[name], self.sizes["B"]
        pattern = self.like.patterns[name]
        tokens = old.written.shape[1] if old.each_token else 0
        tokens = min(tokens, self.sizes.get("T", 1)) if tokens else 0
        slots = batch * max(tokens, 1) + batch + 1
        pool = self._values(name, self._shape(pattern, name, B=slots), like.dtype)
        order = torch.randperm(slots, generator=self.rng).int()
        if tokens:
            out = order[batch : batch + batch * tokens].view(batch, tokens)
            return StatePool(pool, order[:batch], out.contiguous())
        return StatePool(pool, order[:batch].clone(), None)

    def _places(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Where sequences and pages lie."""
        like, sizes = self.like, self.sizes
        batch = sizes["B"]
        if like.cu_seqlens is not None:
            even = self.even or sizes["T"] <= FEW * max(batch, 1)
            yield "cu_seqlens", _cuts(sizes["T"], batch, even=even)
        if like.cu_seqlens_k is not None:
            yield "cu_seqlens_k", _cuts(sizes["S"], batch, even=True)
        if like.lengths is not None:
            room = max(sizes["S"] - sizes.get("T", 1), 0)
            less = 0 if self.even else room
            held = [room - (less * b) // max(batch, 1) for b in range(batch)]
            yield "lengths", torch.tensor(held, dtype=torch.int32)
        if like.block_table is not None:
            order = torch.randperm(sizes[PAGES], generator=self.rng).int()
            each = sizes["S"] // sizes[PAGE]
            yield "block_table", order[: batch * each].view(batch, each).contiguous()
