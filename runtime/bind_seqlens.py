"""The sequences of a packed call: where its tokens and its whole histories begin and end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attncc.dsl.errors import ArgumentError, SizeError
from attncc.runtime import checks
from attncc.runtime.arguments import Options


def seqlens(
    op: str, options: Options, sizes: Mapping[str, int], *, histories: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``cu_seqlens`` and ``cu_seqlens_k`` of a call, each int32 ``[B + 1]`` or None.

    Args:
        op: name of the op.
        options: the call's.
        sizes: every axis.
        histories: whether the op has a history along S.

    Returns:
        Offsets of the tokens, and of the rows of whole histories.

    Raises:
        ArgumentError: ``cu_seqlens_k`` where no whole packed history has a use for it.
        SizeError: the two count other sequences, or the second is missing.
        SeqlensError: see :func:`checks.seqlens`.
    """
    _wanted(op, options, histories=histories)
    if options.cu_seqlens is None:
        return None, None
    cu = checks.seqlens(op, "cu_seqlens", options.cu_seqlens, sizes.get("T", 0))
    if not histories or options.cache is not None:
        return cu, None
    if options.cu_seqlens_k is None:
        if sizes["S"] != sizes["T"]:
            raise SizeError(
                "packed histories longer than the tokens need cu_seqlens_k",
                op=op, axis="S", expected=sizes["T"], found=sizes["S"],
            )  # fmt: skip
        return cu, cu
    cu_k = checks.seqlens(op, "cu_seqlens_k", options.cu_seqlens_k, sizes["S"])
    if cu_k.numel() != cu.numel():
        raise SizeError(
            "cu_seqlens_k counts other sequences",
            op=op, argument="cu_seqlens_k", expected=cu.numel(), found=cu_k.numel(),
        )  # fmt: skip
    return cu, cu_k


def _wanted(op: str, options: Options, *, histories: bool) -> None:
    if options.cu_seqlens_k is None:
        return
    reason = expected = None
    if options.cu_seqlens is None:
        reason = "cu_seqlens_k without cu_seqlens"
    elif options.cache is not None:
        reason, expected = "a cache says itself how much it holds", "cache.lengths alone"
    elif not histories:
        reason, expected = "the op has no history along S", "cu_seqlens alone"
    if reason is not None:
        raise ArgumentError(reason, op=op, argument="cu_seqlens_k", expected=expected)
