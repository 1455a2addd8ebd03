"""What was measured: commit and versions, for each row."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from benchmarks.peers import DISTRIBUTIONS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("dsl", "codegen", "templates", "runtime", "benchmarks")


def fingerprint(root: Path = ROOT) -> str:
    """Eight hex digits of the sources' content."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".jinja") and path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit(root: Path = ROOT) -> str:
    """The commit; with changes in the sources, or without git, their fingerprint as well."""
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return f"tree-{fingerprint(root)}"
    changed = _git(
        root, "status", "--porcelain", "--", *(f"{s}/*.py" for s in SOURCES), "templates"
    )
    return head if changed == "" else f"{head}+{fingerprint(root)}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions(peer: str) -> dict[str, str | None]:
    """Versions of the parts that decide a time, the peer's among them."""
    names = ["torch", "triton", DISTRIBUTIONS.get(peer, peer)]
    return {"python": platform.python_version(), **{n: _version(n) for n in names}}
