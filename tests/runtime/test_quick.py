"""Whether a call is like an earlier one, as the function written out for that one says."""

import time

import pytest
import torch

import attncc as ac
from attncc.runtime.quick import take
from attncc.runtime.signature import read


def drawn():
    q, k, v = torch.randn(3, 1, 20, 2, 16).unbind()
    g, beta = torch.randn(2, 1, 20, 2)
    pool = ac.StatePool(torch.randn(4, 2, 16, 16), torch.zeros(1, dtype=torch.int32))
    return [q, k, v, g, beta], {"s": pool, "backend": "triton", "scale": 0.5, "return_lse": False}


def asked(function, args, kwargs, gradients=False):
    frame, pointers = [None] * 9, [0] * 9
    numbers = function(args, kwargs, frame, pointers, gradients)
    return numbers and (frame, pointers, numbers)


def test_what_it_gives_is_what_reading_gives():
    args, kwargs = drawn()
    function = take(args, kwargs)
    for _ in range(2):
        seen = read("prefill", args, kwargs)
        n = len(seen.tensors)
        frame, pointers, numbers = asked(function, args, kwargs)
        assert all(a is b for a, b in zip(frame[:n], seen.tensors, strict=True)) and n == 7
        assert pointers[:n] == seen.pointers and numbers == seen.numbers == [kwargs["scale"]]
        assert frame[n:] == [None] * (9 - n)
        args, kwargs = drawn()
        kwargs["scale"] = -0.25  # another number of its kind


def odd(x):
    return torch.zeros(x.numel() + 1)[1:].view(x.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, k: a.__setitem__(0, a[0].half()),
        lambda a, k: a.__setitem__(0, a[0][:, :19]),
        lambda a, k: a.__setitem__(0, a[0].transpose(1, 2).contiguous().transpose(1, 2)),
        lambda a, k: a.__setitem__(0, odd(a[0])),
        lambda a, k: a.__setitem__(0, a[0].to("meta")),
        lambda a, k: a.__setitem__(0, a[0].to_sparse_csr()),
        lambda a, k: a.__setitem__(0, a[0].to_mkldnn()),
        lambda a, k: a.__setitem__(0, torch.nested.nested_tensor([a[0][0]])),
        lambda a, k: a.__setitem__(0, None),
        lambda a, k: a.__setitem__(0, 1.0),
        lambda a, k: k.update(backend="auto"),
        lambda a, k: k.update(backend=None),
        lambda a, k: k.update(scale=1),
        lambda a, k: k.update(scale=torch.tensor(0.5)),
        lambda a, k: k.update(return_lse=True),
        lambda a, k: k.update(return_lse=0),
        lambda a, k: k.update(s=k["s"].pool),
        lambda a, k: k.update(s=None),
        lambda a, k: k.update(s=ac.StatePool(k["s"].pool, k["s"].slots, k["s"].slots)),
        lambda a, k: k.update(s=ac.StatePool(k["s"].pool.half(), k["s"].slots)),
    ],
)  # fmt: skip
def test_what_is_otherwise_is_not_accepted(change):
    args, kwargs = drawn()
    function = take(args, kwargs)
    key = read("prefill", args, kwargs).key
    assert asked(function, args, kwargs)
    change(args, kwargs)
    assert asked(function, args, kwargs) is None
    seen = read("prefill", args, kwargs)
    assert seen is None or seen.key != key


def test_a_parameter_has_to_be_read():
    args, kwargs = drawn()
    function, key = take(args, kwargs), read("prefill", args, kwargs).key
    args[0] = torch.nn.Parameter(args[0], requires_grad=False)
    assert asked(function, args, kwargs) is None and read("prefill", args, kwargs).key == key


def test_gradients_are_not_accepted():
    args, kwargs = drawn()
    function = take(args, kwargs)
    assert asked(function, args, kwargs, gradients=True)
    args[1].requires_grad_()
    assert asked(function, args, kwargs, gradients=True) is None
    assert asked(function, args, kwargs)
    wanting = take(args, kwargs)  # written out for a tensor that wants one
    assert asked(wanting, args, kwargs)
    for given in (args, drawn()[0]):
        wants = given[1].requires_grad
        assert (asked(wanting, given, kwargs, gradients=True) is None) == wants


def test_caches_and_mappings_of_outputs_are_told_apart():
    sizes = {"B": 2, "Hkv": 2, "D": 16, "E": 16}
    cache = ac.DenseCache.allocate(ac.ops.attention, sizes=sizes, capacity=8, dtype=torch.float32)
    out = {"o": torch.zeros(3)}
    function = take((), {"cache": cache, "out": out})
    frame = [None] * 9
    assert function((), {"cache": cache, "out": out}, frame, [0] * 9, False) == []
    seen = read("decode", (), {"cache": cache, "out": out})
    held = [t for t in frame if t is not None]
    assert len(held) > 3 and list(map(id, held)) == list(map(id, seen.tensors))
    for other in ({"cache": cache, "out": {"p": out["o"]}}, {"cache": cache, "out": out["o"]}):
        assert function((), other, frame, [0] * 9, False) is None


def test_arguments_that_only_a_signature_tells_apart():
    args, kwargs = drawn()
    assert take(args, {**kwargs, "sizes": {"G": 2}}) is None
    assert take([*args, object()], kwargs) is None


def test_it_costs_less_than_reading():
    args, kwargs = drawn()
    function = take(args, kwargs)
    frame, pointers = [None] * 9, [0] * 9

    def seconds(run):
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(500):
                run()
            best = min(best, time.perf_counter() - start)
        return best

    quick = seconds(lambda: function(args, kwargs, frame, pointers, False))
    slow = seconds(lambda: tuple(read("prefill", args, kwargs).key))
    print(f"\ntold apart in {quick * 2000:.2f} us, read in {slow * 2000:.2f} us")
    assert quick < slow
