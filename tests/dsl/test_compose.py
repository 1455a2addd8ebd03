"""Layers as they are composed: their structure, and every mistake with its line."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import attncc as ac
from attncc.dsl.compose import Nodes
from attncc.dsl.composition import check_settings
from attncc.dsl.errors import LayerError, PatternError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, NodeKind
from attncc.dsl.library.attention import attention
from attncc.dsl.library.cross_attention import cross_attention
from attncc.dsl.library.layers import COMPOSITIONS, LAYERS
from attncc.dsl.library.short_conv import short_conv
from attncc.dsl.library.silu import silu

MHA, GDN = LAYERS["mha_decode"], LAYERS["gdn_layer"]
TITLES = {
    "mha_decode": {
        "Current layer input", "Current Query", "Current Key/Value", "Historical Key/Value",
        "Scores and probabilities", "Output",
    },
    "gdn_layer": {
        "Q/K/V", "Decay and write rate", "Decayed state", "Prediction and error",
        "Recurrent state", "Short-convolution state", "Read-out",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TITLES)
def test_every_row_of_the_object_tables_has_objects(name: str) -> None:
    layer = LAYERS[name]
    found = {o.row for o in layer.objects} | {i.row for n in layer.nodes for i in n.inner}
    assert TITLES[name] <= found


@pytest.mark.parametrize("name", LAYERS)
def test_every_object_is_made_once_and_read(name: str) -> None:
    layer = LAYERS[name]
    for o in layer.objects:
        made = [n for n in layer.producers(o.name) if o.name not in n.inputs]
        there = bool(o.source) or o.lifetime in (*KEPT, Lifetime.PARAMETER)
        assert len(made) == (not there), o.name
        assert o.sink or list(layer.consumers(o.name)), o.name
    kept = [o.name for o in layer.objects if o.lifetime in KEPT]
    assert all(any(n in node.inputs and n in node.outputs for node in layer.nodes) for n in kept)


def test_the_ways_of_the_two_documents_layers() -> None:
    ways = {
        ("mha_decode", "query_states"): ["W_Q", "RoPE"],
        ("mha_decode", "output"): ["W_Q", "RoPE", "attention", "W_O"],
        ("gdn_layer", "q"): ["W_Q", "ShortConv", "SiLU", "heads", "L2Norm"],
        ("gdn_layer", "g"): ["a_proj", "gate"],
    }
    for (name, end), labels in ways.items():
        layer, path, at = LAYERS[name], list[str](), end
        while producer := next((n for n in layer.producers(at) if at not in n.inputs), None):
            path.append(producer.shown)
            at = producer.inputs[0]
        assert path[::-1] == labels and at == "hidden_states"


def test_fusions_stand_for_the_nodes_they_name() -> None:
    for composition in COMPOSITIONS.values():
        every = {n.name for n in composition.layer.nodes}
        for phase in ("prefill", "decode"):
            run = [n.name for n, _ in composition.running(phase)]
            assert {part for name in run for part in name.split("+")} == every
            assert [n.name for n, _ in composition.running(phase, fuse=False)] == [
                n.name for n in composition.layer.nodes
            ]
    for sequences, name in (
        (1, "gated_delta_net"),
        (8, "gated_delta_net"),
        (9, "raw_gated_delta_rule"),
    ):
        run = COMPOSITIONS["gdn_layer"].running("decode", sequences=sequences)
        (step,) = [n.op for n, _ in run if n.op is not None and "recurrence" in n.name]
        assert step.name == name


def test_settings_are_host_numbers_of_nodes() -> None:
    @ac.layer
    def normed(n: Nodes) -> str:
        x = n.input("x", "B T M")
        return n.same(NodeKind.RMSNORM, "norm", x, "y", params={"w": "M"}, settings={"eps": 1e-3})

    assert normed.setting("norm", "eps", 1e-6) == 1e-3
    assert normed.setting("norm", "base", 2.0) == 2.0
    assert normed.axes == ("M",)


def test_a_setting_that_its_node_does_not_take() -> None:
    def normed(n: Nodes) -> str:
        x = n.input("x", "B T M")
        return n.same(NodeKind.RMSNORM, "norm", x, "y", settings={"epsilon": 1e-3})

    assert "argument epsilon: node norm has no such setting (expected eps" in str(wrong(normed))
    nodes = LAYERS["dsa_layer"].nodes
    for settings, says in (
        ({"attend": {"scale": 1.0}, "index_q_rope": {"base": 5e5}, "index_scale": {"by": 2}}, ""),
        ({"attend": {"eps": 1.0}}, "node attend has no such setting (expected scale"),
        ({"rope": {"base": 5e5}}, "no such node"),
    ):
        if says:
            with pytest.raises(LayerError, match=re.escape(says)):
                check_settings(nodes, settings, "dsa_layer")
        else:
            check_settings(nodes, settings, "dsa_layer")


def wrong(body: Callable[[Nodes], Any]) -> LayerError:
    with pytest.raises(LayerError) as caught:
        ac.layer(body)
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.loc == error.loc
    return error


def given(n: Nodes) -> str:
    return n.input("x", "B T M")


def test_an_object_that_is_not_there() -> None:
    def broken(n: Nodes) -> str:
        given(n)
        return n.project("proj", "h", "y", "B T D")

    error = wrong(broken)
    assert "op broken, argument h: no such object (expected x)" in str(error)
    assert 'n.project("proj", "h", "y", "B T D")' in str(error)


def test_an_object_or_a_node_that_stands_twice() -> None:
    def objects(n: Nodes) -> str:
        given(n)
        return n.input("x", "B T M")

    def nodes(n: Nodes) -> str:
        x = given(n)
        y = n.project("proj", x, "y", "B T D")
        return n.project("proj", y, "z", "B T M", weight="other")

    def made(n: Nodes) -> str:
        x = given(n)
        n.project("one", x, "y", "B T D")
        n.node(NodeKind.SILU, "two", [x], ["y"])
        return "y"

    assert "an object of this name is there" in str(wrong(objects))
    assert "a node of this name is there" in str(wrong(nodes))
    assert "the object is made twice" in str(wrong(made))


def test_an_object_that_is_read_before_it_is_made() -> None:
    def early(n: Nodes) -> str:
        x = given(n)
        n.object("y", "B T M")
        n.node(NodeKind.SILU, "silu", ["y"], [x])
        return "y"

    assert "argument y: nothing has made this object yet" in str(wrong(early))


def test_an_op_that_is_bound_otherwise_than_it_is_declared() -> None:
    def layout(n: Nodes) -> str:
        x = given(n)
        n.object("q", "B T H D")
        n.node(NodeKind.RESHAPE, "split", [x], ["q"])
        n.op("attend", attention, {"q": "q", "k": "q", "v": "q", "o": "q"})
        return "q"

    def unknown(n: Nodes) -> str:
        x = given(n)
        n.op("conv", short_conv, {"y": x})
        return x

    def missing(n: Nodes) -> str:
        x = given(n)
        n.op("conv", short_conv, {"x": x}, axes={"D": "M"})
        return x

    text = str(wrong(layout))
    assert "q is laid out otherwise than q (expected [B T (Hkv G) D], found [B T H D])" in text
    assert "short_conv has no y (expected x w bias win o)" in str(wrong(unknown))
    assert "argument conv: w of short_conv is not bound" in str(wrong(missing))


def test_what_a_layer_gives_back_is_made_in_it() -> None:
    def cached(n: Nodes) -> str:
        x = given(n)
        n.cache("kept", "B S M")
        n.append("append", x, "kept")
        return "kept"

    for body in (given, cached):
        assert "a layer's output is an activation that a node makes" in str(wrong(body))


def test_a_foreign_sequence_is_there_from_the_start() -> None:
    @ac.layer
    def crossed(n: Nodes) -> str:
        x = n.input("x", "B T (Hkv G) D")
        n.object("memory", "B S Hkv D", lifetime=Lifetime.MEMORY)
        o = n.object("y", "B T (Hkv G) D")
        binds = {"q": x, "k": "memory", "v": "memory", "o": o}
        n.op("attend", cross_attention, binds, axes={"E": "D"})
        return o

    sizes = {"B": 1, "T": 1, "S": 5, "Hkv": 2, "G": 1, "D": 4}
    assert ac.ledger(crossed.layer, sizes).entry("memory").bytes == 5 * 2 * 4 * 2


def test_layouts_and_fields_that_there_are_not() -> None:
    def field(n: Nodes) -> str:
        return n.input("x", "B T M", colour=1)

    def square(n: Nodes) -> str:
        return n.project("proj", given(n), "y", "B T M")

    def pattern(n: Nodes) -> str:
        return n.input("x", "B T (M")

    assert "an object has no colour" in str(wrong(field))
    text = str(wrong(square))
    assert "trailing axes other than those of x, [B T M], found [B T M]" in text
    with pytest.raises(PatternError, match="op pattern, argument x"):
        ac.layer(pattern)


def test_a_fusion_makes_what_the_rest_reads() -> None:
    def three(binds: dict[str, str], nodes: list[str], result: str = "yc") -> str:
        def chain(n: Nodes) -> str:
            x = n.input("x", "B T H V")
            a = n.same(NodeKind.SILU, "a", x, "ya")
            b = n.same(NodeKind.L2NORM, "b", a, "yb")
            n.same(NodeKind.SILU, "c", a, "yc", inputs=[b])
            n.fuse(nodes, silu, binds)
            return result

        return str(wrong(chain))

    assert "node b reads what a+c has not made by then" in three({"x": "x", "o": "yc"}, ["a", "c"])
    assert "node c reads what a+b has not made by then" in three({"x": "x", "o": "yb"}, ["a", "b"])
    assert "b+c reads what is not there by then" in three({"x": "yb", "o": "yc"}, ["b", "c"])
    assert "is the one that runs last" in three({"x": "x", "o": "yc"}, ["c", "b", "a"])
    back = three({"x": "x", "o": "yc"}, ["a", "b", "c"], "yb")
    assert "the layer gives back what a+b+c does not make" in back
    assert "no such node to fuse" in three({"x": "x", "o": "yc"}, [])


def test_a_fusion_with_a_flag_that_its_op_has_not() -> None:
    def body(n: Nodes) -> str:
        x = n.input("x", "B T H V")
        y = n.same(NodeKind.SILU, "a", x, "y")
        n.fuse(["a"], silu, {"x": x, "o": y}, flags=["gate"])
        return y

    assert "no such flag" in str(wrong(body))


def test_a_fusion_in_a_phase_that_there_is_not() -> None:
    def body(n: Nodes) -> str:
        x = n.input("x", "B T H V")
        y = n.same(NodeKind.SILU, "a", x, "y")
        n.fuse(["a"], silu, {"x": x, "o": y}, phase="decoding")
        return y

    assert "a layer has no phase 'decoding'" in str(wrong(body))


def test_two_selections_of_one_name_are_of_one_size() -> None:
    def op(k: int) -> Any:
        @ac.op(out="B T D")
        def picked(q=ac.Activation("B T D"), c=ac.Cache("B S D")):
            rows = ac.topk(ac.dot(q, c, "D"), "S", k=k, where=ac.causal)
            return ac.dot(ac.softmax(ac.dot(q, c[rows], "D"), rows), c[rows], rows)

        return picked

    few, many = op(2), op(3)

    def layer(n: Nodes, axes: dict[str, str]) -> str:
        x = n.input("x", "B T D")
        n.cache("kept", "B S D")
        n.append("append", x, "kept")
        one, two = n.object("one", "B T D"), n.object("two", "B T D")
        n.op("first", few, {"q": x, "c": "kept", "o": one})
        n.op("second", many, {"q": one, "c": "kept", "o": two}, axes=axes)
        return two

    with pytest.raises(LayerError, match=r"axis J: .*expected 2, found 3"):
        ac.ledger(ac.layer(lambda n: layer(n, {})).layer)
    found = ac.ledger(ac.layer(lambda n: layer(n, {"J": "Jn"})).layer, {"B": 1, "D": 4, "S": 9})
    assert (found.entry("first.rows").bytes, found.entry("second.rows").bytes) == (2 * 4, 3 * 4)


def test_a_fusion_of_a_node_that_is_not_there_and_a_result_that_is_no_object() -> None:
    def fused(n: Nodes) -> str:
        x = given(n)
        n.fuse(["conv"], short_conv, {"x": x}, axes={"D": "M"})
        return x

    assert "argument conv: no such node to fuse" in str(wrong(fused))
    assert "gives back the name of its output (expected x, found None)" in str(
        wrong(lambda n: given(n) and None)
    )
