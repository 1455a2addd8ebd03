"""One check for every kernel on the GPU: against the fp64 oracle, with the contract's tolerance."""

from dataclasses import replace

import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.runtime.backends import run_kernels, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.eager.run import run as run_eager
from tests.runtime.eager_ops import as_kernels
from tests.tolerance import assert_close

DEVICE = "cuda"


def on_cpu(value):
    """Tensors, pools of states and whatever holds them, copied to the CPU; the rest as it is.

    Token by token an oracle is thousands of tiny kernels, and a device that many processes share
    switches between them.
    """
    match value:
        case torch.Tensor():
            return value.cpu()
        case ac.StatePool():
            return ac.StatePool(*map(on_cpu, (value.pool, value.slots, value.out_slots)))
        case dict():
            return {name: on_cpu(x) for name, x in value.items()}
        case tuple() | list():
            return [on_cpu(x) for x in value]
        case _:
            return value


def eager(op, args, kwargs):
    """The contract's eager reference: fp32 accumulation, operands and outputs in the call's
    dtype.
    """
    call, _ = bind(op.declaration, args, kwargs)
    run_eager(call, as_kernels(analyse(call.program)), round_operands=True)
    named = {**call.final_states, **call.outputs}
    if call.lse is not None:
        named["lse"] = call.lse
    return named


def as_dict(result):
    """A call's result by name (``o`` for a single one)."""
    return {"o": result} if isinstance(result, torch.Tensor) else result._asdict()


def poisoned(op, args, kwargs):
    """NaN-filled tensors for every result, so that an element nobody writes is seen."""
    call, _ = bind(op.declaration, args, kwargs)
    named = {**call.final_states, **call.outputs}
    return {name: t.fill_(torch.nan) for name, t in named.items()}


def check(op, *args, phase="prefill", backend="triton", **kwargs):
    """Run the generated kernels and hold every result to the contract; returns the results."""
    exact = as_dict(op.reference(*args, **kwargs))
    rough = eager(op, args, kwargs)
    out = poisoned(op, args, kwargs)
    result = as_dict(getattr(op, phase)(*args, **kwargs, out=out, backend=backend))
    for name, tensor in result.items():
        assert_close(
            tensor, exact[name], rough[name], tensor.dtype, f"{op.declaration.name}.{name}"
        )
    return result


def check_parts(op, args, state, parts):
    """A prompt of a scan in Gluon, cut into ``parts`` segments, held to the contract."""
    named = {"s": state}
    exact, rough = as_dict(op.reference(*args, **named)), eager(op, args, named)
    call, _ = bind(op.declaration, args, named)
    results = {**call.outputs, **call.final_states}
    for tensor in results.values():
        tensor.fill_(torch.nan)
    spec = replace(spec_of(call), dialect=Dialect.GLUON)
    run_kernels(call, analyse(call.program), spec, "prefill", parts=parts)
    for name, tensor in results.items():
        assert_close(tensor, exact[name], rough[name], tensor.dtype, name)


def check_in_cache(op, args, cache, other, phase, **options):
    """One call that appends to a cache, and the eager one to its copy ``other``: outputs and lse
    are held to the contract; what was appended is the caller's to compare.
    """
    kwargs = {"cache": cache, "return_lse": True, **options}
    exact_o, exact_lse = op.reference(*args, **kwargs)
    rough = eager(op, args, {**kwargs, "cache": other})
    out = torch.full(rough["o"].shape, torch.nan, dtype=rough["o"].dtype, device=DEVICE)
    o, lse = getattr(op, phase)(*args, **kwargs, out=out, backend="triton")
    assert_close(o, exact_o, rough["o"], o.dtype, "o")
    assert_close(lse, exact_lse, rough["lse"], torch.float32, "lse")


def unit(*shape, dtype):
    """Random rows of length 1."""
    x = torch.randn(shape, device=DEVICE)
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)


def offsets(lengths):
    """cu_seqlens of sequence lengths."""
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    return torch.tensor(cu, device=DEVICE)
