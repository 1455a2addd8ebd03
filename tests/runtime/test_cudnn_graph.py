"""cuDNN's graph without its GPU: what is asked of the frontend, and what the frontend says.

cuDNN has no interpreter. ``documented`` stands for its engine: it reads the graph as the frontend
writes it out, and computes what the node's documentation says.
"""

import dataclasses
import json
import os

import pytest
import torch
from cudnn import linear_attention

import attncc as ac
from attncc.codegen.emit.cudnn import GraphPlan
from attncc.dsl.errors import BackendError
from attncc.runtime import backends, cudnn_found, cudnn_graph
from attncc.runtime.backends import TRITON_NAMES
from attncc.runtime.cudnn_found import FRONTEND, version_of
from tests.gdp_document import Shape, arguments, document, held
from tests.runtime.cudnn_calls import CALLS, plan_of
from tests.tolerance import assert_close

DTYPES = {
    "data_type.FLOAT": "fp32", "data_type.BFLOAT16": "bf16", "data_type.HALF": "fp16",
    "data_type.INT32": "i32",
}  # fmt: skip
CHUNK = ac.gdp.chunk_gated_delta_product


def described(graph: object) -> tuple[dict, dict[str, dict]]:
    """The one node of a graph's JSON, and its tensors by port."""
    found = json.loads(repr(graph))
    (node,) = found["nodes"]
    ports = {**node["inputs"], **node["outputs"]}
    return node, {port: found["tensors"][name] for port, name in ports.items()}


@pytest.mark.parametrize("name", CALLS)
def test_the_frontend_takes_the_graph_as_described(name):
    plan = plan_of(CALLS[name])
    node, tensors = described(cudnn_graph.make_graph(plan))
    assert node["type"] == "GDP" and node["params"] == dict(plan.attributes)
    for t in (*plan.inputs, *plan.outputs):
        seen = tensors.pop(t.port)
        assert seen["dim"] == list(t.dims) and seen["stride"] == list(t.strides)
        assert DTYPES[seen["dtype"]] == t.dtype
        assert seen["uid"] == t.uid and not seen["is_virtual"]
    assert not tensors


@pytest.mark.parametrize("name", CALLS)
def test_cudnns_reason_is_what_the_caller_reads(name):
    args = arguments(CALLS[name])
    ours = "no cuDNN kernel: cuDNN's kernels need SM100, SM103 or SM107, not cpu; cuDNN declines: "
    engines = ".*GdpFrostEngine requires SM100 / SM103 / SM107"  # of each engine, from 1.32 on
    theirs = engines if version_of(FRONTEND) >= (1, 32) else ".*No valid engine configs for GDP"
    with pytest.raises(BackendError, match=ours + theirs):
        CHUNK(**args, backend="cudnn")


def test_a_row_count_that_cudnns_validation_takes_is_refused_by_ours():
    plan = plan_of(Shape((9, 4), n=2))
    ports = [
        t if t.port != "k" else dataclasses.replace(t, dims=(13, *t.dims[1:])) for t in plan.inputs
    ]
    cudnn_graph.make_graph(dataclasses.replace(plan, inputs=tuple(ports)))  # no word of it
    args = arguments(Shape((9, 4), n=2))
    with pytest.raises(ac.AttnccError, match=r"argument k, axis \(T N\)"):
        CHUNK(**{**args, "k": args["k"][:13]}, backend="cudnn")


@pytest.mark.parametrize("name", CALLS)
def test_cudnns_own_op_agrees_on_every_shape(name):
    """Its operator on tensors without data gives the shapes and dtypes that ours allocates."""
    shape = CALLS[name]
    args = arguments(shape)
    heads, tokens = max(shape.heads), sum(shape.lengths)
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    g = meta.get("g", torch.empty(tokens, heads, device="meta"))
    beta = meta.get("beta", torch.empty(tokens * shape.n, heads, device="meta"))
    o, s, *_ = linear_attention.gated_delta_product(
        meta["q"], meta["k"], meta["v"], g, beta, meta["cu_seqlens"], shape.n,
        initial_state=meta.get("initial_state"), output_final_state=True,
    )  # fmt: skip
    ours, final = CHUNK(**args, output_final_state=True)
    assert (o.shape, o.dtype) == (ours.shape, ours.dtype)
    assert (s.shape, s.dtype) == (final.shape, final.dtype)


# --- running it


