"""Prepared launches as the driver sees them, and what they cost the host."""

import ctypes
import gc
import itertools
import threading
import time
import weakref
from dataclasses import dataclass

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import ToolchainError
from attncc.runtime import driver, replay, unrolled
from attncc.runtime.driver import INVALID_CONTEXT, Block, Cuda
from attncc.runtime.loader import function_of
from attncc.runtime.manifest import Manifest
from attncc.runtime.recorder import Recorder
from attncc.runtime.signature import Layout, leaves, read
from tests.runtime.driving import STREAM, Library, on_a_device, prepared

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule


@pytest.fixture(autouse=True)
def device(monkeypatch):
    on_a_device(monkeypatch)


def delta(batch=2, tokens=1):
    q, k, v = (torch.randn(batch, tokens, 2, 16) for _ in range(3))
    g, beta = torch.randn(2, batch, tokens, 2)
    slots = torch.arange(batch, dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "s": ac.StatePool(
        torch.randn(5, 2, 16, 16), slots)}  # fmt: skip


def step(monkeypatch, **options):
    args = delta()
    out = torch.empty(2, 1, 2, 16)
    return args, out, prepared(monkeypatch, GDR, "decode", **args, out=out, **options)


def test_the_driver_sees_what_the_ordinary_launch_gave(monkeypatch):
    _, out, made = step(monkeypatch)
    assert made.call() is out
    [(grid, values)] = made.given
    [seen] = made.library.asked
    [function] = made.functions
    assert seen.function == function.handle and seen.stream == STREAM
    assert seen.grid == grid and seen.block == (function.threads, 1, 1) and seen.shared == 1234
    wanted = [v if not isinstance(v, float) else ctypes.c_float(v).value for v in values]
    assert list(seen.values) == [*wanted, 0, 0]


def test_only_pointers_of_replaced_tensors_change_and_only_once(monkeypatch):
    args, _, made = step(monkeypatch)
    made.call()
    other = torch.randn_like(args["v"])
    made.call(v=other)
    made.call()
    before, replaced, after = (a.values for a in made.library.asked)
    changed = {(a, b) for a, b in zip(before, replaced, strict=True) if a != b}
    assert changed == {(args["v"].data_ptr(), other.data_ptr())} and after == before


def test_a_pool_is_replaced_with_its_slots(monkeypatch):
    args, _, made = step(monkeypatch)
    made.call()
    pool = ac.StatePool(args["s"].pool.clone(), args["s"].slots.clone())
    made.call(s=pool)
    before, replaced = (a.values for a in made.library.asked)
    moved = {a: b for a, b in zip(before, replaced, strict=True) if a != b}
    old = args["s"]
    assert moved == {
        old.pool.data_ptr(): pool.pool.data_ptr(), old.slots.data_ptr(): pool.slots.data_ptr()
    }  # fmt: skip


def test_results_that_nobody_gave_are_new_each_time(monkeypatch):
    made = prepared(monkeypatch, GDR, "decode", **delta())
    one, two = made.call(), made.call()
    assert one.data_ptr() != two.data_ptr() and one.shape == made.result.shape
    for seen, out in zip(made.library.asked, (one, two), strict=True):
        assert out.data_ptr() in seen.values
    given = torch.empty_like(one)
    assert made.call(out=given) is given and given.data_ptr() in made.library.asked[2].values


def split_decode(monkeypatch):
    q, k, v = torch.randn(1, 1, 8, 64), *torch.randn(2, 1, 2048, 2, 64)
    return prepared(monkeypatch, ATTENTION, "decode", q, k, v, out=torch.empty_like(q))


def workspaces(made):
    """Addresses that each series of launches had beside the arguments."""
    known = {t.data_ptr() for t in made.call._leaves.tensors.values()}
    n = len(made.functions)
    found = []
    for i in range(0, len(made.library.asked), n):
        wide = {v for a in made.library.asked[i : i + n] for v in a.values if v > 1 << 32}
        found.append(wide - known)
    return found


