"""Looks after a store: what it holds, and removing what nothing will ask for again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attncc.runtime.entry import BadEntryError, ForeignEntryError, check_owner, read_entry
from attncc.runtime.key import STORE_FORMAT, fingerprint
from attncc.runtime.store import LOCKS, Store

STALE_SECONDS = 3600.0
"""An unfinished folder that old has no writer any more."""

_UNFINISHED = ".new-"
_SET_ASIDE = ".bad-"


@dataclass(frozen=True, slots=True)
class Held:
    """One folder of a store, as a list shows it.

    Attributes:
        name: the folder's name.
        kernel: the kernel's name, or the folder's where it cannot be read.
        target: ``sm_90`` and the like; ``source`` for a generated file alone.
        size: in bytes.
        bundled: it lies in a bundle.
        current: its sources are those of this version.
        problem: why it will not be loaded, or None.
    """

    name: str
    kernel: str
    target: str
    size: int
    bundled: bool
    current: bool
    problem: str | None = None


def list_store(store: Store) -> Iterator[Held]:
    """Every entry, checked; the writable root's first."""
    for folder, bundled in store.folders():
        try:
            entry = read_entry(folder, bundled=bundled)
        except (BadEntryError, OSError) as error:
            yield Held(folder.name, folder.name, "-", 0, bundled, False, str(error))
            continue
        current = entry.key["sources"] == fingerprint()
        target = entry.manifest.target
        yield Held(folder.name, entry.manifest.entry, target, entry.size, bundled, current)


def sweep(store: Store, *, everything: bool = False) -> list[str]:
    """Remove from the writable root what is damaged, unfinished, or of another version.

    Args:
        store: bundles are left alone.
        everything: also remove good entries.

    Returns:
        Names of what was removed.
    """
    removed = []
    for held in list_store(Store(store.root)):
        if everything or held.problem is not None or not held.current:
            removed += _remove(store.base / held.name)
    if store.base.is_dir():
        for folder in sorted(store.base.iterdir()):
            unfinished = folder.name.startswith(_UNFINISHED) and _age(folder) > STALE_SECONDS
            if unfinished or folder.name.startswith(_SET_ASIDE):
                removed += _remove(folder)
        for lock in (store.base / LOCKS).glob("*"):
            if not (store.base / lock.name).exists() and _age(lock) > STALE_SECONDS:
                lock.unlink(missing_ok=True)
    for old in sorted(store.root.glob("[0-9]*")):
        if old.name.isdigit() and int(old.name) < int(STORE_FORMAT):
            removed += _remove(old)
    return removed


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _remove(folder: Path) -> list[str]:
    # Renamed first, so that no reader sees half of it.
    aside = folder.with_name(f".bad-{folder.name.lstrip('.')}.swept")
    try:
        check_owner(folder)
        folder.rename(aside)
        shutil.rmtree(aside)
    except (ForeignEntryError, OSError):
        return []
    return [folder.name]
