"""What a body is taken apart into: names, operations, ways, bounds of masks; layers."""

from dataclasses import replace

import pytest

import attncc as ac
from attncc.dsl.axes import parse
from attncc.dsl.errors import LayerError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Inner, Layer, LayerNode, LayerObject, NodeKind
from attncc.dsl.ledger import Growth, Phase, graph_of
from attncc.dsl.ledger import ledger as derive
from attncc.dsl.ledger.compare import compare
from attncc.dsl.ledger.reach import reach

ATTENTION = ac.ops.attention.declaration
DELTA = ac.ops.gated_delta_rule.declaration


def way(op, name, phase="decode"):
    found = op.ledger(phase=phase).entry(name)
    return f"{', '.join(found.producers)} -> {', '.join(found.consumers)}"


def test_attention_is_five_operations():
    graph = graph_of(ATTENTION)
    assert [(n.kind, n.inputs, n.outputs) for n in graph.nodes] == [
        (NodeKind.CONTRACT, ("q", "k"), ("dot0",)),
        (NodeKind.SCALE, ("dot0",), ("score",)),
        (NodeKind.MASK, ("score",), ("masked_score",)),
        (NodeKind.SOFTMAX, ("masked_score",), ("p",)),
        (NodeKind.CONTRACT, ("p", "v"), ("o",)),
    ]
    assert way(ac.ops.attention, "q") == "caller -> q · k over D"
    assert way(ac.ops.attention, "score") == "q · k over D, scale -> mask"
    assert way(ac.ops.attention, "p") == "mask, softmax -> p · v over S"
    assert way(ac.ops.attention, "v") == "previous step, append -> p · v over S"
    assert way(ac.ops.attention, "v", "train") == "caller -> p · v over T"


def test_versions_of_a_state_have_primes():
    graph = graph_of(DELTA)
    update = next(n for n in graph.nodes if n.kind is NodeKind.UPDATE)
    assert update.inputs == ("s'", "k", "e") and update.outputs == ("s_next", "s")
    assert graph.object("s'").formula == "exp(g) * s"
    assert graph.object("e").formula == "beta * (v - read0)"
    assert graph.object("read0").formula == "s' · k over K"
    assert graph.object("s").lifetime is Lifetime.STATE and not graph.object("s").fused
    expected = "previous step, s' + k * e -> exp(g) * s, next step"
    assert way(ac.ops.gated_delta_rule, "s") == expected


def test_an_absent_input_leaves_no_trace():
    graph = graph_of(DELTA, given=frozenset({"s"}))
    names = {o.name for o in graph.objects}
    assert not names & {"g", "beta", "s'"} and "s" in names
    assert derive(DELTA, None, Phase.DECODE).entry("g")


def test_names_over_several_lines_and_without_any():
    @ac.op(out="B T H D")
    def spelled(q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H D")):
        logits = (
            ac.dot(q, k, "D") * 2.0
            + ac.dot(q, q, "D")
        )  # fmt: skip
        logits += 1.0
        return ac.dot(ac.softmax(ac.relu(logits), "S"), v, "S")

    graph = graph_of(spelled.declaration)
    names = [o.name for o in graph.objects]
    assert "logits" in names and "logits'" in names and "p" in names
    assert graph.object("logits'").formula == "logits + 1"
    relu = next(n for n in graph.nodes if n.shown == "relu(logits')")
    assert graph.object(relu.outputs[0]).row is None


def test_a_body_whose_source_cannot_be_read():
    scope = {"ac": ac}
    body = (
        "def hidden(q=ac.Activation('B T H D'), k=ac.Cache('B S H D')):\n"
        "    score = ac.dot(q, k, 'D')\n"
        "    return ac.dot(ac.softmax(score, 'S', where=ac.causal), k, 'S')\n"
    )
    exec(compile(body, "<nowhere>", "exec"), scope)
    op = ac.op(out="B T H D")(scope["hidden"])
    assert [o.name for o in graph_of(op.declaration).objects] == [
        "q", "k", "dot0", "masked_dot0", "p", "o",
    ]  # fmt: skip
    assert op.ledger({"B": 1, "H": 2, "D": 4, "S": 8}).entry("k").bytes == 8 * 2 * 4 * 2


def test_an_output_that_is_an_input_or_given_twice():
    @ac.op(scan="T", out={"o": "B T H", "again": "B T H", "same": "B T H"})
    def copies(x=ac.Activation("B T H"), s=ac.State("B H")):
        s = s + x
        return s, s, s, x

    found = copies.ledger({"B": 1, "H": 4})
    assert {"o", "again", "same", "s"} <= {e.name for e in found.entries}
    assert found.entry("same").producers == ("copy",)
    assert found.entry("s").producers == ("previous step", "s + x")


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (lambda t, s: ac.causal, None),
        (lambda t, s: ac.causal & (t - s < 8), 8),
        (lambda t, s: ac.causal & (8 > t - s), 8),  # noqa: SIM300 - on purpose
        (lambda t, s: (s <= t) & (s >= t - 7), 8),
        (lambda t, s: (s <= t + 2) & (t < s + 8), 10),
        (lambda t, s: ac.causal & (t - s < 8) & (t - s < 3), 3),
        (lambda t, s: (ac.causal & (t - s < 8)) | (ac.causal & (t - s < 3)), None),
        (lambda t, s: (ac.causal & (t - s < 8)) | (s < 4), None),
        (lambda t, s: t - s < 8, None),
        (lambda t, s: ac.causal & (2 * (t - s) < 8), None),
        (lambda t, s: ac.eq(t, s), None),
    ],
)
def test_what_a_mask_lets_a_query_see(mask, rows):
    @ac.op(out="B T H D")
    def masked(q=ac.Activation("B T H D"), k=ac.Cache("B S H D")):
        where = mask(ac.index("T"), ac.index("S"))
        return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=where), k, "S")

    assert reach(masked.declaration.trace(), "S") == rows


