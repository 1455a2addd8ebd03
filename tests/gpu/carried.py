"""Run by ``test_bundle.py`` in a process of its own: every call finds its kernels in a bundle."""

import json

import torch

import attncc as ac
from attncc.runtime import kernels
from attncc.runtime.tolerance import judge
from tests.gpu.checking import DEVICE, as_dict, eager, unit

BF16 = torch.bfloat16
ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
HEADS = {"Hkv": 8, "D": 128, "E": 128}


def hold(what, result, op, args, **kwargs):
    """Hold results to the reference of a plain call; prints how much of the tolerance is used."""
    exact, rough = as_dict(op.reference(*args, **kwargs)), eager(op, args, kwargs)
    for name, tensor in result.items():
        found = judge(tensor, exact[name], rough[name].to(tensor.dtype), tensor.dtype)
        assert found.right, (what, name, found)
        print(json.dumps({"call": what, "result": name, "used": found.error / found.budget}))


def tokens(batch, count):
    q = torch.randn(batch, count, 32, 128, device=DEVICE, dtype=BF16)
    k, v = torch.randn(2, batch, count, 8, 128, device=DEVICE, dtype=BF16)
    return q, k, v


def attention_calls():
    for count in (4, 300):
        args = tokens(2, count)
        out = ATTENTION.prefill(*args, backend="triton")
        hold(f"attention prefill {count}", {"o": out}, ATTENTION, args)
    q, (_, k, v) = tokens(2, 1)[0], tokens(2, 999)
    hold("attention decode", {"o": ATTENTION.decode(q, k, v, backend="triton")}, ATTENTION,
         (q, k, v))  # fmt: skip


def cached(make, what):
    """A prompt into an empty cache, then one token; each is a plain call over all the rows."""
    cache = make()
    first, more = tokens(2, 300), tokens(2, 1)
    out = ATTENTION.prefill(*first, cache=cache, backend="triton")
    hold(f"attention prefill {what}", {"o": out}, ATTENTION, first)
    out = ATTENTION.decode(*more, cache=cache, backend="triton")
    rows = [torch.cat(pair, 1) for pair in zip(first[1:], more[1:], strict=True)]
    hold(f"attention decode {what}", {"o": out}, ATTENTION, (more[0], *rows))
    assert cache.lengths.tolist() == [301, 301]


def dense():
    return ac.DenseCache.allocate(
        ATTENTION, sizes={"B": 2, **HEADS}, capacity=512, dtype=BF16, device=DEVICE
    )


def pages():
    return ac.PagedCache.allocate(
        ATTENTION, sizes={"B": 2, **HEADS}, capacity=512, page=16, dtype=BF16, device=DEVICE
    )


def delta(batch, count):
    q, k = (unit(batch, count, 8, 128, dtype=BF16) for _ in range(2))
    v = torch.randn(batch, count, 16, 128, device=DEVICE, dtype=BF16)
    g, beta = torch.rand(2, batch, count, 16, device=DEVICE)
    return q, k, v, -g, beta


def delta_calls():
    for count, phase in ((1, "decode"), (4, "prefill"), (300, "prefill")):
        args = delta(2, count)
        state = torch.randn(2, 16, 128, 128, device=DEVICE) / 8
        for backend in ("triton", "auto"):
            result = getattr(GDR, phase)(*args, state, backend=backend)
            what = f"gated_delta_rule {phase} {count}, {backend}"
            hold(what, as_dict(result), GDR, (*args, state))
        if phase == "prefill":
            fresh = as_dict(GDR.prefill(*args, backend="triton"))
            hold(f"gated_delta_rule {phase} {count}, no state", fresh, GDR, args)
        pool = torch.randn(5, 16, 128, 128, device=DEVICE) / 8
        slots = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
        before = pool[slots.long()].clone()
        out = getattr(GDR, phase)(*args, ac.StatePool(pool, slots), backend="triton")
        found = {"s": pool[slots.long()], "o": as_dict(out)["o"]}
        hold(f"gated_delta_rule {phase} {count}, pool", found, GDR, (*args, before))


def main():
    torch.manual_seed(0)
    attention_calls()
    cached(dense, "with a cache")
    cached(pages, "in pages")
    delta_calls()
    routes = {type(x).__name__ for k in kernels._LOADED.values() for x in k.launchers.values()}
    assert routes == {"DriverLauncher"}, routes
    print(json.dumps({"compilations": kernels.compilations()}))


if __name__ == "__main__":
    main()
