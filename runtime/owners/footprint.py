"""Bytes of what an op keeps between calls, from the declaration alone.

Patterns and sizes give the shapes, storage the bytes; the planners are those of the allocation, run
without memory, so that what is promised is what is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.ir import Lifetime, Tensor
from attncc.runtime.caches import Storage, storage
from attncc.runtime.owners.kept import FIXED, INDEX, Stored, declared, kept, pools


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Bytes of one object that an op keeps.

    Attributes:
        name: the argument's name, ``k.scales`` for the scales of a quantised k; ``block_table``,
            ``lengths`` and ``slots`` for what finds rows and states.
        lifetime: CACHE, STATE, WINDOW, or CONTROL for tables, lengths and slots.
        dtype: as it is stored.
        token: bytes that each token adds (histories).
        sequence: bytes of one sequence, whatever its length.
        shared: one history for all sequences (a pattern without B).
    """

    name: str
    lifetime: Lifetime
    dtype: torch.dtype
    token: int = 0
    sequence: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of what an op keeps between calls.

    Attributes:
        objects: each of them.
        sequences: how many sequences.
        rows: rows that each has room for, whole pages where histories lie in pages.
        page_rows: rows of a page, None for dense caches.
    """

    objects: tuple[ObjectBytes, ...]
    sequences: int
    rows: int
    page_rows: int | None

    @property
    def token(self) -> int:
        """Bytes that a token adds to its sequence."""
        return sum(o.token for o in self.objects)

    @property
    def page(self) -> int:
        """Bytes of one page of every history; 0 for dense caches."""
        return self.token * (self.page_rows or 0)

    @property
    def sequence(self) -> int:
        """Bytes of one sequence: the rows it has room for, its states, its place in tables."""
        return self.token * self.rows + sum(o.sequence for o in self.objects)

    @property
    def total(self) -> int:
        """Bytes of all sequences: what :func:`allocate` allocates."""
        once = sum(o.token * self.rows for o in self.objects if o.shared)
        return self.sequences * (self.sequence - once) + once


def bytes_of(
    op: Any,
    *,
    sizes: Mapping[str, int],
    capacity: int = 0,
    page: int | None = None,
    dtype: Storage | Mapping[str, Storage] = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
) -> Footprint:
    """Bytes of everything an op keeps between calls, before anything is allocated.

    Args:
        op: the op (or its declaration).
        sizes: sizes of every axis of what it keeps but S; ``B`` (1 if missing) counts sequences,
            a window's axis the rows that the body sees.
        capacity: tokens that each sequence has room for.
        page: rows of a page; None for dense caches.
        dtype: storage of histories and windows, of all or by name.
        state_dtype: of states that ``dtype`` does not name.

    Raises:
        CacheError: the op keeps nothing, a size or a storage is missing, or a block does not divide
            its axis.
        DtypeError: no call takes what is kept of that dtype.
        RefusedError: a history lies in blocks.
    """
    declaration, stored = declared(op), Stored(dtype, state_dtype)
    tensors = kept(declaration)
    pages = -(-capacity // page) if page else 0
    found = [*_rows(declaration, tensors, sizes, dtype)]
    control = {"lengths": 1, "block_table": pages} if found else {}
    fixed = [t for t in tensors if t.lifetime in FIXED]
    if fixed:
        control["slots"] = 1
        names = [t.name for t in fixed]
        one = pools(declaration, sizes=sizes, slots=1, stored=stored, device="meta", names=names)
        found += [
            ObjectBytes(t.name, t.lifetime, one[t.name].dtype, sequence=one[t.name].nbytes)
            for t in fixed
        ]
    for name, count in control.items():
        if count:
            found.append(
                ObjectBytes(name, Lifetime.CONTROL, INDEX, sequence=count * INDEX.itemsize)
            )
    rows = pages * page if page else capacity
    return Footprint(tuple(found), sizes.get("B", 1), rows, page)


def _rows(
    declaration: Declaration, tensors: Iterable[Tensor], sizes: Mapping[str, int],
    dtype: Storage | Mapping[str, Storage],
) -> Iterator[ObjectBytes]:  # fmt: skip
    """Each history's row of one token, as the allocation would make it, without memory."""
    histories = [t for t in tensors if t.lifetime is Lifetime.CACHE]
    patterns = {t.name: t.pattern for t in histories}
    one = {**sizes, "B": 1, "S": 1}
    rows, scales = storage(declaration.name, histories, patterns, one, dtype, "meta")
    for t in histories:
        shared = "B" not in t.pattern.axes
        for label, held in ((t.name, rows.get(t.name)), (f"{t.name}.scales", scales.get(t.name))):
            if held is not None:
                yield ObjectBytes(label, t.lifetime, held.dtype, held.nbytes, shared=shared)