def test_a_second_fold_without_the_mask_sees_everything():
    @ac.op(out="B T H D")
    def both(q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), w=ac.param(integer=True)):
        near = ac.causal & (ac.index("T") - ac.index("S") <= w)
        one = ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=near), k, "S")
        return one + ac.dot(ac.dot(q, k, "D"), k, "S")

    assert reach(both.declaration.trace(), "S") is None

    @ac.op(out="B T H D")
    def near_only(q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), w=ac.param(integer=True)):
        near = ac.causal & (ac.index("T") - ac.index("S") <= w)
        return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=near), k, "S")

    assert reach(near_only.declaration.trace(), "S") == "w + 1"
    sizes = {"B": 1, "H": 1, "D": 1, "S": 100, "w": 9}
    assert near_only.ledger(sizes).entry("k").read.bytes == 10 * 2
    unknown = {a: n for a, n in sizes.items() if a != "w"}
    with pytest.raises(ac.AttnccError, match="a size is missing"):
        near_only.ledger(unknown)


@pytest.mark.parametrize("masked", [True, False])
def test_rows_that_a_closed_or_a_shifted_softmax_does_not_weigh(masked):
    @ac.op(out="B T H D")
    def again(q=ac.Activation("B T H D"), k=ac.Cache("B S H D")):
        near = ac.causal & (ac.index("T") - ac.index("S") < 4)
        p = ac.softmax(ac.dot(q, k, "D"), "S", where=near)
        first = ac.dot(p - 0.5 * p * ac.silu(ac.dot(q, k, "D")), k, "S")
        return first if masked else ac.dot(first * ac.dot(q, k, "D"), k, "S")

    @ac.op(out="B T H D")
    def shifted(q=ac.Activation("B T H D"), k=ac.Cache("B S H D")):
        near = ac.causal & (ac.index("T") - ac.index("S") < 4)
        p = ac.softmax(ac.dot(q, k, "D"), "S", where=near)
        return ac.dot(p if masked else p + 1.0, k, "S")

    for op in (again, shifted):
        assert reach(op.declaration.trace(), "S") == (4 if masked else None)


def test_two_histories_of_one_softmax_are_two_probabilities():
    graph = graph_of(ac.ops.cascade.declaration)
    softmaxes = [n for n in graph.nodes if n.kind is NodeKind.SOFTMAX]
    assert len(softmaxes) == 2
    over = [graph.object(n.outputs[0]).pattern.axes[-1] for n in softmaxes]
    assert sorted(over) == ["P", "S"]
    (prefix,) = [n for n in softmaxes if graph.object(n.outputs[0]).pattern.axes[-1] == "P"]
    assert len(prefix.inputs) == 2  # its own scores and those beside it
    found = ac.ops.cascade.ledger(None, "train")
    assert sum(e.name.startswith("lse") for e in found.entries) == 2


def test_a_foreign_sequence_is_kept_and_does_not_grow():
    found = ac.ops.cross_attention.ledger({"B": 1, "Hkv": 2, "G": 1, "D": 4, "E": 4, "S": 10})
    assert found.entry("k").lifetime is Lifetime.MEMORY
    assert found.entry("k").growth is Growth.FIXED and found.entry("k").read.bytes == 10 * 2 * 4 * 2
    answers = dict(compare([ac.ops.cross_attention.declaration]))
    assert answers["Main read of a decode step"] == "all of k, v"
    assert answers["Ring (sequence)"] == "blocks of k, v go round"
    assert answers["Grows with the context"] == "no: fixed size"


# --- layers


