"""Ops as custom ops of torch.library: schemas, opcheck, and graphs that hold them as one node."""

import copy
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import sympy
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import attncc as ac
from attncc.dsl import errors
from attncc.runtime import torch_ops, torch_trace
from attncc.runtime.arguments import Options
from attncc.runtime.quantised import E4M3, QuantisedTensor
from tests.runtime.compiled_calls import (
    ATTENTION,
    CALLS,
    GDR,
    delta,
    dense,
    ints,
    overload_of,
    paged,
    qkv,
    tensors_in,
)

LENGTHS = range(2, 22)


@pytest.fixture(autouse=True)
def fresh():
    """No graph of another test, and eager answers to compare with."""
    torch._dynamo.reset()
    torch.manual_seed(0)


def drawn(name, n):
    torch.manual_seed(n)
    return CALLS[name](n)


def same(found, expected):
    """Results, or arguments after a call, bit for bit."""
    got, want = tensors_in(found), tensors_in(expected)
    assert len(got) == len(want) and type(found) is type(expected)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert torch.equal(x, y), (x.shape, y.shape)


# --- schemas


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        (
            "attention paged",
            "attention_decode_paged_#(Tensor q, Tensor k, Tensor v, float? scale,"
            " Tensor(a4!) cache_k, Tensor(a5!) cache_v, Tensor block_table, str? layout_k,"
            " str? layout_v, Tensor(a9!) lengths, Tensor? cu_seqlens=None,"
            " Tensor? cu_seqlens_k=None, str? backend=None) -> Tensor",
        ),
        (
            "attention scaled",
            "attention_decode_dense_scaled_k_v_#(Tensor q, Tensor k, Tensor v, float? scale,"
            " Tensor(a4!) cache_k, Tensor(a5!) scales_k, Tensor(a6!) cache_v,"
            " Tensor(a7!) scales_v, Tensor(a8!) lengths, Tensor? cu_seqlens=None,"
            " Tensor? cu_seqlens_k=None, str? backend=None) -> Tensor",
        ),
        (
            "delta pool",
            "gated_delta_rule_decode_pool_s_#(Tensor q, Tensor k, Tensor v, Tensor? g,"
            " Tensor? beta, Tensor(a5!) s, Tensor s_slots, Tensor? s_out_slots=None,"
            " float? scale=None, bool? l2norm=None, Tensor? cu_seqlens=None,"
            " Tensor? cu_seqlens_k=None, str? backend=None) -> Tensor",
        ),
        (
            "delta out",
            "gated_delta_rule_prefill_out_o_#(Tensor q, Tensor k, Tensor v, Tensor? g,"
            " Tensor? beta, Tensor? s, float? scale, bool? l2norm, Tensor(a8!) out_o,"
            " Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, str? backend=None) -> Tensor",
        ),
        (
            "sink window",
            "sink_window_prefill_#(Tensor q, Tensor k, Tensor v, Tensor sink, SymInt? w=None,"
            " Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, str? backend=None) -> Tensor",
        ),
        (
            "sizes",
            "two_writes_prefill_size_N_#(Tensor k, Tensor v, Tensor? s, SymInt size_N,"
            " Tensor? cu_seqlens=None, Tensor? cu_seqlens_k=None, str? backend=None)"
            " -> (Tensor, Tensor)",
        ),
    ],
)
def test_a_schema_says_what_a_call_takes_writes_and_returns(name, schema):
    call = drawn(name, 3)
    mark = torch_ops.fingerprint(call.op.declaration)
    assert str(overload_of(call)[0]._schema) == f"attncc::{schema}".replace("#", mark)


def test_a_custom_op_is_called_like_any_other():
    overload = ATTENTION.register("prefill", return_lse=True)
    name = overload._schema.name.partition("::")[2]
    assert getattr(torch.ops.attncc, name).default is overload
    assert ATTENTION.register("prefill", return_lse=True) is overload
    q, k, v = qkv(2, 5)
    same(overload(q, k, v), tuple(ATTENTION(q, k, v, return_lse=True)))
    assert ATTENTION.register(cache="dense") is not ATTENTION.register(cache="paged")
    # Any sequence in any order is the structure that a traced call has.
    assert ATTENTION.register(out=["o"], sizes=["E", "D"]) is ATTENTION.register(
        out="o", sizes=("D", "E")
    )


