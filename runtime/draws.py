"""The data of trials: what a call's tensors have to look like, and where its rows lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch

from attncc.codegen.affine_choices import vectors_of
from attncc.codegen.forms import Analysis
from attncc.codegen.pipeline import analyse
from attncc.codegen.terms import depends_on
from attncc.dsl.axes import PAGE, PAGES, Pattern
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Contract, Fn, Input, Kind, Lifetime, Map, Node, Program
from attncc.runtime.bind import window_axes
from attncc.runtime.call import Call
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import Scales
from attncc.runtime.recorder import plain

FEW = 8
"""Up to this many tokens a trial keeps a call's own number: the kernels may depend on it."""
STEP = 1.75
"""Whole multiples of it are exact in every element type, and e4m3 stores them beside a power of two
as their scale (its largest number is 448 = 1.75 * 2^8).
"""


def draw(call: Call, sizes: Mapping[str, int], seed: int, *, even: bool) -> Call:
    """A call of the same kind on the CPU, with data.

    Args:
        call: any bound call; its tensors are not read.
        sizes: of the new one.
        seed: of the data.
        even: full histories, and sequences of one length.
    """
    return _Draw(call, sizes, torch.Generator().manual_seed(seed), even=even).call()


def _cuts(total: int, count: int, *, even: bool) -> torch.Tensor:
    """Offsets of sequences: of equal lengths, or the first one shorter."""
    steps = [total * i // max(count, 1) for i in range(count + 1)]
    if not even and count > 1:
        steps[1] -= steps[1] // 5
    return torch.tensor(steps, dtype=torch.int32)


def _under(root: Node) -> set[str]:
    return {n.name for n in walk(root) if isinstance(n, Input)}


def roles(program: Program, analysis: Analysis) -> dict[str, str]:
    """What an input's values have to look like.

    For a scan to stay finite, ``gate``: a logarithm below 0; ``unit``: vectors of length 1;
    ``coef``: between 0 and 1. For a selection to be the same in any order of its sums, ``whole``:
    -1, 0 or 1 times one number.
    """
    form = analysis.affine
    found = _stepped(program) if form is None else {}
    if analysis.selected is not None:
        found |= dict.fromkeys(_under(analysis.selected.selection.node.score), "whole")
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
        self.roles = roles(call.program, analyse(call.program))
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
            scales={n: replace(own, tensor=self._scales(n, own)) for n, own in like.scales.items()},
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
            case "whole":
                x = STEP * x.round().clamp(-1, 1)
        return x.to(dtype)

    def _scales(self, name: str, own: Scales) -> torch.Tensor:
        """Factors of e4m3 numbers: about 1, as fp32 or (uint8, or to be exact) powers of two."""
        sizes = own.sizes(self.sizes)
        shape = [prod(sizes[a] for a in dim) for dim in own.pattern.dims]
        floating = own.tensor.dtype.is_floating_point
        if floating and self.roles.get(name) != "whole":
            return torch.rand(shape, generator=self.rng, dtype=torch.float32) + 0.5
        powers = torch.randint(126, 129, shape, generator=self.rng)
        return torch.exp2(powers - 127.0) if floating else powers.to(own.tensor.dtype)

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
