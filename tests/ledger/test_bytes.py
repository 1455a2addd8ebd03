"""Bytes: the formula that is printed, the number beside it, and what is really allocated agree."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import attncc as ac
from attncc.dsl.errors import ArgumentError, EvictionError, SizeError, UnknownSizeError
from attncc.dsl.ir import Lifetime
from attncc.dsl.ledger import Growth, Held, Phase
from attncc.dsl.library.layers import LAYERS
from attncc.runtime.ledger import ledger
from tests.examples import examples

KEEPING = [
    "attention", "sliding_window", "mla", "sparse_mla", "gated_delta_rule", "gated_delta_product",
    "short_conv", "hgrn", "kda", "gated_delta_net",
]  # fmt: skip
PLAIN = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS = {"D": 128, "E": 64, "Di": 64, "R": 128, "P": 64}


def evaluated(text, sizes):
    """The printed formula in Python's own whole numbers."""
    names = {"Min": min, "ceiling": math.ceil, **sizes}
    return eval(text, {"__builtins__": {}}, names)


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def allocated(op, sizes, **options):
    """Bytes of histories and their scales, and of states and windows, as they are allocated."""
    held = op.caches(sizes=sizes, device="meta", **options)
    cache = held.cache
    rows = getattr(cache, "tensors", None) or getattr(cache, "pages", None) or {}
    scales = getattr(cache, "scales", None) or {}
    pools = [pool.pool for pool in held.states.values()]
    return bytes_of([*rows.values(), *scales.values()]), bytes_of(pools)


@st.composite
def calls(draw):
    """An op, sizes of its axes, and how what it keeps is stored."""
    op = getattr(ac.ops, draw(st.sampled_from(KEEPING)))
    axes = {a for t in op.declaration.tensors for a in t.pattern.axes} - {"T", "S"}
    sizes = {a: draw(st.integers(1, 5)) for a in sorted(axes)}
    if "N" in sizes:
        sizes["N"] = 2
    sizes["W"] = draw(st.integers(2, 8)) if "W" in axes else 2
    sizes = {a: n for a, n in sizes.items() if a in axes}
    capacity = draw(st.integers(0, 40))
    page = draw(st.sampled_from([None, 1, 4, 16]))
    quantised = draw(st.booleans())
    cached = any(t.lifetime is Lifetime.CACHE for t in op.declaration.tensors)
    if quantised and cached:
        sizes |= {a: n for a, n in BLOCKS.items() if a in sizes}
        block = draw(st.sampled_from([None, 32, 64]))
        dtype = ac.Quantised(block=block, scale=draw(st.sampled_from(["fp32", "ue8m0"])))
    else:
        dtype = draw(st.sampled_from(PLAIN))
    return op, sizes, capacity, page, dtype, draw(st.sampled_from(PLAIN))


@examples(60)
@given(calls())
def test_formula_number_and_allocation_agree(call):
    op, sizes, capacity, page, dtype, state_dtype = call
    given_sizes = {**sizes, "S": capacity, "w": 3}
    words = {n for t in op.declaration.tensors for n in (t.name,) if t.scalar}
    given_sizes = {a: n for a, n in given_sizes.items() if a != "w" or "w" in words}
    found = op.ledger(given_sizes, page=page, dtype=dtype, state_dtype=state_dtype)
    for entry in found.entries:
        assert evaluated(entry.size.text, found.sizes | {"T": 1}) == entry.size.bytes, entry.name
        assert entry.read is not None
        assert evaluated(entry.read.text, found.sizes | {"T": 1}) == entry.read.bytes, entry.name
    options = {"capacity": capacity, "page": page, "dtype": dtype, "state_dtype": state_dtype}
    histories, fixed = allocated(op, sizes, **options)
    assert found.bytes_of(Lifetime.CACHE) == histories
    assert found.bytes_of(Lifetime.STATE, Lifetime.WINDOW) == fixed
    assert found.peak["M_persistent_cache_or_state"].bytes == histories + fixed
    assert sum(e.bytes for e in found.kept()) == ac.bytes_of(op, sizes=sizes, **options).total