@pytest.mark.parametrize(
    ("error", "op", "structure"),
    [
        (errors.ArgumentError, GDR, {"phase": "train"}),
        (errors.ArgumentError, GDR, {"pools": ("q",)}),
        (errors.ArgumentError, GDR, {"out": ("lse",)}),
        (errors.ArgumentError, GDR, {"pools": ("s",), "out": ("s",)}),
        (errors.ArgumentError, ATTENTION, {"quantised": ("q",)}),
        (errors.ArgumentError, ATTENTION, {"cache": "dense", "scales": ("q",)}),
        (errors.CacheError, GDR, {"cache": "dense"}),
        (errors.ArgumentError, ATTENTION, {"cache": "ring"}),
        (errors.ArgumentError, ATTENTION, {"lse": True}),
        (errors.ArgumentError, ATTENTION, {"out": ("o", "o")}),
    ],
)
def test_no_op_is_defined_for_a_structure_without_calls(error, op, structure):
    with pytest.raises(error, match=op.declaration.name):
        op.register(**structure)


def declared(factor):
    @ac.op(out="B T H D")
    def mixed(
        cache_k=ac.Activation("B T H D"), k=ac.Cache("B S H D"), ψ=ac.param(default=1.0),
    ):  # fmt: skip
        score = ac.dot(cache_k, k, "D") * ψ * factor
        return ac.dot(ac.softmax(score, "S", where=ac.causal), k, "S")

    return mixed


def test_names_say_what_is_computed_and_never_meet():
    one, twin, other = declared(1.0), declared(1.0), declared(2.0)
    names = [op.register(cache="dense")._schema.name for op in (one, twin, other)]
    assert names[1] == f"{names[0]}_2"
    assert len({torch_ops.fingerprint(op.declaration) for op in (one, other)}) == 2
    schema = str(one.register(cache="dense")._schema)
    assert "Tensor cache_k, Tensor k, float? u3c8, Tensor(a3!) cache_k_," in schema
    x = torch.randn(3, 2, 4, 1, 16).unbind()
    compiled = torch.compile(lambda op, q, k: op(q, k), fullgraph=True, backend="eager")
    for op in (one, other, twin, one):
        same(compiled(op, *x[:2]), op(*x[:2]))
    assert not torch.equal(one(*x[:2]), other(*x[:2]))


def test_a_structure_carries_everything_a_call_can_hold():
    """A field that is added to one of these must be added to the schemas."""
    held = {
        ac.DenseCache: "tensors lengths scales",
        ac.PagedCache: "pages block_table lengths layouts scales",
        ac.StatePool: "pool slots out_slots",
        QuantisedTensor: "data scales",
        Options: "cache cu_seqlens cu_seqlens_k out return_lse return_partial backend sizes",
    }
    for kind, names in held.items():
        assert [f.name for f in fields(kind)] == names.split(), kind


# --- opcheck and fake kernels


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    overload, flat = overload_of(drawn(name, 5))
    checks = [
        "test_schema", "test_autograd_registration", "test_faketensor",
        "test_aot_dispatch_dynamic",
    ]  # fmt: skip
    if any(t.dtype == E4M3 for t in tensors_in(flat)):
        checks.remove("test_schema")  # it compares with allclose, which torch has not for e4m3
    torch.library.opcheck(overload, flat, test_utils=checks)


def symbolic(value, mode):
    """A fake tensor of which every size is a symbol."""
    if not isinstance(value, torch.Tensor):
        return value
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * value.dim())
    return mode.from_tensor(value, symbolic_context=context)


