"""The state pass in CuTe-DSL on the CPU: its text runs on a machine that plays the warps.

The kernels before it run through Triton's interpreter or as Gluon; its own file runs as the Python
it is, in any order of warps and copies (``tests/codegen/cute_machine.py``).
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncc.codegen.plan import Dialect
from tests.codegen import cute_machine
from tests.codegen.gluon_machine import ProtocolError
from tests.interpreter.test_gluon_affine import check
from tests.state_pass_ops import OPS, arguments

pytestmark = pytest.mark.played
PROPERTY = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
LENGTHS = st.lists(st.sampled_from([0, 1, 64, 65, 130]), min_size=1, max_size=3)


def run(monkeypatch, name, args, **options):
    """Run a call and hold every result to the contract."""
    chosen = options.pop("choose", ())
    options["choose"] = (*chosen, ("dialect", "cutedsl")) if chosen else ()
    return check(monkeypatch, OPS[name], args, dialect=Dialect.CUTEDSL, **options)


@pytest.mark.parametrize("name", list(OPS))
def test_tables_of_the_domain(name, monkeypatch):
    torch.manual_seed(0)
    args, state = arguments(name, 1, 70, 1, 64, 64)
    run(monkeypatch, name, args, s=state)


@pytest.mark.parametrize("rows", [3, 4])
def test_rows_that_leave_places_over_or_fill_blocks(rows, monkeypatch):
    torch.manual_seed(0)
    args, state = arguments("two_rows", 1, 45, 1, 64, 64, rows=rows)
    run(monkeypatch, "two_rows", args, s=state, sizes={"N": rows})


@pytest.mark.parametrize(("consumers", "stages"), [(1, 1), (2, 2)])
def test_warpgroups_and_stages(consumers, stages, monkeypatch):
    torch.manual_seed(1)
    args, state = arguments("delta", 1, 130, 1, 128, 128)
    choose = (("consumers", consumers), ("stages", stages), ("systems", stages == 1))
    run(monkeypatch, "delta", args, s=state, choose=choose)


@given(st.integers(0, 2**32), LENGTHS)
@PROPERTY
def test_packed_sequences_in_any_order_of_warps(seed, lengths):
    torch.manual_seed(seed)
    args, _ = arguments("delta", 1, sum(lengths), 1, 64, 64)
    state = torch.randn(len(lengths), 2, 64, 64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    with pytest.MonkeyPatch.context() as patch:
        named = run(patch, "delta", [x[0] for x in args], seed=seed, s=state, cu_seqlens=cu)
    for b, n in enumerate(lengths):
        assert n or torch.equal(named["s"][b], state[b])


@pytest.mark.parametrize("name", ["delta", "linear"])
def test_segments(name, monkeypatch):
    torch.manual_seed(2)
    args, state = arguments(name, 1, 200, 1, 64, 64)
    run(monkeypatch, name, args, s=state, segments=3)


def test_a_bad_sequence_stays_alone(monkeypatch):
    torch.manual_seed(3)
    args, _ = arguments("two_rows", 1, 100, 1, 64, 64)
    args = [x[0] for x in args]
    for x in args:
        n = len(x) // 100
        x[30 * n : 70 * n] = torch.nan
    cu = torch.tensor([0, 30, 70, 100])
    named = run(monkeypatch, "two_rows", args, cu_seqlens=cu)
    assert named["o"][:30].isfinite().all() and named["o"][70:].isfinite().all()


@pytest.mark.parametrize(("right", "wrong"), [
    ("wait(full + 8 * place, parity_of(count, 2))", "pass"),
    ("wait(free + 8 * place, parity_of(count, 2) ^ 1)", "pass"),
    ("release(free + 8 * place, lane)", "pass"),
    ("warpgroup.wait_group(1)", "pass"),
    ("    wait_sent(lane)\n\n    last_state(", "    last_state("),
    ("SCRATCH_BYTES = 1024", "SCRATCH_BYTES = 896"),  # room for the maps of three warps' outputs
    ("lines_ring + place * 640", "lines_ring + place * 512"),
])  # fmt: skip
def test_the_machine_sees_mistakes(right, wrong, monkeypatch):
    """Each synchronisation is needed: without one, some order of warps and copies goes wrong.

    And memory is for one thing at a time.
    """
    torch.manual_seed(4)
    args, state = arguments("linear", 1, 300, 1, 64, 64)
    calls = []
    play = cute_machine.run
    monkeypatch.setattr(cute_machine, "run", lambda *a: (calls.append(a), play(*a)))
    good = run(monkeypatch, "linear", args, s=state, choose=(("stages", 2),))["o"]
    [(text, _, values, _)] = calls
    assert right in text
    out = next(x for x in values if isinstance(x, torch.Tensor) and x.data_ptr() == good.data_ptr())
    good = good.clone()
    for seed in range(12):
        out.fill_(torch.nan)
        try:
            play(text.replace(right, wrong), 1, values, seed)
        except (ProtocolError, KeyError):
            return
        if not torch.equal(out[:, :, :1].nan_to_num(), good[:, :, :1].nan_to_num()):
            return
    raise AssertionError("no order of warps and copies showed the mistake")
