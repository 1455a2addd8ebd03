"""Runs a call the ordinary way, recorded, and says what a repetition has to know of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.errors import BackendError
from attncc.runtime.arguments import arguments, read_options
from attncc.runtime.bind import bind
from attncc.runtime.merge import Partial
from attncc.runtime.recorder import Recorder, marked
from attncc.runtime.recording import Recording
from attncc.runtime.signature import PLAIN, Layout, Leaves, leaves

if TYPE_CHECKING:
    from attncc.runtime.api import Op


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call that was run and noted.

    Attributes:
        result: what it returned.
        recording: what it did; None where that cannot be done again.
        leaves: its arguments.
        given: registers of results that are the caller's tensors.
        pools: registers of state pools, which are written too.
    """

    result: Any
    recording: Recording | None
    leaves: Leaves
    given: tuple[int, ...]
    pools: tuple[int, ...]


def record(
    op: Op, phase: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, strict: bool
) -> Recorded:
    """Run a call the ordinary way and note what it does.

    Args:
        op: the op.
        phase: ``prefill`` or ``decode``.
        args: positional arguments.
        kwargs: keyword arguments and options.
        strict: whether a call that cannot be done again is an error.

    Raises:
        BackendError: something else than generated kernels runs the call; nothing was written.
        CallError: as a call of the op.
    """
    rest = dict(kwargs)
    read_options(op.declaration.name, rest)  # what is no call is not taken apart
    arguments(op.declaration, tuple(args), rest)
    names = [t.name for t in op.declaration.tensors]
    found = leaves(names, args, kwargs)
    given = list(found.tensors.values())
    for label, tensor in found.tensors.items():
        if type(tensor) not in PLAIN:
            raise BackendError(
                "the call cannot be prepared: a subclass of Tensor", op=op.declaration.name,
                argument=label, found=type(tensor).__name__,
            )  # fmt: skip
    # Each argument is an object of its own, though one tensor may be two of them.
    inputs = [t.detach() for t in given]
    numbers = [marked(value, i) for i, value in enumerate(found.numbers.values())]
    recorder = Recorder(op.declaration.name, inputs, strict=strict)
    with recorder.active():
        again, options = found.rebuilt(inputs, numbers)
        call, chosen = bind(op.declaration, again, options)
        results = call.results
        fresh = recorder.allocated(results)
        op.execute(call, chosen, phase)
    recording = None
    if recorder.refusal is None:
        recording = recorder.finish(results, fresh, partial=chosen.return_partial)
    by_input = dict(zip(map(id, inputs), given, strict=True))
    own = {name: by_input.get(id(t), t) for name, t in results.items()}
    return Recorded(
        gather(op, own, partial=chosen.return_partial),
        recording,
        found,
        tuple(recorder.register_of(t) for t in results.values() if id(t) in by_input),
        tuple(recorder.register_of(p.pool) for p in call.pools.values()),
    )


def gather(op: Op, named: Mapping[str, torch.Tensor], *, partial: bool) -> Any:
    """What a call returns: a tensor, a named tuple or a partial."""
    if partial:
        o, lse = named.values()
        return Partial.of(o, lse)
    if len(named) == 1:
        return next(iter(named.values()))
    return op.result_kind(tuple(named))(*named.values())


class Apart:
    """Which written tensors must not share memory with which others, by register.

    Pairs that did so when the call was bound were allowed then: they are left out.
    """

    def __init__(self, layouts: Sequence[Layout], pointers: Sequence[int], written: Iterable[int]):
        extents = [layout.extent for layout in layouts]
        self._pairs: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
        for w in written:
            others = [
                (r, -n)
                for r, n in enumerate(extents)
                if n and r != w and not _met(pointers[w], extents[w], pointers[r], n)
            ]
            if extents[w]:
                self._pairs.append((w, extents[w], tuple(others)))

    def clash(self, pointers: Sequence[int]) -> tuple[int, int] | None:
        """A written register and another one that share memory, by address range."""
        for written, size, others in self._pairs:
            low = pointers[written]
            if not low:  # allocated by the call itself
                continue
            for other, least in others:  # least: minus the bytes of the other
                if least < pointers[other] - low < size:
                    return written, other
        return None


def _met(a: int, size: int, b: int, extent: int) -> bool:
    return a != 0 and b != 0 and b < a + size and a < b + extent
