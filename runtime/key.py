"""What identifies a compiled kernel: named parts, one a line, the same on every machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attncc.codegen.plan import plan_text
from attncc.codegen.render import Source

STORE_FORMAT = "3"
"""Version of the entries' layout and of how kernels are compiled; a folder below every root."""

SOURCE_ONLY = "source"
"""Target of an entry that holds a generated file and no artifact."""

COMPILER = frozenset({"triton"})
"""Parts that say who compiled a kernel, not what it computes."""

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
        base = (_PACKAGE / folder).resolve()
        for path in sorted(base.rglob(pattern)):
            total.update(f"{folder}/{path.relative_to(base).as_posix()}\0".encode())
            total.update(path.read_bytes())
    return total.hexdigest()


@lru_cache(maxsize=1)
def triton_version() -> str:
    """Version of the installed Triton, without importing it; ``none`` where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def code_digest(text: str) -> str:
    """Hash of a generated file without its comments, which name lines of the user's file."""
    code = "\n".join(x for x in text.splitlines() if not x.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()


def key_of(source: Source, target: str) -> Key:
    """Key of a source compiled for a target (``sm_90``), or of the source alone."""
    plan = source.plan
    triton = "-" if target == SOURCE_ONLY else triton_version()
    options = f"num_warps={plan.num_warps} num_stages={plan.num_stages}"
    # The source alone is read by people too: there the comments count.
    code = source.digest if target == SOURCE_ONLY else code_digest(source.text)
    return Key(
        (
            ("format", STORE_FORMAT),
            ("kernel", source.entry),
            ("sources", fingerprint()),
            ("plan", hashlib.sha256(plan_text(plan).encode()).hexdigest()),
            ("code", code),
            ("target", target),
            ("triton", triton),
            ("options", options),
        )
    )
