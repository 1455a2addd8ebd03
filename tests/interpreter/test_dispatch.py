"""Repeated ordinary calls: done from memory where the signature says they may, and equal."""

import threading

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import ArgumentError, OverlapError, StrideError, ToolchainError
from attncc.runtime import api, dispatch, knobs, slices
from attncc.runtime.recording import KEPT
from attncc.runtime.signature import leaves
from tests.interpreter.test_prepared import (
    ATTENTION,
    GDR,
    copied,
    delta,
    dense,
    paged,
    tokens_of,
)
from tests.interpreter.test_softmax import windowed


@pytest.fixture(autouse=True)
def went(monkeypatch):
    """Calls on the CPU are remembered too; the list says how each call went."""
    found = []
    monkeypatch.setattr(dispatch, "eligible", lambda args, kwargs: True)
    monkeypatch.setattr(dispatch, "values_are_read", knobs.check)
    ordinary, record, repeat = api.Op.ordinary, dispatch.record, dispatch._Known.run

    def noting(name, function):
        def run(*args, **kwargs):
            found.append(name)
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(api.Op, "ordinary", noting("ordinary", ordinary))
    monkeypatch.setattr(dispatch, "record", noting("recorded", record))
    monkeypatch.setattr(dispatch._Known, "run", noting("repeated", repeat))
    for op in (ATTENTION, GDR):
        monkeypatch.setattr(op, "_repeated", dispatch.Repeated())
    return found


def step(seed, cache, **options):
    q, k, v = tokens_of(seed, 3, 1)
    return ATTENTION.decode(q, k, v, cache, backend="triton", **options)


@pytest.mark.parametrize("make", [dense, paged])
def test_a_third_call_of_a_signature_is_done_from_memory(make, went):
    cache, rival = make(1, [3, 40, 0]), make(1, [3, 40, 0])
    for i in range(5):
        found = step(i, cache)
        here = went.copy()
        q, k, v = tokens_of(i, 3, 1)
        want = ATTENTION.ordinary("decode", (q, k, v), {"cache": rival, "backend": "triton"})
        went[:] = here
        assert torch.equal(found, want)
        assert all(map(torch.equal, cache.tensors.values(), rival.tensors.values()))
    assert went == ["ordinary", "recorded", *["repeated"] * 3]
    assert cache.lengths.tolist() == [8, 45, 5]
    other = make(7, [10, 10, 10])  # another cache of the same layout
    rival = copied(other)
    found = step(9, other)
    q, k, v = tokens_of(9, 3, 1)
    want = ATTENTION.ordinary("decode", (q, k, v), {"cache": rival, "backend": "triton"})
    assert went[5] == "repeated" and torch.equal(found, want)


def test_pools_and_given_outputs(went):
    args, out = delta(1, 2, 1), torch.zeros(2, 1, 2, 16)
    for i in range(4):
        now = {**args, "q": args["q"] * (i + 1)}
        rival = copied(args["s"])
        assert GDR.decode(**now, out=out, backend="triton") is out
        here = went.copy()
        want = GDR.ordinary("decode", (), {**now, "s": rival, "backend": "triton"})
        went[:] = here
        assert torch.equal(out, want) and torch.equal(rival.pool, args["s"].pool)
    assert went[2:] == ["repeated"] * 2


VARIATIONS = {
    "shape": lambda q, k, v, o: ((q[:, :2], k[:, :2], v[:, :2]), o),
    "layout": lambda q, k, v, o: ((q.transpose(0, 1).contiguous().transpose(0, 1), k, v), o),
    "alignment": lambda q, k, v, o: ((shifted(q), k, v), o),
    "dtype": lambda q, k, v, o: ((q.half(), k.half(), v.half()), o),
    "option": lambda q, k, v, o: ((q, k, v), {**o, "return_lse": True}),
    "output": lambda q, k, v, o: ((q, k, v), {**o, "out": torch.zeros_like(q)}),
    "mapping": lambda q, k, v, o: ((q, k, v), {**o, "out": {"o": torch.zeros_like(q)}}),
    "backend": lambda q, k, v, o: ((q, k, v), {"backend": "torch"}),
    "keyword": lambda q, k, v, o: ((q, k), {**o, "v": v}),
    "cu_seqlens": lambda q, k, v, o: (
        (q[0], k[0], v[0]), {**o, "cu_seqlens": torch.tensor([0, 1, 4])}
    ),
}  # fmt: skip


def shifted(x):
    """The same numbers at an address that is no multiple of 16 bytes."""
    held = x.new_empty(x.numel() + 1)[1:].view_as(x)
    return held.copy_(x)


@pytest.mark.parametrize("name", VARIATIONS)
def test_whatever_else_a_call_says_is_another_signature(name, went):
    args, options = tokens_of(1, 2, 4), {"backend": "triton"}
    for _ in range(3):
        ATTENTION(*args, **options)
    assert went == ["ordinary", "recorded", "repeated"]
    other, said = VARIATIONS[name](*args, options)
    ATTENTION(*other, **said)
    assert went[3:] == ["ordinary"]