def documented(graph: object, pack: dict[int, torch.Tensor], device: torch.device) -> None:
    """An engine by the book: what a graph of the node means, on the tensors it is given."""
    node, tensors = described(graph)
    params = node["params"]
    at = {}
    for port, seen in tensors.items():
        at[port] = x = pack.pop(seen["uid"])
        assert list(x.shape) == seen["dim"] and list(x.stride()) == seen["stride"]
        assert TRITON_NAMES[x.dtype] == DTYPES[seen["dtype"]]
    assert not pack and x.device == device
    g = at["g"].double()
    alpha = g + 1e-10 if params.get("gate_domain") == "linear" else g.exp()
    start, slots = at.get("initial_state"), at.get("state_indices")
    o, s = document(
        at["q"], at["k"].flatten(0, -3), at["v"].flatten(0, -3), alpha,
        at["beta"].flatten(0, -2), params["num_householder"], params["scale"],
        start if slots is None else start[slots], at["cu_seqlens"],
        params.get("use_qk_l2norm", False),
    )  # fmt: skip
    at["O"].copy_(o)
    if slots is None:
        at["final_state"].copy_(s)
    else:
        assert (
            params["overwrite_initial_state"] and at["final_state"].data_ptr() == start.data_ptr()
        )
        at["final_state"][slots] = s.to(start.dtype)


@pytest.fixture
def engine(monkeypatch):
    """The frontend's graphs, executed by ``documented`` on the CPU."""
    made = []

    def build(plan: GraphPlan, device: torch.device) -> object:
        made.append(plan)
        return cudnn_graph._Built(cudnn_graph.make_graph(plan))

    monkeypatch.setattr(cudnn_graph, "_build", build)
    monkeypatch.setattr(cudnn_graph, "execute", documented)
    monkeypatch.setattr(cudnn_graph, "problem", lambda device: None)
    cudnn_graph._GRAPHS.clear()
    yield made
    cudnn_graph._GRAPHS.clear()


@pytest.fixture
def on_sm100(engine, monkeypatch):
    """``auto`` as on a GPU that has cuDNN's kernels: who ran each call, the engine or others."""
    ran = []

    def execute(*args):
        ran.append("cudnn")
        documented(*args)

    def others(call, analysis, phase, backend):
        ran.append("others")
        backends.run_eager(call, analysis)

    monkeypatch.setattr(backends, "has_triton", lambda call: True)
    monkeypatch.setattr(backends, "target_problem", lambda target: None)
    monkeypatch.setattr(backends, "_run_triton", others)
    monkeypatch.setattr(cudnn_graph, "execute", execute)
    return ran


@pytest.mark.parametrize("name", CALLS)
def test_ports_mean_what_the_document_means(engine, name):
    args = arguments(CALLS[name])
    held(*CHUNK(**args, output_final_state=True, backend="cudnn"), args)
    assert len(engine) == 1


def test_auto_takes_it_where_its_kernels_are_and_goes_on_where_it_declines(engine, on_sm100):
    args = arguments(Shape((9, 4)))
    want = CHUNK(**args, backend="cudnn")
    assert torch.equal(CHUNK(**args), want) and len(engine) == 1  # kept, not built again
    assert on_sm100 == ["cudnn", "cudnn"]
    unaligned = {**args, "k": torch.nn.functional.pad(args["k"], (1, 0))[..., 1:]}
    held(*CHUNK(**unaligned, output_final_state=True), args)
    assert len(engine) == 1 and on_sm100.pop() == "others"
    with pytest.raises(BackendError, match="rows and heads at multiples of 16"):
        CHUNK(**unaligned, backend="cudnn")


def test_graphs_are_kept_up_to_a_bound(engine, monkeypatch):
    monkeypatch.setattr(cudnn_graph, "MOST", 3)
    for tokens in (1, 2, 3, 4, 1):
        CHUNK(**arguments(Shape((tokens,))), backend="cudnn")
        assert len(cudnn_graph._GRAPHS) <= 3
    assert len(engine) == 5  # the first one was forgotten


def test_kernels_that_do_not_compile_are_refused_once(engine, on_sm100, monkeypatch):
    """cuDNN compiles at the first execution, before anything is launched."""
    tried = []

    def execute(graph, pack, device):
        tried.append(graph)
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(cudnn_graph, "execute", execute)
    args = arguments(Shape((6, 3)))
    for _ in range(2):
        with pytest.raises(BackendError, match="cuDNN declines: no kernel image"):
            CHUNK(**args, backend="cudnn")
    assert len(tried) == len(engine) == 1
    held(*CHUNK(**args, output_final_state=True), args)
    assert len(tried) == 1 and on_sm100 == ["others"]  # auto goes on


def test_a_forked_child_builds_its_own_graphs(engine):
    CHUNK(**arguments(Shape((5,))), backend="cudnn")
    assert cudnn_graph._GRAPHS
    read, write = os.pipe()
    with cudnn_graph._LOCK:  # as another thread of the parent may hold it
        child = os.fork()
        if not child:
            try:
                free = cudnn_graph._LOCK.acquire(blocking=False)
                os.write(write, bytes([free, len(cudnn_graph._GRAPHS)]))
            finally:
                os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 2) == bytes([True, 0])
    os.close(read)
    os.close(write)


