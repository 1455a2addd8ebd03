"""What a program may have on a target."""

from __future__ import annotations

SHARED = {
    "sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10,
    "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10,
    "sm_110": 227 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10,
}  # fmt: skip
"""Shared memory of a program in bytes (CUDA C++ Programming Guide, "Compute Capabilities")."""


def can_chain(target: str) -> bool:
    """Whether a kernel of a target can wait for the one ahead of it (PTX ``griddepcontrol``)."""
    return int(target.removeprefix("sm_")) >= 90


def shared_limit(target: str) -> int:
    """Bytes of shared memory a program may have; the least of all targets for an unknown one.

    Args:
        target: ``sm_90`` and the like.
    """
    return SHARED.get(target, min(SHARED.values()))