def test_the_documents_example_is_exact():
    sizes = {"B": 1, "Hkv": 32, "G": 1, "D": 128, "E": 128, "S": 8192}
    found = ac.ops.attention.ledger(sizes, "decode", layers=32)
    assert found.peak["M_persistent_cache_or_state"].bytes == 4_294_967_296
    assert found.bytes_of(Lifetime.CACHE) == 4_294_967_296 == 4 * 1024**3
    one = ac.ops.attention.ledger(sizes, "decode")
    assert one.bytes_of(Lifetime.CACHE) * 32 == 4_294_967_296
    assert found.read == 32 * one.read > 4_294_967_296
    grouped = ac.ops.attention.ledger({**sizes, "Hkv": 8, "G": 4}, layers=32)
    assert grouped.bytes_of(Lifetime.CACHE) == 1024**3


def test_what_a_token_adds():
    sizes = {"B": 7, "Hi": 64, "Di": 128, "H": 128, "R": 512, "P": 64, "S": 4096}
    found = ac.ops.sparse_mla.ledger(sizes, page=64)
    assert [found.token_bytes(n) for n in ("ki", "c", "r")] == [256, 1024, 128]
    with pytest.raises(ArgumentError, match="asked of a history"):
        found.token_bytes("qi")
    with pytest.raises(ArgumentError, match="asked of a history"):
        ac.ops.sparse_mla.ledger().token_bytes("c")
    with pytest.raises(ArgumentError, match="no such object"):
        found.token_bytes("q")


def test_selected_rows_are_read_and_the_others_kept():
    sizes = {"B": 2, "Hi": 4, "Di": 128, "H": 8, "R": 512, "P": 64, "S": 100_000}
    found = ac.ops.sparse_mla.ledger(sizes)
    c, index_keys = found.entry("c"), found.entry("ki")
    assert c.size.bytes == 2 * 100_000 * 512 * 2
    assert c.read.bytes == 2 * 2048 * 512 * 2
    assert index_keys.read.bytes == index_keys.size.bytes == 2 * 100_000 * 128 * 2
    short = ac.ops.sparse_mla.ledger({**sizes, "S": 100})
    assert short.entry("c").read.bytes == short.entry("c").size.bytes == 2 * 100 * 512 * 2


def test_a_window_bounds_what_is_read_and_lets_older_rows_go():
    sizes = {"B": 1, "Hkv": 2, "G": 1, "D": 64, "E": 64, "S": 10_000, "w": 512}
    found = ac.ops.sliding_window.ledger(sizes)
    assert found.entry("k").size.bytes == 10_000 * 2 * 64 * 2
    assert found.entry("k").read.bytes == 512 * 2 * 64 * 2
    several = ac.ops.sliding_window.ledger({**sizes, "T": 4})
    assert several.entry("k").read.bytes == 515 * 2 * 64 * 2
    kept = ac.ops.sliding_window.ledger(sizes, keep={"k": 512, "v": 600})
    assert kept.entry("k").size.bytes == 512 * 2 * 64 * 2
    assert kept.entry("v").size.bytes == 600 * 2 * 64 * 2


def test_what_is_fused_takes_no_memory():
    sizes = {"B": 1, "Hkv": 1, "G": 1, "D": 8, "E": 8, "T": 512}
    found = ac.ops.attention.ledger(sizes, "prefill")
    scores = found.entry("score")
    assert scores.held is Held.FUSED and scores.bytes == 0
    assert scores.size.bytes == 512 * 512 * 4
    assert found.entry("partials of o").held is Held.FUSED
    split = ac.ops.attention.ledger({**sizes, "T": 1, "S": 512, "splits": 4})
    assert split.entry("partials of o").bytes == 4 * (8 + 2) * 4
    assert "partials of o" in split.peak["M_operator_workspace"].of


def test_a_peak_counted_by_hand():
    found = ac.ops.attention.ledger({"B": 1, "Hkv": 2, "G": 3, "D": 4, "E": 8, "T": 5}, "train", 2)
    q, k, v, o, lse = 5 * 6 * 4 * 2, 5 * 2 * 4 * 2, 5 * 2 * 8 * 2, 5 * 6 * 8 * 2, 5 * 6 * 4
    bytes_by_item = {i.name: i.bytes for i in found.peak.items}
    assert bytes_by_item["M_saved_activation"] == 2 * (q + k + v + o + lse)
    assert bytes_by_item["M_operator_workspace"] == q + k + v + o  # their gradients
    assert bytes_by_item["M_persistent_cache_or_state"] == 0
    assert bytes_by_item["M_comm_buffer"] == 0
    blocks = [q, k, v, o, lse] * 2 + [q, k, v, o]
    assert bytes_by_item["M_allocator_margin"] == sum(-b % 512 for b in blocks)
    assert found.peak.bytes == sum(bytes_by_item.values())


