"""One entry of the store as it lies on disk: reading it means checking it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attncc.runtime.key import Key, parse_key
from attncc.runtime.manifest import MANIFEST, Manifest, parse_manifest, sha256

KERNEL = "kernel.py"
KEY = "key.txt"
_MOST_BYTES = 1 << 28


class BadEntryError(Exception):
    """An entry that must not be used; it counts as missing."""


class ForeignEntryError(BadEntryError):
    """An entry that somebody else owns or may change: not ours to load, nor to set aside."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checked entry: its files were read once and are what their hashes say.

    Attributes:
        key: its identity.
        manifest: how to load it.
        files: contents by name.
        folder: where it lies (a private folder of this process, if it could not be published).
        bundled: it comes from a read-only bundle.
    """

    key: Key
    manifest: Manifest
    files: Mapping[str, bytes]
    folder: Path
    bundled: bool = False

    @property
    def kernel(self) -> Path:
        """The generated source."""
        return self.folder / KERNEL

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))


def check_owner(folder: Path) -> None:
    """Refuse a folder that another user could have filled.

    Raises:
        ForeignEntryError: the owner is neither this user nor root, or everybody may write.
        OSError: it cannot be looked at.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise ForeignEntryError("not a folder")
    if found.st_uid not in (os.geteuid(), 0):
        raise ForeignEntryError(f"owned by user {found.st_uid}, not by {os.geteuid()}")
    if found.st_mode & stat.S_IWOTH:
        raise ForeignEntryError("everybody may write to it")


def read_entry(folder: Path, *, bundled: bool = False) -> Entry:
    """Read and check an entry.

    Raises:
        FileNotFoundError: there is none.
        ForeignEntryError: it is somebody else's.
        BadEntryError: a file is missing, cut short or changed, or the manifest is unreadable.
    """
    check_owner(folder)
    check_owner(folder.parent)  # whoever owns that could put other entries in their place
    try:
        data = _read(folder / MANIFEST)
        manifest = parse_manifest(data)
        files = {name: _read(folder / name) for name in manifest.files}
        for name, content in files.items():
            if sha256(content) != manifest.files[name]:
                raise BadEntryError(f"{name} is not what the manifest says")
        key = parse_key(files[KEY].decode())
    except (OSError, ValueError, KeyError) as error:
        raise BadEntryError(str(error)) from error
    if key.folder != folder.name:
        raise BadEntryError("the key is another entry's")
    return Entry(key, manifest, {**files, MANIFEST: data}, folder, bundled)


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as f:
        data = f.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise BadEntryError(f"{path.name} is too large")
    return data


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has a folder's names."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
