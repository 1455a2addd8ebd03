"""``attncc.gdp`` through the generated kernels: the document's loop, and the gated delta rule."""

import pytest
import torch

import attncc as ac
from attncc.dsl.library.gated_delta_product import gated_delta_product
from tests.gdp_document import Shape, arguments, document
from tests.gpu.checking import eager
from tests.tolerance import assert_close

CHUNK = ac.gdp.chunk_gated_delta_product


def check(shape: Shape) -> None:
    """Both results are the document's, as far as operands of the call's dtype allow."""
    args = arguments(shape)
    q, k, v = (args[n] for n in "qkv")
    heads = max(shape.heads)
    o, s = CHUNK(**args, output_final_state=True, backend="triton")
    op = ac.gdp._op("Gq" if k.shape[1] == q.shape[1] else "Gv")
    kwargs = {
        "q": q, "k": k, "v": v, "alpha": args.get("g"), "beta": args.get("beta"),
        "s": args.get("initial_state"), "scale": args["scale"] or None, "l2norm": shape.unit,
        "cu_seqlens": args["cu_seqlens"],
        "sizes": {"N": shape.n, "Gq": heads // v.shape[1], "Gv": heads // q.shape[1]},
    }  # fmt: skip
    rough = eager(op, (), kwargs)
    for name, got, want in zip("os", (o, s), document(**args), strict=True):
        assert_close(got, want, rough[name], got.dtype, name)


SHAPES = {
    "two updates": Shape((40, 0, 25), k_dim=32, v_dim=16, heads=(1, 1, 2), dtype=torch.float16),
    "three, unit rows, keys of the values": Shape(
        (35,), n=3, k_dim=16, v_dim=32, heads=(1, 2, 2), unit=True, gate=torch.bfloat16
    ),
    "four, keys of the values, more queries": Shape(
        (34, 9), n=4, k_dim=16, v_dim=16, heads=(2, 1, 1), beta=None, state=torch.bfloat16
    ),
    "one, no gate, strided": Shape(
        (50,), n=1, k_dim=32, v_dim=16, heads=(1, 1, 1), gate=None, state=None, strided=True
    ),
    "few tokens": Shape((3, 0, 5), n=3, k_dim=16, v_dim=16, heads=(2, 2, 1), scale=0.3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_generated_kernels_are_the_documents_loop(name):
    check(SHAPES[name])


def test_one_update_a_token_is_the_gated_delta_rule_bit_for_bit():
    shape = Shape((40, 0, 25), n=1, k_dim=32, v_dim=16, heads=(1, 1, 2), dtype=torch.float16)
    args = arguments(shape)
    gates = torch.nn.functional.logsigmoid(torch.randn(65, 2))
    rule = ac.Op(ac.ops.gated_delta_rule.declaration.with_patterns(s="B (Hk G) V K"))
    product = ac.Op(gated_delta_product.with_patterns(s="B (H Gq Gv) V K"))
    given = (args["q"], args["k"], args["v"], gates, args["beta"], args["initial_state"])
    options = {"cu_seqlens": args["cu_seqlens"], "backend": "triton"}
    one = rule(*given, **options)
    many = product(*given, **options, sizes={"N": 1, "Gq": 1, "Gv": 2})
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def test_decode_writes_a_slot_for_each_token():
    shape = Shape((3, 3), n=2, k_dim=16, v_dim=16, heads=(1, 1, 2), dtype=torch.float16)
    args = arguments(shape)
    args = {n: x.view(2, -1, *x.shape[1:]) if n in ("q", "k", "v", "g", "beta") else x
            for n, x in args.items() if n not in ("cu_seqlens", "initial_state")}  # fmt: skip
    pool = torch.randn(6, 2, 16, 16)
    slots = torch.tensor([0, -1], dtype=torch.int32)
    each = torch.tensor([[1, 2, 3], [-1, -1, 4]], dtype=torch.int32)
    pools, outs = [], []
    for backend in ("triton", "torch"):
        pools.append(pool.clone())
        outs.append(
            ac.gdp.decode_gated_delta_product(
                **args, state=pools[-1], state_indices=slots, output_state_indices=each,
                backend=backend,
            )
        )  # fmt: skip
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-3, atol=1e-3)
    assert torch.equal(pools[0][[0, 5]], pool[[0, 5]])
    assert not torch.equal(pools[0][4], pool[4])
