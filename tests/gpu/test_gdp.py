"""``attncc.gdp`` on the GPU: the document's loop, cut calls, decode, graphs, cuDNN's refusal."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl.errors import BackendError
from attncc.dsl.library.gated_delta_product import gated_delta_product
from attncc.runtime import backends
from attncc.runtime.cudnn_found import problem
from tests.gdp_document import Shape, arguments, document
from tests.gpu.checking import DEVICE, eager
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
CHUNK = ac.gdp.chunk_gated_delta_product
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 33, 64, 65, 130, 257]), min_size=1, max_size=3)
# Few kinds of kernels, each compiled once; lengths and values are drawn.
KINDS = {
    "n1 K64 V128, more values": Shape((), 1, (1, 1, 3), 64, 128, torch.float16),
    "n2 K128 V128": Shape((), 2, (2, 2, 2), 128, 128),
    "n3 K128 V64, keys of the values": Shape((), 3, (2, 4, 4), 128, 64, gate=torch.bfloat16),
    "n4 K64 V64, more queries, unit rows": Shape(
        (), 4, (4, 2, 2), 64, 64, beta=torch.bfloat16, state=torch.bfloat16, unit=True, scale=0.3
    ),
}


def operands(args):
    """What the op beneath takes, and which op it is."""
    q, k, v = (args[n] for n in "qkv")
    heads = max(q.shape[1], v.shape[1])
    named = {
        "q": q, "k": k, "v": v, "alpha": args.get("g"), "beta": args.get("beta"),
        "s": args.get("initial_state"), "scale": args["scale"] or None,
        "l2norm": args["use_qk_l2norm_in_kernel"], "cu_seqlens": args["cu_seqlens"],
        "sizes": {
            "N": args["num_householder"], "Gq": heads // v.shape[1], "Gv": heads // q.shape[1],
        },
    }  # fmt: skip
    return ac.gdp._op("Gq" if k.shape[1] == q.shape[1] else "Gv"), named


def held(o, s, args):
    """Both are the document's; rounding as the kernels round sets the contract's budget."""
    op, named = operands(args)
    rough = eager(op, (), named)
    for name, got, want in zip("os", (o, s), document(**args), strict=True):
        assert_close(got, want, rough[name], got.dtype, name)


@pytest.mark.parametrize("kind", KINDS)
@given(LENGTHS, st.booleans(), st.integers(0, 5))
@settings(
    max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)  # fmt: skip
def test_auto_runs_generated_kernels_and_they_are_the_documents_loop(kind, lengths, wide, seed):
    offsets = torch.int64 if wide else torch.int32
    shape = replace(KINDS[kind], lengths=tuple(lengths), seed=seed, offsets=offsets)
    args = arguments(shape, DEVICE)
    tokens, heads = sum(lengths), max(shape.heads)
    output = torch.full((tokens, heads, shape.v_dim), torch.nan, dtype=shape.dtype, device=DEVICE)
    final = torch.full_like(args["initial_state"], torch.nan)
    o, s = CHUNK(**args, output_final_state=True, output=output, output_state=final)
    assert o is output and s is final
    held(o, s, args)
    for i, length in enumerate(lengths):
        assert length or torch.equal(s[i], args["initial_state"][i])


def test_auto_is_no_torch_lowering(monkeypatch):
    def refused(*_):
        raise AssertionError("the torch lowering ran")

    monkeypatch.setattr(backends, "run_eager", refused)
    args = arguments(replace(KINDS["n2 K128 V128"], lengths=(130, 64)), DEVICE)
    o, s = CHUNK(**args, output_final_state=True)
    monkeypatch.undo()
    held(o, s, args)


def test_a_call_in_two_parts_is_one_call():
    args = arguments(replace(KINDS["n2 K128 V128"], lengths=(300,)), DEVICE)
    state, outs = args["initial_state"], []
    for a, b in ((0, 131), (131, 300)):
        part = {
            **args, "q": args["q"][a:b], "k": args["k"][2 * a : 2 * b], "g": args["g"][a:b],
            "v": args["v"][2 * a : 2 * b], "beta": args["beta"][2 * a : 2 * b],
            "initial_state": state, "cu_seqlens": torch.tensor([0, b - a], device=DEVICE),
        }  # fmt: skip
        o, state = CHUNK(**part, output_final_state=True)
        outs.append(o)
    held(torch.cat(outs), state, args)


def test_one_update_a_token_is_the_gated_delta_rule_bit_for_bit():
    args = arguments(replace(KINDS["n1 K64 V128, more values"], lengths=(200, 0, 70)), DEVICE)
    gates = args["g"].log().clamp(min=-30)
    rule = ac.Op(ac.ops.gated_delta_rule.declaration.with_patterns(s="B (Hk G) V K"))
    product = ac.Op(gated_delta_product.with_patterns(s="B (H Gq Gv) V K"))
    given_ = (args["q"], args["k"], args["v"], gates, args["beta"], args["initial_state"])
    options = {"cu_seqlens": args["cu_seqlens"], "backend": "triton"}
    one = rule(*given_, **options)
    many = product(*given_, **options, sizes={"N": 1, "Gq": 1, "Gv": 3})
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def test_a_captured_call_replays_on_other_values():
    shape = replace(KINDS["n2 K128 V128"], lengths=(130, 64))
    args, other = arguments(shape, DEVICE), arguments(replace(shape, seed=1), DEVICE)
    CHUNK(**args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, s = CHUNK(**args, output_final_state=True)
    for name, x in args.items():
        if isinstance(x, torch.Tensor):
            x.copy_(other[name])
    graph.replay()
    held(o, s, other)


@pytest.mark.parametrize("several", [False, True])
def test_decode_writes_slots(several):
    tokens = 3 if several else 1
    shape = replace(KINDS["n2 K128 V128"], lengths=(tokens,) * 3)
    args = arguments(shape, DEVICE)
    del args["cu_seqlens"], args["initial_state"]
    for name in ("q", "k", "v", "g", "beta"):
        args[name] = args[name].view(3, -1, *args[name].shape[1:])
    pool = torch.randn(12, 2, 128, 128, device=DEVICE)
    before, rest = pool.clone(), {4, 5}
    slots = torch.tensor([0, -1, 2], dtype=torch.int32, device=DEVICE)
    each = torch.tensor([[6, 7, 8], [-1, -1, 9], [10, 11, 2]], dtype=torch.int32, device=DEVICE)
    where = each if several else None
    o = ac.gdp.decode_gated_delta_product(
        **args, state=pool, state_indices=slots, output_state_indices=where
    )
    start = before[slots.clamp(min=0).long()]
    start[1] = 0
    for i in range(3):
        for t in range(tokens):
            part = {n: args[n][i, : t + 1] for n in ("q", "g")}
            part |= {n: args[n][i, : 2 * (t + 1)] for n in ("k", "v", "beta")}
            ends = torch.tensor([0, t + 1], device=DEVICE)
            given_ = {**part, "num_householder": 2, "initial_state": start[i : i + 1]}
            exact, rough = (
                document(**given_, cu_seqlens=ends, dtype=d) for d in (torch.float64, torch.float32)
            )
            assert_close(o[i, t], exact[0][t], rough[0][t].to(o.dtype), o.dtype, "o")
            slot = int(each[i, t]) if several else int(slots[i])
            if slot >= 0:
                assert_close(pool[slot], exact[1][0], rough[1][0], torch.float32, f"slot {slot}")
    for slot in rest:
        assert torch.equal(pool[slot], before[slot])


def test_cudnn_runs_on_sm100_and_says_elsewhere_what_it_needs():
    args = arguments(replace(KINDS["n2 K128 V128"], lengths=(130, 64)), DEVICE)
    if problem(args["q"].device) is None:
        held(*CHUNK(**args, output_final_state=True, backend="cudnn"), args)
        return
    with pytest.raises(BackendError, match="SM100"):
        CHUNK(**args, backend="cudnn")


def test_a_dialect_without_the_form_is_refused_by_name():
    args = arguments(replace(KINDS["n4 K64 V64, more queries, unit rows"], lengths=(64,)), DEVICE)
    with pytest.raises(BackendError, match="output o is not computed element by element"):
        CHUNK(**args, backend="cutedsl")
