"""The Markdown table of a result file, and its place in a document."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Results, Row

BEGIN = "<!-- benchmarks:begin -->"
END = "<!-- benchmarks:end -->"
LIBRARY = "library_"
"""What the names of groups that go through the library begin with."""
RESOURCES = ("<!-- resources:begin -->", "<!-- resources:end -->")
SUMMARY = ("work", "ours (ms)", "ratio to each peer, the best one first", "of ceiling")
HEAD = ("work", "ours (ms)", "peer", "peer (ms)", "ratio", "of ceiling", "error / budget")


class MarkerError(ValueError):
    """The document has no place for the table, or more than one."""


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _number(value: float | str | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:.2g}"


def cells(row: Row) -> list[str]:
    """One row's cells, the work without its group."""
    ratio, share = row["ratio"], row["share_of_ceiling"]
    timing = {"graph": " ᵍ", "host": " ʰ", "process": " ᵖ"}.get(row.get("timing") or "", "")
    peer_ms = _ms(row["peer_ms"])
    if row.get("reason"):
        peer_ms = f"{peer_ms} ({row['reason']})" if row["peer_ms"] is not None else row["reason"]
    limit = "" if not row["bound"] else f" {row['bound']}"
    return [
        row["work"].partition("/")[2],
        f"{_ms(row['ours_ms'])}{timing} {row['backend'] or ''}".strip(),
        row["peer"],
        peer_ms,
        "–" if ratio is None else f"{ratio:.2f}",
        "–" if share is None else f"{100 * share:.0f} %{limit}",
        f"{_number(row['error'])} / {_number(row['budget'])}",
    ]


def line(values: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(v.replace("|", "\\|").replace("\n", " ") for v in values) + " |"


def _ceilings(results: Results) -> str:
    """The range of each ceiling over the runs that rows come from."""
    units = {
        "copy_gbs": "copy {} GB/s",
        "read_gbs": "read {} GB/s",
        "bf16_tflops": "bf16 {} TFLOP/s",
    }
    found = []
    for name, text in units.items():
        seen = [run["ceilings"][name] for run in results.runs.values() if name in run["ceilings"]]
        if seen:
            low, high = f"{min(seen):.0f}", f"{max(seen):.0f}"
            found.append(text.format(low if low == high else f"{low}-{high}"))
    return ", ".join(found)


def _heading(results: Results) -> list[str]:
    commits = ", ".join(dict.fromkeys(row["commit"] for row in results.rows))
    return [
        f"{results.gpu or 'no GPU'}; ceilings in the same runs: {_ceilings(results) or '–'}; "
        f"commit {commits or '–'}.",
        "Ratio = peer's time / ours; ᵍ CUDA-graph replay, ʰ host time a call, ᵖ in a new process, "
        "else events; answers checked before timing.",
    ]


def summary(results: Results) -> str:
    """One line a work, group by group: our time, each peer's ratio, the best peer first.

    The groups that go through the library op by op are left to the whole table.
    """
    works: dict[str, list[Row]] = {}
    for group, rows in _by_group(results).items():
        for row in rows if not group.startswith(LIBRARY) else ():
            works.setdefault(row["work"], []).append(row)
    lines = [*_heading(results), "", line(SUMMARY), line(["---"] * len(SUMMARY))]
    for work, rows in works.items():
        timed = sorted((r for r in rows if r["ratio"] is not None), key=lambda r: float(r["ratio"]))
        if not timed:
            continue
        ours, share = cells(timed[0])[1], cells(timed[0])[5]
        ratios = [f"{r['peer']} **{r['ratio']:.2f}**" for r in timed]
        lines.append(line([work.replace("/", ": ", 1), ours, ", ".join(ratios), share]))
    return "\n".join(lines) + "\n"


def _by_group(results: Results) -> dict[str, list[Row]]:
    """Rows by group, in the order of the first row of each."""
    groups: dict[str, list[Row]] = {}
    for row in results.rows:
        groups.setdefault(row["work"].partition("/")[0], []).append(row)
    return groups


def markdown(results: Results) -> str:
    """The whole table: one part a group, in the order of the rows."""
    lines = _heading(results)
    for group, rows in _by_group(results).items():
        lines += ["", f"**{group}**", "", line(HEAD), line(["---"] * len(HEAD))]
        lines += [line(cells(row)) for row in rows]
    return "\n".join(lines) + "\n"


def insert(document: str, table: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """Replace what stands between the two markers.

    Raises:
        MarkerError: the markers are not there exactly once, in order.
    """
    begin, end = markers
    if document.count(begin) != 1 or document.count(end) != 1:
        raise MarkerError(f"wanted one line {begin} and one line {end}")
    before, _, rest = document.partition(begin)
    if end not in rest:
        raise MarkerError(f"{end} stands before {begin}")
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{table}{end}{after}"


def write(path: Path, table: str, markers: tuple[str, str] = (BEGIN, END)) -> None:
    """Put the table into a document."""
    path.write_text(insert(path.read_text(encoding="utf-8"), table, markers), encoding="utf-8")