def test_calls_of_other_lowerings_are_never_recorded(went):
    args = tokens_of(1, 2, 4)
    want = ATTENTION(*args, backend="torch")
    for _ in range(3):
        assert torch.equal(ATTENTION(*args, backend="torch"), want)
    assert went == ["ordinary", "recorded", "ordinary", *["ordinary"] * 2]


def test_a_kernel_that_only_its_own_launcher_can_launch_goes_the_ordinary_way(went, monkeypatch):
    def unknown(recording):
        raise ToolchainError("a launch with launch_pdl")

    monkeypatch.setattr(dispatch, "replay_of", unknown)
    args = tokens_of(1, 2, 4)
    for _ in range(4):
        ATTENTION(*args, backend="triton")
    assert went == ["ordinary", "recorded", "ordinary", "ordinary"]


def test_gradients_subclasses_and_knobs_go_the_ordinary_way(went, monkeypatch):
    class Own(torch.Tensor):
        pass

    q, k, v = tokens_of(1, 2, 4)
    for _ in range(3):
        ATTENTION(q.clone().requires_grad_(), k, v, backend="triton")
        ATTENTION(q.as_subclass(Own), k, v, backend="triton")
    assert went == ["ordinary"] * 6
    for _ in range(3):
        ATTENTION(q, k, v, backend="triton")
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    ATTENTION(q, k, v, backend="triton")
    monkeypatch.delenv("ATTNCC_CHECK")
    ATTENTION(q, k, v, backend="triton")
    assert went[6:] == ["ordinary", "recorded", "repeated", "ordinary", "ordinary"]


def test_other_knobs_kernels_and_plans_are_asked_for_again(went, monkeypatch):
    q, k, v = tokens_of(1, 2, 4)

    def thrice():
        went.clear()
        for _ in range(3):
            ATTENTION(q, k, v)
        return went

    assert thrice() == ["ordinary", "recorded", "repeated"]
    KEPT.choose_again()
    assert thrice() == ["ordinary", "recorded", "repeated"]
    KEPT.forget()
    assert thrice() == ["ordinary", "recorded", "repeated"]
    monkeypatch.setenv("ATTNCC_BACKEND", "torch")
    assert "repeated" not in thrice()


def test_overlaps_are_seen_by_the_ordinary_path(went):
    q, k, v = tokens_of(1, 2, 4)
    out = torch.zeros_like(q)
    for _ in range(3):
        ATTENTION(q, k, v, out=out, backend="triton")
    with pytest.raises(OverlapError):
        ATTENTION(q, k, v, out=q, backend="triton")
    assert went == ["ordinary", "recorded", "repeated", "ordinary"]


