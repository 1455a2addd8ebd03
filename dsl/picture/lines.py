"""The dataflow as text: an operation a line, training and inference side by side."""

from __future__ import annotations

from itertools import zip_longest

from attncc.dsl.ledger.derive import Subject
from attncc.dsl.ledger.model import Phase
from attncc.dsl.picture.figure import Figure, Mark, figure

_SIGN = {Mark.DOT: "●", Mark.RING: "◎", Mark.BOX: "■"}
LEGEND = "● activation   ◎ kept across steps   ■ operation   ↺ to the next step or chunk"


def text(subject: Subject) -> str:
    """Both panels: every operation with what it reads and what it makes."""
    left = ["training", "", *_panel(figure(subject, Phase.TRAIN))]
    right = ["inference", "", *_panel(figure(subject, Phase.DECODE))]
    width = max(map(len, left)) + 4
    lines = (f"{a.ljust(width)}{b}".rstrip() for a, b in zip_longest(left, right, fillvalue=""))
    return "\n".join([subject.name, *lines, "", LEGEND]) + "\n"


def _panel(drawn: Figure) -> list[str]:
    told = {v.name: f"{_SIGN[v.mark]} {v.label}" for v in drawn.vertices}
    lines = []
    for v in drawn.vertices:
        if v.mark is not Mark.BOX:
            if not any(e.target == v.name and not e.back for e in drawn.edges):
                lines.append(f"{told[v.name]} {v.detail}")
            continue
        read = [told[e.source] for e in drawn.edges if e.target == v.name]
        made = [
            ("↺ " if e.back else "") + told[e.target] for e in drawn.edges if e.source == v.name
        ]
        lines.append(f"■ {v.label}: {', '.join(read) or '-'} → {', '.join(made) or '-'}")
    return lines
