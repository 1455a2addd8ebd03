"""The state pass in CuTe-DSL on the GPU, against the fp64 interpreter.

The kernels come from a bundle (``python -m tests.cutedsl_bundle``), or are compiled here where the
wheel is installed. Each call is one whose kernels the bundle has.
"""

import pytest
import torch

import attncc as ac
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_cutedsl_state import CuteStatePlan
from attncc.dsl.errors import BackendError
from attncc.runtime.bind import bind
from attncc.runtime.compile_cutedsl import cutedsl_problem
from attncc.runtime.key import key_of
from attncc.runtime.sources import call_sources
from attncc.runtime.store import current
from tests.cutedsl_calls import offsets
from tests.cutedsl_state_calls import CALLS, PRODUCTS
from tests.gdp_document import arguments as product_arguments
from tests.gpu.checking import DEVICE, check
from tests.gpu.test_gdp import held
from tests.state_pass_ops import OPS, arguments

pytestmark = pytest.mark.gpu


def sources(made):
    """The kernels of a call, for sm_90."""
    op, args, kwargs = made
    call, _ = bind(op.declaration, args, kwargs)
    return call_sources(call, "prefill", "sm_90", dialect=Dialect.CUTEDSL)


@pytest.fixture(autouse=True)
def kernels_are_there():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")
    if cutedsl_problem() is None:
        return
    states = [s for s in sources(CALLS["delta 128"]("cpu")) if s.plan.phase == "state"]
    if current().find(key_of(states[0], "sm_90")) is None:
        pytest.skip("neither a bundle of these kernels nor nvidia-cutlass-dsl is here")


def test_the_plans_are_those_in_cutedsl():
    plans = {s.plan.phase: s.plan for s in sources(CALLS["delta 128"](DEVICE))}
    assert all(isinstance(plans[p], CuteStatePlan) for p in ("state", "summary", "local"))


@pytest.mark.parametrize("name", list(CALLS))
def test_calls(name):
    op, args, kwargs = CALLS[name](DEVICE)
    named = check(op, *args, **kwargs, backend="cutedsl")
    if "cu_seqlens" in kwargs:
        lengths = kwargs["cu_seqlens"].diff()
        for b in (lengths == 0).nonzero().flatten():
            assert torch.equal(named["s"][b], kwargs["s"][b])


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_gated_delta_products_are_the_documents_loop(name):
    args = product_arguments(PRODUCTS[name], DEVICE)
    o, s = ac.gdp.chunk_gated_delta_product(**args, output_final_state=True, backend="cutedsl")
    held(o, s, args)


def test_a_bad_sequence_stays_alone():
    op, args, kwargs = CALLS["packed [64, 0, 65]"](DEVICE)
    args = [torch.cat([x, x, x]) for x in args]
    kwargs = {"cu_seqlens": offsets(DEVICE, [100, 70, 217])}
    kwargs["s"] = torch.randn(3, *arguments("delta", 1, 1, 2, 128, 128)[1].shape[1:], device=DEVICE)
    good = op.prefill(*args, **kwargs, backend="cutedsl")
    for x in args:
        x[100:170] = torch.nan
    bad = op.prefill(*args, **kwargs, backend="cutedsl")
    assert bad.o[100:170].isnan().all()
    assert torch.equal(bad.o[:100], good.o[:100]) and torch.equal(bad.o[170:], good.o[170:])
    assert torch.equal(bad.s[[0, 2]], good.s[[0, 2]])


def test_keys_that_are_nearly_one_and_a_beta_of_two():
    op, (q, _, v, g, beta), kwargs = CALLS["delta 128"](DEVICE)
    near = torch.randn(1, 1, 3, 128, device=DEVICE) + 0.25 * torch.randn_like(q.float())
    k = torch.nn.functional.normalize(near, dim=-1).to(q.dtype)
    check(op, q, k, v, 0.01 * g, torch.full_like(beta, 2.0), **kwargs, backend="cutedsl")


@pytest.mark.parametrize("name", ["many systems", "4 rows 100", "long, in segments"])
def test_repeated_runs_are_bitwise_equal(name):
    op, args, kwargs = CALLS[name](DEVICE)
    first = op.prefill(*args, **kwargs, backend="cutedsl")
    for _ in range(20):
        again = op.prefill(*args, **kwargs, backend="cutedsl")
        assert torch.equal(again.o, first.o) and torch.equal(again.s, first.s)


def test_a_captured_graph_replays():
    op, args, kwargs = CALLS["delta 128"](DEVICE)
    op.prefill(*args, **kwargs, backend="cutedsl")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op.prefill(*args, **kwargs, backend="cutedsl")
    for x in args[:3]:
        x.copy_(torch.nn.functional.normalize(torch.randn_like(x.float()), dim=-1))
    graph.replay()
    wanted = op.prefill(*args, **kwargs, backend="cutedsl")
    assert torch.equal(found.o, wanted.o) and torch.equal(found.s, wanted.s)


def test_it_gives_what_gluon_gives_within_rounding():
    op, args, kwargs = CALLS["many systems"](DEVICE)
    own = op.prefill(*args, **kwargs, backend="cutedsl")
    other = op.prefill(*args, **kwargs, backend="gluon")
    assert (own.s - other.s).abs().max() <= 1e-2 * other.s.abs().max()


def test_a_decode_is_refused_with_the_reason():
    args, state = arguments("delta", 2, 1, 2, 128, 128, device=DEVICE)
    with pytest.raises(BackendError, match="bound by bandwidth"):
        OPS["delta"].decode(*args, s=state, backend="cutedsl")
