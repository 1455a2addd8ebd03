"""The store of generated and compiled kernels: readable, content-addressed, published by a rename.

``<root>/<format>/<readable>-<sha16>/`` holds ``kernel.py``, ``program.txt``, ``plan.txt``,
``key.txt``, the artifact ``kernel.<target>.cubin`` and ``manifest.json``, written last. Readers
take no lock and check hashes; a writer takes the key's lock, looks again, fills a temporary sibling
and renames it, so no partial entry is ever seen under its final name. Beneath the writable root
there may be bundles, which are only read.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from attncc.codegen.plan import plan_text
from attncc.codegen.render import Source
from attncc.dsl.text import program_text
from attncc.runtime import knobs
from attncc.runtime.entry import (
    KERNEL,
    KEY,
    BadEntryError,
    Entry,
    ForeignEntryError,
    read_entry,
    sync_folder,
    write_file,
)
from attncc.runtime.key import SOURCE_ONLY, SOURCES, STORE_FORMAT, Key, key_of
from attncc.runtime.locks import file_lock, process_lock
from attncc.runtime.manifest import MANIFEST, Manifest, sha256

LOCKS = ".locks"
PROGRAM, PLAN = "program.txt", "plan.txt"


class StoreWarning(RuntimeWarning):
    """A kernel that could not be kept; it runs all the same, and is compiled again next time."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a compiler hands the store: the manifest (without hashes) and further files."""

    manifest: Manifest
    files: Mapping[str, bytes]


Build = Callable[[Path], Built]
"""Compiles: given a folder that holds ``kernel.py``."""


@dataclass(frozen=True, slots=True)
class Store:
    """A writable root and the read-only bundles beneath it."""

    root: Path
    bundles: tuple[Path, ...] = ()

    @property
    def base(self) -> Path:
        """The folder of this format's entries."""
        return self.root / STORE_FORMAT

    def find(self, key: Key) -> Entry | None:
        """The entry of a key, or None; takes no lock and changes nothing.

        A bundle's entry also serves where only the compiler's version differs: its artifact needs
        no compiler.
        """
        own = self._read(self.base / key.folder)
        if own is not None and own.key == key:
            return own
        for bundle in self.bundles:
            exact = self._read(bundle / STORE_FORMAT / key.folder, bundled=True)
            if exact is not None and exact.key == key:
                return exact
            for entry in self._named(bundle, key["kernel"]):
                if entry.key.same_kernel(key):
                    return entry
        return None

    def named(self, key: Key) -> bool:
        """Whether something lies under a key's name; it has not been read and may be damaged."""
        roots = (self.root, *self.bundles)
        return any((root / STORE_FORMAT / key.folder / MANIFEST).exists() for root in roots)

    def alike(self, key: Key, text: bytes) -> Entry | None:
        """An entry that another version of the generator made with the very same text, if any."""
        for root in (self.root, *self.bundles):
            for entry in self._named(root, key["kernel"]):
                apart = {name for name, _, _ in entry.key.differences(key)}
                if apart == {SOURCES} and entry.files[KERNEL] == text:
                    return entry
        return None

    def _named(self, root: Path, kernel: str) -> Iterator[Entry]:
        for folder in sorted((root / STORE_FORMAT).glob(f"{kernel}-*")):
            entry = self._read(folder, bundled=root != self.root)
            if entry is not None:
                yield entry

    def _read(self, folder: Path, *, bundled: bool = False) -> Entry | None:
        try:
            return read_entry(folder, bundled=bundled)
        except (BadEntryError, OSError):
            return None

    def get(self, key: Key, source: Source, build: Build) -> Entry:
        """The entry of a key; built and published if it is missing.

        Args:
            key: what is wanted.
            source: its generated source.
            build: called at most once, with a folder that holds ``kernel.py``.

        Returns:
            The entry; where it could not be published (a warning), one of this process alone.
        """
        found = self.find(key)
        if found is not None:
            return found
        texts = {
            KERNEL: source.text.encode(),
            PROGRAM: program_text(source.plan.program).encode(),
            PLAN: plan_text(source.plan).encode(),
            KEY: key.text.encode(),
        }
        with process_lock(), self._staging(key, texts) as (folder, shared):
            again = self.find(key)
            if again is not None:
                return again
            built = build(folder)
            entry = _complete(key, built, texts, folder)
            return self._publish(entry) if shared else _keep(entry)

    @contextmanager
    def _staging(self, key: Key, texts: Mapping[str, bytes]) -> Iterator[tuple[Path, bool]]:
        """A folder with the texts, and whether it is one that can be published."""
        with ExitStack() as stack:
            try:
                locks = self.base / LOCKS
                for folder in (self.root, self.base, locks):
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                stack.enter_context(file_lock(locks / key.folder))
                made = Path(tempfile.mkdtemp(prefix=f".new-{key.folder}.", dir=self.base))
                stack.callback(shutil.rmtree, made, ignore_errors=True)
                _write(made, texts)
                shared = True
            except OSError as error:
                _warn(key, error)
                made, shared = _private_folder(), False
                _write(made, texts)
            yield made, shared

    def _publish(self, entry: Entry) -> Entry:
        """Give the finished folder its name; the lock of its key is held."""
        staging, final = entry.folder, self.base / entry.key.folder
        again = self._read(final)
        if again is not None:
            return again  # a file system without locks, and another process was first
        try:
            for name in entry.files.keys() - {MANIFEST} - {p.name for p in staging.iterdir()}:
                write_file(staging / name, entry.files[name])
            write_file(staging / MANIFEST, entry.files[MANIFEST])
            sync_folder(staging)
            set_aside(final)
            staging.rename(final)
            sync_folder(self.base)
        except OSError as error:
            _warn(entry.key, error)
            return _keep(entry)
        return replace(entry, folder=final)

    def folders(self) -> Iterator[tuple[Path, bool]]:
        """Every entry's folder, and whether it lies in a bundle."""
        for root, bundled in ((self.root, False), *((b, True) for b in self.bundles)):
            for folder in sorted((root / STORE_FORMAT).glob("*-*")):
                if not folder.name.startswith("."):
                    yield folder, bundled


