"""Every mistake of a call has its own error, raised before anything is written."""

import copy
import pickle

import pytest
import torch

import attncc as ac
from attncc.dsl import errors

GDR = ac.ops.gated_delta_rule


def delta(tokens=4, **changes):
    """Arguments of the gated delta rule, some of them replaced."""
    args = {
        "q": torch.randn(2, tokens, 3, 8),
        "k": torch.randn(2, tokens, 3, 8),
        "v": torch.randn(2, tokens, 6, 4),
        "g": -torch.rand(2, tokens, 6),
        "beta": torch.rand(2, tokens, 6),
    }
    return {**args, **changes}


def fails(kind, op=GDR, **kwargs):
    """The error of a call, checked for kind and for naming the op."""
    with pytest.raises(kind) as caught:
        op(**kwargs)
    error = caught.value
    assert type(error) is kind
    assert error.op == op.declaration.name
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return error


def test_a_missing_argument_is_named_with_its_declaration():
    args = delta()
    del args["v"]
    error = fails(errors.ArgumentError, **args)
    assert (error.argument, error.expected) == ("v", "[B T (Hk G) V]")
    assert "gated_delta_rule.py" in str(error)


def test_an_unknown_argument_is_named():
    assert fails(errors.ArgumentError, **delta(gate=torch.ones(1))).argument == "gate"


def test_a_reserved_option_that_is_not_offered_is_an_error_not_ignored():
    assert fails(errors.ArgumentError, **delta(mesh=1)).argument == "mesh"


def test_an_argument_given_twice_is_an_error():
    args = delta()
    with pytest.raises(errors.ArgumentError, match="given twice"):
        GDR(args["q"], **args)


def test_too_many_positional_arguments_are_counted():
    with pytest.raises(errors.ArgumentError, match="too many"):
        GDR(*([torch.ones(1)] * 9))


def test_a_number_where_a_tensor_is_wanted():
    error = fails(errors.ArgumentError, **delta(g=0.5))
    assert (error.argument, error.found) == ("g", "float")


def test_rank_names_the_pattern_and_the_shape():
    error = fails(errors.RankError, **delta(v=torch.randn(2, 4, 6)))
    assert error.argument == "v"
    assert "[B T (Hk G) V]" in error.expected
    assert "(2, 4, 6)" in error.found


@pytest.mark.parametrize(
    ("name", "shape", "axis", "expected"),
    [
        ("k", (2, 5, 3, 8), "T", "4 as in q"),
        ("k", (2, 4, 3, 9), "K", "8 as in q"),
        ("beta", (2, 4, 5), "(Hk G)", "6 as in q, v"),
        ("s", (3, 6, 8, 4), "B", "2 as in q"),
    ],
)
def test_unequal_sizes_name_the_axis_and_who_fixed_it(name, shape, axis, expected):
    error = fails(errors.SizeError, **delta(**{name: torch.randn(shape)}))
    assert (error.argument, error.axis, error.expected) == (name, axis, expected)


def test_a_group_its_head_count_does_not_divide():
    error = fails(errors.SizeError, **delta(v=torch.randn(2, 4, 7, 4), g=None, beta=None))
    assert (error.argument, error.axis, error.found) == ("v", "G", 7)


