"""One tiny call of each family of the library in Triton's interpreter, options and all."""

from typing import Any

import pytest
import torch

import attncc as ac
from tests.interpreter.test_states import check
from tests.library.recurrences import BY_NAME, Dims
from tests.library.variants import BY_NAME as VARIANTS
from tests.library.variants import Heads, arguments


def drawn(name: str, d: Dims, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Vectors in ``dtype``, gates, rates and states in fp32."""
    args = BY_NAME[name].draw(0, d)
    wide = {n for n, x in args.items() if n != "s" and (x.dim() > 3 or n == "x")}
    return {n: x.to(dtype if n in wide else torch.float32) for n, x in args.items()}


def packed(args: dict[str, Any], *kept: str) -> dict[str, Any]:
    return {n: x if n in kept else x[0] for n, x in args.items()}


CU = torch.tensor([0, 5, 5, 20], dtype=torch.int32)


def test_a_product_of_two_with_more_heads_of_queries() -> None:
    args = drawn("gated_delta_product", Dims(b=1, t=18, hk=2, k=16, v=16, n=2), torch.bfloat16)
    args["v"] = args["v"][:, :, :1].contiguous()
    check(ac.ops.gated_delta_product, **args, l2norm=True, scale=0.4)


def test_decays_of_each_key_over_packed_sequences_with_states_of_v_by_k() -> None:
    args = drawn("kda", Dims(b=1, t=20, hk=1, g=2, k=16, v=32), torch.bfloat16)
    s = torch.randn(3, 2, 32, 16, generator=torch.Generator().manual_seed(1))
    op = ac.ops.kda.with_patterns(s="B (Hk G) V K")
    check(op, **{**packed(args), "s": s}, cu_seqlens=CU, l2norm=True)


def test_state_spaces_whose_groups_share_b_and_c() -> None:
    check(ac.ops.mamba2, **drawn("mamba2", Dims(b=1, t=20, hk=2, g=2, k=16, v=16)))


@pytest.mark.parametrize("name", ["rwkv7", "gated_oja"])
def test_decode_of_what_has_no_chunks_in_a_pool(name: str) -> None:
    args = drawn(name, Dims(b=2, t=1, hk=2, k=16, v=16))
    op, start = getattr(ac.ops, name), args.pop("s")
    pool = torch.full((4, *start.shape[1:]), 7.5)
    pool[[3, 1]] = start
    o = op.decode(**args, s=ac.StatePool(pool, torch.tensor([3, 1]).int()), backend="triton")
    s, want = op.reference(**args, s=start)
    assert (o - want).abs().max() < 1e-5 and (pool[[3, 1]] - s).abs().max() < 1e-5
    assert bool((pool[[0, 2]] == 7.5).all())


@pytest.mark.parametrize("name", ["alibi", "sliding_window", "cascade"])
def test_scores_with_a_scale_of_the_call(name: str) -> None:
    v = VARIANTS[name]
    args = arguments(v, 1, Heads(b=1, t=3, s=40, hkv=1, d=16, e=16))
    args = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    check(getattr(ac.ops, name), **args, scale=0.3)