@pytest.mark.parametrize("name", CALLS)
def test_fake_results_ask_no_size_anything(name):
    overload, flat = overload_of(drawn(name, 5))
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        found = tensors_in(overload(*(symbolic(x, mode) for x in flat)))
    asked = [guard.expr for guard in env.guards]
    assert not any(isinstance(expr, sympy.Eq) for expr in asked)
    assert not asked or name == "sizes"  # where torch asks whether a quotient is more than 1
    real = tensors_in(overload(*flat))
    assert [(t.shape, t.stride(), t.dtype) for t in real] == [
        (tuple(int(n) for n in t.shape), tuple(int(n) for n in t.stride()), t.dtype) for t in found
    ]


def test_a_fake_call_names_a_wrong_rank_and_a_size_that_nothing_fixes():
    q, k, v = (t.to("meta") for t in qkv(2, 5))
    overload = ATTENTION.register()
    assert overload(q, k, v).shape == (2, 5, 4, 16)
    with pytest.raises(errors.RankError, match="argument q: wrong number of axes"):
        overload(q[0], k, v)
    call = drawn("sizes", 4)
    with pytest.raises(errors.UnknownSizeError):
        call.op.register()(*(t.to("meta") for t in call.args))


# --- graphs


def compile_counted(backend):
    counter = CompileCounterWithBackend(backend)

    def run(op, phase, args, kwargs):
        return getattr(op, phase)(*args, **kwargs)

    return torch.compile(run, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("name", CALLS)
def test_no_recompiles_over_twenty_lengths(name):
    """One graph for the first length, one for all others; results and writes are the eager ones."""
    compiled, counter = compile_counted("aot_eager")
    for n in LENGTHS:
        call, eager = drawn(name, n), drawn(name, n)
        found = compiled(call.op, call.phase, call.args, call.kwargs)
        same(found, eager.run())
        same((call.args, call.kwargs), (eager.args, eager.kwargs))
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_marked_sizes_compile_once(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(
        lambda q, k, v, cache: ATTENTION.decode(q, k, v, cache), fullgraph=True, backend=counter
    )
    for n in LENGTHS:
        batch = 2 + n % 3
        args, cache, twin = qkv(batch, n), paged(batch, n), paged(batch, n)
        for t in (*args, cache.block_table):
            torch._dynamo.mark_dynamic(t, (0, 1))
        for t in (*cache.pages.values(), cache.lengths):
            torch._dynamo.mark_dynamic(t, 0)
        same(compiled(*args, cache), ATTENTION.decode(*args, twin))
        same(cache, twin)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_graph_sees_what_its_calls_write(backend):
    """Three steps over one cache and one pool, made inside the function; the sums come after."""

    def steps(q, k, v, pages, table, lengths, states, slots, x):
        cache = ac.PagedCache(pages, table, lengths)
        pool = ac.StatePool(states, slots)
        before = lengths.clone()
        outs = [ATTENTION.decode(q[i], k[i], v[i], cache) for i in range(3)]
        outs += [GDR.decode(*(part[:, i : i + 1] for part in x), s=pool) for i in range(3)]
        return outs, lengths - before, pages["k"].sum(), states.sum()

    def arguments():
        torch.manual_seed(3)
        cache = paged(2, 4)
        q, k, v = (torch.stack(t) for t in zip(*(qkv(2, 1) for _ in range(3)), strict=True))
        states, slots = torch.randn(7, 4, 16, 8), ints(4, 1)
        return [
            q, k, v, cache.pages, cache.block_table, cache.lengths, states, slots, delta(2, 3),
        ]  # fmt: skip

    args, twins = arguments(), arguments()
    found = torch.compile(steps, fullgraph=True, backend=backend)(*args)
    expected = steps(*twins)
    same(found[:2], expected[:2])
    torch.testing.assert_close(found[2:], expected[2:])  # inductor adds in another order
    assert found[1].tolist() == [3, 3]
    same(args, twins)


@pytest.mark.parametrize(
    "name",
    ["attention paged", "attention interleaved", "attention scaled", "delta pool", "delta all out"],
)
def test_inductor_copies_nothing_that_is_written(name):
    def run(op, phase, args, kwargs):
        return getattr(op, phase)(*args, **kwargs)

    call, eager = drawn(name, 4), drawn(name, 4)
    compiled = torch.compile(run, fullgraph=True)
    found, (code,) = run_and_get_code(compiled, call.op, call.phase, call.args, call.kwargs)
    same(found, eager.run())
    same((call.args, call.kwargs), (eager.args, eager.kwargs))
    body = code.partition("def call")[2].partition("def get_args")[0]
    assert len(re.findall(r"torch\.ops\.attncc\.\w+\.default\(", body)) == 1
    assert "empty_strided" not in body and "copy_" not in body


def test_a_number_of_tokens_may_be_data():
    def masked(q, k, v, n):
        rows = n.item()
        torch._check(rows >= 0)
        q, k, v = (t.narrow(0, 0, rows) for t in (q, k, v))
        return ATTENTION(q, k, v, cu_seqlens=torch.stack([torch.zeros_like(n), n]))

    q, k, v = (t[0] for t in qkv(1, 9))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
        for n in (5, 0, 1, 9):
            exact = ATTENTION(q[:n], k[:n], v[:n], cu_seqlens=torch.tensor([0, n]))
            same(compiled(q, k, v, torch.tensor(n)), exact)


def test_a_whole_number_may_change_between_calls():
    counter = CompileCounterWithBackend("aot_eager")
    op = drawn("sink window", 3).op
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend=counter)
    args = (*qkv(2, 9), torch.randn(4))
    for width in range(2, 12):
        same(compiled(*args, width), op(*args, width))
    assert counter.frame_count == 2


def test_partials_merge_inside_a_graph():
    def both(q, k, v, k2, v2):
        parts = [ATTENTION(q, a, b, return_partial=True) for a, b in ((k, v), (k2, v2))]
        return ac.merge(parts), parts[0]

    args = (*qkv(2, 5), *qkv(2, 5)[1:])
    same(torch.compile(both, fullgraph=True, backend="aot_eager")(*args), both(*args))


class Step(torch.nn.Module):
    """A layer that holds its op, and builds a cache from its arguments."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, q, k, v, keys, values, lengths):
        return self.op.decode(q, k, v, ac.DenseCache({"k": keys, "v": values}, lengths))


def step_arguments(tokens, capacity):
    rows = torch.zeros(2, 2, capacity, 2, 16)
    return (*qkv(2, tokens), *rows.unbind(), ints(0, 1))


def exported(strict):
    tokens, capacity = torch.export.Dim("tokens"), torch.export.Dim("capacity")
    shapes = ({1: tokens}, {1: tokens}, {1: tokens}, {1: capacity}, {1: capacity}, None)
    step = copy.deepcopy(Step(ATTENTION))
    args = step_arguments(3, 30)
    return torch.export.export(step, args, strict=strict, dynamic_shapes=shapes)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_one_node(strict):
    program = exported(strict)
    nodes = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert nodes == [ATTENTION.register("decode", cache="dense")]
    args = step_arguments(7, 40)
    twins = copy.deepcopy(args)
    same(program.module()(*args), Step(ATTENTION)(*twins))
    same(args, twins)
    assert args[-1].tolist() == [7, 8]


def test_another_process_registers_what_a_saved_program_needs(tmp_path):
    torch.export.save(exported(False), tmp_path / "step.pt2")
    script = (
        "import sys, torch, attncc\n"
        "attncc.ops.attention.register('decode', cache='dense')\n"
        "program = torch.export.load(sys.argv[1]).module()\n"
        "torch.manual_seed(0)\n"
        "args = [torch.randn(2, 7, h, 16) for h in (4, 2, 2)]\n"
        "args += [torch.zeros(2, 40, 2, 16) for _ in 'kv'] + [torch.zeros(2, dtype=torch.int32)]\n"
        "assert program(*args).equal(attncc.ops.attention(*args[:3]))\n"
        "assert args[-1].tolist() == [7, 7]\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "step.pt2"], check=True, timeout=300)


# --- what a graph cannot do, and says


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: ATTENTION(q, k, v, window=3), "argument window: unknown argument"),
        (lambda q, k, v: ATTENTION(q, k), "argument v: missing argument"),
        (lambda q, k, v: ATTENTION(q, k, v, v), "too many arguments"),
        (lambda q, k, v: ATTENTION(q, k, [v]), r"argument v: a tensor is wanted .* found list"),
        (lambda q, k, v: ATTENTION(q, k, v, out=3), "argument out: out= is a tensor"),
        (lambda q, k, v: ATTENTION(q, k, v, out={"p": q}), "not a structure .* found p"),
        (lambda q, k, v: ATTENTION(q, k, v, cache={"k": k}), "argument cache: not a cache"),
        (lambda q, k, v: ATTENTION(q, k, v, mesh=1), "argument mesh: the option is not offered"),
        (
            lambda q, k, v: ATTENTION(q, k, v, cache=ac.DenseCache({"k": k}, ints(0, 0))),
            "argument v: the cache lacks a history",
        ),
        (lambda q, k, v: ATTENTION(q[0], k, v), "argument q: wrong number of axes"),
    ],
)
def test_a_trace_says_what_the_eager_call_says(call, message):
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(call, fullgraph=True, backend="eager")(*qkv(2, 4))
    assert "torch._dynamo" in type(caught.value).__module__


def test_sizes_and_values_are_checked_when_the_graph_runs():
    compiled = torch.compile(
        lambda q, k, v, cache: ATTENTION.decode(q, k, v, cache), fullgraph=True, backend="aot_eager"
    )
    q, k, v = qkv(2, 4)
    cache = dense(2, 4)
    with pytest.raises(errors.SizeError, match="argument v, axis Hkv: unequal sizes"):
        compiled(q, k, v[:, :, :1], cache)
    cache.lengths.fill_(43)
    with pytest.raises(errors.CacheError, match="no room for the new tokens"):
        compiled(q, k, v, cache)
    assert cache.lengths.tolist() == [43, 43]
    assert not any(t.any() for t in cache.tensors.values())


def test_autograd_is_refused_before_a_gradient_is_lost():
    q, k, v = (t.requires_grad_() for t in qkv(2, 4))
    o = ATTENTION.register()(q, k, v)
    assert o.requires_grad
    with pytest.raises(errors.RefusedError, match="there is no backward yet"):
        o.sum().backward()
    out = torch.empty(2, 4, 4, 16)
    with pytest.raises(errors.RefusedError, match=r"torch\.no_grad"):
        ATTENTION.register(out=("o",))(q, k, v, None, out)
    compiled = torch.compile(lambda *args: ATTENTION(*args), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="there is no backward yet"):
        compiled(q, k, v)
    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            same(compiled(q, k, v), ATTENTION(q, k, v))
            same(ATTENTION.register(out=("o",))(q, k, v, None, out), None)
            same(out, ATTENTION(q, k, v))


def test_autograd_sees_that_a_cache_was_written():
    cache = dense(2, 3)
    written = [*cache.tensors.values(), cache.lengths]
    before = [t._version for t in written]
    ATTENTION.register("decode", cache="dense")(*qkv(2, 3), None, *written)
    assert all(t._version > n for t, n in zip(written, before, strict=True))


def test_a_constant_of_a_trace_is_a_function_of_its_arguments():
    fields = ("decode", "dense", (), (), (), (), (), True, False)
    name, names, kind = torch_trace._prepare(ATTENTION.token, fields)
    assert (name, names, kind) == torch_trace._prepare(ATTENTION.token, fields)
    assert names == ("o", "lse")
    assert getattr(torch_trace.Results, kind) is ATTENTION.result_kind(names)


def test_importing_attncc_imports_no_compiler():
    script = (
        "import sys, attncc\n"
        "heavy = ('torch._dynamo', 'torch._inductor', 'attncc.runtime.torch_trace')\n"
        "sys.exit(' '.join(m for m in heavy if m in sys.modules) or 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
