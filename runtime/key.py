"""What identifies a compiled kernel: named parts, one a line, the same on every machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attncc.codegen.plan import Dialect
from attncc.codegen.render import Source

STORE_FORMAT = "5"
"""Version of the entries' layout and of how kernels are compiled; a folder below every root."""

SOURCE_ONLY = "source"
"""Target of an entry that holds a generated file and no artifact."""

SOURCES = "sources"
"""The part that says which version of the generator printed the source."""

COMPILER = frozenset({"triton", "cutedsl"})
"""Parts that say who compiled a kernel, not what it computes."""

CUTEDSL_WHEEL = "nvidia-cutlass-dsl"
_PACKAGE = Path(__file__).resolve().parent.parent
_COMPILED_BY = (
    ("dsl", "*.py"), ("codegen", "*.py"), ("codegen", "*.json"), ("templates", "*.jinja"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """The named parts of an entry's identity, in order."""

    parts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """One part a line: what ``key.txt`` holds."""
        return "".join(f"{name} = {value}\n" for name, value in self.parts)

    @property
    def digest(self) -> str:
        """Hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the entry's folder: ``<readable>-<sha16>``."""
        return f"{self['kernel']}-{self.digest[:16]}"

    def __getitem__(self, name: str) -> str:
        return dict(self.parts)[name]

    def differences(self, other: Key) -> tuple[tuple[str, str, str], ...]:
        """Parts that differ: name, value here, value there (``-`` where there is none)."""
        mine, theirs = dict(self.parts), dict(other.parts)
        names = [*mine, *(n for n in theirs if n not in mine)]
        found = ((n, mine.get(n, "-"), theirs.get(n, "-")) for n in names)
        return tuple((n, a, b) for n, a, b in found if a != b)

    def same_kernel(self, other: Key) -> bool:
        """Whether both name one kernel, whichever version of the compiler built it."""
        return all(name in COMPILER for name, _, _ in self.differences(other))


def parse_key(text: str) -> Key:
    """Read ``key.txt``.

    Raises:
        ValueError: a line is no ``name = value``, or the kernel is not named.
    """
    parts = []
    for line in text.splitlines():
        name, found, value = line.partition(" = ")
        if not found:
            raise ValueError(f"not a key part: {line!r}")
        parts.append((name, value))
    if "kernel" not in dict(parts):
        raise ValueError("the key names no kernel")
    return Key(tuple(parts))


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Hash of the files that decide what is generated: dsl, codegen, its tables, templates."""
    total = hashlib.sha256()
    for folder, pattern in _COMPILED_BY:
        base = str((_PACKAGE / folder).resolve())
        ending = pattern.removeprefix("*")
        for name in sorted(n for n in _files(base) if n.endswith(ending)):
            total.update(f"{folder}/{name}\0".encode())
            with open(f"{base}/{name}", "rb") as file:
                total.update(file.read())
    return total.hexdigest()


def _files(base: str) -> Iterator[str]:
    """Names of the files below a folder, relative to it, with slashes."""
    for where, _, names in os.walk(base):
        inside = where[len(base) + 1 :].replace(os.sep, "/")
        yield from (f"{inside}/{name}" if inside else name for name in names)


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Version of the installed Triton, without importing it; ``none`` where there is none."""
    return _version("triton")


@lru_cache(maxsize=1)
def cutedsl_version() -> str:
    """Version of the installed CuTe-DSL, without importing it; ``none`` where there is none."""
    return _version(CUTEDSL_WHEEL)


def _version(wheel: str) -> str:
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def key_of(source: Source, target: str) -> Key:
    """Key of a source compiled for a target (``sm_90``), or of the source alone.

    Sources and plan decide the generated code, so it is no part of the key and is not printed to
    make one.
    """
    plan = source.plan
    cute = plan.dialect is Dialect.CUTEDSL
    version = cutedsl_version() if cute else triton_version()
    options = f"num_warps={plan.num_warps} num_stages={plan.num_stages}"
    parts = [
        ("format", STORE_FORMAT),
        ("kernel", source.entry),
        (SOURCES, fingerprint()),
        ("plan", source.digest),
        ("target", target),
        ("cutedsl" if cute else "triton", "-" if target == SOURCE_ONLY else version),
        ("options", options),
    ]
    if target == SOURCE_ONLY:  # read by people: its comments name lines of the user's file
        parts.append(("text", hashlib.sha256(source.text.encode()).hexdigest()))
    return Key(tuple(parts))