def thing(name, pattern, **about):
    return LayerObject(name, name, parse(pattern), **about)


def small(**changed):
    """A layer of a projection, an append and attention."""
    objects = (
        thing("h", "B T M", source="previous sublayer", row="Input"),
        thing("w", "(Hkv D) M", lifetime=Lifetime.PARAMETER),
        thing("q", "B T (Hkv G) D", source="previous sublayer", row="Query"),
        thing("raw", "B T Hkv D"),
        thing("k", "B T Hkv D", row="Key"),
        thing("k_cache", "B S Hkv D", lifetime=Lifetime.CACHE, row="History"),
        thing("o", "B T (Hkv G) D", lifetime=Lifetime.OUTPUT, row="Output", sink="next sublayer"),
    )
    attend = LayerNode(
        "attend", NodeKind.OP, ("q", "k_cache"), ("o",), op=ATTENTION,
        binds=(("q", "q"), ("k", "k_cache"), ("v", "k_cache"), ("o", "o")), axes=(("E", "D"),),
        inner=(Inner("p", "p_t", "Probabilities"),),
    )  # fmt: skip
    nodes = (
        LayerNode("proj", NodeKind.PROJECT, ("h",), ("raw",), ("w",), "W_K"),
        LayerNode("rope", NodeKind.ROPE, ("raw",), ("k",), label="RoPE"),
        LayerNode("append", NodeKind.APPEND, ("k", "k_cache"), ("k_cache",)),
        attend,
    )
    return replace(Layer("small", nodes, objects), **changed)


def changed_node(at, **about):
    nodes = small().nodes
    return {"nodes": (*nodes[:at], replace(nodes[at], **about), *nodes[at + 1 :])}


def test_an_op_inside_a_layer_speaks_the_layers_words():
    found = derive(small(), None, Phase.DECODE)
    assert found.entry("attend.p").symbol == "p_t"
    assert found.entry("attend.p").row == "Probabilities"
    assert found.entry("attend.score").row is None
    assert found.entry("k").producers == ("W_K", "RoPE")
    assert found.entry("k_cache").producers == ("previous step", "append")
    assert found.entry("k_cache").consumers == ("q · k_cache over D", "p_t · k_cache over S")
    assert [title for title, _ in found.rows()] == [
        "Input", "Query", "Key", "History", "Probabilities", "Output", "Parameters", "Tables",
    ]  # fmt: skip


def test_a_history_that_is_key_and_value_is_read_once():
    found = derive(small(), {"B": 1, "M": 8, "Hkv": 2, "G": 1, "D": 4, "S": 16}, Phase.DECODE)
    assert found.entry("k_cache").read.bytes == 16 * 2 * 4 * 2


def test_in_training_nothing_is_appended():
    found = derive(small(), {"B": 1, "M": 8, "Hkv": 2, "G": 1, "D": 4, "T": 16}, Phase.TRAIN)
    assert found.entry("k_cache").lifetime is Lifetime.ACTIVATION
    assert found.entry("k_cache").bytes == 0  # a view of k
    assert found.entry("k").consumers == ("all rows at once",)
    assert "q · k over D" in found.entry("q").consumers


def test_rows_come_in_the_layers_order():
    found = derive(small(rows=("Query", "Input")), None, Phase.DECODE)
    assert [title for title, _ in found.rows()][:3] == ["Query", "Input", "Key"]


def test_what_lies_in_memory_while_a_node_runs():
    sizes = {"B": 1, "M": 64, "Hkv": 2, "G": 1, "D": 4, "S": 16}
    found = derive(small(), sizes, Phase.DECODE)
    h, q, k, o = 64 * 2, 8 * 2, 8 * 2, 8 * 2
    assert found.peak["M_operator_workspace"].bytes == h + q + k  # at the projection
    assert set(found.peak["M_operator_workspace"].of) == {"h", "q", "raw"}
    assert h + q + k > q + o


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"objects": (*small().objects, small().objects[0])}, "two objects of one name"),
        ({"nodes": (*small().nodes, small().nodes[0])}, "two nodes of one name"),
        ({"nodes": small().nodes[1:]}, "reads what nothing has made"),
        (changed_node(0, inputs=("x",)), "an object that the layer does not"),
        (changed_node(3, binds=small().nodes[3].binds[1:]), "lacks an argument"),
        (changed_node(3, axes=()), "the layout of"),
        (changed_node(3, binds=(*small().nodes[3].binds, ("z", "q"))), "binds what is not there"),
        (changed_node(0, kind=NodeKind.OP), "names its declaration"),
    ],
)
def test_a_layer_that_does_not_fit_together(changed, says):
    with pytest.raises(LayerError, match=says):
        derive(small(**changed), None, Phase.DECODE)