def test_recomputation_saves_what_comes_in_and_makes_one_layer_again():
    sizes = {"B": 1, "Hkv": 2, "G": 3, "D": 4, "E": 8, "T": 5}
    q, k, v, o, lse = 5 * 6 * 4 * 2, 5 * 2 * 4 * 2, 5 * 2 * 8 * 2, 5 * 6 * 8 * 2, 5 * 6 * 4
    found = ac.ops.attention.ledger(sizes, "train", 10, recompute=True)
    assert found.peak["M_saved_activation"].bytes == 10 * (q + k + v)
    assert found.peak["M_saved_activation"].of == ("q", "k", "v")
    assert found.peak["M_operator_workspace"].bytes == (q + k + v + o) + (o + lse)
    sizes["S"] = 9
    plain = ac.ops.attention.ledger(sizes, "decode").peak
    assert ac.ops.attention.ledger(sizes, "decode", recompute=True).peak == plain


def test_the_margin_holds_tables_and_what_blocks_are_rounded_up_by():
    sizes = {"B": 3, "Hkv": 1, "G": 1, "D": 4, "E": 4, "S": 100}
    found = ac.ops.attention.ledger(sizes, layers=2, page=16)
    rows = 3 * 112 * 4 * 2  # seven pages of 16
    blocks = [rows] * 4 + [3 * 4 * 2] * 2  # k and v of two layers, q and o of one
    tables = 2 * (512 + 512)  # lengths and block tables, each a block of its own
    assert found.peak["M_allocator_margin"].bytes == tables + sum(-b % 512 for b in blocks)
    assert found.entry("block_table").bytes == 2 * 3 * 7 * 4
    assert {"lengths", "block_table"} <= {e.name for e in found.kept()}
    large = ac.ops.attention.ledger({**sizes, "S": 100_000})
    rows = 3 * 100_000 * 4 * 2  # above 1 MiB: multiples of 2 MiB
    expected = 512 + 2 * (-rows % (2 << 20)) + 2 * (-24 % 512)
    assert large.peak["M_allocator_margin"].bytes == expected


def test_parameters_in_training_have_gradients_and_an_optimizer():
    sizes = {"B": 1, "T": 3, "D": 64, "W": 4}
    weights = (64 * 4 + 64) * 2
    plain = ac.ops.short_conv.ledger(sizes, "prefill", layers=3)
    assert plain.peak["M_model_state"].bytes == 3 * weights
    train = ac.ops.short_conv.ledger(sizes, "train", layers=3, optimizer=8)
    assert train.peak["M_model_state"].bytes == 3 * (2 * weights + 8 * (64 * 4 + 64))
    assert {"dw", "dbias"} & set(train.peak["M_operator_workspace"].of) == set()


def test_a_margin_for_fragments_and_a_buffer_for_communication():
    sizes = {"B": 1, "Hkv": 1, "G": 1, "D": 256, "E": 256, "S": 4096}
    plain = ac.ops.attention.ledger(sizes)
    more = ac.ops.attention.ledger(sizes, margin=0.1, comm={"attention": 1000})
    rest = sum(i.bytes for i in plain.peak.items[:-1])
    assert more.peak["M_comm_buffer"].bytes == 1000
    assert more.peak.bytes - plain.peak.bytes == 1000 + int(0.1 * (rest + 1000))


def test_workspace_of_a_plan_and_buffers_count_where_they_are():
    sizes = {"B": 1, "Hkv": 1, "G": 1, "D": 4, "E": 4, "T": 8}
    plain = ac.ops.attention.ledger(sizes, "train")
    more = ac.ops.attention.ledger(
        sizes, "train", comm={"attention": 100}, workspace={"attention": 4096}
    )
    assert more.peak["M_comm_buffer"].bytes == 100
    workspace = "M_operator_workspace"
    assert more.peak[workspace].bytes == plain.peak[workspace].bytes + 4096
    with pytest.raises(ArgumentError, match="no such node"):
        ac.ops.attention.ledger(sizes, "prefill", comm={"ring": 1})


