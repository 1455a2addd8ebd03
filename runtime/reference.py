"""The reference of a call: the interpreter over each sequence, in fp64 or fp32, nothing rounded."""

from __future__ import annotations

import torch

from attncc.dsl.interp import Result, interpret
from attncc.dsl.ir import Lifetime
from attncc.runtime.call import Call
from attncc.runtime.gathered import each_token, gathered


def run_reference(call: Call, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Interpret a call sequence by sequence.

    A cache or pool is read, not written: its rows and the call's new ones are joined.

    Args:
        call: the bound call.
        dtype: compute dtype of the results.

    Returns:
        States (of a pool: one a sequence), outputs and (if asked for) ``lse`` by name, laid out as
        in the call.
    """
    return reference_results(call, dtype)[0]


def reference_results(
    call: Call, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The results of :func:`run_reference`, and states after every token.

    Returns:
        Results by name; and, of states with an out-slot a token, ``[B, T, ...]``.
    """
    tokens = {n: t.to(dtype) for n, t in each_token(call).items()}
    call = gathered(call, appended=False, dtype=dtype)
    results: dict[str, torch.Tensor] = {}
    for name, tensor in {**call.final_states, **call.outputs}.items():
        results[name] = torch.zeros(tensor.shape, dtype=dtype, device=call.device)
    if call.lse is not None:
        results["lse"] = torch.zeros(call.lse.shape, dtype=dtype, device=call.device)
    for b in range(call.sizes["B"]):
        _sequence(call, b, dtype, results, tokens)
    return results, tokens


def _rows(call: Call, b: int) -> tuple[slice, slice]:
    if call.cu_seqlens is None:
        return slice(0, call.sizes.get("T", 0)), slice(0, call.sizes.get("S", 0))
    cu = call.cu_seqlens.tolist()
    cu_k = cu if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
    return slice(cu[b], cu[b + 1]), slice(cu_k[b], cu_k[b + 1])


def _cut(call: Call, name: str, tensor: torch.Tensor, b: int) -> torch.Tensor:
    """One sequence's part of a tensor, with a leading B of 1 where the pattern has one."""
    pattern = call.patterns[name]
    if "B" in pattern.axes:
        dim = pattern.dim_of("B")
        each = tensor.shape[dim] // max(call.sizes["B"], 1)  # it may be the first of a group
        return tensor.narrow(dim, b * each, each)
    if call.cu_seqlens is None:
        return tensor
    t, s = _rows(call, b)
    for axis, rows in (("T", t), ("S", s)):
        if axis in pattern.axes:
            dim = pattern.dim_of(axis)
            each = tensor.shape[dim] // max(call.sizes[axis], 1)
            tensor = tensor.narrow(dim, rows.start * each, (rows.stop - rows.start) * each)
            return tensor.unsqueeze(_batch_dim(call, name))
    return tensor


def _batch_dim(call: Call, name: str) -> int:
    for t in call.program.tensors:
        if t.name == name:
            return t.pattern.dim_of("B") if "B" in t.pattern.axes else 0
    for o in call.program.outputs:
        if o.name == name:
            return o.pattern.dim_of("B") if "B" in o.pattern.axes else 0
    return 0


def _history(call: Call, name: str, b: int) -> torch.Tensor:
    """A cache's filled rows of one sequence joined with the call's new ones."""
    assert call.lengths is not None
    pattern = call.program.tensor(name).pattern
    at, row = pattern.dim_of("S"), pattern.dim_of("B")
    held = call.tensors[name].narrow(row, b, 1).narrow(at, 0, int(call.lengths[b]))
    new = call.new_rows[name]
    if call.cu_seqlens is None:
        new = new.narrow(row, b, 1)
    else:
        t, _ = _rows(call, b)
        new = new.narrow(at - (row < at), t.start, t.stop - t.start).unsqueeze(row)
    return torch.cat([held, new.to(held.dtype)], at)


def _appended(call: Call, name: str) -> bool:
    """Whether a tensor is a cache that holds the call's own rows already."""
    held = (t.name for t in call.program.tensors if t.lifetime is Lifetime.CACHE)
    return name in held and "S" in call.patterns[name].axes


def _sequence(
    call: Call, b: int, dtype: torch.dtype, results: dict[str, torch.Tensor],
    tokens: dict[str, torch.Tensor],
) -> None:  # fmt: skip
    t, s = _rows(call, b)
    sizes = {**call.sizes, "B": 1, "T": t.stop - t.start, "S": s.stop - s.start}
    inputs: dict[str, torch.Tensor | float] = dict(call.scalars)
    for name, tensor in call.tensors.items():
        if name in call.new_rows:
            inputs[name] = _history(call, name, b)
            sizes["S"] = int(call.lengths[b]) + sizes["T"]  # type: ignore[index]
            continue
        own = _cut(call, name, tensor, b)
        if call.lengths is not None and _appended(call, name):
            sizes["S"] = int(call.lengths[b]) + sizes["T"]
            own = own.narrow(call.patterns[name].dim_of("S"), 0, sizes["S"])
        inputs[name] = own
    for name, final in call.final_states.items():
        if name not in inputs:
            inputs[name] = torch.zeros_like(_cut(call, name, final, b))
    run = interpret(call.program, inputs, sizes, dtype=dtype, return_lse=call.lse is not None)
    _put(call, b, {**run.states, **run.outputs}, results)
    if call.lse is not None and run.lse is not None and call.lse_axes is not None:
        _put_lse(call, b, run, results["lse"])
    for n in range(sizes["T"] if tokens else 0):
        states = interpret(
            call.program, _first(call, inputs, n + 1, sizes), {**sizes, "T": n + 1}, dtype=dtype
        ).states
        for name, target in tokens.items():
            target[b, n] = states[name].squeeze(call.patterns[name].dim_of("B"))


def _first(
    call: Call, inputs: dict[str, torch.Tensor | float], count: int, sizes: dict[str, int]
) -> dict[str, torch.Tensor | float]:
    """The inputs of a sequence's first tokens."""
    found = dict(inputs)
    for t in call.program.tensors:
        value = inputs.get(t.name)
        if isinstance(value, torch.Tensor) and "T" in t.pattern.axes:
            dim = t.pattern.dim_of("T")
            found[t.name] = value.narrow(dim, 0, count * (value.shape[dim] // sizes["T"]))
    return found


def _put(
    call: Call, b: int, values: dict[str, torch.Tensor], results: dict[str, torch.Tensor]
) -> None:
    for name, value in values.items():
        target = _cut(call, name, results[name], b)
        target.copy_(value.reshape(target.shape))


def _put_lse(call: Call, b: int, run: Result, lse: torch.Tensor) -> None:
    assert call.lse_axes is not None and run.lse is not None
    axes = call.lse_axes.axes
    target = lse
    t, _ = _rows(call, b)
    if "B" in axes:
        target = lse.narrow(call.lse_axes.dim_of("B"), b, 1)
    elif call.cu_seqlens is not None:
        target = lse.narrow(call.lse_axes.dim_of("T"), t.start, t.stop - t.start)
    order = [run.lse_axes.index(a) for a in axes]
    data = run.lse.permute([*order, *(i for i, a in enumerate(run.lse_axes) if a not in axes)])
    target.copy_(data.reshape(target.shape))
