"""Complete layers against the same weights in fp64: whole, from caches, packed, cut anywhere."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl.errors import (
    ArgumentError,
    BackendError,
    CacheError,
    CacheInTrainingError,
    DeviceError,
    DtypeError,
    RankError,
    RefusedError,
    SizeError,
    UnknownSizeError,
)
from attncc.dsl.layers import NodeKind
from attncc.dsl.library.layers import COMPOSITIONS
from attncc.runtime.nn.nodes import _rotations as rotations
from tests.nn.plain import SELECTED, Shape, double, gradients, module, whole
from tests.strategies import cuts
from tests.tolerance import assert_close

KINDS = ("attention", "delta", "sparse")
SMALL = Shape(width=40, heads=2, group=3, dim=8)
DTYPES = [torch.float32, torch.bfloat16]


def hidden(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, SMALL.width, generator=g).to(dtype)


@pytest.fixture(autouse=True)
def _no_grad(request: pytest.FixtureRequest) -> None:
    """Inference, but for the tests of gradients."""
    torch.set_grad_enabled("gradients" in request.node.name)
    request.addfinalizer(lambda: torch.set_grad_enabled(True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_sequence(kind: str, dtype: torch.dtype) -> None:
    layer, x = module(kind, SMALL, dtype), hidden(2, 70, dtype=dtype)
    exact, rough = whole(kind, layer, x, SMALL)
    assert_close(layer(x), exact, rough, dtype)


def test_sixteen_bits_where_every_row_is_selected() -> None:
    """In longer sequences a rounded index selects other rows, and the bound is as wide."""
    layer, x = module("sparse", SMALL, torch.bfloat16), hidden(8, SELECTED, dtype=torch.bfloat16)
    exact, rough = whole("sparse", layer, x, SMALL)
    assert_close(layer(x), exact, rough, torch.bfloat16)
    assert float((rough - exact).abs().max()) < 0.03 * float(exact.abs().max())


@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (3, 1)])
def test_numbers_of_heads(heads: tuple[int, int]) -> None:
    for kind in KINDS:
        s = Shape(40, *heads, 8)
        layer, x = module(kind, s, torch.float32), hidden(1, 12)
        exact, rough = whole(kind, layer, x, s)
        assert_close(layer(x), exact, rough, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_decode_of_one_and_of_several_tokens(
    kind: str, page: int | None, dtype: torch.dtype
) -> None:
    layer, x = module(kind, SMALL, dtype), hidden(2, 60, dtype=dtype)
    exact, rough = whole(kind, layer, x, SMALL)
    kept = layer.allocate(2, 64, page=page)
    outs = [layer(x[:, :45], kept=kept), layer.decode(x[:, 45:50], kept)]
    outs += [layer.decode(x[:, i : i + 1], kept) for i in range(50, 60)]
    assert_close(torch.cat(outs, 1), exact, rough, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_one_op_for_several_nodes_or_each_node_by_itself(kind: str) -> None:
    x, outs = hidden(2, 20), []
    exact = None
    for fuse in (True, False):
        layer = module(kind, SMALL, torch.float32, fuse=fuse)
        exact, rough = whole(kind, layer, x, SMALL)
        kept = layer.allocate(2, 32)
        outs += [torch.cat([layer(x[:, :9], kept=kept), layer.decode(x[:, 9:], kept)], 1)]
        assert_close(outs[-1], exact, rough, torch.float32, f"fuse={fuse}")


def test_decode_of_more_sequences_than_are_normed_in_the_step() -> None:
    layer, x = module("delta", SMALL, torch.float32), hidden(9, 12)
    exact, rough = whole("delta", layer, x, SMALL)
    kept = layer.allocate(9)
    outs = [layer(x[:, :9], kept=kept), layer.decode(x[:, 9:], kept)]
    assert_close(torch.cat(outs, 1), exact, rough, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_stand_at_their_own_positions(kind: str) -> None:
    layer, x = module(kind, SMALL, torch.float32), hidden(3, 20)
    exact, rough = whole(kind, layer, x, SMALL)
    first, more = (0, 7, 20, 2), (5, 1, 0, 8)
    own = [x[0], x[1], x[2], x[0]]
    want, near = ([t[0], t[1], t[2], t[0]] for t in (exact, rough))

    def pack(rows: list[torch.Tensor], start: tuple[int, ...], n: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([r[a : a + m] for r, a, m in zip(rows, start, n, strict=True)])

    zero = (0, 0, 0, 0)
    cu = torch.tensor([0, *itertools.accumulate(first)])
    y = layer(pack(own, zero, first), cu_seqlens=cu)
    assert_close(y, pack(want, zero, first), pack(near, zero, first), torch.float32)

    owner = ac.nn.LayerOwner(layer, slots=4, pages=12, page=8)
    handles = [owner.add() for _ in first]
    for start, counts in ((zero, first), (first, more)):
        cu = torch.tensor([0, *itertools.accumulate(counts)])
        with owner.append(handles, counts) as kept:
            y = layer(pack(own, start, counts), kept=kept, cu_seqlens=cu)
        assert_close(y, pack(want, start, counts), pack(near, start, counts), torch.float32)


@given(cuts(24, 4), st.sampled_from(KINDS), st.sampled_from([None, 4]))
@settings(max_examples=20)
def test_a_layer_cut_anywhere(pieces: list[int], kind: str, page: int | None) -> None:
    with torch.no_grad():
        layer, x = module(kind, SMALL, torch.float32), hidden(2, 24)
        exact, rough = whole(kind, layer, x, SMALL)
        kept = layer.allocate(2, 24, page=page)
        outs = [layer(part, kept=kept) for part in x.split(pieces, 1)]
        assert_close(torch.cat(outs, 1), exact, rough, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_a_whole_sequence(kind: str) -> None:
    layer, x = module(kind, SMALL, torch.float32), hidden(2, 10).requires_grad_()
    weights = dict(layer.named_parameters())
    wanted = (x, *weights.values())
    found = torch.autograd.grad(layer(x).square().sum(), wanted, allow_unused=True)

    exact = gradients(kind, double(weights), x.double(), SMALL)
    rough = gradients(kind, weights, x, SMALL)
    for name, got, want, near in zip(("x", *weights), found, exact, rough, strict=True):
        if want is None:  # what is selected has no gradient, nor what selects
            assert got is None and ("index" in name or name == "weights_proj_weight")
        else:
            assert_close(got, want, near, torch.float32, name)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_refused_where_something_is_kept_or_a_kernel_is_asked_for(kind: str) -> None:
    layer, x = module(kind, SMALL, torch.float32), hidden(1, 3)
    kept = layer.allocate(1, 8)
    with pytest.raises(CacheInTrainingError, match="a cache in a call that autograd records"):
        layer(x, kept=kept)
    assert kept.lengths is None or not kept.lengths.any()
    with torch.no_grad():
        layer(x, kept=kept)
    with pytest.raises(BackendError, match="only the torch lowering has a backward"):
        module(kind, SMALL, torch.float32, backend="triton")(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_goes_into_another_module(kind: str) -> None:
    one, other, x = *(module(kind, SMALL, torch.float32) for _ in range(2)), hidden(1, 9)
    for p in other.parameters():
        p.zero_()
    assert not torch.equal(one(x), other(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize("kind", ["attention", "delta"])
def test_a_layer_is_one_graph(kind: str) -> None:
    layer, x = module(kind, SMALL, torch.float32), hidden(2, 12)
    torch._dynamo.reset()
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    exact, rough = whole(kind, layer, x, SMALL)
    assert_close(traced(x), exact, rough, torch.float32)
    kept = layer.allocate(2, 16, page=4)
    outs = [traced(x[:, :9], kept=kept)]
    outs += [traced(x[:, i : i + 1], kept=kept, phase="decode") for i in range(9, 12)]
    assert_close(torch.cat(outs, 1), exact, rough, torch.float32)


def test_sizes_that_are_missing_or_do_not_fit() -> None:
    with pytest.raises(UnknownSizeError, match="axis DV: a size is missing"):
        ac.nn.LayerModule(COMPOSITIONS["gdn_layer"], {"M": 8, "Hk": 1, "G": 1, "K": 4, "W": 4})
    sizes = {"M": 8, "Hk": 1, "G": 1, "K": 4, "V": 4, "W": 4}
    with pytest.raises(SizeError, match="q_split reshapes other numbers of elements"):
        ac.nn.LayerModule(COMPOSITIONS["gdn_layer"], {**sizes, "DK": 5})
    with pytest.raises(SizeError, match="heads do not divide into groups"):
        ac.nn.MultiHeadAttention(32, 6, 4)
    layer = module("attention", SMALL, torch.float32)
    with pytest.raises(RankError, match="hidden_states: wrong number of axes"):
        layer(hidden(3))
    with pytest.raises(RankError, match="hidden_states: wrong number of axes"):
        layer(hidden(1, 3), cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(SizeError, match="hidden_states, axis M: the input has another size"):
        layer(hidden(1, 3)[..., :-1])


def test_a_kind_of_node_that_no_module_runs() -> None:
    @ac.layer
    def masked(n):
        x = n.input("x", "B T M")
        return n.same(NodeKind.MASK, "hide", x, "y")

    with pytest.raises(RefusedError, match="no module runs a node of kind mask"):
        ac.nn.LayerModule(masked, {"M": 4})


@pytest.mark.parametrize("numbers", [{"gate_first": 1.0}, {"eps": 0.1}])
def test_an_op_for_several_nodes_has_their_settings_or_is_not_taken(numbers: object) -> None:
    options = {"eps": 1e-3, "settings": {"norm": numbers}}
    layer, x = module("delta", SMALL, torch.float32, **options), hidden(2, 12)
    whole_sequence = layer(x)
    assert not torch.allclose(whole_sequence, module("delta", SMALL, torch.float32)(x), atol=1e-3)
    kept = layer.allocate(2)
    outs = [layer(x[:, :9], kept=kept), layer.decode(x[:, 9:], kept)]
    torch.testing.assert_close(torch.cat(outs, 1), whole_sequence)


def test_the_settings_of_a_call_join_those_of_the_layer() -> None:
    about = {
        "query_rank": 24, "latent": 16, "rope_dim": 4, "nope_dim": 8, "value_dim": 8,
        "index_heads": 2, "index_dim": 16, "dtype": torch.float32,
    }  # fmt: skip
    layer = ac.nn.SparseLatentAttention(
        40, 2, scale=0.0, settings={"index_q_rope": {"base": 5e5}}, **about
    )
    assert layer.settings["index_q_rope"] == {"rotated": 4, "base": 5e5}
    assert layer.settings["attend"]["scale"] == 0.0, "uniform attention, not the usual scale"


def test_what_is_kept_for_another_layer_is_refused() -> None:
    layer, x = module("attention", SMALL, torch.float32), hidden(1, 3)
    for other in (module("delta", SMALL, torch.float32).allocate(1), ac.nn.Kept({}, {})):
        with pytest.raises(CacheError, match="what is kept is another layer's"):
            layer(x, kept=other)


def test_another_phase_dtype_or_device_is_refused() -> None:
    layer, x = module("attention", SMALL, torch.float32), hidden(1, 3)
    with pytest.raises(ArgumentError, match="phase: no such phase"):
        layer(x, phase="decoding")
    with pytest.raises(DtypeError, match="hidden_states: not the parameters' dtype"):
        layer(x.bfloat16())
    with pytest.raises(DeviceError, match="arguments on different devices"):
        layer(x.to("meta"))


def test_positions_without_a_history_are_refused_where_something_is_kept() -> None:
    @ac.layer
    def turned(n):
        h, at = n.input("x", "B T M"), n.positions()
        k = n.project("k_proj", h, "k_projected", "B T H K")
        k = n.same(NodeKind.ROPE, "turn", k, "k", inputs=[at])
        v = n.project("v_proj", h, "v", "B T H V")
        o = n.object("o", "B T H V")
        s = n.state("s", "B H K V")
        n.op("recur", ac.ops.linear_attention, {"q": k, "k": k, "v": v, "s": s, "o": o})
        return n.project("out", o, "result", "B T M")

    sizes = {"M": SMALL.width, "H": 1, "K": 4, "V": 4}
    layer = ac.nn.LayerModule(turned, sizes, dtype=torch.float32)
    assert layer(hidden(1, 3)).shape == (1, 3, SMALL.width)
    with pytest.raises(RefusedError, match="says how many tokens came before"):
        layer(hidden(1, 3), kept=layer.allocate(1))


def test_an_export_leaves_nothing_behind() -> None:
    layer, x = module("attention", SMALL, torch.float32), hidden(1, 5)
    rotations.cache_clear()
    exported = torch.export.export(layer, (x,), strict=False).module()
    exact, rough = whole("attention", layer, x, SMALL)
    for found in (layer(x), exported(x)):
        assert_close(found, exact, rough, torch.float32)
