"""What an op keeps between calls: histories that grow by rows, states and windows of fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError, CacheError
from attncc.dsl.ir import Lifetime, Tensor
from attncc.runtime import checks
from attncc.runtime.bind import window_axes
from attncc.runtime.bind_caches import whole
from attncc.runtime.caches import Storage
from attncc.runtime.quantised import Quantised

FIXED = (Lifetime.STATE, Lifetime.WINDOW)
KEPT = (Lifetime.CACHE, *FIXED)
INDEX = torch.int32


@dataclass(frozen=True, slots=True)
class Stored:
    """How what an op keeps is stored.

    Attributes:
        rows: histories and windows, whose rows are activations: all of them, or by name.
        states: states that ``rows`` does not name.
    """

    rows: Storage | Mapping[str, Storage] = torch.bfloat16
    states: torch.dtype = torch.float32

    def of(self, op: str, t: Tensor) -> torch.dtype:
        """The dtype of a state or window.

        Raises:
            CacheError: its storage is missing, or quantised, which only histories may be.
            DtypeError: no call takes a state or window of that dtype.
        """
        named = self.rows if isinstance(self.rows, Mapping) else {}
        usual = self.states if t.lifetime is Lifetime.STATE else self.rows
        found = named.get(t.name, usual)
        if isinstance(found, Mapping):
            raise CacheError(
                "a storage is missing", op=op, argument=t.name, expected="an entry in dtype="
            )
        if isinstance(found, Quantised):
            raise CacheError(
                "only histories have quantised storage",
                op=op, argument=t.name, expected="a dtype", found=found,
            )  # fmt: skip
        return checks.usable(
            op, t.name, found, checks.REAL, f"no call takes a {t.lifetime.value} of this dtype"
        )


def declared(op: Any) -> Declaration:
    """The declaration of an op, or the one that was given."""
    found: Declaration = getattr(op, "declaration", op)
    return found


def kept(
    declaration: Declaration, lifetimes: Iterable[Lifetime] = KEPT, names: Iterable[str] = ()
) -> list[Tensor]:
    """The tensors that outlive a call, in the signature's order.

    Args:
        declaration: the op.
        lifetimes: which of them.
        names: only those of these names, all if there are none.

    Raises:
        CacheError: there are none, or a name is not among them.
        RefusedError: a history lies in blocks, which a call can only be given whole.
    """
    lifetimes, wanted = tuple(lifetimes), tuple(names)
    found = [t for t in declaration.tensors if t.lifetime in lifetimes]
    known = [t.name for t in found]
    label = " or ".join(x.value for x in lifetimes)
    if not found:
        raise CacheError(f"the op keeps no {label}", op=declaration.name)
    for name in wanted:
        if name not in known:
            raise CacheError(
                f"the op keeps no {label} of this name",
                op=declaration.name, argument=name, expected=", ".join(known),
            )  # fmt: skip
    for t in found:
        whole(declaration.name, t)
    return [t for t in found if t.name in wanted] if wanted else found


def shape(declaration: Declaration, t: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Extents of a state's or window's memory axes; of a window the last W - 1 rows are kept.

    Raises:
        CacheError: a size is missing.
    """
    missing = next((a for a in t.pattern.axes if a not in sizes), None)
    if missing is not None:
        raise CacheError(
            "a size is missing",
            op=declaration.name, argument=t.name, axis=missing, expected="an entry in sizes=",
        )  # fmt: skip
    full = dict(sizes)
    if t.lifetime is Lifetime.WINDOW:
        axis = window_axes(declaration.trace()).get(t.name)
        if axis is not None:
            full[axis] = max(full[axis] - 1, 0)
    return tuple(prod(full[a] for a in dim) for dim in t.pattern.dims)


def own_batch_axis(declaration: Declaration, t: Tensor) -> None:
    """A state that can live in a pool.

    Raises:
        ArgumentError: it has no memory axis B of its own.
    """
    if ("B",) not in t.pattern.dims:
        raise ArgumentError(
            "a pool needs B as a memory axis of its own",
            op=declaration.name, argument=t.name, found=f"[{t.pattern}]",
        )  # fmt: skip


def pools(
    declaration: Declaration, *, sizes: Mapping[str, int], slots: int, stored: Stored,
    device: torch.device | str, lifetimes: Iterable[Lifetime] = FIXED, names: Iterable[str] = (),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A pool of zeros for every state and window, B counting slots.

    Raises:
        ArgumentError: a state without a memory axis B of its own.
        CacheError: there are none, or a size or a storage is missing.
        DtypeError: no call takes a state or window of that dtype.
    """
    found = {}
    for t in kept(declaration, lifetimes, names):
        own_batch_axis(declaration, t)
        extents = shape(declaration, t, {**sizes, "B": slots})
        dtype = stored.of(declaration.name, t)
        found[t.name] = torch.zeros(extents, dtype=dtype, device=device)
    return found
