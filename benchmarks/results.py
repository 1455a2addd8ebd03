"""The result file: rows of one GPU, merged by work and peer, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FOLDER = Path(__file__).resolve().parent / "results"
_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|\d+\s*gb|hbm\w*|pcie|sxm\w*|generation", re.I)


def slug(device: str) -> str:
    """A device's name as a file name: ``NVIDIA H100 80GB HBM3`` gives ``h100``."""
    words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", device).lower())
    return "-".join(words) or "gpu"


def default_path(device: str) -> Path:
    """Where a device's rows are kept."""
    return FOLDER / f"{slug(device)}.json"


def key(row: Row) -> tuple[str, str]:
    """What a row is about: a later one of the same key takes its place."""
    return row["work"], row["peer"]


def finished(row: Row) -> bool:
    """Both sides were timed, or the answer was wrong; nothing to gain from running it again."""
    return row.get("ratio") is not None or row.get("wrong", False)


@dataclass(slots=True)
class Results:
    """All rows of one GPU.

    Attributes:
        gpu: the device's full name.
        rows: one a work and peer.
        runs: by run id, the ceilings measured in that run and when; each row names its run.
    """

    gpu: str
    rows: list[Row] = field(default_factory=list)
    runs: dict[str, Row] = field(default_factory=dict)

    @staticmethod
    def load(path: Path, gpu: str = "") -> Results:
        """Read a file; a missing one is empty.

        Raises:
            ValueError: the file is not one of ours.
        """
        if not path.exists():
            return Results(gpu)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return Results(data["gpu"], list(data["rows"]), dict(data["runs"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path.name} is not a result file: {error}") from error

    def merge(self, rows: Iterable[Row]) -> None:
        """Put rows in place of those about the same work and peer; new ones go to the end."""
        by_key = {key(r): r for r in self.rows}
        by_key.update((key(r), r) for r in rows)
        self.rows = list(by_key.values())

    def done(self, commit: str) -> frozenset[tuple[str, str]]:
        """Keys that ``--resume`` need not run again."""
        return frozenset(key(r) for r in self.rows if r["commit"] == commit and finished(r))

    def save(self, path: Path) -> None:
        """Write to a sibling, then rename: a reader sees the old file or the new one."""
        used = {r.get("run") for r in self.rows}
        data = {
            "gpu": self.gpu,
            "runs": {k: v for k, v in self.runs.items() if k in used},
            "rows": self.rows,
        }
        text = json.dumps(_plain(data), indent=1, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks become words."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {k: _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
        case _:
            return value
