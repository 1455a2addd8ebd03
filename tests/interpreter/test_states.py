"""Windows, element-wise states and several states in generated kernels, on the CPU."""

from typing import Any

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.runtime.bind import bind
from attncc.runtime.eager.run import run as run_eager
from tests.runtime import state_ops as ops
from tests.runtime.eager_ops import as_kernels
from tests.tolerance import assert_close


def as_dict(result: Any) -> dict[str, torch.Tensor]:
    return {"o": result} if isinstance(result, torch.Tensor) else result._asdict()


def check(op: Any, **args: Any) -> None:
    """Generated kernels against the fp64 interpreter, NaN where nothing is written."""
    exact = as_dict(op.reference(**args))
    rough, _ = bind(op.declaration, (), args)
    run_eager(rough, as_kernels(analyse(rough.program)), round_operands=True)
    call, _ = bind(op.declaration, (), args)
    out = {n: x.fill_(torch.nan) for n, x in {**call.final_states, **call.outputs}.items()}
    found = as_dict(op(**args, out=out, backend="triton"))
    named = {**rough.final_states, **rough.outputs}
    for name, value in found.items():
        assert_close(value, exact[name], named[name], value.dtype, f"{op} {name}")


@pytest.mark.parametrize("name", ops.NAMES)
def test_dense(name: str) -> None:
    op, args, _, _ = ops.cases(2, 11)[name]
    check(op, **args, sizes=ops.SIZES.get(name, {}))


@pytest.mark.parametrize("name", ["hgrn", "selective", "stacked", "convolved delta", "normalised"])
@pytest.mark.parametrize("given", [True, False])
def test_packed(name: str, given: bool) -> None:
    op, args, held, model = ops.cases(1, 20)[name]
    states = {n: ops.cases(4, 1)[name][1][n] for n in held} if given else {}
    tokens = {n: x[0] for n, x in args.items() if n not in held and n not in model}
    params = {n: args[n] for n in model}
    cu = torch.tensor([0, 2, 2, 19, 20])
    check(op, **tokens, **params, **states, cu_seqlens=cu, sizes=ops.SIZES.get(name, {}))


@pytest.mark.parametrize("name", ["convolution", "stacked", "convolved delta", "hgrn"])
def test_slots_of_pools(name: str) -> None:
    op, args, held, _ = ops.cases(3, 2)[name]
    slots, out = (torch.tensor(x, dtype=torch.int32) for x in ([4, -1, 1], [4, 2, -1]))
    tokens = {n: x for n, x in args.items() if n not in held}
    pools = {n: ops.cases(6, 2)[name][1][n] for n in held}
    starts = {n: x[slots.clamp(min=0)].contiguous() for n, x in pools.items()}
    for x in starts.values():
        x[1] = 0
    before = {n: x.clone() for n, x in pools.items()}
    given = {n: ac.StatePool(x, slots, out) for n, x in pools.items()}
    o = op(**tokens, **given, backend="triton")
    want = op(**tokens, **starts, backend="torch")
    torch.testing.assert_close(o, want.o)
    for n, pool in pools.items():
        torch.testing.assert_close(pool[[4, 2]], getattr(want, n)[[0, 1]])
        assert torch.equal(pool[[0, 1, 3, 5]], before[n][[0, 1, 3, 5]])


@pytest.mark.parametrize("t", [0, 1, 2, 9])
def test_windows_are_updated_in_place(t: int) -> None:
    for name in ("convolution", "stacked"):
        op, args, held, _ = ops.cases(2, t)[name]
        want = op(**args, backend="torch")
        slots = torch.tensor([0, 1], dtype=torch.int32)
        pools = {n: ac.StatePool(args[n].clone(), slots) for n in held}
        torch.testing.assert_close(op(**{**args, **pools}, backend="triton"), want.o)
        for n, pool in pools.items():
            torch.testing.assert_close(pool.pool, getattr(want, n))
