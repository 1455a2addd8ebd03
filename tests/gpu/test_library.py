"""Every op of the library on the GPU: prefill and decode against the fp64 oracle.

Head dims are 64 where nothing depends on them, so that most kernels compile in a second or two.
"""

import pytest
import torch

import attncc as ac
from tests.gpu.checking import DEVICE, check, offsets
from tests.library.recurrences import RECURRENCES, Dims
from tests.library.variants import VARIANTS, Heads, arguments
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
RECURRENT = pytest.mark.parametrize("r", RECURRENCES, ids=repr)


def drawn(r, d, seed=0):
    """Arguments on the device: vectors in bf16; gates, rates, parameters and states in fp32."""
    found = {}
    for name, x in r.draw(seed, d).items():
        narrow = name == "x" or (x.dim() > 3 and name not in ("s", "g", "w"))
        found[name] = x.to(DEVICE, BF16 if narrow else torch.float32)
    return found


def dims(r, t, b=2):
    several = r.name == "gated_delta_product"
    return Dims(b=b, t=t, hk=2, g=2 if r.grouped else 1, k=64, v=64, n=2 if several else 1)


@RECURRENT
def test_prefill(r):
    check(getattr(ac.ops, r.name), **drawn(r, dims(r, 150)))


@RECURRENT
def test_decode_in_a_pool(r):
    op, args = getattr(ac.ops, r.name), drawn(r, dims(r, 1, b=3))
    rough_s, rough_o = check(op, **args, phase="decode").values()
    exact_s, exact_o = op.reference(**args)
    start = args.pop("s")
    pool = torch.full((5, *start.shape[1:]), 7.5, device=DEVICE)
    slots = torch.tensor([4, 0, 2], device=DEVICE, dtype=torch.int32)
    pool[slots.long()] = start
    o = op.decode(**args, s=ac.StatePool(pool, slots), backend="triton")
    assert_close(o, exact_o, rough_o, o.dtype, "o")
    assert_close(pool[slots.long()], exact_s, rough_s, torch.float32, "s")
    assert bool((pool[[1, 3]] == 7.5).all())


@pytest.mark.parametrize("name", ["kda", "gated_delta_product", "mamba2"])
def test_packed_sequences_whose_states_lie_the_other_way(name):
    r = next(r for r in RECURRENCES if r.name == name)
    args = drawn(r, dims(r, 170, b=1))
    pattern = next(t.pattern for t in getattr(ac.ops, name).declaration.tensors if t.name == "s")
    first, second = pattern.axes[-2:]
    op = getattr(ac.ops, name).with_patterns(s=f"{str(pattern)[:-4]} {second} {first}")
    model = ("a_log", "d", "dt_bias")
    packed = {n: x if n in model else x[0] for n, x in args.items()}
    packed["s"] = torch.randn(3, 4, 64, 64, device=DEVICE)
    more = {"l2norm": True, "scale": 0.3} if name != "mamba2" else {}
    check(op, **packed, **more, cu_seqlens=offsets([0, 100, 70]))


@pytest.mark.parametrize("name", ["kda", "delta_rule"])
def test_rates_up_to_two_and_heads_of_128(name):
    r = next(r for r in RECURRENCES if r.name == name)
    args = drawn(r, Dims(b=1, t=700, hk=2, k=128, v=128))
    assert float(args["beta"].max()) > 1.5
    check(getattr(ac.ops, name), **args)


# --- softmax


def scored(v, h):
    args = {}
    for name, x in arguments(v, 0, h).items():
        if isinstance(x, torch.Tensor):
            x = x.to(DEVICE)
            x = x.to(BF16 if x.dim() > 2 else torch.float32) if x.is_floating_point() else x
        args[name] = x
    return args


HEADS = {"hkv": 2, "g": 3, "d": 64, "e": 64}


@pytest.mark.parametrize("v", VARIANTS, ids=repr)
def test_scores_of_a_prefill_and_of_a_decode_step(v):
    op = getattr(ac.ops, v.name)
    check(op, **scored(v, Heads(t=200, s=300, **HEADS)), return_lse=True)
    check(op, **scored(v, Heads(t=1, s=700, **HEADS)), phase="decode")


@pytest.mark.parametrize("v", [v for v in VARIANTS if not v.memory], ids=repr)
def test_pages(v):
    op, args = getattr(ac.ops, v.name), scored(v, Heads(t=40, s=40, **HEADS))
    if v.name == "prefix_lm":
        args["prefix"] = torch.tensor([3, 20], device=DEVICE, dtype=torch.int32)
    histories = {t.name for t in op.declaration.tensors if t.lifetime.name == "CACHE"}
    held = {n: args[n].new_zeros(9, 16, *args[n].shape[2:]) for n in histories}
    table = torch.randperm(9, device=DEVICE)[:8].int().view(2, 4)
    cache = ac.PagedCache(held, table, torch.zeros(2, dtype=torch.int32, device=DEVICE))

    def part(low, high):
        return {n: x[:, low:high] if n in ("q", *histories) else x for n, x in args.items()}

    exact = op.reference(**args)
    rough = op(**args, backend="torch")
    out = [op.prefill(**part(0, 38), cache=cache, backend="triton")]
    out += [op.decode(**part(i, i + 1), cache=cache, backend="triton") for i in (38, 39)]
    assert_close(torch.cat(out, 1), exact, rough, BF16, v.name)
