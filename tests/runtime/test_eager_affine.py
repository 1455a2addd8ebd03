"""The chunked affine form in the torch lowering against the interpreter."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.interp import Named, interpret
from attncc.runtime.eager import affine, blocks
from attncc.runtime.eager.run import run
from attncc.runtime.reference import run_reference
from tests.runtime import eager_ops as ops
from tests.runtime.eager_ops import affine_form, call_of, check, results, unit
from tests.strategies import cuts, randn, seeds
from tests.tolerance import max_error

INF = torch.inf
GDN = ac.ops.gated_delta_rule


def gdn(seed: int, b: int, t: int, h: int, g: int, k: int, v: int) -> dict[str, torch.Tensor]:
    args = {
        "q": unit(randn(seed, b, t, h, k)),
        "k": unit(randn(seed + 1, b, t, h, k)),
        "v": randn(seed + 2, b, t, h * g, v),
        "g": -2 * torch.rand(b, t, h * g, generator=torch.Generator().manual_seed(seed)),
        "beta": torch.rand(b, t, h * g, generator=torch.Generator().manual_seed(seed + 3)),
        "s": randn(seed + 4, b, h * g, k, v),
    }
    return {name: x.float() for name, x in args.items()}


def tables(seed: int, b: int, t: int) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """Ops of every kind of flat table, with their arguments."""
    h, k, v = 2, 6, 5
    rows = {
        n: unit(randn(seed + i, b, t, h, k)).float() for i, n in enumerate(("q", "k", "a", "b"))
    }
    vec = randn(seed + 5, b, t, h, v).float()
    head = torch.rand(b, t, h, generator=torch.Generator().manual_seed(seed))
    per_k = -torch.rand(b, t, h, k, generator=torch.Generator().manual_seed(seed))
    s = randn(seed + 6, b, h, k, v).float()
    q, key = rows["q"], rows["k"]
    wide = unit(randn(seed + 7, b, t, 3 * h, k)).float()
    return {
        "gdn": (GDN, gdn(seed, b, t, h, 3, k, v)),
        "gdp": (
            ops.delta_product,
            {
                "q": q, "k": unit(randn(seed + 8, b, t * 3, h, k)).float(),
                "v": randn(seed + 9, b, t * 3, h, v).float(), "g": -head,
                "beta": 2 * randn(seed + 10, b, t * 3, h).float().sigmoid(), "s": s,
            },
        ),
        "kda": (
            ops.kda,
            {"q": q, "k": key, "v": vec, "g": per_k, "beta": head, "s": s.mT.contiguous()},
        ),
        "negative alpha": (
            ops.linear_alpha,
            {"q": q, "k": key, "v": vec, "a": 2 * head - 1, "beta": 2 * head, "s": s},
        ),
        "retention": (ops.retention, {"q": wide, "k": key, "v": vec, "g": -head, "s": s}),
        "rwkv7": (
            ops.rwkv7,
            {"r": q, "w": per_k, "k": key, "v": vec, "a": -rows["a"], "b": rows["a"] * 0.7, "s": s},
        ),
        "two slots": (
            ops.two_slots,
            {"q": q, "k": key, "v": vec, "a": head, "c": per_k.exp(), "s": s},
        ),
        "position": (ops.by_position, {"k": key, "v": vec, "s": s}),
    }  # fmt: skip


NAMES = list(tables(0, 1, 1))
ROWS = {"gdp": {"sizes": {"N": 3}}}  # what no argument fixes where there are no tokens


# --- shapes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("t", [0, 1, 33, 63, 64, 65])
def test_every_table_at_any_length(name: str, t: int) -> None:
    # a34
    op, args = tables(1, 2, t)[name]
    check(op, **args, **ROWS.get(name, {}))


@pytest.mark.parametrize("name", ["gdn", "gdp", "kda"])
def test_a_thousand_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a34; and in ranges of a few chunks
    monkeypatch.setattr(blocks, "BUDGET", 1 << 18)
    op, args = tables(2, 1, 1000)[name]
    check(op, **args)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 50, 64])
def test_any_chunk_size(name: str, chunk: int) -> None:
    op, args = tables(3, 1, 70)[name]
    check(op, chunk=chunk, **args)


@pytest.mark.parametrize("g", [1, 4, 6, 7])
def test_any_group(g: int) -> None:
    check(GDN, **gdn(4, 1, 40, 2, g, 8, 4))


@pytest.mark.parametrize(("k", "v"), [(16, 256), (96, 32), (160, 16), (192, 64), (256, 16)])
def test_any_head_dim(k: int, v: int) -> None:
    # a9
    check(GDN, **gdn(5, 1, 65, 1, 1, k, v))


@pytest.mark.parametrize("absent", [("g",), ("beta",), ("s",), ("g", "beta", "s")])
@pytest.mark.parametrize("t", [0, 1, 70])
def test_absent_inputs(absent: tuple[str, ...], t: int) -> None:
    args = gdn(6, 2, t, 2, 2, 8, 4)
    check(GDN, **{n: x for n, x in args.items() if n not in absent})


@pytest.mark.parametrize("t", [0, 1, 9, 70])
def test_constant_vectors_no_rows_and_two_active_axes(t: int) -> None:
    r = [unit(randn(i, 2, t, 2, 4)).float() for i in range(4)]
    s, m = randn(5, 2, 2, 4, 3).float(), [randn(i, 2, 4).float() for i in (6, 7)]
    v, a = randn(8, 2, t, 2, 3).float(), randn(9, 2, t, 2).float().sigmoid()
    check(ops.constants, *m, randn(10, 2, 3, 4).float(), randn(11, 2, 3).float(), v, s)
    check(ops.forgets_only, r[0], a, s)
    q, wide = randn(12, 2, t, 2, 4, 3).float(), randn(13, 2, 2, 4, 3, 5).float()
    v = randn(14, 2, t, 2, 5).float()
    check(ops.two_active, q, r[0], unit(randn(15, 2, t, 2, 3)).float(), v, -r[1].abs(), wide)
    for op in (ops.constants, ops.forgets_only, ops.two_active):
        assert analyse(op.declaration.trace()).affine is not None


@pytest.mark.parametrize("n", [1, 2, 4])
def test_any_number_of_rows(n: int) -> None:
    t, h, k, v = 35, 2, 8, 4
    args = {
        "q": randn(0, 2, t, h, k), "k": unit(randn(1, 2, t * n, h, k)),
        "v": randn(2, 2, t * n, h, v), "g": -randn(3, 2, t, h).abs(),
        "beta": 2 * randn(4, 2, t * n, h).sigmoid(),
    }  # fmt: skip
    check(ops.delta_product, chunk=16, **{m: x.float() for m, x in args.items()})


def test_one_householder_is_the_gated_delta_rule() -> None:
    # a17
    args = gdn(7, 2, 70, 2, 1, 8, 4)
    a, b = GDN(**args, backend="torch"), ops.delta_product(**args, backend="torch")
    assert max_error(a.s, b.s.double()) < 1e-6
    assert max_error(a.o, b.o.double() * 8**-0.5) < 1e-6


def test_strides_do_not_matter() -> None:
    # a29
    args = gdn(8, 2, 70, 2, 2, 8, 4)
    want = GDN(**args, backend="torch")
    loose = {n: torch.stack([x, x], 1)[:, 1] for n, x in args.items()}
    loose["k"] = args["k"].transpose(1, 2).contiguous().transpose(1, 2)
    got = GDN(**loose, backend="torch")
    assert torch.equal(got.o, want.o) and torch.equal(got.s, want.s)


def test_no_sequences() -> None:
    check(GDN, **gdn(9, 0, 5, 2, 2, 8, 4))


# --- gates


@pytest.mark.parametrize("chunk", [4, 32, 64])
def test_tiny_decays_stay_finite(chunk: int) -> None:
    # a10: alpha = 1e-12 over 64 tokens
    args = gdn(10, 1, 64, 1, 1, 8, 4)
    args["g"] = torch.full_like(args["g"], -27.6)
    check(GDN, chunk=chunk, **args)


@pytest.mark.parametrize("at", [[0], [5], [63], [64], [3, 4, 69], list(range(70))])
def test_a_gate_of_minus_infinity_forgets(at: list[int]) -> None:
    # a11
    args = gdn(11, 2, 70, 1, 2, 8, 4)
    args["g"][:, at] = -INF
    check(GDN, **args)
    last = at[-1] + 1
    got = GDN(**{n: x if n == "s" else x[:, :last] for n, x in args.items()}, backend="torch")
    k, v, beta = (args[n][:, last - 1] for n in ("k", "v", "beta"))
    k = k.repeat_interleave(2, 1)
    want = k[..., :, None] * (beta[..., None] * v)[..., None, :]
    assert max_error(got.s, want.double()) < 1e-6


@pytest.mark.parametrize("name", ["kda", "rwkv7", "two slots"])
def test_gates_per_channel_of_minus_infinity(name: str) -> None:
    op, args = tables(12, 1, 70)[name]
    gate = next(n for n in ("g", "w", "c") if n in args and args[n].dim() == 4)
    closed = 0.0 if gate == "c" else -INF
    args[gate][:, 3, :, 0] = args[gate][:, 64:66] = closed
    check(op, **args)


@pytest.mark.parametrize("value", [-1.0, -0.5, 0.0, 1.0, 1.25])
def test_linear_decays_of_any_sign(value: float) -> None:
    op, args = tables(13, 1, 70)["negative alpha"]
    args["a"][:] = value
    args["a"][:, 20:23] *= -1
    # beyond 1 the weights within a chunk grow, and what cancels with them: short chunks in fp32
    check(op, chunk=8 if value > 1 else 64, **args)


# --- beta


@pytest.mark.parametrize("t", [64, 2048])
def test_a_repeated_key_gives_back_its_value(t: int) -> None:
    # a14, pure: beta = 1, g = 0, one unit key, q = k
    k = torch.full((1, t, 1, 128), 128**-0.5)
    v = randn(14, 1, t, 1, 16).float()
    got = GDN(k, k, v, backend="torch")
    assert max_error(got.o, v.double() * 128**-0.5) < 1e-6
    assert max_error(got.s[0, 0], (k[0, -1, 0, :, None] * v[0, -1, 0]).double()) < 1e-6


def test_beta_of_two_flips_the_component_along_the_key() -> None:
    # a16
    t = 70
    k = unit(randn(15, 8)).float().expand(1, t, 1, 8)
    v, beta = torch.zeros(1, t, 1, 4), torch.full((1, t, 1), 2.0)
    start = torch.ones(1, 1, 8, 4)
    got = GDN(k, k, v, beta=beta, s=start, backend="torch")
    along = (k[0, 0, 0, :, None] * start[0, 0]).sum(0)
    sign = torch.tensor([-1.0, 1.0]).repeat(t // 2)
    assert max_error(got.o[0, :, 0], (sign[:, None] * along * 8**-0.5).double()) < 2e-6
    assert max_error(got.s, start.double()) < 2e-6  # an even number of flips


def test_gated_delta_product_by_hand() -> None:
    # a17
    eye = torch.eye(8)
    k, v = eye[:2].reshape(1, 2, 1, 8), torch.arange(16.0).reshape(1, 2, 1, 8)
    alpha = torch.full((1, 1, 1), 0.5)
    q, s = (eye[0] + eye[1]).reshape(1, 1, 1, 8), torch.ones(1, 1, 8, 8)
    got = ops.delta_product(q, k, v, alpha.log(), s=s, backend="torch")
    assert got.o.flatten().tolist() == [8, 10, 12, 14, 16, 18, 20, 22]
    assert bool((got.s[0, 0, 2:] == 0.5).all()) and torch.equal(got.s[0, 0, :2], v[0, :, 0])
    two = {"q": q.expand(1, 2, 1, 8), "g": alpha.log().expand(1, 2, 1)}
    still = torch.zeros(1, 4, 1, 8)
    got = ops.delta_product(**two, k=still, v=still, s=s, backend="torch")
    assert bool((got.s == 0.25).all())


def test_expanded_tokens_decay_on_their_first_copy_and_read_on_their_last() -> None:
    # a18
    n, t = 3, 65
    op, args = tables(16, 1, t)["gdp"]
    got = op(**args, backend="torch")

    def only(x: torch.Tensor, at: int) -> torch.Tensor:
        wide = torch.zeros(1, t, n, *x.shape[2:])
        wide[:, :, at] = x
        return wide.flatten(1, 2)

    one = {**args, "q": only(args["q"], n - 1), "g": only(args["g"], 0)}
    want = op(**one, backend="torch")
    assert max_error(got.o, want.o[:, n - 1 :: n].double()) < 4e-6
    assert max_error(got.s, want.s.double()) < 4e-6


# --- packed sequences and cuts

CU = [0, 100, 256, 512, 1500, 1500]


@pytest.mark.parametrize("cu", [CU, [0, 0, 70, 75], [0, 5, 5, 70], [0, 0, 0], [0, 9, 18, 18, 27]])
@pytest.mark.parametrize("name", ["gdn", "gdp"])
def test_packed_equals_dense(cu: list[int], name: str) -> None:
    # a5: empty sequences first, in the middle, last, all
    op, args = tables(17, 1, cu[-1])[name]
    s = (
        torch.cat([args.pop("s")] * (len(cu) - 1))
        + torch.arange(len(cu) - 1.0)[:, None, None, None]
    )
    flat, fixed = {n: x[0] for n, x in args.items()}, ROWS.get(name, {})
    got = op(**flat, s=s, cu_seqlens=torch.tensor(cu), backend="torch", **fixed)
    for b, (lo, hi) in enumerate(pairwise(cu)):
        part = {n: _rows(x, lo, hi, cu[-1]) for n, x in args.items()}
        want = op(**part, s=s[b : b + 1], backend="torch", **fixed)
        assert max_error(got.s[b], want.s[0].double()) < 4e-6
        assert max_error(got.o[lo:hi], want.o[0].double()) < 4e-6
        if lo == hi:
            assert torch.equal(got.s[b], s[b])


def _rows(x: torch.Tensor, lo: int, hi: int, t: int) -> torch.Tensor:
    each = x.shape[1] // max(t, 1)
    return x[:, lo * each : hi * each]


def test_a_bad_sequence_does_not_leak_into_the_next() -> None:
    args = {n: x[0] for n, x in gdn(18, 1, 90, 1, 1, 8, 4).items()}
    s = randn(0, 3, 1, 8, 4).float()
    args["k"][:30], args["g"][:30] = torch.nan, INF
    cu = torch.tensor([0, 30, 50, 90])
    args.pop("s")
    got = GDN(**args, s=s, cu_seqlens=cu, backend="torch")
    assert bool(got.s[1:].isfinite().all()) and bool(got.o[30:].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_state_of_an_empty_sequence_keeps_its_bits(dtype: torch.dtype) -> None:
    # a5
    args = gdn(19, 3, 0, 2, 2, 8, 4)
    args["s"] = args["s"].to(dtype)
    args["s"][0, 0, 0, 0] = -0.0
    got = GDN(**args, backend="torch")
    assert torch.equal(got.s.view(torch.uint8), args["s"].view(torch.uint8))
    again = GDN(**{n: x for n, x in args.items() if n != "s"}, backend="torch")
    assert bool((again.s == 0).all())


@given(
    name=st.sampled_from([n for n in NAMES if n != "position"]),
    pieces=cuts(67, 4),
    seed=seeds(),
    chunk=st.integers(1, 64),
)
@settings(max_examples=25)
def test_any_cut_carried_by_the_state_is_the_whole(
    name: str, pieces: list[int], seed: int, chunk: int
) -> None:  # but of positions, which start at 0 in each call
    op, args = tables(seed, 1, 67)[name]
    call = call_of(op, **args, double=True)
    whole = run_reference(call, torch.float64)
    state, at = args.pop("s"), 0
    outs = []
    for n in pieces:
        part = {m: _rows(x, at, at + n, 67) for m, x in args.items()}
        fixed = ROWS.get(name, {})
        call = call_of(op, **part, s=state.float(), double=True, **fixed)
        call = replace(call, tensors={**call.tensors, "s": state.double()})
        run(call, analyse(call.program), chunk=chunk)
        state, at = call.final_states["s"], at + n
        outs.append(call.outputs)
    assert max_error(state, whole["s"]) < 1e-10
    for m in call.outputs:
        assert max_error(torch.cat([o[m] for o in outs], 1), whole[m]) < 1e-10


# --- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gdn", "gdp", "kda", "rwkv7"])
def test_rounded_operands_err_like_their_dtype(name: str, dtype: torch.dtype) -> None:
    op, args = tables(20, 2, 130)[name]
    args = {n: x if n == "s" else x.to(dtype) for n, x in args.items()}
    oracle = run_reference(call_of(op, **args), torch.float64)
    errors = []
    for rounded in (False, True):
        call = call_of(op, **args)
        run(call, analyse(call.program), round_operands=rounded)
        got = results(call)
        assert got["o"].dtype == dtype and got["s"].dtype == torch.float32
        scale = float(oracle["s"].abs().max())
        errors.append(max_error(got["s"], oracle["s"]) / scale)
    eps = torch.finfo(dtype).eps
    assert errors[0] < 4e-6 < errors[1] < 4 * eps


def test_a_stored_state_is_rounded_once() -> None:
    args = gdn(21, 2, 70, 2, 2, 8, 4)
    args["s"] = args["s"].bfloat16()
    got = GDN(**args, backend="torch")
    want = GDN(**{**args, "s": args["s"].float()}, backend="torch")
    assert got.s.dtype == torch.bfloat16 and torch.equal(got.s, want.s.bfloat16())
    assert torch.equal(got.o, want.o)


# --- summaries


@given(name=st.sampled_from(NAMES), pieces=cuts(40, 3), seed=seeds())
@settings(max_examples=25)
def test_summaries_compose_in_order(name: str, pieces: list[int], seed: int) -> None:
    op, args = tables(seed, 2, 40)[name]
    call = call_of(op, **args, double=True)
    form = affine_form(op, call)
    edges = [0, pieces[0], pieces[0] + pieces[1], 40]
    one, two, three = (affine.summary(call, form, lo, hi, chunk=7) for lo, hi in pairwise(edges))
    left, right = one.then(two).then(three), one.then(two.then(three))
    for x in (left.a, left.b):
        y = right.a if x is left.a else right.b
        assert max_error(x.data, y.aligned(x.axes)) < 1e-11
    axes = call.patterns["s"].axes
    sizes = {**call.sizes, "T": 40}
    start = Named(call.tensors["s"].reshape([sizes[a] for a in axes]), axes)
    want = interpret(call.program, call.tensors, sizes).states["s"]
    got = left.apply(start).aligned(axes)
    assert max_error(got.reshape(want.shape), want) < 1e-10


def test_the_summary_of_no_tokens_is_the_identity() -> None:
    op, args = tables(22, 1, 10)["gdn"]
    call = call_of(op, **args, double=True)
    form = affine_form(op, call)
    none, some = (affine.summary(call, form, 4, hi) for hi in (4, 9))
    for both in (none.then(some), some.then(none)):
        assert max_error(both.a.aligned(some.a.axes), some.a.data) == 0
        assert max_error(both.b.aligned(some.b.axes), some.b.data) == 0