def test_an_axis_that_nothing_fixes_asks_for_sizes():
    @ac.op(scan="T", out="B T H V")
    def two(k=ac.Activation("B (T N) H K"), v=ac.Activation("B (T N) H V"), s=ac.State("B H K V")):
        for kj, vj in ac.unroll("N", k, v):
            s = s + kj * vj
        return s, ac.dot(s, kj, "K")

    k, v = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4)
    error = fails(errors.UnknownSizeError, two, k=k, v=v)
    assert error.axis in ("T", "N")
    _, o = two(k=k, v=v, sizes={"N": 3})
    exact = two.reference(k, v, sizes={"N": 3}).o
    assert o.shape == (1, 2, 1, 4)
    assert torch.allclose(o.double(), exact, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_dtypes_outside_the_contract(dtype):
    error = fails(errors.DtypeError, **delta(q=torch.ones(2, 4, 3, 8, dtype=dtype)))
    assert error.argument == "q"


def test_operands_of_a_contraction_share_one_dtype():
    error = fails(errors.DtypeError, **delta(k=torch.randn(2, 4, 3, 8).bfloat16()))
    assert (error.argument, error.expected, error.found) == ("k", "float32", "bfloat16")


def test_whole_numbers_are_taken_only_as_labels():
    error = fails(errors.DtypeError, **delta(v=torch.ones(2, 4, 6, 4, dtype=torch.int64)))
    assert error.argument == "v"


def test_devices_must_agree():
    error = fails(errors.DeviceError, **delta(k=torch.empty(2, 4, 3, 8, device="meta")))
    assert (error.argument, error.expected, error.found) == ("k", "cpu", "meta")


def test_the_innermost_axis_must_be_dense():
    strided = torch.randn(2, 4, 8, 3).transpose(2, 3)
    error = fails(errors.StrideError, **delta(q=strided))
    assert (error.argument, error.found) == ("q", "stride 3")


def test_an_output_may_not_lie_on_an_input_or_on_another_output():
    args = delta()
    before = {k: v.clone() for k, v in args.items()}
    assert fails(errors.OverlapError, **args, out=args["v"]).argument == "out[o]"
    memory = torch.empty(2 * 6 * 8 * 4)
    s = memory[: 2 * 6 * 8 * 4].view(2, 6, 8, 4)
    o = memory[:192].view(2, 4, 6, 4)
    assert fails(errors.OverlapError, **args, out={"s": s, "o": o}).found == "overlap with out[s]"
    assert all(torch.equal(before[k], args[k]) for k in args)


def test_a_final_state_may_not_lie_on_the_initial_one():
    args = delta(s=torch.zeros(2, 6, 8, 4))
    error = fails(errors.OverlapError, **args, out={"s": args["s"]})
    assert error.found == "overlap with s"


def test_outputs_are_checked_like_inputs():
    assert fails(errors.SizeError, **delta(), out=torch.empty(2, 5, 6, 4)).argument == "out[o]"
    assert fails(errors.DtypeError, **delta(), out=torch.empty(2, 4, 6, 4).half()).found
    assert fails(errors.ArgumentError, **delta(), out={"p": torch.empty(1)}).argument == "out[p]"


def test_given_outputs_are_the_ones_returned():
    o, s = torch.full((2, 4, 6, 4), torch.nan), torch.full((2, 6, 8, 4), torch.nan)
    result = GDR(**delta(), out={"o": o, "s": s})
    assert result.o is o and result.s is s
    assert o.isfinite().all() and s.isfinite().all()


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([1, 4], "start at 0"),
        ([0, 3, 2, 4], "not decrease"),
        ([0, 3], "end at the number of rows"),
        ([[0, 4]], "vector"),
        ([0.0, 4.0], "whole numbers"),
    ],
)
def test_cu_seqlens_are_checked(cu, message):
    args = {k: v[0] for k, v in delta().items()}
    error = fails(errors.SeqlensError, **args, cu_seqlens=torch.tensor(cu))
    assert message in error.message
    assert error.argument == "cu_seqlens"


def test_packed_histories_of_another_length_need_their_own_seqlens():
    q, k = torch.randn(4, 2, 8), torch.randn(6, 2, 8)
    cu = torch.tensor([0, 4])
    error = fails(errors.SizeError, ac.ops.attention, q=q, k=k, v=k, cu_seqlens=cu)
    assert error.axis == "S"
    dense = {"q": q[None], "k": k[None], "v": k[None]}
    error = fails(errors.ArgumentError, ac.ops.attention, **dense, cu_seqlens_k=cu)
    assert error.argument == "cu_seqlens_k"


def test_the_seqlens_of_a_cached_history_are_its_lengths():
    cache, cu = cache_for(), torch.tensor([0, 1, 4], dtype=torch.int32)
    packed = dict(zip("qkv", (t[0] for t in attention_args(4, batch=1)), strict=True))
    before = copy.deepcopy(cache)
    error = fails(
        errors.ArgumentError, ac.ops.attention, **packed, cache=cache, cu_seqlens=cu,
        cu_seqlens_k=cu,
    )  # fmt: skip
    assert error.argument == "cu_seqlens_k" and "cache.lengths" in str(error)
    assert torch.equal(cache.lengths, before.lengths)
    assert all(map(torch.equal, cache.tensors.values(), before.tensors.values()))
    flat = {name: t[0] if name != "s" else t for name, t in delta().items()}
    error = fails(errors.ArgumentError, cu_seqlens=cu, cu_seqlens_k=cu, **flat)
    assert error.argument == "cu_seqlens_k"


@pytest.mark.parametrize("name", ["return_lse", "return_partial"])
@pytest.mark.parametrize("value", [1, 0, "yes"])
def test_options_that_are_on_or_off(name, value):
    args = dict(zip("qkv", attention_args(2), strict=True))
    error = fails(errors.ArgumentError, ac.ops.attention, **args, **{name: value})
    assert error.argument == name and error.expected == "True or False"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sizes", 5, "a mapping of axes to sizes"), ("cu_seqlens", [0, 2], "a tensor"),
        ("cu_seqlens_k", (0, 2), "a tensor"), ("cache", {}, "DenseCache or PagedCache"),
    ],
)  # fmt: skip
def test_options_of_another_type_are_named(name, value, expected):
    args = dict(zip("qkv", attention_args(2), strict=True))
    error = fails(errors.ArgumentError, ac.ops.attention, **args, **{name: value})
    assert error.argument == name and expected in error.expected
    with pytest.raises(errors.ArgumentError, match=f"argument {name}"):
        ac.ops.attention.prepare(**args, **{name: value})


