"""Ledgers of ops and layers, with torch's dtypes and the storage types of caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError, DtypeError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Dtype, Layer
from attncc.dsl.ledger import Choices, Ledger, Phase, Scaled
from attncc.dsl.ledger import ledger as derive
from attncc.dsl.ledger.derive import Subject
from attncc.dsl.ledger.model import phase_of
from attncc.runtime.caches import Storage
from attncc.runtime.quantised import Quantised

DTYPES: Mapping[torch.dtype, Dtype] = {
    torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16,
    torch.float8_e4m3fn: Dtype.E4M3, torch.uint8: Dtype.UE8M0, torch.int32: Dtype.INT32,
    torch.int64: Dtype.INT64,
}  # fmt: skip


def subject_of(given: Any) -> Subject:
    """What has a ledger: an op, a declaration, a layer, or what has one in ``layer``.

    Raises:
        ArgumentError: it is none of them.
    """
    if isinstance(given, (Declaration, Layer)):
        return given
    for name in ("declaration", "layer"):
        found = getattr(given, name, None)
        found = found() if callable(found) and not isinstance(found, Declaration) else found
        if isinstance(found, (Declaration, Layer)):
            return found
    raise ArgumentError(
        "an op or a layer has a ledger", argument="subject", expected="an op or a layer",
        found=type(given).__name__,
    )  # fmt: skip


def ledger(
    subject: Any,
    sizes: Mapping[str, int] | None = None,
    phase: str | Phase = "decode",
    layers: int = 1,
    *,
    dtype: Storage | Mapping[str, Storage] = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    **choices: Any,
) -> Ledger:
    """Every object of an op or a layer: who makes and reads it, how long it lives, its bytes.

    Args:
        subject: an op, a declaration or a layer.
        sizes: of every axis; None for formulas alone. In decode T is 1 where nothing is said, in a
            prefill S is T; ``splits``, ``segments`` (1) and ``chunk`` (64) are choices of a plan.
        phase: ``prefill``, ``decode`` or ``train``.
        layers: how many layers keep and save what is theirs.
        dtype: as of ``op.caches``: of everything but states, or by name; histories may be
            :class:`Quantised`.
        state_dtype: of states that ``dtype`` does not name.
        **choices: ``page``, ``keep``, ``given``, ``optimizer``, ``recompute``, ``comm``,
            ``workspace``, ``margin``; see :class:`attncc.dsl.ledger.Choices`.

    Raises:
        CallError: a size that is missing, unknown or none; a cache asked for in training.
        RefusedError: rows dropped that a later query may read.
    """
    found = subject_of(subject)
    given = {k: v for k, v in choices.items() if k in _CHOICES}
    if len(given) < len(choices):
        unknown = next(k for k in choices if k not in _CHOICES)
        raise ArgumentError(
            "no such option of a ledger",
            op=found.name, argument=unknown, expected=", ".join(_CHOICES),
        )  # fmt: skip
    if given.get("given") is not None:
        given["given"] = frozenset(given["given"])
    common, named = _stored(found, dtype)
    chosen = Choices(common, _floating(found.name, "state_dtype", state_dtype), named, **given)
    return derive(found, sizes, phase_of(phase), layers, chosen)


_CHOICES = ("page", "keep", "given", "optimizer", "recompute", "comm", "workspace", "margin")


def _stored(
    subject: Subject, dtype: Storage | Mapping[str, Storage]
) -> tuple[Dtype, dict[str, Dtype | Scaled]]:
    """The dtype of everything, and storage by name."""
    if isinstance(dtype, Mapping):
        return Dtype.BF16, {n: _storage(subject.name, n, s) for n, s in dtype.items()}
    if isinstance(dtype, Quantised):
        named = {n: _storage(subject.name, n, dtype) for n in _histories(subject)}
        return Dtype.BF16, named
    return _floating(subject.name, "dtype", dtype), {}


def _histories(subject: Subject) -> list[str]:
    """Histories that are stored as a call says; some of a layer's say it themselves."""
    if isinstance(subject, Declaration):
        return [t.name for t in subject.tensors if t.lifetime is Lifetime.CACHE]
    return [o.name for o in subject.objects if o.lifetime is Lifetime.CACHE and o.dtype is None]


def _storage(op: str, name: str, storage: Storage) -> Dtype | Scaled:
    if isinstance(storage, Quantised):
        elements, scales = storage.dtype, storage.scale_dtype
        return Scaled(_dtype(op, name, elements), storage.block, _dtype(op, name, scales))
    return _dtype(op, name, storage)


def _dtype(op: str, argument: str, dtype: torch.dtype) -> Dtype:
    found = DTYPES.get(dtype)
    if found is None:
        raise DtypeError(
            "no such dtype", op=op, argument=argument, expected=", ".join(d.value for d in Dtype),
            found=dtype,
        )  # fmt: skip
    return found


_FLOATING = (Dtype.FP32, Dtype.BF16, Dtype.FP16)


def _floating(op: str, argument: str, dtype: torch.dtype) -> Dtype:
    """The dtype of a call's own tensors, or of its states."""
    found = _dtype(op, argument, dtype)
    if found not in _FLOATING:
        raise DtypeError(
            "no dtype of a call's tensors or states", op=op, argument=argument,
            expected=", ".join(d.value for d in _FLOATING), found=dtype,
        )  # fmt: skip
    return found
