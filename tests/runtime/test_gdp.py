"""``attncc.gdp`` and ``attncc.gdn`` on the CPU: the document's calls, and calls that break it."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl.errors import (
    ArgumentError,
    BackendError,
    CallError,
    DtypeError,
    OverlapError,
    RankError,
    SeqlensError,
    SizeError,
    ValueRangeError,
)
from attncc.dsl.library.gated_delta_product import gated_delta_product
from attncc.runtime import knobs
from tests.examples import examples
from tests.gdp_document import Shape, arguments, document, held, shapes
from tests.tolerance import assert_close

CHUNK = ac.gdp.chunk_gated_delta_product
DECODE = ac.gdp.decode_gated_delta_product


@given(shapes(), st.booleans(), st.booleans())
@examples(40)
def test_every_call_of_the_document_is_its_loop(shape, given_output, given_state):
    args = arguments(shape)
    tokens, heads = args["q"].shape[0], max(args["q"].shape[1], args["v"].shape[1])
    output = torch.full((tokens, heads, shape.v_dim), torch.nan, dtype=shape.dtype)
    states = (len(shape.lengths), heads, shape.v_dim, shape.k_dim)
    final = torch.full(states, torch.nan, dtype=shape.state or torch.float32)
    o, s = CHUNK(
        **args, output_final_state=True, output=output if given_output else None,
        output_state=final if given_state else None,
    )  # fmt: skip
    assert (o is output) == given_output and (s is final) == given_state
    held(o, s, args)
    for i, length in enumerate(shape.lengths):
        if not length:  # its state is the initial one, bit for bit
            start = args.get("initial_state")
            assert torch.equal(s[i], torch.zeros_like(s[i]) if start is None else start[i])


def test_only_the_output_comes_back_unless_the_state_is_asked_for():
    args = arguments(Shape((9, 4)))
    o = CHUNK(**args)
    assert isinstance(o, torch.Tensor)
    pair = CHUNK(**args, output_final_state=True)
    assert isinstance(pair, tuple) and torch.equal(pair[0], o)


def test_positional_arguments_are_in_the_documents_order():
    args = arguments(Shape((9, 4), scale=0.3, unit=True))
    order = (
        "q", "k", "v", "g", "beta", "num_householder", "scale", "initial_state", None,
        "cu_seqlens", "use_qk_l2norm_in_kernel",
    )  # fmt: skip
    o, s = CHUNK(*(True if name is None else args[name] for name in order))
    held(o, s, args)


@given(shapes(), st.data())
@examples(12)
def test_a_call_in_two_parts_is_one_call(shape, data):
    if shape.state is torch.bfloat16:  # rounded at the cut, so not the same
        shape = Shape(shape.lengths, shape.n, shape.heads, dtype=shape.dtype)
    args = arguments(shape)
    cuts = [data.draw(st.integers(0, n)) for n in shape.lengths]
    ends = args["cu_seqlens"].tolist()
    state, outs = args.pop("initial_state", None), []
    for part in (0, 1):
        spans = [
            (a, a + c) if part == 0 else (a + c, b)
            for a, b, c in zip(ends, ends[1:], cuts, strict=False)
        ]
        rows = [t for a, b in spans for t in range(a, b)]
        wide = [t * shape.n + j for t in rows for j in range(shape.n)]
        piece = {**args, "q": args["q"][rows], "k": args["k"][wide], "v": args["v"][wide]}
        piece |= {
            name: args[name][at] for name, at in (("g", rows), ("beta", wide)) if name in args
        }
        lengths = [b - a for a, b in spans]
        piece["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        o, state = CHUNK(**piece, initial_state=state, output_final_state=True)
        outs.append((rows, o))
    whole = torch.empty(args["q"].shape[0], *outs[0][1].shape[1:], dtype=shape.dtype)
    for rows, o in outs:
        whole[rows] = o
    held(whole, state, arguments(shape))


@pytest.mark.parametrize("heads", [(2, 2, 2), (1, 1, 3)])
@pytest.mark.parametrize("layout", ["K V", "V K"])
def test_one_update_a_token_is_the_gated_delta_rule_bit_for_bit(heads, layout):
    shape = Shape((70, 0, 5), n=1, heads=heads)
    args = arguments(shape)
    group = heads[2] // heads[0]
    gates = torch.nn.functional.logsigmoid(torch.randn(75, heads[2]))
    state = args["initial_state"] if layout == "V K" else args["initial_state"].mT.contiguous()
    rule = ac.Op(ac.ops.gated_delta_rule.declaration.with_patterns(s=f"B (Hk G) {layout}"))
    product = ac.Op(gated_delta_product.with_patterns(s=f"B (H Gq Gv) {layout}"))
    given = (args["q"], args["k"], args["v"])
    one = rule(*given, gates, args["beta"], state, cu_seqlens=args["cu_seqlens"])
    sizes = {"N": 1, "Gq": 1, "Gv": group}
    many = product(
        *given, gates, args["beta"], state, cu_seqlens=args["cu_seqlens"], sizes=sizes
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def test_flashinfers_gated_delta_rule_is_the_product_of_one_update():
    args = arguments(Shape((70, 0, 5), n=1, heads=(1, 1, 3)))
    want = CHUNK(**args, output_final_state=True)
    del args["num_householder"]
    got = ac.gdn.chunk_gated_delta_rule(**args, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    held(*got, {**args, "num_householder": 1})


def test_a_decay_of_zero_forgets_everything_before_it():
    shape = Shape((20,), state=torch.float32)
    args = arguments(shape)
    args["g"][11] = 0
    args["initial_state"].fill_(1e4)
    o, s = CHUNK(**args, output_final_state=True)
    tail = {
        **args, "q": args["q"][11:], "k": args["k"][22:], "v": args["v"][22:], "g": args["g"][11:],
        "beta": args["beta"][22:], "cu_seqlens": torch.tensor([0, 9]), "initial_state": None,
    }  # fmt: skip
    held(o[11:], s, tail)


# --- decode


def pooled(shape: Shape, tokens: int, device: str = "cpu") -> dict:
    """A decode call: sequences of equally many tokens, states in a pool of 6 slots."""
    args = arguments(shape, device)
    batch = len(shape.lengths)
    del args["cu_seqlens"]
    for name, rows in (("q", 1), ("k", shape.n), ("v", shape.n), ("g", 1), ("beta", shape.n)):
        args[name] = args[name].view(batch, tokens * rows, *args[name].shape[1:])
    heads = max(shape.heads)
    state = torch.randn(6, heads, shape.v_dim, shape.k_dim).to(args.pop("initial_state").dtype)
    return {**args, "state": state.to(device)}


@pytest.mark.parametrize("heads", [(2, 2, 2), (1, 1, 3), (4, 2, 2)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_decode_reads_and_writes_slots(heads, stored):
    shape = Shape((1, 1, 1), n=3, heads=heads, state=stored)
    args = pooled(shape, 1)
    before = args["state"].clone()
    slots = torch.tensor([4, -1, 1], dtype=torch.int32)
    o = DECODE(**args, state_indices=slots)
    flat = {n: x.flatten(0, 1) if n in ("q", "k", "v", "g", "beta") else x for n, x in args.items()}
    start = torch.stack([before[4], torch.zeros_like(before[0]), before[1]])
    cu = torch.arange(4)
    exact, rough = (
        document(**flat, initial_state=start, cu_seqlens=cu, dtype=d)
        for d in (torch.float64, torch.float32)
    )
    assert_close(o.flatten(0, 1), exact[0], rough[0].to(o.dtype), o.dtype, "o")
    for i, slot in ((0, 4), (2, 1)):
        near = rough[1][i].to(stored)
        assert_close(args["state"][slot], exact[1][i], near, stored, f"slot {slot}")
    for slot in (0, 2, 3, 5):  # nobody named them
        assert torch.equal(args["state"][slot], before[slot])


def test_decode_of_several_tokens_leaves_the_state_after_each_in_its_slot():
    shape = Shape((3, 3), n=2)
    args = pooled(shape, 3)
    before = args["state"].clone()
    slots = torch.tensor([0, 5], dtype=torch.int32)
    each = torch.tensor([[1, 2, 3], [-1, -1, 4]], dtype=torch.int32)
    DECODE(**args, state_indices=slots, output_state_indices=each)
    for i, t, slot in ((0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 2, 4)):
        part = {n: args[n][i, : t + 1] for n in ("q", "g")}
        part |= {n: args[n][i, : 2 * (t + 1)] for n in ("k", "v", "beta")}
        start = before[slots[i]][None]
        given = {**part, "initial_state": start, "cu_seqlens": torch.tensor([0, t + 1])}
        (_, exact), (_, rough) = (
            document(**given, num_householder=2, dtype=d) for d in (torch.float64, torch.float32)
        )
        assert_close(args["state"][slot], exact[0], rough[0], torch.float32, f"slot {slot}")
    assert torch.equal(args["state"][0], before[0]) and torch.equal(args["state"][5], before[5])


# --- calls that break a line of the document

T = 13


def wrong(**changes):
    """A right call with some arguments replaced (or made from the right ones)."""
    args = arguments(Shape((9, 4)))
    for name, value in changes.items():
        args[name] = value(args) if callable(value) else value
    return args


BREAKS = {
    "no offsets": (dict(cu_seqlens=None), ArgumentError, "cu_seqlens"),
    "float offsets": (dict(cu_seqlens=torch.tensor([0.0, 9, 13])), SeqlensError, "cu_seqlens"),
    "offsets past the rows": (
        dict(cu_seqlens=torch.tensor([0, 9, 14])), SeqlensError, "cu_seqlens",
    ),
    "offsets over rows of keys": (
        dict(cu_seqlens=torch.tensor([0, 18, 26])), SeqlensError, "cu_seqlens",
    ),
    "keys once a token": (dict(k=lambda a: a["k"][:T]), SizeError, "k"),
    "values once a token": (dict(v=lambda a: a["v"][:T]), SizeError, "v"),
    "betas once a token": (dict(beta=lambda a: a["beta"][:T]), SizeError, "beta"),
    "a gate for each row": (dict(g=lambda a: a["g"].repeat(2, 1)), SizeError, "g"),
    "heads of neither": (dict(k=lambda a: a["k"][:, :1]), SizeError, "k"),
    "3 and 2 heads": (dict(q=lambda a: a["q"].repeat(1, 2, 1)[:, :3]), SizeError, "v"),
    "gates at fewer heads": (dict(g=lambda a: a["g"][:, :1]), SizeError, "g"),
    "states [K, V]": (
        dict(v=lambda a: torch.cat([a["v"]] * 2, -1),
             initial_state=torch.zeros(2, 2, 64, 128)), SizeError, "initial_state",
    ),
    "a state too many": (dict(initial_state=torch.zeros(3, 2, 64, 64)), SizeError, "initial_state"),
    "states of three axes": (
        dict(initial_state=torch.zeros(2, 64, 64)), RankError, "initial_state",
    ),
    "states in fp16": (
        dict(initial_state=torch.zeros(2, 2, 64, 64).half()), DtypeError, "initial_state",
    ),
    "queries in fp32": (dict(q=lambda a: a["q"].float()), DtypeError, "q"),
    "keys of another dtype": (dict(k=lambda a: a["k"].half()), DtypeError, "k"),
    "values of another dtype": (dict(v=lambda a: a["v"].half()), DtypeError, "v"),
    "betas of another dtype": (dict(beta=lambda a: a["beta"].half()), DtypeError, "beta"),
    "gates in fp64": (dict(g=lambda a: a["g"].double()), DtypeError, "g"),
    "queries of two axes": (dict(q=lambda a: a["q"][:, 0]), RankError, "q"),
    "no tensor": (dict(v=[1.0]), ArgumentError, "v"),
    "an output of other rows": (
        dict(output=torch.zeros(26, 2, 64, dtype=torch.bfloat16)), SizeError, "output",
    ),
    "an output in fp32": (dict(output=torch.zeros(T, 2, 64)), DtypeError, "output"),
    "an output that is v": (dict(output=lambda a: a["v"][:T]), OverlapError, "output"),
    "a final state that is the initial": (
        dict(output_state=lambda a: a["initial_state"]), OverlapError, "output_state",
    ),
    "a final state of another dtype": (
        dict(output_state=torch.empty(2, 2, 64, 64).bfloat16()), DtypeError, "output_state",
    ),
    "no updates": (dict(num_householder=0), ArgumentError, "num_householder"),
    "half an update": (dict(num_householder=1.5), ArgumentError, "num_householder"),
    "no backend": (dict(backend="cublas"), BackendError, "backend"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_call_that_breaks_a_line_is_refused_before_anything_is_written(name):
    changes, kind, argument = BREAKS[name]
    args = wrong(**changes)
    output = args.setdefault("output", torch.full((T, 2, 64), 7.0, dtype=torch.bfloat16))
    before = output.clone()
    with pytest.raises(kind) as raised:
        CHUNK(**args)
    assert raised.value.op == "chunk_gated_delta_product" and raised.value.argument == argument
    assert f"argument {argument}" in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert torch.equal(output, before)


def test_overlap_names_both_of_the_callers_arguments():
    with pytest.raises(OverlapError, match=r"output_state.*overlap with initial_state"):
        CHUNK(**wrong(output_state=lambda a: a["initial_state"]))


def test_rows_are_counted_in_the_callers_words():
    with pytest.raises(
        SizeError, match=r"expected 26 as in q, num_householder, found 13"
    ) as raised:
        CHUNK(**wrong(k=lambda a: a["k"][:T]))
    assert "sizes=" not in str(raised.value)


@pytest.mark.parametrize("value", [-0.25, 1.5, float("nan")])
def test_decays_outside_0_to_1_are_found_when_checks_are_on(monkeypatch, value):
    args = wrong()
    args["g"][3, 1] = value
    CHUNK(**args)  # not looked at
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    assert knobs.check()
    with pytest.raises(ValueRangeError, match=r"\[0, 1\], found .* at \(3, 1\)") as raised:
        CHUNK(**args)
    assert raised.value.argument == "g" and isinstance(raised.value, CallError | ValueError)


def test_backends_that_cannot_run_it_say_why():
    args = wrong()
    with pytest.raises(BackendError, match="SM100"):
        CHUNK(**args, backend="cudnn")
    with pytest.raises(BackendError, match=r"need a GPU.*cuda, found cpu"):
        CHUNK(**args, backend="triton")
    with pytest.raises(BackendError):
        CHUNK(**args, backend="cutedsl")
    assert torch.equal(CHUNK(**args, backend="torch"), CHUNK(**args))


def test_checkpoints_of_the_gated_delta_rule_are_refused():
    args = wrong(num_householder=1)
    del args["num_householder"]
    with pytest.raises(ArgumentError, match="checkpoints of the state are not offered"):
        ac.gdn.chunk_gated_delta_rule(**args, checkpoint_every_n_tokens=64)


def test_decode_names_its_own_arguments():
    args = pooled(Shape((1, 1)), 1)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(DtypeError) as raised:
        DECODE(**args, state_indices=slots.long())
    assert raised.value.argument == "state_indices"
    with pytest.raises(DtypeError) as raised:
        DECODE(**{**args, "state": args["state"].half()}, state_indices=slots)
    assert raised.value.argument == "state"
    with pytest.raises(ArgumentError) as raised:
        DECODE(**args, state_indices=[0, 1])
    assert raised.value.argument == "state_indices"


def test_an_explanation_says_what_auto_would_run():
    hopper = ac.gdp.explain(2, 2, 6, 128, 128, 2)
    assert "decay 0: S *= alpha\n" in hopper and "__state__" in hopper
    assert "no cuDNN graph: cuDNN's kernels need SM100, SM103 or SM107, not sm_90" in hopper
    blackwell = ac.gdp.explain(2, 2, 6, 128, 128, 2, target="sm_100")
    graph = "as a cuDNN graph (backend='cudnn', packed): node gdp, 2 rows a token"
    assert graph in blackwell or "nvidia-cudnn-frontend is not installed" in blackwell
    with pytest.raises(SizeError):
        ac.gdp.explain(2, 2, 3, 128, 128)


def test_a_call_is_one_node_of_a_compiled_graph():
    args = arguments(Shape((9, 4), heads=(1, 3, 3)))

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(tensors):
        return CHUNK(**tensors, output_final_state=True)

    held(*compiled(args), args)
