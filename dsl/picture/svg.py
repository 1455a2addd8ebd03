"""The dataflow as SVG, written by hand: plain shapes, system fonts, no scripts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from xml.sax.saxutils import escape

from attncc.dsl.ledger.derive import Subject
from attncc.dsl.ledger.model import Phase
from attncc.dsl.picture.figure import Mark, Vertex, figure
from attncc.dsl.picture.place import BOX_HEIGHT, CHAR, GAP, RADIUS, Placed, place, route

HEAD, FOOT, BETWEEN = 58.0, 44.0, 36.0
_STYLE = """
  text { font-family: 'DejaVu Sans', Verdana, Helvetica, sans-serif; fill: #1b1f24 }
  .title { font-size: 15px; font-weight: 600 }
  .panel { font-size: 13px; fill: #57606a }
  .label { font-size: 11px }
  .detail { font-size: 9.5px; fill: #57606a }
  .op { fill: #eef1f5; stroke: #57606a; stroke-width: 1 }
  .dot { fill: #2a6fdb; stroke: none }
  .ring { fill: #ffffff; stroke: #c2410c; stroke-width: 1.8 }
  .core { fill: none; stroke: #c2410c; stroke-width: 1.8 }
  .edge { fill: none; stroke: #8c959f; stroke-width: 1.1 }
  .back { fill: none; stroke: #c2410c; stroke-width: 1.2; stroke-dasharray: 4 3 }
"""
_LEGEND = (
    (Mark.DOT, "activation"), (Mark.RING, "kept across steps"), (Mark.BOX, "operation"),
)  # fmt: skip


def svg(subject: Subject) -> str:
    """Both panels, training on the left and inference on the right."""
    panels = [place(figure(subject, phase)) for phase in (Phase.TRAIN, Phase.DECODE)]
    width = max(sum(p.width for p in panels) + BETWEEN, 460.0)
    height = max(p.height for p in panels) + HEAD + FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="dataflow of {escape(subject.name)}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0.8 L7.5 4 L0 7.2 z" fill="#8c959f"/></marker>'
        '<marker id="tail" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0.8 L7.5 4 L0 7.2 z" fill="#c2410c"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text class="title" x="{GAP}" y="26">{escape(subject.name)}</text>',
    ]
    left = 0.0
    for title, panel in zip(("training", "inference"), panels, strict=True):
        lines.append(f'<text class="panel" x="{left + GAP:.1f}" y="48">{title}</text>')
        lines.append(f'<g transform="translate({left:.1f} {HEAD:.1f})">')
        lines += _panel(panel)
        lines.append("</g>")
        left += panel.width + BETWEEN
    middle = panels[0].width + BETWEEN / 2
    lines.append(
        f'<path class="edge" d="M{middle:.1f} 36 V{height - FOOT:.1f}" stroke-dasharray="1 4"/>'
    )
    lines += [*_legend(height - 18), "</svg>"]
    return "\n".join(lines) + "\n"


def _panel(panel: Placed) -> Iterator[str]:
    for i, edge in enumerate(panel.figure.edges):
        yield _edge(panel, i, edge.back)
    for vertex in panel.figure.vertices:
        yield from _vertex(vertex, *panel.at[vertex.name], panel.span[vertex.name])


def _edge(panel: Placed, index: int, back: bool) -> str:
    points = route(panel, index)
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (a, b), (c, d) in pairwise(points):
        half = (b + d) / 2
        bent = f" C{a:.1f} {half:.1f} {c:.1f} {half:.1f} {c:.1f} {d:.1f}"
        path += f" V{d:.1f}" if a == c else f" H{c:.1f}" if b == d else bent
    kind, tip = ("back", "tail") if back else ("edge", "tip")
    return f'<path class="{kind}" d="{path}" marker-end="url(#{tip})"/>'


def _vertex(vertex: Vertex, x: float, y: float, span: tuple[float, float]) -> Iterator[str]:
    if vertex.mark is Mark.BOX:
        left, width = x + span[0], span[1] - span[0]
        yield (
            f'<rect class="op" x="{left:.1f}" y="{y - BOX_HEIGHT / 2:.1f}" width="{width:.1f}" '
            f'height="{BOX_HEIGHT}"/>'
        )
        yield (
            f'<text class="label" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">'
            f"{escape(vertex.label)}</text>"
        )
        return
    yield from _mark(vertex.mark, x, y)
    at = x + RADIUS + 5
    yield f'<text class="label" x="{at:.1f}" y="{y - 1:.1f}">{escape(vertex.label)}</text>'
    yield f'<text class="detail" x="{at:.1f}" y="{y + 10:.1f}">{escape(vertex.detail)}</text>'


def _mark(mark: Mark, x: float, y: float) -> Iterator[str]:
    if mark is Mark.DOT:
        yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS - 1.5}"/>'
    elif mark is Mark.RING:
        yield f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/>'
        yield f'<circle class="core" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS - 3.5}"/>'
    else:
        yield f'<rect class="op" x="{x - 7:.1f}" y="{y - 6:.1f}" width="14" height="12"/>'


def _legend(y: float) -> Iterator[str]:
    x = GAP
    for mark, words in _LEGEND:
        yield from _mark(mark, x + 7, y - 4)
        yield f'<text class="detail" x="{x + 20:.1f}" y="{y:.1f}">{words}</text>'
        x += 34 + len(words) * CHAR
    yield f'<path class="back" d="M{x:.1f} {y - 4:.1f} h22"/>'
    yield f'<text class="detail" x="{x + 28:.1f}" y="{y:.1f}">to the next step or chunk</text>'
