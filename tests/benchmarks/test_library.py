"""Rows of the library's other ops: answers at small sizes, and which ops are covered."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch

from attncc import ops
from benchmarks.answers import judge, run_and_judge
from benchmarks.cli import main
from benchmarks.groups import GROUPS, OPS, library, library_decode, library_prefill, load
from benchmarks.peers import library as plain
from benchmarks.runner import PEER_LENIENCE

CPU = torch.device("cpu")
PROMPTS = library_prefill.rows(S=48, Hq=4, Hk=2, D=16, T=48, H=2, K=16, V=16, tokens=40)
STEPS = library_decode.rows(B=3, S=48, Hq=4, Hk=2, D=16, states=3, H=2, K=16, V=16)
ROWS = [*PROMPTS, *STEPS]


@pytest.fixture
def eager(monkeypatch):
    """Peers as they are before they are compiled."""
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.op}-{r.phase}{r.stored * '-e4m3'}")
def test_a_rows_answer_is_the_oracles_and_another_is_not(row, eager, monkeypatch):
    monkeypatch.setattr(library, "ROWS", 24)
    monkeypatch.setattr(plain, "CHUNK", 16)
    case = row.case()
    x = case.build(CPU)
    parts = list(case.parts(x))
    assert {p.output for p in parts} == {*getattr(ops, row.op).declaration.trace().state_names, "o"}
    ours = case.ours(x, "torch")
    answer = run_and_judge(ours, parts)
    assert answer.right, answer
    for name, peer in case.peers.items():
        if name not in ("fla", "fla recurrent", "attncc-bf16", "sdpa-cudnn"):  # a GPU runs them
            found = judge(peer(x).fn(), parts, frozenset({"o"}))
            assert found.error <= PEER_LENIENCE * found.budget, (name, found)
    spoiled = {n: t.clone() for n, t in ours.fn().items()}
    spoiled["o"][-1, -1].mul_(1.5)
    rows = {n: [p for p in parts if p.output == n] for n in spoiled}
    if row.last or row.phase == "decode" or "s" in rows:
        assert not judge(spoiled, rows["o"]).right


OF_FLA = [(r, p) for r in ROWS for p in ("fla", "fla recurrent") if p in r.peers]


@pytest.mark.parametrize(("row", "peer"), OF_FLA, ids=lambda x: getattr(x, "op", x))
def test_what_fla_is_given_is_the_ops_own_data(row, peer, monkeypatch):
    """Under the names of FLA's own functions, whose formulas stand here for its kernels."""
    case = row.case()
    x = case.build(CPU)
    called = {}

    class Module:
        def __getattr__(self, name):
            def run(**named):
                called.update(named, name=name)
                return formula(**{n: v for n, v in named.items() if n != "output_final_state"})

            formula = FORMULAS[name]
            return run

    monkeypatch.setattr("benchmarks.peers.library.import_module", lambda name: Module())
    monkeypatch.setattr(torch, "compile", lambda run, **options: run)
    found = judge(case.peers[peer](x).fn(), list(case.parts(x)), frozenset({"o"}))
    assert found.error <= PEER_LENIENCE * found.budget, found
    assert called["name"].startswith("chunk_" if peer == "fla" else "fused_recurrent_")
    assert called["output_final_state"] and ("initial_state" in called) == ("s" in x)


def _scan(v, s, step):
    """Token by token; what a step takes is looked up by it."""
    rows = []
    for t in range(v.shape[1]):
        s, o = step(s, t)
        rows.append(o)
    return torch.stack(rows, 1).to(v.dtype), s


def _start(k, v, initial_state):
    heads = v.shape[2]
    zero = torch.zeros(v.shape[0], heads, k.shape[-1], v.shape[-1])
    return zero if initial_state is None else initial_state.clone()


