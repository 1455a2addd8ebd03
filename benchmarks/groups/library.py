"""Rows of library ops that have no group of their own: inputs, our call, the oracle's parts.

The answer is checked on the call that is timed: at few rows of it (the last queries of an
attention, the first tokens of a recurrence, two sequences of a step) against the interpreter of the
op's declaration in fp64, and a recurrence's whole prompt, its final state included, against the
torch lowering in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from attncc import QuantisedTensor
from benchmarks.case import Case, Inputs, Part, Work, generator

BF16 = torch.bfloat16
ROWS = 64
"""Tokens of a prompt that the interpreter takes."""
STEPS = 2
"""Sequences of a decode step that it takes."""

HISTORIES = ("k", "v")
UNIT = 2.0**-6
"""Every row's scale of an e4m3 history: a power of two, so that bf16 holds what the bits mean."""

Draw = Callable[..., torch.Tensor]
Make = Callable[[Draw, tuple[int, ...]], torch.Tensor]
"""Makes a tensor of a shape from a function that draws normal numbers."""


def normal(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal numbers."""
    return draw(*shape)


def unit(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Vectors of length 1."""
    return F.normalize(draw(*shape), dim=-1)


def gate(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Logarithms of decays, about -0.05."""
    return F.logsigmoid(draw(*shape) + 3)


def rate(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Between 0 and 1."""
    return draw(*shape).sigmoid()


def narrow(x: torch.Tensor) -> QuantisedTensor:
    """A history [B, S, H, D] as e4m3 and scales [B, H, 1, S]."""
    data = (x.float() / UNIT).clamp(-448, 448).to(torch.float8_e4m3fn)
    batch, rows, heads, _ = x.shape
    return QuantisedTensor(data, torch.full((batch, heads, 1, rows), UNIT, device=x.device))


@dataclass(frozen=True, slots=True)
class Arg:
    """A tensor of a call: its shape, how it is made, its dtype."""

    shape: tuple[int, ...]
    make: Make = normal
    dtype: torch.dtype = BF16

    @property
    def bytes(self) -> int:
        """Of all of it."""
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True, slots=True)
class Row:
    """One op at one size.

    Attributes:
        op: its name in the library.
        sizes: text of the case's name.
        args: tensors by the op's names.
        peers: by name.
        flops: of the usual algorithm.
        options: numbers and flags of the call.
        phase: ``prefill`` or ``decode``.
        last: the oracle's rows are the last ones, which see the whole history; else the first.
        outputs: bytes that are written.
        read: share of a history's bytes that has to be read.
        stored: the histories k and v lie as e4m3 with a scale a row; peers have the same numbers
            in bf16.
    """

    op: str
    sizes: str
    args: Mapping[str, Arg]
    peers: Mapping[str, Callable[[Inputs], Work]]
    flops: float
    outputs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "prefill"
    last: bool = False
    read: float = 1.0
    stored: bool = False

    def case(self) -> Case:
        """The row as a case of its phase's group."""
        held = [a.bytes * (self._share(a) if n in HISTORIES else 1) for n, a in self.args.items()]
        steps = self.phase == "decode"
        return Case(
            group=f"library_{self.phase}",
            name=f"{self.op} {self.sizes}",
            build=self._build,
            ours=self.ours,
            peers=self.peers,
            parts=self.parts,
            bytes=round(sum(held)) + self.outputs,
            flops=self.flops,
            timing="graph" if steps else "events",
            reads=steps and self.last,
        )

    def _share(self, history: Arg) -> float:
        """What is read of a history, by its bytes in bf16; e4m3 has one scale of 4 bytes a row."""
        width = history.shape[-1]
        return self.read * (width + 4) / (2 * width) if self.stored else self.read

    def _build(self, device: torch.device) -> Inputs:
        rng = generator(device)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, device=device)

        made = {n: a.make(draw, a.shape).to(device, a.dtype) for n, a in self.args.items()}
        held = {}
        if self.stored:
            held = {n: narrow(made[n]) for n in HISTORIES}
            made |= {n: (x.data.float() * UNIT).to(BF16) for n, x in held.items()}
        return {**made, **self.options, "held": held}

    def ours(self, inputs: Inputs, backend: str) -> Work:
        """Our call, into tensors of its own."""
        from attncc.runtime.bind import bind

        op = self._op()
        call, _ = bind(op.declaration, (), self._named(inputs))
        out = {n: t.fill_(float("nan")) for n, t in {**call.final_states, **call.outputs}.items()}
        run = getattr(op, self.phase)
        named = {**self._named(inputs), **inputs["held"]}

        def fn() -> Mapping[str, torch.Tensor]:
            run(**named, out=out, backend=backend)
            return out

        return Work(fn, out)

    def _op(self) -> Any:
        from attncc import ops

        return getattr(ops, self.op)

    def _named(self, inputs: Inputs) -> dict[str, Any]:
        return {n: inputs[n] for n in (*self.args, *self.options)}

    def parts(self, inputs: Inputs) -> Iterator[Part]:
        """Few rows in fp64; of a prompt that leaves a state, all of it in fp32 too."""
        op, dtype = self._op(), BF16
        few, where = self._few(inputs)
        exact = self._results(op, op.reference(**few))
        rough = self._results(op, op(**few, backend="torch"))
        states = op.declaration.trace().state_names
        whole = bool(states) and self.phase == "prefill"
        for name, oracle in exact.items():
            if name not in states:
                yield Part(name, self._index(op, name, where), oracle, rough[name], dtype)
            elif not whole:
                index = self._index(op, name, where)
                yield Part(name, index, oracle, rough[name], rough[name].dtype)
        if whole:
            yield from self._whole(op, inputs)

    def _whole(self, op: Any, inputs: Inputs) -> Iterator[Part]:
        named = self._named(inputs)
        wide = {
            n: x.float() if isinstance(x, torch.Tensor) and x.dtype == BF16 else x
            for n, x in named.items()
        }
        exact = self._results(op, op(**wide, backend="torch"))
        rough = self._results(op, op(**named, backend="torch"))
        for name, oracle in exact.items():
            yield Part(name, (slice(None),), oracle.double(), rough[name].to(BF16), BF16)

    @staticmethod
    def _results(op: Any, found: Any) -> dict[str, torch.Tensor]:
        program = op.declaration.trace()
        names = [*program.state_names, *(o.name for o in program.outputs)]
        return dict(zip(names, (found,) if isinstance(found, torch.Tensor) else found, strict=True))

    def _few(self, inputs: Inputs) -> tuple[dict[str, Any], dict[str, slice]]:
        """The arguments of a small call on the same data, and where its rows are, by axis."""
        tensors = {t.name: t for t in self._op().declaration.tensors}
        rows: dict[str, slice] = {}
        found = self._named(inputs)
        for name, x in found.items():
            if not isinstance(x, torch.Tensor):
                continue
            pattern = tensors[name].pattern
            for axis, most in (("B", STEPS if self.phase == "decode" else 1), ("T", ROWS)):
                if (axis,) in pattern.dims:
                    dim = pattern.dim_of(axis)
                    n = x.shape[dim]
                    late = axis == "B" or self.last
                    rows[axis] = slice(max(n - most, 0), n) if late else slice(0, min(n, most))
                    x = x.narrow(dim, rows[axis].start, rows[axis].stop - rows[axis].start)
            found[name] = x
        return found, rows

    @staticmethod
    def _index(op: Any, name: str, rows: Mapping[str, slice]) -> tuple[slice, ...]:
        program = op.declaration.trace()
        patterns = {o.name: o.pattern for o in program.outputs}
        patterns |= {n: program.tensor(n).pattern for n in program.state_names}
        return tuple(rows.get(" ".join(dim), slice(None)) for dim in patterns[name].dims)
