"""Cache objects: frozen views over tensors that the caller allocates.

A history grows by appending rows in place; only ``lengths`` and the rows themselves change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.errors import CacheError
from attncc.dsl.ir import Lifetime
from attncc.runtime import knobs


@dataclass(frozen=True, slots=True)
class DenseCache:
    """One tensor ``[B, capacity, ...]`` per history of an op, and how much of each row is filled.

    Attributes:
        tensors: by name of the op's ``Cache`` arguments, in their patterns with S = capacity.
        lengths: int32 ``[B]``, tokens held. A call that is given the cache appends its tokens and
            adds their number here, on the device.
    """

    tensors: Mapping[str, torch.Tensor]
    lengths: torch.Tensor

    @staticmethod
    def allocate(
        op: Any,
        *,
        sizes: Mapping[str, int],
        capacity: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> DenseCache:
        """An empty cache for an op.

        Args:
            op: the op (or its declaration); its ``Cache`` tensors are allocated.
            sizes: sizes of ``B`` and of every other axis of those tensors but S.
            capacity: most tokens a sequence may hold.
            dtype: storage dtype.
            device: where it lives.

        Raises:
            CacheError: the op has no ``Cache``, or a size is missing.
        """
        declaration: Declaration = getattr(op, "declaration", op)
        histories = [t for t in declaration.tensors if t.lifetime is Lifetime.CACHE]
        name = declaration.name
        if not histories:
            raise CacheError("the op has no Cache argument", op=name)
        full = {**sizes, "S": capacity}
        tensors = {}
        for t in histories:
            shape = []
            for dim in t.pattern.dims:
                n = 1
                for axis in dim:
                    if axis not in full:
                        raise CacheError(
                            "a size is missing",
                            op=name,
                            argument=t.name,
                            axis=axis,
                            expected="an entry in sizes=",
                        )
                    n *= full[axis]
                shape.append(n)
            tensors[t.name] = torch.zeros(shape, dtype=dtype, device=device)
        lengths = torch.zeros(full["B"], dtype=torch.int32, device=device)
        return DenseCache(tensors, lengths)

    def check_room(self, op: str, new: torch.Tensor | int, capacity: int) -> None:
        """The new tokens fit.

        Looked at where reading is free (CPU) or asked for (the check knob of ``runtime.knobs``).

        Raises:
            CacheError: a sequence would pass its capacity.
        """
        if self.lengths.device.type != "cpu" and not knobs.check():
            return
        after = (self.lengths + new).tolist()
        for b, n in enumerate(after):
            if n > capacity:
                raise CacheError(
                    f"sequence {b} has no room for the new tokens",
                    op=op,
                    axis="S",
                    expected=f"at most {capacity}",
                    found=n,
                )
