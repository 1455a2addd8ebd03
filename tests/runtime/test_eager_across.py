"""The torch lowering of states that outputs read across, beside the fp64 oracle."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncc.codegen.pipeline import analyse
from attncc.runtime.bind import bind
from attncc.runtime.eager.run import run
from tests.across_ops import OJA, oja, queries, two_queries
from tests.runtime.eager_ops import as_kernels
from tests.tolerance import max_error

F32 = torch.float32


def lowered(op, args, **options):
    """A call's results by name, in chunks."""
    call, _ = bind(op.declaration, (), args)
    analysis = as_kernels(analyse(call.program))
    assert analysis.across is not None
    run(call, analysis, **options)
    return {**call.final_states, **call.outputs}


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 90), group=st.integers(1, 2), key=st.integers(1, 9),
    value=st.integers(1, 9), gate=st.sampled_from([0, 0.1, 1.0, 8.0]), chunk=st.integers(1, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_chunks_of_any_sizes(tokens, group, key, value, gate, chunk, seed):
    torch.manual_seed(seed)
    args, s = oja(
        tokens, 1, group, key, value, dtype=F32, gate=gate if tokens > 3 and value > 3 else 1
    )
    named = {**args, "s": s}
    exact = OJA.reference(**named)._asdict()
    for name, got in lowered(OJA, named, chunk=chunk).items():
        assert max_error(got, exact[name]) <= 4e-6 * max(1.0, exact[name].abs().max().item()), name


def test_a_long_prompt_without_a_gate_does_not_drift():
    torch.manual_seed(1)
    args, s = oja(1500, 1, 1, 16, 16, gate=0)
    named = {**args, "s": s}
    exact, rough = OJA.reference(**named)._asdict(), lowered(OJA, named, round_operands=True)
    late = slice(1400, None)
    eps = torch.finfo(torch.bfloat16).eps
    assert max_error(rough["o"][:, late], exact["o"][:, late]) <= 2 * eps * exact["o"].abs().max()


def test_a_norm_of_two_reads_and_rows_of_length_one():
    torch.manual_seed(2)
    args, s = queries(75, 2, 8, 12, dtype=F32)
    named = {**args, "s": s}
    exact = two_queries.reference(**named)._asdict()
    for name, got in lowered(two_queries, named, chunk=16).items():
        assert max_error(got, exact[name]) <= 1e-5, name


def test_prompts_in_pieces_and_packed_ones_agree():
    torch.manual_seed(3)
    args, s = oja(60, 1, 1, 8, 8, dtype=F32)
    whole_s, whole = OJA(**args, s=s, backend="torch")
    state, found = s, []
    for part in (slice(0, 7), slice(7, 59), slice(59, 60)):
        state, o = OJA(**{n: x[:, part] for n, x in args.items()}, s=state, backend="torch")
        found.append(o)
    assert (torch.cat(found, 1) - whole).abs().max() < 2e-6 and (state - whole_s).abs().max() < 2e-6
    own = {n: x[0] for n, x in args.items()}
    starts = torch.cat([s, s, s])
    cu = torch.tensor([0, 60, 60, 60])
    packed_s, packed = OJA(**own, s=starts, cu_seqlens=cu, backend="torch")
    assert torch.equal(packed_s[1:], starts[1:]) and (packed - whole[0]).abs().max() < 2e-6


def test_a_flag_for_norms_and_a_scale():
    torch.manual_seed(4)
    args, s = oja(40, 1, 1, 8, 8, dtype=F32)
    named = {**args, "q": 3 * args["q"], "k": 2 * args["k"], "s": s}
    options = {"l2norm": True, "scale": 0.5}
    exact = OJA.reference(**named, **options)._asdict()
    got = OJA(**named, **options, backend="torch")._asdict()
    rough = {n: x.float() for n, x in exact.items()}
    for name in ("s", "o"):
        assert max_error(got[name], exact[name]) <= 2e-6, (name, rough[name].abs().max())


def test_gradients_reach_every_input():
    torch.manual_seed(5)
    args, s = oja(21, 1, 1, 4, 4, dtype=F32)
    named = {n: x.requires_grad_() for n, x in {**args, "s": s}.items()}
    last, o = OJA(**named)
    (o.square().sum() + last.sum()).backward()
    wide = {n: x.detach().double().requires_grad_() for n, x in named.items()}
    state, total = wide["s"], 0
    for t in range(21):
        q, k, v, g, beta = (wide[n][:, t] for n in ("q", "k", "v", "g", "beta"))
        state = state * g.exp()[:, :, None]
        e = beta[..., None] * (k - torch.einsum("bhkv,bhv->bhk", state, v))
        state = state + e[..., None] * v[:, :, None]
        total = total + (torch.einsum("bhkv,bhk->bhv", state, q) * 0.5).square().sum()
    (total + state.sum()).backward()
    for name, x in named.items():
        assert (x.grad - wide[name].grad).abs().max() < 1e-5, name
