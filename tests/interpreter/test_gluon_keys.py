"""Gluon kernels of decays along the key, on the CPU (see ``test_gluon_affine``)."""

from functools import partial

import pytest
import torch

from attncc.codegen import affine_dialects
from attncc.codegen.plan_gluon_keys import keys_plans
from attncc.runtime import affine
from tests.interpreter.test_gluon_affine import check
from tests.key_decay_ops import OPS, ROWS, arguments, forgetting, nearly_one

pytestmark = pytest.mark.played


@pytest.mark.parametrize("name", list(OPS))
def test_tables_of_the_domain(name, monkeypatch):
    torch.manual_seed(0)
    args, state = arguments(name, 1, 70, 1, 64, 64)
    check(monkeypatch, OPS[name], args, s=state)


def test_gates_that_forget(monkeypatch):
    torch.manual_seed(1)
    args, state = arguments("kda", 1, 130, 1, 128, 64)
    named = check(monkeypatch, OPS["kda"], forgetting(args), s=state)
    assert all(x.isfinite().all() for x in named.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_that_are_nearly_one_and_a_beta_of_two(dtype, monkeypatch):
    torch.manual_seed(2)
    args, state = arguments("kda", 1, 70, 1, 64, 64, dtype)
    check(monkeypatch, OPS["kda"], nearly_one(args), s=state)


def test_packed_sequences(monkeypatch):
    torch.manual_seed(3)
    lengths = [0, 65, 0, 40]
    args, _ = arguments("kda", 1, sum(lengths), 1, 64, 64)
    state = torch.randn(len(lengths), 1, 64, 64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    named = check(monkeypatch, OPS["kda"], [x[0] for x in args], s=state, cu_seqlens=cu)
    assert torch.equal(named["s"][[0, 2]], state[[0, 2]])


@pytest.mark.parametrize("name", ["kda", "gla"])
def test_segments(name, monkeypatch):
    torch.manual_seed(4)
    args, state = arguments(name, 1, 200, 1, 64, 64)
    check(monkeypatch, OPS[name], args, s=state, segments=3)


@pytest.mark.parametrize(("consumers", "reader"), [(1, False), (2, False), (1, True)])
def test_warpgroups_that_read_or_do_not(consumers, reader, monkeypatch):
    torch.manual_seed(5)
    args, state = arguments("kda", 1, 130, 1, 128, 128)
    choose = (("consumers", consumers), ("reader", reader), ("stages", 1 + reader))
    check(monkeypatch, OPS["kda"], args, s=state, choose=choose)


def test_a_table_that_asks_for_columns_is_about_others(monkeypatch):
    torch.manual_seed(4)
    args, state = arguments("kda", 1, 70, 1, 64, 64)
    check(monkeypatch, OPS["kda"], args, s=state, choose=(("columnwise", True),))


@pytest.mark.parametrize(("name", "joined"), [*((n, False) for n in ROWS), ("rwkv7", True)])
def test_rows_of_a_token_and_reads_ahead_of_its_decay(name, joined, monkeypatch):
    monkeypatch.setattr(affine_dialects, "keys_plans", partial(keys_plans, joined=joined))
    affine._PLANS.clear()
    torch.manual_seed(6)
    args, state = arguments(name, 1, 70, 1, 64, 64)
    args = forgetting(args, at=1 if name == "rwkv7" else 3)
    named = check(monkeypatch, ROWS[name], args, s=state)
    assert all(x.isfinite().all() for x in named.values())


def test_segments_of_rows_that_read_ahead_of_the_decay(monkeypatch):
    torch.manual_seed(7)
    args, _ = arguments("rwkv7", 1, 150, 1, 64, 64)
    state = torch.randn(3, 1, 64, 64)
    cu = torch.tensor([0, 0, 130, 150])
    args = [x[0] for x in args]
    check(monkeypatch, ROWS["rwkv7"], args, s=state, cu_seqlens=cu, segments=2)