def test_scores_of_a_selection_lie_in_memory_for_as_many_tokens_as_there_is_room():
    sizes = {"B": 1, "Hi": 1, "Di": 8, "H": 1, "R": 8, "P": 8, "S": 3000}
    decode = ac.ops.sparse_mla.ledger(sizes)
    assert decode.entry("index").held is Held.MEMORY and decode.entry("index").bytes == 3000 * 4
    assert "index" in decode.peak["M_operator_workspace"].of
    prefill = ac.ops.sparse_mla.ledger({**sizes, "T": 3000, "room": 1 << 20}, "prefill")
    assert prefill.entry("index").bytes == 1 << 20
    train = ac.ops.sparse_mla.ledger({**sizes, "T": 3000}, "train")
    assert "index" not in train.peak["M_saved_activation"].of
    assert "J" in train.peak["M_saved_activation"].of and "dJ" not in {
        e.name for e in train.entries
    }


def test_a_history_in_blocks_grows():
    @ac.op(out="B T H D")
    def blocked(q=ac.Activation("B T H D"), k=ac.Cache("B (Sb C) H D")):
        summed = ac.sum(ac.dot(q, k, "D"), "C")
        return ac.dot(ac.softmax(summed, "Sb"), ac.sum(k, "C"), "Sb")

    found = blocked.ledger({"B": 1, "H": 2, "D": 4, "Sb": 10, "C": 16})
    assert found.entry("k").bytes == 160 * 2 * 4 * 2
    assert found.entry("k").growth is Growth.LINEAR


def test_without_sizes_there_are_formulas_only():
    found = ac.ops.attention.ledger()
    assert found.entry("k").size.bytes is None
    assert found.entry("k").size.text == "B * S * Hkv * D * 2"
    assert found.peak.bytes is None and "B * S * Hkv * D * 2" in found.text()


@pytest.mark.parametrize(
    ("sizes", "options", "kind", "says"),
    [
        ({"B": 1, "Hkv": 2}, {}, UnknownSizeError, "axis D G"),
        ({"B": 1, "Q": 2}, {}, ArgumentError, "no such axis"),
        ({"B": 1.5}, {}, ArgumentError, "whole number"),
        ({"B": -1}, {}, ArgumentError, "whole number"),
        (None, {"layers": 0}, ArgumentError, "number of layers"),
        (None, {"phase": "backward"}, ArgumentError, "prefill, decode, train"),
        (None, {"page": 0}, ArgumentError, "a page has rows"),
        (None, {"keep": {"z": 1}}, ArgumentError, "no such object"),
        (None, {"keep": {"q": 1}}, ArgumentError, "rows are kept of a history"),
        (None, {"dtype": {"q": ac.Quantised()}}, ArgumentError, "only histories"),
        (None, {"dtype": torch.float64}, ac.AttnccError, "no such dtype"),
        (None, {"dtype": torch.int32}, ac.AttnccError, "argument dtype: no dtype of a call"),
        (None, {"state_dtype": torch.int8}, ac.AttnccError, "argument state_dtype: no such dtype"),
        (None, {"page": 1.5}, ArgumentError, "a page has rows"),
        ({"chunk": 0}, {}, ArgumentError, "axis chunk: a size is a whole number"),
        (None, {"given": ["q"]}, ArgumentError, "argument q: no such optional input"),
        (None, {"margin": -0.5}, ArgumentError, "argument margin: a number of bytes"),
        (None, {"comm": {"attention": -1}}, ArgumentError, "argument attention: a number of"),
        (None, {"pages": 1}, ArgumentError, "no such option"),
    ],
)
def test_mistakes_are_named(sizes, options, kind, says):
    with pytest.raises(kind, match=says):
        ac.ops.attention.ledger(sizes, **options)


def test_sizes_that_the_declaration_or_the_phase_fixes():
    sizes = {"B": 1, "H": 1, "Gq": 1, "Gv": 1, "K": 4, "V": 4}
    three = ac.ops.gated_delta_product.ledger({**sizes, "N": 3})
    assert three.entry("k").shape == ("B", "3", "H*Gq", "K")
    assert three.entry("k").size.bytes == 3 * 4 * 2
    with pytest.raises(SizeError, match="the batch's own tokens"):
        ac.ops.attention.ledger({"T": 4, "S": 5}, "train")
    with pytest.raises(ArgumentError, match="an op or a layer"):
        ledger(3)
    block = {"B": 1, "Hkv": 1, "G": 1, "D": 48, "E": 64, "S": 4}
    with pytest.raises(ArgumentError, match="does not divide"):
        ac.ops.attention.ledger(block, dtype=ac.Quantised(block=32))


