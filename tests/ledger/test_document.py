"""The object tables of the source document come out of the layers row by row; docs are current."""

import importlib.util
import re
import sys
from functools import cache
from math import prod
from pathlib import Path

import pytest

import attncc as ac
from attncc.dsl.ir import Lifetime
from attncc.dsl.ledger import Held, Phase, ledger
from attncc.dsl.library.layers import LAYERS

DOCS = Path(__file__).resolve().parents[2] / "docs"

# What the document says, in words that the ledger's ways must contain: producers, consumers.
WAYS = {
    ("mha_decode", "Current layer input"): (["previous sublayer"], ["W_Q", "W_K", "W_V"]),
    ("mha_decode", "Current Query"): (["W_Q", "RoPE"], ["q_t · K_cache"]),
    ("mha_decode", "Current Key/Value"): (["W_K", "W_V", "RoPE"], ["cache update"]),
    ("mha_decode", "Historical Key/Value"): (
        ["previous step", "cache update"], ["q_t · K_cache", "p_t · V_cache"],
    ),
    ("mha_decode", "Scores and probabilities"): (
        ["q_t · K_cache", "scale", "mask", "softmax"], ["p_t · V_cache"],
    ),
    ("mha_decode", "Output"): (["p_t · V_cache", "W_O"], ["next sublayer"]),
    ("dsa_layer", "Indexer Query"): (["Indexer Q", "RoPE", "quantise"], ["q_i · k_j"]),
    ("dsa_layer", "Indexer Key"): (["k_cache", "k_scale_cache"], ["q_i · k_j"]),
    ("dsa_layer", "Indexer head weights"): (["weights_proj", "scale"], ["sum over Hi"]),
    ("dsa_layer", "Index score"): (["q_i · k_j", "relu", "sum over Hi"], ["mask"]),
    ("dsa_layer", "Selected positions"): (["top-2048"], ["cKV_j[J]", "kR_j[J]"]),
    ("dsa_layer", "MLA latent cache"): (
        ["W_DKV", "RMSNorm", "RoPE"], ["cKV_j[J]", "kR_j[J]"],
    ),
    ("dsa_layer", "Main MLA output"): (["cKV_j[J]", "W_UV", "W_O"], ["next sublayer"]),
    ("gdn_layer", "Q/K/V"): (["W_Q", "ShortConv", "SiLU", "L2Norm"], ["Sbar_t · k_t", "new S_t"]),
    ("gdn_layer", "Decay and write rate"): (["a_proj", "b_proj"], ["S_t", "beta_t * (v_t"]),
    ("gdn_layer", "Decayed state"): (["lambda_t) * S_t"], ["Sbar_t · k_t", "Sbar_t + k_t * e_t"]),
    ("gdn_layer", "Prediction and error"): (
        ["Sbar_t · k_t", "beta_t * (v_t - vhat_t)"], ["Sbar_t + k_t * e_t"],
    ),
    ("gdn_layer", "Recurrent state"): (["previous step", "Sbar_t + k_t * e_t"], ["next step"]),
    ("gdn_layer", "Short-convolution state"): (["previous step"], ["ShortConv", "next step"]),
    ("gdn_layer", "Read-out"): (["q_t", "Gated RMSNorm", "W_O"], ["next sublayer"]),
}  # fmt: skip

LIFETIMES = {
    "Historical Key/Value": {Lifetime.CACHE},
    "Indexer Key": {Lifetime.CACHE},
    "MLA latent cache": {Lifetime.CACHE},
    "Selected positions": {Lifetime.CONTROL},
    "Recurrent state": {Lifetime.STATE},
    "Short-convolution state": {Lifetime.WINDOW},
    "Output": {Lifetime.ACTIVATION, Lifetime.OUTPUT},
    "Main MLA output": {Lifetime.OUTPUT},
    "Read-out": {Lifetime.ACTIVATION, Lifetime.OUTPUT},
}

# Sizes in which every axis of the document is another prime, and the layer's that follow.
DOCUMENT = {"B": 3, "T": 8209, "D": 31, "d": 7, "Hq": 5, "Hkv": 5, "Hidx": 11, "Didx": 13,
            "Rkv": 17, "DR": 19, "k": 2048, "H": 5, "K": 23, "V": 29}  # fmt: skip
LAYER = {
    "mha_decode": {"B": 3, "S": 8209, "M": 31, "D": 7, "Hkv": 5, "G": 1},
    "dsa_layer": {
        "B": 3, "S": 8209, "M": 31, "Hi": 11, "Di": 13, "R": 17, "P": 19, "H": 5, "D": 7, "V": 29,
        "Rq": 37,
    },
    "gdn_layer": {"B": 3, "M": 31, "Hk": 5, "G": 1, "K": 23, "V": 29, "W": 4, "DK": 115, "DV": 145},
}  # fmt: skip


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


GENERATE = generator()
ROWS = [(table.layer, row) for table in GENERATE.TABLES for row in table.rows]


def extents(pattern, sizes):
    """Sizes of a layout's memory axes that are not 1, sorted."""
    known = {"T": 1, **sizes}
    found = [prod(known[a] for a in dim) for dim in pattern.dims]
    return sorted(n for n in found if n > 1)


@cache
def formulas(layer):
    """Rows of the object table of a layer in decode, by title."""
    return {r[0]: r for r in GENERATE.object_rows(ledger(LAYERS[layer], None, Phase.DECODE))}


@cache
def in_primes(layer):
    return ledger(LAYERS[layer], LAYER[layer], Phase.DECODE)