def test_workspaces_belong_to_a_stream_and_to_a_capture(monkeypatch):
    made = split_decode(monkeypatch)
    for stream in (1, 2, 1):
        monkeypatch.setattr(replay, "raw_stream", lambda device, s=stream: s)
        made.call()
    first, second, third = workspaces(made)
    assert first and first == third and not first & second
    assert [a.stream for a in made.library.asked[:: len(made.functions)]] == [1, 2, 1]
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    held = list(made.call._replay._kept.values())
    made.call()
    assert not workspaces(made)[3] & first
    assert list(made.call._replay._kept.values()) == held  # what a graph uses is nobody else's


def test_large_workspaces_are_not_kept(monkeypatch):
    monkeypatch.setattr(replay, "SMALL", 16)
    made = split_decode(monkeypatch)
    made.call()
    assert workspaces(made) != [set()] and not made.call._replay._kept


def test_global_scratch_is_allocated_for_the_whole_grid(monkeypatch):
    _, _, made = step(monkeypatch, scratch=64)
    made.call()
    [rooms] = made.call._replay._kept.values()
    [(grid, _)] = made.given
    assert [r.numel() for r in rooms] == [64 * grid[0] * grid[1] * grid[2]]
    assert made.library.asked[0].values[-2:] == (rooms[0].data_ptr(), 0)


def test_a_thread_without_a_context_gets_torchs_and_other_failures_are_errors(monkeypatch):
    _, _, made = step(monkeypatch)
    made.library.errors = [INVALID_CONTEXT]
    made.call()
    assert len(made.library.contexts) == 1 and len(made.library.asked) == 1
    made.library.errors = [700]
    with pytest.raises(ToolchainError, match="the launch failed: CUDA_ERROR_TEST"):
        made.call()
    made.library.errors = [INVALID_CONTEXT, INVALID_CONTEXT]
    with pytest.raises(ToolchainError, match="the launch failed"):
        made.call()


def test_a_failure_leaves_the_call_as_it_was(monkeypatch):
    args, _, made = step(monkeypatch)
    made.call()
    made.library.errors = [700]
    with pytest.raises(ToolchainError):
        made.call(v=torch.randn_like(args["v"]))
    made.call()
    assert made.library.asked[0] == made.library.asked[1]


def test_numbers_lie_as_the_manifest_says_and_addresses_inside_tensors_have_words_of_their_own():
    library = Library()
    pairs = (("a_ptr", "*bf16"), ("n", "i32"), ("m", "i64"), ("x", "fp32"), ("b_ptr", "*i32"))
    manifest = Manifest(entry="k", target="sm_90", parameters=pairs, num_warps=4)
    function = function_of(manifest, 16)
    assert function.offsets == (0, 8, 16, 24, 32, 40, 48) and function.threads == 128
    library.kinds[16] = [kind for _, kind in pairs] + ["*", "*"]
    block = Block([function, function], [(1, 1, 1), (2, 3, 4)], 2, 0, Cuda(library))
    for launch in (0, 1):
        block.refer(launch, 0, 0, 0)
        block.refer(launch, 4, 1, 12 * launch)
        for parameter, value in ((1, -7), (2, 1 << 40), (3, 0.5)):
            block.write(launch, parameter, value)
    block.bind([1 << 45, 1 << 46])
    for launch, arguments in block.calls(5):
        assert launch(*arguments) == 0
    first, second = library.asked
    assert first.values == (1 << 45, -7, 1 << 40, 0.5, 1 << 46, 0, 0)
    assert second.values == (1 << 45, -7, 1 << 40, 0.5, (1 << 46) + 12, 0, 0)
    assert second.grid == (2, 3, 4) and second.stream == 5
    block.put(1, 1 << 44)
    launch, arguments = block.calls(5)[1]
    launch(*arguments)
    assert library.asked[2].values[4] == (1 << 44) + 12
    for parameter, value in ((1, 1 << 40), (2, 0.5)):
        with pytest.raises(ToolchainError, match=f"parameter {parameter} cannot hold"):
            block.write(0, parameter, value)


