"""Locks: one for the threads of this process, one a key between processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = threading.RLock()


def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.RLock()  # a thread that held it does not exist in the child


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def process_lock() -> Iterator[None]:
    """One thread at a time: the store and the compiler's settings are the process's."""
    with _LOCK:
        yield


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it, however it ends.

    A file system without locks gives none: publishing is a rename, so the answer stays right and
    only the work may be done twice.

    Raises:
        OSError: the file cannot be made.
    """
    import fcntl

    # Record locks are not inherited by forked children, so none of them keeps a key locked.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            fcntl.lockf(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
