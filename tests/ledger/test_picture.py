"""Pictures: what is drawn in which phase, and a geometry in which everything can be read."""

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

import attncc as ac
from attncc.dsl.ledger import Phase
from attncc.dsl.library.layers import LAYERS
from attncc.dsl.picture import Mark, figure, place, svg, text
from attncc.dsl.picture.place import BOX_HEIGHT, RADIUS, route

OPS = ["attention", "mla", "sparse_mla", "gated_delta_rule", "gated_delta_product", "short_conv",
       "cascade", "mamba2", "rwkv7", "document_attention"]  # fmt: skip
SUBJECTS = {**{n: getattr(ac.ops, n).declaration for n in OPS}, **LAYERS}
PHASES = [Phase.TRAIN, Phase.DECODE]
NAMED = pytest.mark.parametrize("name", SUBJECTS)


def box(placed, vertex):
    """Left, top, right and bottom of a vertex with its label."""
    (x, y), (left, right) = placed.at[vertex.name], placed.span[vertex.name]
    half = BOX_HEIGHT / 2 if vertex.mark is Mark.BOX else RADIUS + 4
    return x + left, y - half, x + right, y + half


def edges(drawn, vertex):
    read = {e.source for e in drawn.edges if e.target == vertex}
    return read, {e.target for e in drawn.edges if e.source == vertex}


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.value)
@NAMED
def test_nothing_lies_on_anything_else(name, phase):
    placed = place(figure(SUBJECTS[name], phase))
    boxes = {v.name: box(placed, v) for v in placed.figure.vertices}
    for (one, a), (two, b) in combinations(boxes.items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, two)
    for left, top, right, bottom in boxes.values():
        assert left >= 0 and top >= 0 and right <= placed.width and bottom <= placed.height


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.value)
@NAMED
def test_an_edge_crosses_no_box(name, phase):
    placed = place(figure(SUBJECTS[name], phase))
    boxes = {v.name: box(placed, v) for v in placed.figure.vertices if v.mark is Mark.BOX}
    for i, edge in enumerate(placed.figure.edges):
        others = [b for n, b in boxes.items() if n not in (edge.source, edge.target)]
        for (x, y), (u, v) in pairwise(route(placed, i)):
            assert (y <= v or edge.back) and 0 <= x <= placed.width
            for left, top, right, bottom in others:
                beside = max(x, u) <= left or min(x, u) >= right
                assert beside or max(y, v) <= top or min(y, v) >= bottom, edge


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.value)
@NAMED
def test_edges_lead_down_but_those_to_the_next_step(name, phase):
    placed = place(figure(SUBJECTS[name], phase))
    for edge in placed.figure.edges:
        above, below = placed.at[edge.source][1], placed.at[edge.target][1]
        assert (above > below) is edge.back, edge


@NAMED
def test_the_file_is_well_formed_and_every_label_is_inside(name):
    root = ElementTree.fromstring(svg(SUBJECTS[name]))
    space = "{http://www.w3.org/2000/svg}"
    width, height = float(root.get("width")), float(root.get("height"))
    shown = []
    for group in root.iter(f"{space}g"):
        dx, dy = map(float, re.findall(r"[\d.]+", group.get("transform")))
        for label in group.iter(f"{space}text"):
            size = 6.1 if label.get("class") == "detail" else 7.0
            length = len(label.text) * size
            x = float(label.get("x")) - (length / 2 if label.get("text-anchor") else 0)
            assert dx + x >= 0 and dx + x + length <= width
            assert 0 <= dy + float(label.get("y")) <= height
            shown.append(label.text)
    for phase in PHASES:
        assert {v.label for v in figure(SUBJECTS[name], phase).vertices} <= set(shown)


def test_a_history_is_a_double_circle_in_inference_only():
    for phase, mark, layout in ((Phase.TRAIN, Mark.DOT, "T"), (Phase.DECODE, Mark.RING, "S")):
        drawn = figure(SUBJECTS["attention"], phase)
        assert drawn.vertex("k").mark is mark
        assert drawn.vertex("k").detail == f"[B {layout} Hkv D]"
    training = figure(LAYERS["mha_decode"], Phase.TRAIN)
    names = {v.name for v in training.vertices}
    assert "k_cache" not in names and all(v.mark is not Mark.RING for v in training.vertices)
    assert not any(v.label == "cache update" for v in training.vertices)
    inference = figure(LAYERS["mha_decode"], Phase.DECODE)
    (update,) = edges(inference, "k_cache")[0]
    assert inference.vertex(update).label == "cache update"
    assert edges(inference, update)[0] == {"key_states"}
    rings = {v.name for v in inference.vertices if v.mark is Mark.RING}
    assert rings == {"k_cache", "v_cache"}


def test_a_state_goes_back_to_the_next_step_or_chunk():
    for phase in PHASES:
        drawn = figure(SUBJECTS["gated_delta_rule"], phase)
        (back,) = [e for e in drawn.edges if e.back]
        assert back.target == "s" and drawn.vertex(back.source).label == "s' + k * e"
        assert drawn.vertex(back.source).mark is Mark.BOX
    assert drawn.vertex("s").mark is Mark.RING
    chunks = figure(SUBJECTS["gated_delta_rule"], Phase.TRAIN).vertex("s")
    assert chunks.mark is Mark.DOT and chunks.detail == "[chunks B (Hk G) K V]"


def test_a_window_is_drawn_with_the_rows_that_are_kept():
    inference = figure(SUBJECTS["short_conv"], Phase.DECODE)
    assert inference.vertex("win").detail == "[B W-1 D]"
    assert "win" not in {v.name for v in figure(SUBJECTS["short_conv"], Phase.TRAIN).vertices}


def test_parameters_are_not_drawn_and_views_are_passed_through():
    drawn = figure(LAYERS["gdn_layer"], Phase.DECODE)
    names = {v.name for v in drawn.vertices}
    assert "A_log" not in names and "q_proj_weight" not in names
    (above,) = edges(drawn, "v")[0]
    assert drawn.vertex(above).label == "SiLU"


def test_text_stands_side_by_side():
    lines = text(LAYERS["mha_decode"]).splitlines()
    assert lines[0] == "mha_decode" and lines[1].split() == ["training", "inference"]
    both = next(line for line in lines if "cache update" in line and "k_t" in line)
    assert "■ cache update: ● k_t → ◎ K_cache" in both
    assert any("■ q_t · k_t over D: ● q_t, ● k_t" in line for line in lines)


def test_a_picture_is_the_same_every_time():
    assert svg(SUBJECTS["sparse_mla"]) == svg(SUBJECTS["sparse_mla"])
