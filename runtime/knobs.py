"""Environment variables: all of them are read here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

CACHE_DIR = "ATTNCC_CACHE_DIR"
"""The variable's name, for who starts another process."""


def cache_dir() -> Path:
    """``ATTNCC_CACHE_DIR``: where generated sources and compiled kernels are kept.

    Several folders may be listed (``:`` between them, ``;`` on Windows): the first is written to,
    the others are bundles that are only read. An empty first one stands for the default.
    """
    given = os.environ.get("ATTNCC_CACHE_DIR", "").split(os.pathsep)[0]
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given).expanduser() if given else Path(base).expanduser() / "attncc"


def bundle_dirs() -> tuple[Path, ...]:
    """``ATTNCC_CACHE_DIR``: the bundles listed behind its first folder."""
    rest = os.environ.get("ATTNCC_CACHE_DIR", "").split(os.pathsep)[1:]
    return tuple(Path(folder).expanduser() for folder in rest if folder)


def places() -> tuple[str, str]:
    """The variables that name the store's folders, as they stand: cheap to compare."""
    return os.environ.get("ATTNCC_CACHE_DIR", ""), os.environ.get("XDG_CACHE_HOME", "")


def expect_hit() -> bool:
    """``ATTNCC_EXPECT_HIT=1``: nothing is compiled; a kernel the store lacks is an error."""
    return os.environ.get("ATTNCC_EXPECT_HIT", "") == "1"


def backend() -> str:
    """``ATTNCC_BACKEND``: the backend where a call names none; ``auto`` by default."""
    return os.environ.get("ATTNCC_BACKEND", "auto")


def check() -> bool:
    """``ATTNCC_CHECK=1``: look at lengths, tables, slots and cu_seqlens (reads the device)."""
    return os.environ.get("ATTNCC_CHECK", "") == "1"


def dump() -> Path | None:
    """``ATTNCC_DUMP``: a folder that receives every program, plan and source as it is made."""
    given = os.environ.get("ATTNCC_DUMP")
    return Path(given) if given else None


def interpreting() -> bool:
    """Whether Triton runs its CPU interpreter in this process (Triton's own variable)."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


_DECISIVE = (
    "ATTNCC_BACKEND", "ATTNCC_CHECK", "ATTNCC_CACHE_DIR", "XDG_CACHE_HOME", "TRITON_INTERPRET",
)  # fmt: skip


def _raw() -> Any:
    """The environment's own dictionary: a look into ``os.environ`` itself costs a microsecond."""
    held = getattr(os.environ, "_data", None)
    return held if isinstance(held, dict) else None


_RAW = _raw()
_RAW_NAMES = tuple(map(getattr(os.environ, "encodekey", str), _DECISIVE))


def snapshot() -> tuple[Any, ...]:
    """Everything here that decides how a call runs, as it stands; only good for comparing."""
    if _RAW is None:
        return tuple(map(os.environ.get, _DECISIVE))
    return tuple(map(_RAW.get, _RAW_NAMES))
