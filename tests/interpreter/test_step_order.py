"""Orders of a step's loads, sums and stores that tables choose between, on the CPU."""

import itertools

import pytest
import torch

import attncc as ac
from attncc.codegen import plan_scan, step_choices
from attncc.codegen.emit.scan_sources import choose_plans, sources_of
from attncc.codegen.pipeline import analyse
from attncc.runtime import affine
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests.interpreter.test_states import check
from tests.interpreter.test_steps_apart import randn

BF16 = torch.bfloat16
DELTA = ac.ops.gated_delta_rule


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No plan or kernel of another choice is found."""
    monkeypatch.setattr(affine, "_PLANS", {})
    monkeypatch.setattr(affine, "_FOUND", {})


def choose(monkeypatch, **choices):
    monkeypatch.setattr(step_choices, "decide", lambda *_: ("test", tuple(choices.items())))


def delta(batch=2, dtype=BF16):
    q, k = (randn(i, batch, 1, 2, 16, dtype=dtype) for i in (1, 2))
    v, g = randn(3, batch, 1, 4, 32, dtype=dtype), -randn(4, batch, 1, 4).abs()
    return {"q": q, "k": k / 4, "v": v, "g": g, "beta": randn(5, batch, 1, 4).sigmoid(),
            "s": randn(6, batch, 4, 16, 32)}  # fmt: skip


def text_of(op, **args):
    call, _ = bind(op.declaration, (), args)
    full = affine.completed(call, spec_of(call))
    [found] = sources_of(choose_plans(call.program, analyse(call.program), full, chunked=False))
    return found


ORDERS = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize(("first", "joint", "own"), ORDERS)
def test_orders_of_one_token(first, joint, own, monkeypatch):
    choose(monkeypatch, states_first=first, joint=joint, own_loads=own, columns=16, narrow=own)
    made = text_of(DELTA, **delta())
    text, plan = made.text, made.plan
    assert (plan.states_first, plan.joint, plan.own_loads) == (first, joint, own)
    assert ("together" in text) == joint and ("each_its_own(k_ptr" in text) == own
    stored = [text.index(f"{n}_ptr\n" if n[0] == "s" else f"{n}_ptr +") for n in ("s_final", "o")]
    assert (stored[0] < stored[1]) == first
    check(DELTA, **delta())


def test_an_infinite_value_is_no_number_in_the_output(monkeypatch):
    choose(monkeypatch, joint=True, own_loads=True)
    args = delta()
    args["v"][0, 0, 1, 3], args["v"][1, 0, 2, 5] = torch.inf, torch.nan
    exact, found = DELTA.reference(**args), DELTA.decode(**args, backend="triton")
    assert torch.equal(found.o.isnan(), exact.o.isnan()) and exact.o.isnan().sum() == 2
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(found.s), test(exact.s))


def test_sums_keep_their_order_where_outputs_hold_more_than_16_bits(monkeypatch):
    choose(monkeypatch, joint=True, own_loads=True)
    args = delta(dtype=torch.float32)
    made = text_of(DELTA, **args)
    assert not made.plan.joint and "each_its_own(k" not in made.text
    check(DELTA, **args)


def test_several_rows_a_token_and_decays_of_keys(monkeypatch):
    choose(monkeypatch, joint=True, own_loads=True, states_first=True)
    q, k, v = randn(1, 2, 1, 2, 16), randn(2, 2, 2, 2, 16) / 4, randn(3, 2, 2, 2, 16)
    gates = {"g": -randn(4, 2, 1, 2).abs(), "beta": randn(5, 2, 2, 2).sigmoid()}
    s = randn(6, 2, 2, 16, 16)
    names = {"q": q.to(BF16), "k": k.to(BF16), "v": v.to(BF16)}
    check(ac.ops.gated_delta_product, **names, **gates, s=s, sizes={"N": 2})
    k, v = names["k"][:, :1], names["v"][:, :1]
    g, beta = -randn(7, 2, 1, 2, 16).abs(), gates["beta"][:, :1]
    check(ac.ops.kda, q=names["q"], k=k, v=v, g=g, beta=beta, s=s)


@pytest.mark.parametrize("most", [1, 65535])
def test_more_sequences_than_a_grids_second_axis_holds(most, monkeypatch):
    monkeypatch.setattr(plan_scan, "MOST_APART", most)
    made = text_of(DELTA, **delta(3))
    assert made.plan.apart == (most > 3) == ("tl.program_id(1)" in made.text)
    check(DELTA, **delta(3))


def test_states_whose_strides_are_known_when_compiled_and_others():
    args = delta()
    pieces = torch.empty(2, 6, 16, 32)[:, 1:5]  # sequences lie apart, each in one piece
    rows = torch.empty(2, 4, 16, 64)[..., :32]
    heads = torch.empty(2, 8, 16, 32)[:, ::2]
    for held, dense in ((args["s"], True), (pieces, True), (rows, False), (heads, False)):
        held.copy_(args["s"])
        given = {**args, "s": held}
        assert text_of(DELTA, **given).text.count("(at_K * s_initial_s2)") == (not dense)
        check(DELTA, **given)
    turned = DELTA.with_patterns(s="B (Hk G) V K")
    check(turned, **{**args, "s": args["s"].transpose(2, 3).contiguous()})


def test_slots_of_a_pool_are_read_before_they_are_written(monkeypatch):
    choose(monkeypatch, joint=True, own_loads=True, states_first=True)
    args = delta(3)
    pool = randn(9, 5, 4, 16, 32)
    slots = torch.tensor([4, -1, 1], dtype=torch.int32)
    start = pool[slots.clamp(min=0)].contiguous()
    start[1] = 0
    want = DELTA.decode(**{**args, "s": start}, backend="triton")
    before = pool.clone()
    o = DELTA.decode(**{**args, "s": ac.StatePool(pool, slots)}, backend="triton")
    assert torch.equal(o, want.o)
    assert torch.equal(pool[slots[[0, 2]]], want.s[[0, 2]])
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]])