def test_nothing_of_the_caller_is_kept(went):
    import gc
    import weakref

    q, k, v = tokens_of(1, 2, 4)
    for _ in range(3):
        out = ATTENTION(q, k, v, backend="triton")
    dead = [weakref.ref(t) for t in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    assert went[-1] == "repeated" and all(r() is None for r in dead)


def test_the_memory_is_bounded(went, monkeypatch):
    monkeypatch.setattr(dispatch, "MOST", 2)
    for _ in range(2):
        for tokens in (1, 2, 3, 4):
            q, k, v = tokens_of(1, 2, tokens)
            for _ in range(2):
                ATTENTION(q, k, v, backend="triton")
    memory = ATTENTION._repeated.memory
    assert len(memory.known) <= 2 and len(memory.met) <= 2


def test_numbers_are_no_part_of_the_signature(went):
    windowed._repeated = dispatch.Repeated()
    q, k, v = tokens_of(1, 2, 9)
    for scale, width in ((0.3, 4), (0.5, 2), (0.7, 3), (0.9, 9)):
        found = windowed(q, k, v, width, scale, backend="triton")
        args = (q, k, v, width, scale)
        here = went.copy()
        assert torch.equal(found, windowed.ordinary("prefill", args, {"backend": "triton"}))
        went[:] = here
    assert went == ["ordinary", "recorded", "repeated", "repeated"]
    windowed(q, k, v, 4, 1, backend="triton")  # a whole number where a real one was
    assert went[-1] == "ordinary"


def test_an_op_without_history(went):
    from tests.runtime import state_ops

    op, args, _, _ = state_ops.cases(2, 5)["hgrn"]
    op._repeated = dispatch.Repeated()
    for _ in range(4):
        found = op(**args, backend="triton")
        want = op.ordinary("prefill", (), {**args, "backend": "triton"})
        assert all(map(torch.equal, found, want))
    assert "repeated" in went
    assert isinstance(found, tuple) and found._fields == want._fields


WRONG = {
    "too many arguments": lambda q, k, v: ((q, k, v, *[None] * 9, q), {}),
    "given twice": lambda q, k, v: ((q, k, v), {"q": q}),
    "a tensor is wanted": lambda q, k, v: ((3, k, v), {}),
    "not a mapping": lambda q, k, v: ((q, k, v), {"sizes": [1]}),
    "not a tensor": lambda q, k, v: ((q, k, v), {"cu_seqlens": [0, 4]}),
    "the option is on or off": lambda q, k, v: ((q, k, v), {"return_lse": 1}),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_call_stays_wrong_when_it_is_repeated(text, went):
    args, kwargs = WRONG[text](*tokens_of(1, 2, 4))
    for _ in range(3):
        with pytest.raises(ArgumentError, match=text) as caught:
            ATTENTION(*args, **kwargs, backend="triton")
        assert "_Marked" not in str(caught.value)
    with pytest.raises(ArgumentError, match=text):
        ATTENTION.prepare(*args, **kwargs, backend="triton")


def test_a_history_may_be_called_as_a_field_of_the_cache(went):
    @ac.op(out="B T E")
    def odd(
        q=ac.Activation("B T D"),
        block_table=ac.Cache("B S D"),
        v=ac.Cache("B S E"),
    ):
        return ac.dot(ac.softmax(ac.dot(q, block_table, "D"), "S", where=ac.causal), v, "S")

    sizes = {"B": 1, "D": 16, "E": 16}
    cache = ac.PagedCache.allocate(odd, sizes=sizes, capacity=32, page=16, dtype=torch.float32)
    rival = copied(cache)
    for i in range(4):
        q, k, v = (torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(i + j))
                   for j in range(3))  # fmt: skip
        found = odd.decode(q, k, v, cache, backend="torch")
        want = odd.ordinary("decode", (q, k, v), {"cache": rival, "backend": "torch"})
        assert torch.equal(found, want)
    assert "recorded" in went and cache.lengths.tolist() == [4]
    names = leaves(["q"], (), {"cache": cache}).tensors
    assert {"cache.tensors.block_table", "cache.block_table"} < {
        n.replace("pages", "tensors") for n in names
    }


def test_what_other_knobs_decided_meanwhile_is_not_remembered(went, monkeypatch):
    """A knob changes, and another thread calls, while a call is being recorded."""
    args = tokens_of(1, 2, 4)
    record = dispatch.record

    def slow(*given, **options):
        found = record(*given, **options)
        monkeypatch.setenv("ATTNCC_BACKEND", "torch")
        other = threading.Thread(target=ATTENTION, args=args)
        other.start()
        other.join()
        return found

    for _ in range(2):
        ATTENTION(*args)
        monkeypatch.setattr(dispatch, "record", slow)
    monkeypatch.setattr(dispatch, "record", record)
    went.clear()
    ATTENTION(*args)
    assert "repeated" not in went


def test_a_cache_made_in_inference_mode_grows_outside_of_it(went):
    with torch.inference_mode():
        cache = dense(1, [3, 40, 0])
    for i in range(3):
        with torch.no_grad():
            step(i, cache)
    assert cache.lengths.tolist() == [6, 43, 3] and went[-1] == "repeated"


def test_a_call_whose_signature_cannot_be_read_goes_the_ordinary_way(went):
    q, k, v = tokens_of(1, 2, 4)
    for _ in range(3):
        with pytest.raises(StrideError):
            ATTENTION(q, k.to_sparse(), v)
        with pytest.raises(ArgumentError, match=r"argument sizes\[D\]"):
            ATTENTION(q, k, v, sizes={"D": [1]})
    assert went == ["ordinary"] * 6


def test_a_prompt_in_slices_is_done_from_memory(went, monkeypatch):
    monkeypatch.setattr(slices, "LEAST_TOKENS", 32)
    count = 2 + dispatch.OFTEN
    args = [delta(seed, 1, 68, pool=False) for seed in range(count + 1)]
    found = [GDR.prefill(**given, backend="triton") for given in args[:count]]
    monkeypatch.setattr(dispatch, "read", lambda *_: pytest.fail("nothing has to be read"))
    found += [GDR.prefill(**given, backend="triton") for given in args[count:]]
    assert went == ["ordinary", "recorded", *["repeated"] * (len(args) - 2)]
    monkeypatch.setattr(slices, "LEAST_TOKENS", 1000)
    for given, results in zip(args[-2:], found[-2:], strict=True):
        whole = GDR.ordinary("prefill", (), {**given, "backend": "triton"})
        assert all(map(torch.equal, results, whole))


def test_signatures_in_turns_are_told_apart(went):
    calls = [delta(1, 2, 1), delta(2, 2, 1)]
    calls[1] = {**calls[1], "q": calls[1]["q"].transpose(0, 2).contiguous().transpose(0, 2)}
    out = torch.zeros(2, 1, 2, 16)
    for i in range(14):
        now = calls[i // 2 % 2]
        rival = copied(now["s"])
        GDR.decode(**now, out=out, backend="triton")
        here = went.copy()
        want = GDR.ordinary("decode", (), {**now, "s": rival, "backend": "triton"})
        went[:] = here
        assert torch.equal(out, want) and torch.equal(now["s"].pool, rival.pool)
    assert went == ["ordinary", "recorded"] * 2 + ["repeated"] * 10
