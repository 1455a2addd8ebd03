"""Tensors held to their layouts by a function that is written out for one set of names.

A loop over names costs the host more than the comparisons do. Torch's own guards (those that Dynamo
puts before a compiled graph) do most of it in one call; where gradients are on, if they see which
tensors want one. The function only says yes; whoever asked finds out what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch

from attncc.runtime.signature import Layout

Accepts = Callable[[Collection[Any], list[Any], list[int], bool], bool]
"""Takes tensors in the order of the names, a frame and addresses to fill in by register, and
whether gradients are on; says whether all of them fit."""

_HEAD = """def accepts(values, frame, pointers, gradients):
    {targets} = values
    try:
        if {nested}:  # torch's guards end the process there
            return False
        alike = {free}guarded({arguments})
    except (AttributeError, TypeError):  # not all of them are tensors
        return False
    if not alike:
"""
_EACH = """        if (
            type(t{i}) is not Tensor
            or t{i}.layout is not strided
            or t{i}.shape != shape{i}
            or {strides}
            or t{i}.dtype is not dtype{i}
            or t{i}.device != device{i}
            or (gradients and t{i}.requires_grad)
        ):
            return False
"""
_FILL = """    pointers[{register}] = p = t{i}.data_ptr()
{aligned}    frame[{register}] = t{i}
"""
_ALIGNED = """    if p & 15:
        return False
"""


def accepts(wanted: Sequence[tuple[int, Layout]], tensors: Sequence[torch.Tensor]) -> Accepts:
    """Write out the comparison.

    Args:
        wanted: for each tensor the register that it goes to and its layout.
        tensors: some that fit; they are not kept.
    """
    every = range(len(wanted))
    text = _HEAD.format(
        targets=" ".join(f"t{i}," for i in every), arguments=", ".join(f"t{i}" for i in every),
        free="" if _free(tensors) else "not gradients and ",
        nested=" or ".join(f"t{i}.is_nested" for i in every) or "False",
    )  # fmt: skip
    names: dict[str, Any] = {"Tensor": torch.Tensor, "strided": torch.strided}
    names["guarded"] = _guards(tensors)
    for i, (_, x) in enumerate(wanted):
        strides = f"not t{i}.is_contiguous()" if x.contiguous else f"t{i}.stride() != strides{i}"
        text += _EACH.format(i=i, strides=strides)
        names |= {f"shape{i}": x.shape, f"strides{i}": x.strides}
        names |= {f"dtype{i}": x.dtype, f"device{i}": x.device}
    for i, (register, x) in enumerate(wanted):
        text += _FILL.format(i=i, register=register, aligned=_ALIGNED if x.aligned else "")
    text += "    return True\n"
    exec(compile(text, "<layouts of a prepared call>", "exec"), names)
    made: Accepts = names["accepts"]
    return made


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What torch itself has to compare types, dtypes, devices, sizes and strides in one call.

    What it does not accept may still fit: one tensor twice, or tensors of another mode (inference
    or not). Where this torch has no such check nothing is accepted by it.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        made = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if made.check(*tensors) is True:
            found: Callable[..., bool] = made.check
            return found
    except Exception:  # a private part of torch: without it the comparisons do
        pass
    return _unknown


def _free(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what the guards of these tensors accept wants no gradient."""
    return not any(t.requires_grad for t in tensors) and _gradients_are_seen()


@cache
def _gradients_are_seen() -> bool:
    with torch.inference_mode(False):
        plain = torch.zeros(1, device="cpu")
        check = _guards([plain])
        return check(plain) and not check(torch.zeros(1, device="cpu", requires_grad=True))


def _unknown(*_: torch.Tensor) -> bool:
    return False