@pytest.mark.parametrize(("layer", "row"), ROWS, ids=lambda x: getattr(x, "title", x))
def test_a_row_of_the_document(layer, row):
    found = in_primes(layer)
    entries = dict(found.rows())[row.title]
    theirs = {tuple(sorted(DOCUMENT.get(a, 1) for a in s.split() if a != "1")) for s in row.shapes}
    sizes = {**found.sizes, "J": 2048}
    ours = {tuple(extents(e.pattern, sizes)) for e in entries}
    # The scale of a quantised row has a row's axes without its last; the document only names it.
    scales = {tuple(extents(e.pattern, sizes)) for e in entries if e.symbol.startswith("s_")}
    assert ours - scales == theirs or not theirs
    lifetimes = {e.lifetime for e in entries}
    assert lifetimes == LIFETIMES.get(row.title, {Lifetime.ACTIVATION})


@pytest.mark.parametrize(("layer", "row"), ROWS, ids=lambda x: getattr(x, "title", x))
def test_the_ways_of_the_document(layer, row):
    shown = formulas(layer)
    made, _, read = shown[row.title][4].partition(" → ")
    producers, consumers = WAYS[layer, row.title]
    assert [w for w in producers if w not in made] == []
    assert [w for w in consumers if w not in read] == []


def test_symbols_of_the_document():
    for layer, row in ROWS:
        shown = formulas(layer)
        for symbol in row.symbols.replace(" = TopK(I, k)", "").split(", "):
            if symbol.isascii() and "FP8" not in symbol and "/" not in symbol:
                assert symbol in shown[row.title][1], (row.title, symbol)


def test_what_training_makes_of_the_tables():
    for table in GENERATE.TABLES:
        found = GENERATE.numbers(table, Phase.TRAIN)
        lifetimes = {e.lifetime for e in found.entries}
        assert not lifetimes & {Lifetime.CACHE, Lifetime.STATE, Lifetime.WINDOW}
        assert found.peak["M_persistent_cache_or_state"].bytes == 0
    gdn = GENERATE.numbers(GENERATE.GDN, Phase.TRAIN)
    assert gdn.entry("recurrent_state").lifetime is Lifetime.BOUNDARY
    assert gdn.entry("conv_state_q").held is Held.VIEW


def test_the_documents_cache_of_a_layer_is_exact():
    found = GENERATE.numbers(GENERATE.MHA, Phase.DECODE)
    assert found.peak["M_persistent_cache_or_state"].bytes == 4_294_967_296
    dsa = GENERATE.numbers(GENERATE.DSA, Phase.DECODE)
    a_token = 128 + 1 + (512 + 64) * 2  # e4m3 key, its ue8m0 scale, bf16 latent and RoPE key
    assert dsa.bytes_of(Lifetime.CACHE) == 61 * 65536 * a_token


def test_the_joint_comparison_answers_every_question():
    rows = GENERATE.compare([GENERATE.attention, GENERATE.sparse_mla, GENERATE.gated_delta_rule])
    answers = {row[0]: row[1:] for row in rows}
    assert list(answers) == list(GENERATE.QUESTIONS) and len(GENERATE.JOINT) == len(rows)
    grows = answers["Grows with the context"]
    assert [a.partition(":")[0] for a in grows] == ["yes", "yes", "no"]
    assert answers["Main read of a decode step"] == (
        "all of k, v", "all of ki; the 2048 selected rows of c, r", "s, of fixed size",
    )  # fmt: skip
    assert "sum over Hi" in answers["Ulysses (heads)"][1]
    assert "global top-k" in answers["Context parallelism"][1]
    assert "prefix scan" in answers["Context parallelism"][2]


def test_docs_are_current(capsys):
    assert GENERATE.main([]) == 0, capsys.readouterr().err


def test_a_stale_page_is_reported(monkeypatch, tmp_path, capsys):
    (tmp_path / "ledger.md").write_text((DOCS / "ledger.md").read_text(encoding="utf-8"))
    (tmp_path / "declare.md").write_text("```python\nprint(3)\n```\n\n```text\n4\n```\n")
    monkeypatch.setattr(GENERATE, "DOCS", tmp_path)
    monkeypatch.setattr(GENERATE, "TABLES", (GENERATE.MHA,))
    assert GENERATE.main([]) == 1
    assert {"mha_decode.svg", "declare.md"} <= set(
        re.findall(r"docs/(\S+)", capsys.readouterr().err)
    )
    assert GENERATE.main(["--write"]) == 0 and GENERATE.main([]) == 0
    (tmp_path / "ledger.md").write_text("nothing")
    with pytest.raises(ValueError, match="no markers"):
        GENERATE.main([])


MODULES = {
    "mha_decode": lambda: ac.nn.MultiHeadAttention(48, 6, 2, 16),
    "dsa_layer": lambda: ac.nn.SparseLatentAttention(
        48, 4, query_rank=24, latent=32, rope_dim=16, nope_dim=16, value_dim=8, index_heads=2,
        index_dim=32,
    ),
    "gdn_layer": lambda: ac.nn.GatedDeltaNet(48, 2, 4, 16, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_bytes_are_those_of_the_module(name):
    """What ``attncc.nn`` allocates: parameters, histories and their scales, states, windows."""
    module = MODULES[name]()
    sizes = {a: n for a, n in module.sizes.items() if a not in ("DK", "DV")}
    found = ac.ledger(module, {**sizes, "B": 3, "S": 20})
    kept = module.allocate(3, 20)
    held = [t for c in kept.caches.values() for t in (*c.tensors.values(), *c.scales.values())]
    held += [p.pool for p in kept.pools.values()]
    lifetimes = (Lifetime.CACHE, Lifetime.STATE, Lifetime.WINDOW)
    assert found.bytes_of(*lifetimes) == sum(t.numel() * t.element_size() for t in held) > 0
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    assert found.peak["M_model_state"].bytes == weights