def set_aside(folder: Path) -> None:
    """Move what lies under an entry's name out of the way; a foreign entry cannot be moved.

    Raises:
        OSError: it is somebody else's, or it cannot be moved.
    """
    if not os.path.lexists(folder):
        return
    try:
        read_entry(folder)
    except ForeignEntryError as error:
        raise PermissionError(f"{folder.name}: {error}") from error
    except (BadEntryError, OSError):
        pass
    for number in range(1000):
        aside = folder.with_name(f".bad-{folder.name}.{number}")
        if not os.path.lexists(aside):
            folder.rename(aside)
            return
    raise OSError(f"{folder.name}: too many damaged entries were set aside; sweep the store")


def compiled_part(entry: Entry) -> Built:
    """What a compiler made of an entry, without the texts it was made from."""
    texts = (KERNEL, PROGRAM, PLAN, KEY, MANIFEST)
    return Built(entry.manifest, {n: c for n, c in entry.files.items() if n not in texts})


def _complete(key: Key, built: Built, texts: Mapping[str, bytes], folder: Path) -> Entry:
    files = {**texts, **built.files}
    manifest = replace(built.manifest, files={n: sha256(c) for n, c in files.items()})
    return Entry(key, manifest, {**files, MANIFEST: manifest.to_json().encode()}, folder)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_file(folder / name, content)


def _keep(entry: Entry) -> Entry:
    """The entry in a folder of this process alone; gone when the process ends."""
    folder = _private_folder()
    _write(folder, entry.files)
    return replace(entry, folder=folder)


def _warn(key: Key, error: OSError) -> None:
    text = f"{key['kernel']} cannot be kept in the store: {error}"
    warnings.warn(StoreWarning(text), stacklevel=4)


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="attncc-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's files
        with suppress(OSError):
            shutil.rmtree(folder)


def current() -> Store:
    """The store that the environment asks for."""
    return Store(knobs.cache_dir(), knobs.bundle_dirs())


def put_source(source: Source) -> Path:
    """Path of a source's ``kernel.py`` in the store, written if it is not there yet."""
    manifest = Manifest(source.entry, SOURCE_ONLY)
    key = key_of(source, SOURCE_ONLY)
    return current().get(key, source, lambda _: Built(manifest, {})).kernel