def test_a_chained_kernel_is_launched_while_the_one_ahead_runs():
    library = Library()
    manifest = Manifest("k", "sm_90", "sm_90a", (("n", "i32"),), 4, 1024, chained=True)
    library.kinds[16] = ["i32", "*", "*"]
    block = Block([function_of(manifest, 16)], [(70000, 3, 2)], 0, 0, Cuda(library))
    block.write(0, 0, 9)
    [(launch, arguments)] = block.calls(5)
    assert launch(*arguments) == 0
    [asked] = library.asked  # which looked at the attribute
    assert (asked.function, asked.grid, asked.block) == (16, (70000, 3, 2), (128, 1, 1))
    assert (asked.shared, asked.stream, asked.values) == (1024, 5, (9, 0, 0))


def test_without_a_driver_there_is_an_error(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    driver.cuda.cache_clear()
    with pytest.raises(ToolchainError, match="no CUDA driver"):
        driver.cuda()


def test_threads_on_one_prepared_call_do_not_mix(monkeypatch):
    args, out, made = step(monkeypatch)
    others = [torch.randn_like(args["v"]) for _ in range(4)]

    def work(v, o):
        for _ in range(50):
            assert made.call(v=v, out=o) is o

    outs = [torch.empty_like(out) for _ in others]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(others, outs, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    pairs = {(v.data_ptr(), o.data_ptr()) for v, o in zip(others, outs, strict=True)}
    assert len(made.library.asked) == 200
    for seen in made.library.asked:
        assert sum(v in seen.values and o in seen.values for v, o in pairs) == 1


def test_the_quick_pass_reads_arguments_in_the_order_of_the_slow_one():
    pages = ac.PagedCache.allocate(
        ATTENTION, sizes={"B": 2, "Hkv": 2, "D": 16, "E": 16}, capacity=32, page=16,
        layouts={"k": "pages Hkv page D"},
    )  # fmt: skip
    s = delta()["s"]
    pool = ac.StatePool(s.pool, s.slots, s.slots.clone())
    q, out = torch.randn(2, 1, 4, 16), torch.randn(2)
    args, kwargs = (q, 3, pool), {"cache": pages, "out": {"o": out}, "scale": 0.5, "backend": None}
    slow = leaves(["q", "n", "s"], args, kwargs)
    quick = read("decode", args, kwargs)
    assert all(a is b for a, b in zip(slow.tensors.values(), quick.tensors, strict=True))
    assert list(slow.numbers.values()) == quick.numbers == [3, 0.5]
    assert [*slow.tensors] == [
        "q", "s.pool", "s.slots", "s.out_slots", "cache.k", "cache.v", "cache.block_table",
        "cache.lengths", "out[o]",
    ]  # fmt: skip
    swapped = [t.clone() for t in quick.tensors]
    again_args, again = slow.rebuilt(swapped, [7, 0.25])
    assert again_args[0] is swapped[0] and again_args[1] == 7 and again["scale"] == 0.25
    assert isinstance(again["cache"], ac.PagedCache) and again["cache"].pages["v"] is swapped[5]
    assert again["cache"].layouts == pages.layouts and again["out"]["o"] is swapped[8]


def test_numbers_inside_caches_and_mappings_decide_and_are_not_replaced():
    @dataclass(frozen=True)
    class Own:
        pages: dict
        page: int

    x = torch.randn(3)
    for make in (lambda n: {"cache": Own({"k": x}, n)}, lambda n: {"out": {"o": x, "n": n}}):
        assert read("decode", (x, 2), make(1)).key != read("decode", (x, 2), make(2)).key
        assert read("decode", (x, 2), make(1)).key == read("decode", (x, 3), make(1)).key
        assert read("decode", (x, 2), make(1)).numbers == [2]
        slow = leaves(["q", "n"], (x, 2), make(1))
        assert slow.numbers == {"n": 2} and 1 in slow.constants.values()
    sizes = [read("decode", (x,), {"sizes": {"W": n}}).key for n in (1, 2)]
    assert sizes[0] != sizes[1]


def test_views_of_arguments_are_known_unless_they_may_be_of_several():
    x = torch.randn(4, 8)
    whole, left, right = x.detach(), x[:, :4], x[:, 4:]
    alone = Recorder("op", [whole], strict=True)
    place = alone._place(x[1:, 2:])
    assert (place.register, place.offset, place.strides) == (0, 4 * 10, (8, 1))
    pieces = Recorder("op", [left, right], strict=True)
    assert pieces._place(x[:, 4:]).register == 1
    assert pieces._place(x[:, 2:6]) is None and pieces._place(torch.randn(3)) is None


@pytest.mark.parametrize("guarded", [True, False])
def test_layouts_are_compared_in_full_whoever_compares(guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(unrolled, "_guards", lambda tensors: unrolled._unknown)

    class Own(torch.Tensor):
        pass

    a, b = torch.randn(4, 6, 8), torch.randn(4, 3, 16)[:, :, ::2]
    wanted = [(2, Layout.of(a)), (0, Layout.of(b))]
    right = a.clone(), torch.randn(4, 3, 16)[:, :, ::2]
    wrong = [
        (torch.randn(4, 8, 6), b), (torch.randn(4, 6, 16)[..., ::2], b), (a.half(), b),
        (torch.randn(4, 6, 8, device="meta"), b), (torch.randn(193)[1:].view(4, 6, 8), b),
        (a.as_subclass(Own), b), (a, b.contiguous()), (a, torch.randn(4, 3, 24)[:, :, ::3]),
    ]  # fmt: skip
    graded = a.clone().requires_grad_(), b
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with torch.no_grad():
            fits = unrolled.accepts(wanted, [a, b])
            assert guarded or fits.__globals__["guarded"] is unrolled._unknown
        with mode():
            on = torch.is_grad_enabled()
            frame, pointers = [None] * 3, [0] * 3
            assert fits(right, frame, pointers, on)
            assert frame[2] is right[0] and frame[0] is right[1] and frame[1] is None
            assert pointers == [right[1].data_ptr(), 0, right[0].data_ptr()]
            assert not any(fits(pair, frame, pointers, on) for pair in wrong)
            assert fits(graded, frame, pointers, on) is not on
    held = weakref.ref(a)
    del a, graded, wrong, right, frame
    gc.collect()
    assert held() is None
    twice = torch.randn(2, 2)
    fits = unrolled.accepts([(0, Layout.of(twice)), (1, Layout.of(twice))], [twice, twice])
    assert fits((twice, twice), [None] * 2, [0, 0], False)


def fastest(work, calls=100, series=200):
    best = float("inf")
    for _ in range(series):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def test_a_run_costs_the_host_little(monkeypatch, capsys):
    class Silent(Library):
        def __init__(self):
            super().__init__()
            nothing = ctypes.cast(ctypes.CDLL(None).ffs, ctypes.c_void_p)  # a C function gives 0
            self.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int)(nothing.value)
            self.cuLaunchKernelEx = self.cuLaunchKernel

    args, out, made = step(monkeypatch, library=Silent())
    names = ("q", "k", "v", "beta")
    sets = [{n: args[n].clone() for n in names} | {"out": out.clone()} for _ in range(2)]
    turns = itertools.cycle(sets)
    with torch.no_grad():
        none, five = fastest(made.call), fastest(lambda: made.call(**next(turns)))
    with capsys.disabled():
        print(f"\nhost time a run: {none:.2f} us, with 5 tensors replaced {five:.2f} us")
    assert none < 10 and five < 30
