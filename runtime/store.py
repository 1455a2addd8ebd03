"""The store of generated sources: content-addressed, published by renaming a finished folder.

``<root>/<format>/<readable>-<sha16>/`` holds ``kernel.py`` and ``key.txt``. Readers take no lock; a
writer builds a temporary sibling and renames it, so no partial entry is ever seen under its final
name.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from attncc.codegen.plan import FORMAT
from attncc.codegen.render import Source, key_text
from attncc.runtime import knobs


def entry_path(source: Source) -> Path:
    """Folder of a source's entry."""
    return knobs.cache_dir() / FORMAT / f"{source.entry}-{source.digest[:16]}"


def put_source(source: Source) -> Path:
    """Path of the source's ``kernel.py``, written if it is not there yet.

    An entry whose text differs (a damaged file) is replaced.
    """
    folder = entry_path(source)
    path = folder / "kernel.py"
    if _reads(path, source.text):
        return path
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(staging / "key.txt", key_text(source))
        _write(staging / "kernel.py", source.text)
        _publish(staging, folder, source.text)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return path


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def _write(path: Path, text: str) -> None:
    with path.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def _publish(staging: Path, folder: Path, text: str) -> None:
    for _ in range(3):
        try:
            staging.rename(folder)
            return
        except OSError:
            if _reads(folder / "kernel.py", text):
                return  # another process was first
            aside = folder.with_name(f".bad.{folder.name}.{os.getpid()}")
            try:
                folder.rename(aside)
            except OSError:
                continue
            shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"cannot publish {folder.name} in the store")