def test_a_size_that_is_missing_or_another_is_not_filled_in():
    sizes = {"B": 1, "Hkv": 1, "G": 1, "D": 8, "E": 8}
    with pytest.raises(UnknownSizeError, match="axis S"):
        ac.ops.attention.ledger({**sizes, "T": 4}, "decode")
    assert ac.ops.attention.ledger({**sizes, "T": 4}, "prefill").entry("k").bytes == 4 * 8 * 2
    with pytest.raises(SizeError, match=r"axis J: .*expected 2048, found 100"):
        ac.ops.sparse_mla.ledger({"J": 100})


def test_rows_that_a_mask_or_a_running_sum_still_needs_are_not_dropped():
    def near():
        return ac.index("T") - ac.index("S") < 10

    @ac.op(out="B T E")
    def far(q=ac.Activation("B T D"), k=ac.Cache("B S D"), v=ac.Cache("B S E")):
        seen = (ac.index("S") + 5 <= ac.index("T")) & near()
        return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=seen), v, "S")

    @ac.op(out="B T E")
    def summed(q=ac.Activation("B T"), f=ac.Cache("B S"), v=ac.Cache("B S E")):
        return ac.dot(ac.softmax(q * ac.cumsum(f, "S"), "S", where=ac.causal & near()), v, "S")

    with pytest.raises(EvictionError, match="at least 10 rows, found 9 rows"):
        far.ledger(keep={"k": 9})  # five rows are seen, of the last ten
    assert far.ledger(keep={"k": 10}).entry("k").size.text == "B * Min(10, S) * D * 2"
    with pytest.raises(EvictionError, match="every row"):
        summed.ledger(keep={"f": 10})  # a sum from the beginning


def test_a_history_in_blocks_has_no_pages():
    @ac.op(out="B T D")
    def blocked(q=ac.Activation("B T D"), k=ac.Cache("B (Sb C) D")):
        return q * ac.sum(ac.sum(k, "C"), "Sb")

    with pytest.raises(ArgumentError, match="argument k: a history in blocks is not paged"):
        blocked.ledger(page=16)


def test_a_window_has_a_row_and_a_layers_ops_are_given_what_it_binds():
    with pytest.raises(ArgumentError, match="axis W: a size is a whole number"):
        ac.ops.short_conv.ledger({"B": 1, "D": 4, "W": 0})
    assert ac.ops.short_conv.ledger({"B": 1, "D": 4, "W": 1}).entry("win").bytes == 0
    with pytest.raises(ArgumentError, match="a layer says itself"):
        ac.ledger(LAYERS["mha_decode"], given=["g"])


def test_scales_belong_to_rows():
    with pytest.raises(ArgumentError, match="argument document: only histories"):
        ac.ops.document_attention.ledger(dtype=ac.Quantised())
    layer = LAYERS["dsa_layer"]  # its index has scales of its own
    names = {e.name for e in ac.ledger(layer, dtype=ac.Quantised()).entries if "scales" in e.name}
    assert names == {"kv_cache.scales", "k_rope_cache.scales"}


def test_names_that_look_like_gradients_are_counted():
    @ac.op(scan="T", out="B T D")
    def gated(dw=ac.Activation("B T D"), w=ac.Param("D"), s=ac.State("B D")):
        s = w * s + dw
        return s, s

    found = gated.ledger({"B": 1, "T": 4, "D": 8}, "train")
    assert "dw" in found.peak["M_saved_activation"].of


def test_a_state_in_training_is_kept_where_chunks_begin():
    sizes = {"B": 2, "T": 130, "Hk": 3, "G": 1, "K": 8, "V": 16}
    found = ac.ops.gated_delta_rule.ledger(sizes, Phase.TRAIN)
    assert found.entry("s").lifetime is Lifetime.BOUNDARY
    assert found.entry("s").bytes == 3 * (2 * 3 * 8 * 16 * 4)  # 130 tokens: three chunks of 64
    finer = ac.ops.gated_delta_rule.ledger({**sizes, "chunk": 16}, "train")
    assert finer.entry("s").bytes == 9 * (2 * 3 * 8 * 16 * 4)
