"""Gluon kernels of decays along the key on the GPU, against the fp64 interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncc.codegen.plan import Dialect
from attncc.codegen.plan_gluon_keys import InversePlan, KeysPlan
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.dsl.errors import BackendError
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.gpu.checking import DEVICE, check, check_parts, offsets
from tests.key_decay_ops import OPS, ROWS, SYSTEMS, arguments, forgetting, nearly_one

pytestmark = [pytest.mark.gpu, pytest.mark.gluon]
KDA = OPS["kda"]
PROPERTY = settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LENGTHS = st.sampled_from([0, 1, 2, 33, 63, 64, 65, 128, 200, 330])


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


def drawn(name, batch, tokens, heads=2, key=128, value=128, dtype=torch.bfloat16):
    return arguments(name, batch, tokens, heads, key, value, dtype, DEVICE)


def run(op, *args, **kwargs):
    """Run in Gluon and hold every result to the contract."""
    return check(op, *args, backend="gluon", **kwargs)


def test_the_plans_are_those_of_decays_along_the_key():
    args, state = drawn("kda", 1, 200)
    call, _ = bind(KDA.declaration, args, {"s": state})
    spec = replace(spec_of(call), dialect=Dialect.GLUON)
    plans = {s.plan.phase: s.plan for s in call_sources(call, "prefill", spec=spec)}
    assert isinstance(plans["systems"], KeysPlan) and isinstance(plans["solve"], InversePlan)
    assert "mix" not in plans and "prepare" not in plans
    assert all(isinstance(plans[p], WarpStatePlan) for p in ("state", "summary", "local"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(OPS))
@given(st.data())
@PROPERTY
def test_any_length_with_or_without_a_state(name, dtype, data):
    tokens, batch = data.draw(LENGTHS), data.draw(st.sampled_from([1, 3]))
    args, state = drawn(name, batch, tokens, dtype=dtype)
    run(OPS[name], *args, s=state if data.draw(st.booleans()) else None)


@pytest.mark.parametrize("name", list(OPS))
@pytest.mark.parametrize(("key", "value"), [(64, 64), (128, 256)])
def test_head_dims(name, key, value):
    args, state = drawn(name, 1, 150, 3, key, value)
    run(OPS[name], *args, s=state)


@given(st.lists(LENGTHS, min_size=1, max_size=6))
@PROPERTY
def test_packed_sequences_keep_empty_states_bit_for_bit(lengths):
    args, _ = drawn("kda", 1, sum(lengths))
    state = torch.randn(len(lengths), 2, 128, 128, device=DEVICE)
    result = run(KDA, *(x[0] for x in args), s=state, cu_seqlens=offsets(lengths))
    for b, n in enumerate(lengths):
        assert n or torch.equal(result["s"][b], state[b])


@pytest.mark.parametrize("name", ["kda", "gla"])
def test_gates_that_forget(name):
    args, state = drawn(name, 1, 330)
    result = run(OPS[name], *forgetting(args), s=state)
    assert all(x.isfinite().all() for x in result.values())


@pytest.mark.parametrize(("name", "key", "dtype"), [
    ("rwkv7", 128, torch.bfloat16), ("rwkv7", 64, torch.float16),
    ("two_updates", 128, torch.float16), ("ahead", 64, torch.bfloat16),
])  # fmt: skip
def test_rows_of_a_token_and_reads_ahead_of_its_decay(name, key, dtype):
    args, state = drawn(name, 1, 200, key=key, dtype=dtype)
    result = run(ROWS[name], *forgetting(args, at=1 if name == "rwkv7" else 3), s=state)
    assert all(x.isfinite().all() for x in result.values())


def test_packed_sequences_of_rows_that_read_ahead_of_the_decay():
    lengths = [0, 31, 32, 0, 130, 1]
    args, _ = drawn("rwkv7", 1, sum(lengths))
    state = torch.randn(len(lengths), 2, 128, 128, device=DEVICE)
    result = run(ROWS["rwkv7"], *(x[0] for x in args), s=state, cu_seqlens=offsets(lengths))
    assert torch.equal(result["s"][[0, 3]], state[[0, 3]])


def test_segments_of_rows_that_read_ahead_of_the_decay():
    args, state = drawn("rwkv7", 1, 500)
    check_parts(ROWS["rwkv7"], args, state, 3)


def test_no_decay():
    (q, k, v, g, beta), state = drawn("kda", 1, 200)
    run(KDA, q, k, v, torch.zeros_like(g), beta, s=state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.1])
def test_keys_that_are_nearly_one_and_a_beta_of_two(dtype, scale):
    args, state = drawn("kda", 1, 300, dtype=dtype)
    run(KDA, *nearly_one(args, scale), s=state)


@pytest.mark.parametrize("name", ["kda", "gla"])
@pytest.mark.parametrize("segments", [2, 5])
def test_segments(name, segments):
    args, state = drawn(name, 1, 700)
    check_parts(OPS[name], args, state, segments)


def test_a_bad_sequence_stays_alone():
    args, _ = drawn("kda", 1, 370)
    args = [x[0] for x in args]
    cu = offsets([100, 70, 200])
    good = KDA(*args, cu_seqlens=cu, backend="gluon")
    for x in args:
        x[100:170] = torch.nan
    bad = KDA(*args, cu_seqlens=cu, backend="gluon")
    assert bad.o[100:170].isnan().all()
    assert torch.equal(bad.o[:100], good.o[:100]) and torch.equal(bad.o[170:], good.o[170:])
    assert torch.equal(bad.s[[0, 2]], good.s[[0, 2]])


def test_repeated_runs_are_bitwise_equal():
    args, state = drawn("kda", 2, 3000, 8)
    first = KDA(*args, s=state, backend="gluon")
    for _ in range(10):
        again = KDA(*args, s=state, backend="gluon")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["kda", "gla"])
def test_long_sequences_of_few_heads(name):
    args, state = drawn(name, 1, 2500)
    run(OPS[name], *args, s=state)


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_without_a_named_backend(name):
    args, state = drawn(name, 1, 150)
    check(SYSTEMS[name], *args, backend="auto", s=state)


def test_what_has_no_such_form_says_why():
    args, _ = drawn("kda", 1, 100, dtype=torch.float32)
    with pytest.raises(BackendError, match="operands of fp32"):
        KDA(*args, backend="gluon")
    args, _ = drawn("kda", 1, 100, key=96)
    with pytest.raises(BackendError, match="K of 96"):
        KDA(*args, backend="gluon")