def test_no_sizes_are_no_sizes():
    args = attention_args(2)
    assert torch.equal(ac.ops.attention(*args, sizes=None), ac.ops.attention(*args))


def test_a_sparse_tensor_is_refused():
    q, k, v = attention_args(2)
    error = fails(errors.StrideError, ac.ops.attention, q=q, k=k.to_sparse(), v=v)
    assert error.argument == "k" and "sparse" in str(error)


def test_the_order_of_keywords_decides_nothing():
    @ac.op(out="B T D")
    def product(a=ac.Activation("B T D"), b=ac.Activation("B T D")):
        return a * b

    a, b = torch.randn(1, 2, 4).bfloat16(), torch.randn(1, 2, 4)
    first, second = product(a=a, b=b), product(b=b, a=a)
    assert first.dtype == second.dtype == torch.bfloat16 and torch.equal(first, second)


def cache_for(batch=2, capacity=8, heads=2, dim=4):
    """A small attention cache."""
    return ac.DenseCache.allocate(
        ac.ops.attention,
        sizes={"B": batch, "Hkv": heads, "D": dim, "E": dim},
        capacity=capacity,
        dtype=torch.float32,
    )


def attention_args(tokens, batch=2):
    """q, k and v of a GQA call."""
    k, v = torch.randn(2, batch, tokens, 2, 4)
    return torch.randn(batch, tokens, 4, 4), k, v


def test_a_full_cache_says_which_sequence_and_writes_nothing():
    cache = cache_for()
    cache.lengths.copy_(torch.tensor([2, 6]))
    before = cache.tensors["k"].clone()
    with pytest.raises(errors.CacheError, match="sequence 1 has no room") as caught:
        ac.ops.attention.decode(*attention_args(3), cache)
    assert (caught.value.expected, caught.value.found) == ("at most 8", 9)
    assert torch.equal(before, cache.tensors["k"])
    assert cache.lengths.tolist() == [2, 6]


def test_a_cache_of_another_op_is_refused():
    with pytest.raises(errors.CacheError, match="no Cache argument"):
        ac.DenseCache.allocate(GDR, sizes={"B": 1}, capacity=4)
    error = fails(errors.CacheError, **delta(), cache=cache_for())
    assert error.argument == "cache"
    lacking = ac.DenseCache({"k": cache_for().tensors["k"]}, torch.zeros(2, dtype=torch.int32))
    q, k, v = attention_args(1)
    assert fails(errors.CacheError, ac.ops.attention, q=q, k=k, v=v, cache=lacking).argument == "v"


def test_cache_lengths_must_be_one_int32_a_sequence():
    cache = cache_for()
    wrong = ac.DenseCache(cache.tensors, torch.zeros(2, dtype=torch.int64))
    q, k, v = attention_args(1)
    error = fails(errors.CacheError, ac.ops.attention, q=q, k=k, v=v, cache=wrong)
    assert error.argument == "cache.lengths"


def test_an_unknown_backend_lists_the_known_ones():
    error = fails(errors.BackendError, **delta(), backend="cutlass")
    assert "triton" in error.expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU (cuda)")
def test_triton_without_a_gpu_says_so_instead_of_falling_back():
    error = fails(errors.BackendError, **delta(), backend="triton")
    assert "GPU" in error.message


def test_lse_is_refused_for_an_op_without_a_softmax():
    assert fails(errors.ArgumentError, **delta(), return_lse=True).argument == "return_lse"


def test_host_numbers_are_checked():
    @ac.op(out="B T H D")
    def scaled(
        q=ac.Activation("B T H D"),
        k=ac.Cache("B S H D"),
        scale=ac.param(),
        width=ac.param(default=4, integer=True),
    ):
        seen = ac.causal & (ac.index("T") - ac.index("S") < width)
        return ac.dot(ac.softmax(ac.dot(q, k, "D") * scale, "S", where=seen), k, "S")

    x = torch.randn(1, 3, 1, 4)
    device_scale = torch.tensor(1.0)
    error = fails(errors.ArgumentError, scaled, q=x, k=x, scale=device_scale)
    assert error.argument == "scale"
    assert fails(errors.ArgumentError, scaled, q=x, k=x, scale=1.0, width=1.5).expected == "int"
    assert fails(errors.ArgumentError, scaled, q=x, k=x).argument == "scale"