def _at(x, t, heads):
    x = x[:, t].float()
    return x.repeat_interleave(heads // x.shape[1], 1)


def _delta(
    q, k, v, g, beta, A_log, dt_bias, initial_state=None, use_gate_in_kernel=False,
    use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
):  # fmt: skip
    assert use_gate_in_kernel and use_qk_l2norm_in_kernel and use_beta_sigmoid_in_kernel
    n = v.shape[2]

    def step(s, t):
        qt, kt = (torch.nn.functional.normalize(_at(x, t, n), dim=-1) for x in (q, k))
        decay = (-A_log.exp() * torch.nn.functional.softplus(g[:, t].float() + dt_bias)).exp()
        s = decay[..., None, None] * s
        e = torch.sigmoid(beta[:, t].float())[..., None] * (
            _at(v, t, n) - torch.einsum("bhkv,bhk->bhv", s, kt)
        )
        s = s + torch.einsum("bhk,bhv->bhkv", kt, e)
        return s, torch.einsum("bhkv,bhk->bhv", s, qt) * q.shape[-1] ** -0.5

    return _scan(v, _start(k, v, initial_state), step)


def _comba(q, k, p, v, g, beta, initial_state=None):
    n = v.shape[2]

    def step(s, t):
        e = beta[:, t].float()[..., None] * (
            _at(v, t, n) - torch.einsum("bhkv,bhk->bhv", s, _at(p, t, n))
        )
        s = g[:, t].exp()[..., None, None] * s + torch.einsum("bhk,bhv->bhkv", _at(k, t, n), e)
        return s, torch.einsum("bhkv,bhk->bhv", s, _at(q, t, n)) * q.shape[-1] ** -0.5

    return _scan(v, _start(k, v, initial_state), step)


def _rule(q, k, v, g=None, gk=None, beta=None, decays=None, scale=None, initial_state=None):
    """Linear attention, retention, GLA, the delta rule and KDA, by what is given."""
    n = v.shape[2]
    gates = (x for x in (g, gk) if x is not None)
    g = next((x if x.dim() == 4 else x[..., None] for x in gates), torch.zeros(1, v.shape[1], 1, 1))
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def step(s, t):
        s = g[:, t].float().exp()[..., None] * s * (1 if decays is None else decays[:, None, None])
        e = _at(v, t, n)
        if beta is not None:
            e = beta[:, t].float()[..., None] * (e - torch.einsum("bhkv,bhk->bhv", s, _at(k, t, n)))
        s = s + torch.einsum("bhk,bhv->bhkv", _at(k, t, n), e)
        return s, torch.einsum("bhkv,bhk->bhv", s, _at(q, t, n)) * scale

    return _scan(v, _start(k, v, initial_state), step)


def _linear(normalize, **named):
    assert not normalize
    return _rule(**named)


def _retention(q, **named):
    return _rule(q, decays=library_prefill.gamma(None, (q.shape[2],)), **named)


def _oja(q, k, v, gv, beta, initial_state=None):
    n = v.shape[2]

    def step(s, t):
        s = gv[:, t].exp()[:, :, None] * s
        e = beta[:, t].float()[..., None] * (
            _at(k, t, n) - torch.einsum("bhkv,bhv->bhk", s, _at(v, t, n))
        )
        s = s + torch.einsum("bhk,bhv->bhkv", e, _at(v, t, n))
        return s, torch.einsum("bhkv,bhk->bhv", s, _at(q, t, n)) * q.shape[-1] ** -0.5

    return _scan(v, _start(k, v, initial_state), step)


def _rwkv7(r, w, k, v, a, b, scale, initial_state=None, safe_gate=False):
    n = v.shape[2]
    assert not safe_gate or ((w > -5) & (w <= 0)).all()

    def step(s, t):
        read = torch.einsum("bhkv,bhk->bhv", s, _at(a, t, n))
        s = w[:, t].exp()[..., None] * s + torch.einsum("bhk,bhv->bhkv", _at(b, t, n), read)
        s = s + torch.einsum("bhk,bhv->bhkv", _at(k, t, n), _at(v, t, n))
        return s, scale * torch.einsum("bhkv,bhk->bhv", s, _at(r, t, n))

    return _scan(v, _start(k, v, initial_state), step)


def _hgrn(x, g, initial_state=None):
    s = torch.zeros_like(x[:, 0], dtype=torch.float32) if initial_state is None else initial_state

    def step(s, t):
        s = g[:, t].exp() * s + x[:, t]
        return s, s

    return _scan(x, s, step)


FORMULAS = {
    f"{kind}_{name}": formula
    for kind in ("chunk", "fused_recurrent")
    for name, formula in (
        ("gated_delta_rule", _delta), ("comba", _comba), ("gated_oja_rule", _oja),
        ("rwkv7", _rwkv7), ("hgrn", _hgrn), ("linear_attn", _linear), ("retention", _retention),
        ("gla", _rule), ("delta_rule", _rule), ("kda", _rule), ("simple_gla", _rule),
    )
}  # fmt: skip


def test_a_memory_is_measured_beside_both_kernels_of_torch():
    found = [r.peers for r in ROWS if r.op == "cross_attention"]
    assert len(found) == 2 and all({*p} == {"sdpa-flash", "sdpa-cudnn"} for p in found)


def test_a_narrow_history_is_half_the_bytes_and_means_the_same():
    wide, narrow = (
        next(r for r in STEPS if r.op == "soft_cap" and r.stored is stored)
        for stored in (False, True)
    )
    both, rest = 2 * 3 * 48 * 2 * 16 * 2, 2 * 3 * 4 * 16 * 2
    assert wide.case().bytes == both + rest
    assert narrow.case().bytes == both // 2 + 2 * 3 * 48 * 2 * 4 + rest
    x = narrow.case().build(CPU)
    for name, held in x["held"].items():
        meant = held.data.float() * held.scales.permute(0, 3, 1, 2)
        assert torch.equal(meant, x[name].float()) and held.data.dtype == torch.float8_e4m3fn


# --- who is covered ----------------------------------------------------------------------------


def _words(module: str) -> set[str]:
    """Attributes and strings of a module."""
    nodes = list(ast.walk(ast.parse(Path(import_module(module).__file__).read_text())))
    found = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return found | {n.value for n in nodes if isinstance(n, ast.Constant)}


def test_every_op_of_the_library_is_measured_by_some_group():
    own = {g: {c.name.split()[0] for c in load(g)} for g in GROUPS if g.startswith("library")}
    assert set(own) == {"library_prefill", "library_decode"}
    named = {op for group in OPS.values() for op in group}
    assert named | set().union(*own.values()) == set(ops.__all__)
    assert named & own["library_decode"] == {"gla", "delta_rule", "kda", "gated_delta_product"}
    assert not named & own["library_prefill"]
    rows = {op for op in own["library_prefill"] if op not in own["library_decode"]}
    assert rows == {
        "rms_norm", "layer_norm", "l2_norm", "gated_rms_norm", "silu", "rope", "rope_interleaved"
    }  # which know no phases  # fmt: skip


@pytest.mark.parametrize("group", OPS)
def test_a_group_is_about_the_ops_it_says(group):
    words = _words(GROUPS[group])
    if group.startswith("gdn"):  # the call stands in what these groups share
        words |= _words("benchmarks.groups.recur")
    calls = {"gated_delta_product": "chunk_gated_delta_product"}
    assert {calls.get(op, op) for op in OPS[group]} <= words


def test_the_list_needs_no_gpu_and_names_every_row(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{c.work} | {', '.join(c.peers)}" for g in GROUPS for c in load(g)
    ]  # fmt: skip
    assert main(["--list", "--group", "gdp", "--only", "n3"]) == 0
    some = capsys.readouterr().out.splitlines()
    assert some and all(line.startswith("gdp/") and " n3 " in line for line in some)
    assert len({line.split(" | ")[0] for line in lines}) == len(lines)