def test_a_pool_is_read_and_written_in_place(engine, on_sm100, monkeypatch):
    shape = Shape((9, 4), n=2)
    args = arguments(shape)
    op, pool = ac.gdp._op("Gq"), torch.randn(5, 2, 64, 64)
    before, slots = pool.clone(), torch.tensor([3, 1], dtype=torch.int32)
    given = {
        "q": args["q"],
        "k": args["k"],
        "v": args["v"],
        "alpha": args["g"],
        "beta": args["beta"],
    }
    options = {"cu_seqlens": args["cu_seqlens"], "sizes": {"N": 2, "Gq": 1, "Gv": 1}}
    o = op(**given, s=ac.StatePool(pool, slots), backend="cudnn", **options)
    exact = document(**{**args, "initial_state": before[slots]})
    assert_close(o, exact[0], exact[0].to(o.dtype), o.dtype, "o")
    assert_close(pool[slots], exact[1], exact[1].float(), torch.float32, "s")
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])
    padded = torch.tensor([3, -1], dtype=torch.int32)
    with pytest.raises(BackendError, match="cuDNN has no slot -1"):
        op(**given, s=ac.StatePool(pool, padded), backend="cudnn", **options)
    with monkeypatch.context() as patch, pytest.raises(BackendError, match="nobody looks whether"):
        patch.setattr(cudnn_graph.checks, "looks", lambda tensor: False)  # as on a GPU, unasked
        op(**given, s=ac.StatePool(pool, slots), backend="cudnn", **options)
    with pytest.raises(BackendError, match="no out-slots"):
        op(**given, s=ac.StatePool(pool, slots, slots), backend="cudnn", **options)
    assert len(engine) == 1
    op(**given, s=ac.StatePool(pool, padded), **options)
    assert on_sm100 == ["cudnn", "others"]  # auto leaves pools to other kernels


def test_other_spellings_of_the_same_table_are_served(engine):
    """The gated delta rule in logarithms, its state [V, K]: the same node, of one row a token."""
    rule = ac.Op(ac.ops.gated_delta_rule.declaration.with_patterns(s="B (Hk G) V K"))
    args = arguments(Shape((9, 4), n=1, heads=(1, 1, 3)))
    s, o = rule(
        args["q"], args["k"], args["v"], args["g"].log(), args["beta"], args["initial_state"],
        cu_seqlens=args["cu_seqlens"], backend="cudnn",
    )  # fmt: skip
    held(o, s, args)
    (plan,) = engine
    assert dict(plan.attributes) == {
        "num_householder": 1, "scale": 0.125, "output_final_state": True,
    }  # fmt: skip


def test_dense_calls_and_other_layouts_are_refused_with_the_reason(engine):
    q, k, v = (torch.randn(1, 9, 1, 64).bfloat16() for _ in range(3))
    rule = ac.ops.gated_delta_rule
    with pytest.raises(BackendError, match="takes packed sequences"):
        rule(q, k, v, backend="cudnn")
    with pytest.raises(BackendError, match=r"states are \[V, K\], K dense"):
        rule(q[0], k[0], v[0], cu_seqlens=torch.tensor([0, 9]), backend="cudnn")
    with pytest.raises(BackendError, match="cuDNN has no such node: not one affine state"):
        ac.ops.attention(q, k, v, backend="cudnn")
    assert not engine


def test_a_first_execution_is_not_captured(engine, monkeypatch):
    monkeypatch.setattr(cudnn_graph, "_capturing", lambda device: True)
    args = arguments(Shape((9, 4)))
    with pytest.raises(BackendError, match="make the call once before"):
        CHUNK(**args, backend="cudnn")
    monkeypatch.setattr(cudnn_graph, "_capturing", lambda device: False)
    CHUNK(**args, backend="cudnn")
    monkeypatch.setattr(cudnn_graph, "_capturing", lambda device: True)
    CHUNK(**args, backend="cudnn")  # warm


def test_old_frontends_are_named(monkeypatch):
    monkeypatch.setattr(cudnn_found, "version_of", lambda package: (1, 28))
    cudnn_found.package_problem.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"frontend 1\.28 has no node for it \(1\.29 has\)"):
            CHUNK(**arguments(Shape((9, 4))), backend="cudnn")
    finally:
        cudnn_found.package_problem.cache_clear()


def test_no_tokens_are_left_to_other_kernels(engine):
    args = arguments(Shape((0, 0)))
    _, s = CHUNK(**args, output_final_state=True)
    assert torch.equal(s, args["initial_state"]) and not engine
    with pytest.raises(BackendError, match="no tokens"):
        CHUNK(**args, backend="cudnn")
