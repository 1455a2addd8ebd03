"""The caller's own tables of measured plans: ``<root>/plans/<target>.json`` of each folder.

They are looked at before the table that the package carries; ``attncc tune`` writes them.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from attncc.codegen.plan_table import (
    PLANS,
    PlanTable,
    TableEntry,
    parse_table,
    table_text,
)
from attncc.dsl.errors import ToolchainError
from attncc.runtime import knobs
from attncc.runtime.entry import ForeignEntryError, check_owner, sync_folder, write_file
from attncc.runtime.locks import file_lock, process_lock
from attncc.runtime.recording import KEPT

FOLDER = "plans"


class PlanTableWarning(RuntimeWarning):
    """A table of plans that is not used: it is damaged, of another version or somebody else's."""


def local_table(target: str) -> PlanTable | None:
    """The tables of the writable folder and of the bundles beneath it as one, or None.

    They are read once a process; :func:`write_entries` makes this process read them again.
    """
    return _tables(knobs.places(), target)  # asked for on every call: no path is made


@lru_cache(maxsize=64)
def _tables(places: tuple[str, str], target: str) -> PlanTable | None:
    roots = (knobs.cache_dir(), *knobs.bundle_dirs())
    found = [t for t in (_read(root / FOLDER, target) for root in roots) if t is not None]
    if not found:
        return None
    kept: dict[str, TableEntry] = {}
    for table in found:
        for entry in table.entries:
            kept.setdefault(entry.id, entry)  # the writable folder's come first
    return PlanTable(tuple(kept.values()), found[0].name)


def _read(folder: Path, target: str) -> PlanTable | None:
    path = folder / f"{target}.json"
    if not path.is_file():
        return None
    try:
        check_owner(folder)
        return parse_table(path.read_text(encoding="utf-8"), str(path), target)
    except (OSError, ValueError, ForeignEntryError) as error:
        text = f"{path} is not used: {error}"
        warnings.warn(PlanTableWarning(text), stacklevel=2)
        return None


def write_entries(folder: Path, target: str, new: tuple[TableEntry, ...]) -> Path:
    """Add entries to a table, in place of those that match the same; the rename is atomic.

    Args:
        folder: where ``<target>.json`` lies or will lie.
        target: ``sm_90`` and the like.
        new: the entries.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written.
        ValueError: there is a file of that name that is no table; it is left as it is.
    """
    path = folder / f"{target}.json"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = knobs.cache_dir()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with process_lock(), file_lock(place / ".plans.lock"):
        held: tuple[TableEntry, ...] = ()
        if path.is_file():
            held = parse_table(path.read_text(encoding="utf-8"), str(path), target).entries
        places = {_place(e) for e in new} | {e.id for e in new}
        kept = [e for e in held if _place(e) not in places and e.id not in places]
        _replace(path, table_text((*kept, *new), target).encode())
    _tables.cache_clear()
    KEPT.choose_again()
    return path


def _place(entry: TableEntry) -> object:
    return entry.family, entry.facts, entry.sizes


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".new-{path.name}.", dir=path.parent)
    os.close(handle)
    made = Path(name)
    try:
        write_file(made, data)
        made.chmod(0o644)
        made.replace(path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            made.unlink()


def copy_tables(root: Path, targets: tuple[str, ...]) -> list[Path]:
    """Put what decides plans here beneath a bundle, so that it decides alike where that goes."""
    found = []
    for target in targets:
        table = local_table(target)
        if table is not None:
            found.append(write_entries(root / FOLDER, target, table.entries))
    return found


def committed_folder() -> Path:
    """Where the package's own tables lie.

    Raises:
        ToolchainError: the package is not a checkout whose files may be changed.
    """
    checkout = PLANS.parent.parent / "pyproject.toml"
    if not checkout.is_file():
        raise ToolchainError(f"{PLANS} belongs to an installed package; use a checkout")
    return PLANS


def as_dict(entry: TableEntry) -> dict[str, object]:
    """An entry as JSON shows it."""
    [held] = json.loads(table_text((entry,), "-"))["entries"]
    return dict(held)
