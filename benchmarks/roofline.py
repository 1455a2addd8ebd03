"""One picture a group: what each work attains, under the ceilings of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.results import Results, Row
from benchmarks.runner import NO_BOUND


def points(rows: list[Row]) -> dict[str, list[tuple[float, float, str]]]:
    """(flops a byte, TFLOP/s, case) by who ran it; without host times and failures."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    seen = set()
    for row in rows:
        if row.get("timing") in NO_BOUND or not row.get("bytes"):
            continue
        case = row["work"].partition("/")[2]
        for name, ms in (("attncc", row["ours_ms"]), (row["peer"], row["peer_ms"])):
            if not ms or (name == "attncc" and case in seen):
                continue
            if name == "attncc":
                seen.add(case)
            point = (row["flops"] / row["bytes"], row["flops"] / ms / 1e9, case)
            found.setdefault(name, []).append(point)
    return found


def draw(results: Results, folder: Path) -> list[Path]:
    """Write ``<gpu file>-<group>.png`` for each group that has points.

    Raises:
        ImportError: matplotlib is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[Row]] = {}
    for row in results.rows:
        groups.setdefault(row["work"].partition("/")[0], []).append(row)
    written = []
    for group, rows in groups.items():
        shown = points(rows)
        ceilings = [
            results.runs[r["run"]]["ceilings"] for r in rows if r.get("run") in results.runs
        ]
        if not shown or not ceilings:
            continue
        figure, axes = pyplot.subplots(figsize=(8, 5))
        _roof(axes, ceilings[-1], shown)
        for name, found in shown.items():
            mine = name == "attncc"
            xs, ys = [p[0] for p in found], [p[1] for p in found]
            axes.scatter(xs, ys, label=name, marker="*" if mine else "o", s=120 if mine else 36)
        for x, y, case in shown.get("attncc", next(iter(shown.values()))):
            axes.annotate(case, (x, y), xytext=(5, -9), textcoords="offset points", fontsize=6)
        axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="TFLOP/s")
        axes.set_title(f"{group} on {results.gpu}")
        axes.legend(fontsize=8)
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"{group}.png")
        figure.savefig(written[-1], dpi=120, bbox_inches="tight")
        pyplot.close(figure)
    return written


def _roof(axes: Any, ceilings: dict[str, float], shown: dict[str, list[Any]]) -> None:
    """Memory slope (the better of copy and read) and matrix ceiling."""
    xs = [p[0] for found in shown.values() for p in found]
    top, rate = ceilings["bf16_tflops"], max(ceilings["copy_gbs"], ceilings["read_gbs"]) / 1e3
    knee = top / rate
    low, high = min(*xs, knee) / 2, max(*xs, knee) * 2
    axes.plot([low, knee, high], [low * rate, top, top], color="black", linewidth=1)
