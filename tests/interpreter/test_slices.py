"""Prompts that are cut in time give the bits of those that are not."""

import pytest
import torch

import attncc as ac
from attncc.runtime import affine, slices
from tests.library.recurrences import RECURRENCES, Dims

KNOWN = {r.name: r for r in RECURRENCES}


@pytest.fixture
def seen(monkeypatch):
    """Cuts short prompts, and notes the slices' tokens."""
    found = []
    whole = slices.cut

    def cut(*args):
        for part in whole(*args):
            found.append(part.sizes["T"])
            yield part

    monkeypatch.setattr(slices, "LEAST_TOKENS", 64)
    monkeypatch.setattr(slices, "cut", cut)
    return found


@ac.op(scan="T", out="B T H V")
def aged(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
):
    """Its decay depends on the token's place in the prompt."""
    s = s * ac.exp(-0.01 * ac.index("T"))
    s = s + k * (v - ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K")


def arguments(name, t, n=1, b=1):
    found = KNOWN[name].draw(0, Dims(b=b, t=t, hk=1, k=16, v=16, n=n))
    return {name: x.float() for name, x in found.items()}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("name", "n", "b"), [("gated_delta_rule", 1, 2),
                                              ("gated_delta_product", 2, 1)])  # fmt: skip
def test_the_same_bits_as_in_one_piece(seen, monkeypatch, name, n, b, fresh):
    args, op = arguments(name, 200, n, b), getattr(ac.ops, name)
    if fresh:
        args.pop("s")
    s, o = op.prefill(**args, backend="triton")
    assert len(seen) > 1 and sum(seen) == 200 and all(t % 16 == 0 for t in seen[:-1])
    monkeypatch.setattr(slices, "LEAST_TOKENS", 1000)
    count = len(seen)
    whole_s, whole_o = op.prefill(**args, backend="triton")
    assert len(seen) == count
    assert torch.equal(s, whole_s) and torch.equal(o, whole_o)


def pooled(args):
    slots = torch.zeros(1, dtype=torch.int32)
    return {**args, "s": ac.StatePool(args["s"].clone(), slots)}


def packed(args):
    flat = {n: x if n == "s" else x[0] for n, x in args.items()}
    return {**flat, "cu_seqlens": torch.tensor([0, 130], dtype=torch.int32)}


@pytest.mark.parametrize(
    ("op", "change"),
    [
        (ac.ops.gated_delta_rule, pooled),
        (ac.ops.gated_delta_rule, packed),
        (ac.ops.gated_delta_rule, lambda x: {**x, "s": x["s"].bfloat16()}),
        (aged, lambda x: {n: x[n] for n in ("q", "k", "v", "s")}),
    ],
    ids=["pool", "packed", "16-bit state", "position"],
)
def test_what_is_not_cut(seen, op, change):
    op.prefill(**change(arguments("gated_delta_rule", 130)), backend="triton")
    assert seen == []


def test_a_state_pass_that_fills_the_device_is_not_cut(seen, monkeypatch):
    monkeypatch.setattr(slices, "ROOM", 0.0)
    ac.ops.gated_delta_rule.prefill(**arguments("gated_delta_rule", 130), backend="triton")
    assert seen == [] and affine.MULTIPROCESSORS > 0
