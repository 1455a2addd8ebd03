"""Prompts that are cut in time give the bits of those that are not."""

import pytest
import torch

import attncc as ac
from attncc.runtime import affine, lanes, selfcheck, slices
from attncc.runtime.bind import bind
from attncc.runtime.sources import long_sources
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
    assert seen == [] and slices.MULTIPROCESSORS > 0


@pytest.mark.parametrize("fresh", [False, True])
def test_a_prepared_call_is_cut_once_and_done_again_on_other_tensors(seen, monkeypatch, fresh):
    op = ac.ops.gated_delta_rule
    args, other = arguments("gated_delta_rule", 200, b=2), arguments("gated_delta_rule", 200, b=2)
    other |= {n: other[n] * 0.5 for n in ("q", "v", "s")}
    if fresh:
        del args["s"], other["s"]
    prepared = op.prepare(**args, backend="triton")
    count = len(seen)
    assert count > 1
    results = [prepared(), prepared(**other), prepared()]
    assert len(seen) == count  # a run takes no call apart
    monkeypatch.setattr(slices, "LEAST_TOKENS", 1000)
    for given, found in zip((args, other, args), results, strict=True):
        whole = op.prefill(**given, backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_slices_of_tensors_that_share_one_allocation_are_found_again(seen):
    op, args = ac.ops.gated_delta_rule, arguments("gated_delta_rule", 130)

    def joined(scale):
        every = torch.cat([args[n] for n in "qkv"], -1) * scale
        return dict(zip("qkv", every.split(16, -1), strict=True))

    prepared = op.prepare(**args | joined(1.0), backend="triton")
    assert len(seen) > 1
    found, whole = prepared(**joined(0.5)), op.prefill(**args | joined(0.5), backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_a_result_that_lies_less_evenly_than_the_given_state_is_not_cut(seen):
    args = arguments("gated_delta_rule", 130)
    even, odd = torch.zeros(1, 1, 16, 16), torch.zeros(257)[1:].view(1, 1, 16, 16)
    o = ac.ops.gated_delta_rule.prefill(**args, out={"s": odd}, backend="triton").o
    assert seen == []
    cut_o = ac.ops.gated_delta_rule.prefill(**args, out={"s": even}, backend="triton").o
    assert len(seen) > 1 and torch.equal(odd, even) and torch.equal(o, cut_o)


def test_a_check_of_its_kernels_runs_a_call_with_states(seen, monkeypatch):
    kinds, usual = [], affine.make_ready

    def noting(*args):
        kinds.append(selfcheck._KIND.get())
        usual(*args)

    monkeypatch.setattr(affine, "make_ready", noting)
    args = arguments("gated_delta_rule", 130)
    args.pop("s")
    ac.ops.gated_delta_rule.prefill(**args, backend="triton")
    [kind] = kinds
    assert len(seen) > 1 and kind.spec.given_states == {"s"} and "s" in kind.call.tensors


@pytest.mark.parametrize("fresh", [False, True])
def test_the_sources_of_a_call_are_those_that_a_long_one_launches(seen, monkeypatch, fresh):
    launched, usual = set(), affine.launch

    def noting(kernel, *args):
        launched.add(kernel.source.digest)
        usual(kernel, *args)

    monkeypatch.setattr(affine, "launch", noting)
    args = arguments("gated_delta_rule", 200)
    if fresh:
        args.pop("s")
    call, _ = bind(ac.ops.gated_delta_rule.declaration, (), args)
    known = {s.digest for s in long_sources(call, "prefill")}
    ac.ops.gated_delta_rule.prefill(**args, backend="triton")
    assert len(seen) > 1 and launched and launched <= known


def test_without_memory_for_a_later_slice_the_caller_still_waits(seen, monkeypatch):
    joined, usual = [], affine.prepared

    def full(part, plans):
        if len(seen) > 1:
            raise torch.OutOfMemoryError("no room")
        return usual(part, plans)

    monkeypatch.setattr(affine, "prepared", full)
    monkeypatch.setattr(slices.Ahead, "join", lambda self: joined.append(len(seen)))
    with pytest.raises(torch.OutOfMemoryError):
        ac.ops.gated_delta_rule.prefill(**arguments("gated_delta_rule", 130), backend="triton")
    assert joined == [2]


def test_each_callers_stream_has_one_beside_it(monkeypatch):
    class Stream:
        def __init__(self, number):
            self.cuda_stream, self.device_index = number, 0

    made = iter(range(10, 20))
    own = [Stream(1)]
    monkeypatch.setattr(lanes, "_BESIDE", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(next(made)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own[0])
    device = torch.device("cuda", 0)
    first, again = (slices.Ahead(device)._stream for _ in range(2))
    own[0] = Stream(2)
    other = slices.Ahead(device)._stream
    assert first is again and other is not first
    assert lanes.beside(0, 1, lanes.AHEAD) is first
