"""What of a call's arguments decides how it runs: everything but values on the device.

:func:`leaves` takes the arguments apart (tensors, host numbers, the rest) and can put them together
again with others; it names every part. :func:`read` does the same in one quick pass for a call that
may have been seen before, and gives a key: two calls with one key run alike.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from attncc.dsl.errors import BackendError

_CONSTANTS = (type(None), bool, str)
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose tensors are what they seem; subclasses go the ordinary way."""

SIZES = "sizes"
"""The option whose numbers are axis sizes: they decide how a call runs."""


HELD = ("tensors", "pages")
"""Fields of a cache whose entries are labelled as if they were its own: ``cache.k``."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What has to be equal of two tensors that take each other's place.

    Strides of contiguous tensors may differ where an axis has one element.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    contiguous: bool
    dtype: torch.dtype
    device: torch.device
    aligned: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        return Layout(
            tensor.shape, tensor.stride(), tensor.is_contiguous(), tensor.dtype, tensor.device,
            tensor.data_ptr() % 16 == 0,
        )  # fmt: skip

    @staticmethod
    def dense(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Layout:
        """The layout of a tensor that torch allocates."""
        empty = torch.empty(shape, device="meta")
        return Layout(empty.shape, empty.stride(), True, dtype, device, True)

    @property
    def extent(self) -> int:
        """Bytes from the first element to behind the last; 0 without elements."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    def differences(self, tensor: torch.Tensor) -> list[tuple[str, object, object]]:
        """What is otherwise: name, expected, found; an aligned tensor may stand for any."""
        other = Layout.of(tensor)
        strides = () if self.contiguous and other.contiguous else ("strides",)
        names = ("shape", *strides, "dtype", "device")
        pairs = [(n, getattr(self, n), getattr(other, n)) for n in names]
        if self.aligned and not other.aligned:
            pairs.append(("alignment", "an address of 16 bytes", f"{tensor.data_ptr():#x}"))
        return [(name, want, found) for name, want, found in pairs if want != found]


Mapper = Callable[[str, torch.Tensor], torch.Tensor]
Counter = Callable[[str, float], float]


@dataclass(slots=True)
class Leaves:
    """A call's arguments, taken apart, by label: ``q``, ``cache.k``, ``s.slots``, ``out[o]``.

    Attributes:
        tensors: by label, in the order of :func:`read`.
        numbers: host numbers by label, likewise.
        constants: everything else by label.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float]
    constants: dict[str, Hashable]
    _args: tuple[Any, ...]
    _kwargs: Mapping[str, Any]
    _names: Sequence[str]

    def rebuilt(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[float]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors and numbers, in the same order."""
        by_label = dict(zip(self.tensors, tensors, strict=True))
        plain = dict(zip(self.numbers, numbers, strict=True))
        walk = _Walk(lambda label, _: by_label[label], lambda label, _: plain[label])
        return walk.call(self._names, self._args, self._kwargs)


class _Walk:
    """Goes through arguments in one fixed order and copies their structure."""

    def __init__(self, tensor: Mapper, number: Counter) -> None:
        self.tensor, self.number = tensor, number
        self.constants: dict[str, Hashable] = {}

    def call(
        self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Too many of them, or one twice: a label of its own each, so that binding finds it.
        labels = [*names[: len(args)], *(f"argument {i}" for i in range(len(names), len(args)))]
        found = tuple(self.visit(n, v) for n, v in zip(labels, args, strict=True))
        twice = {n: f"{n} again" for n in labels}
        return found, {n: self.visit(twice.get(n, n), v) for n, v in kwargs.items()}

    def visit(self, label: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(label, value)
        if label == SIZES and value is not None:
            self.constants[label] = tuple(dict(value).items())
            return value
        if type(value) in (int, float):
            if label.isidentifier():
                return self.number(label, value)
            self.constants[label] = value  # a field of a cache, an entry of a mapping
            return value
        if is_dataclass(value) and not isinstance(value, type):
            self.constants[f"{label}:"] = type(value)
            names = [f.name for f in fields(value)]
            return type(value)(
                **{n: self._field(label, n, getattr(value, n), names) for n in names}
            )
        if isinstance(value, Mapping):
            self.constants[f"{label}[]"] = tuple(value)
            return {n: self.visit(f"{label}[{n}]", v) for n, v in value.items()}
        if not isinstance(value, (*_CONSTANTS, enum.Enum, torch.dtype)):
            raise BackendError(
                "the call cannot be prepared: an argument of this type is not known",
                argument=label, found=type(value).__name__,
            )  # fmt: skip
        self.constants[label] = value
        return value

    def _field(self, label: str, name: str, value: Any, names: Sequence[str]) -> Any:
        if not isinstance(value, Mapping):
            return self.visit(f"{label}.{name}", value)
        self.constants[f"{label}.{name}[]"] = tuple(value)
        short = {n for n in value if name in HELD and n not in names}
        return {
            n: self.visit(f"{label}.{n}" if n in short else f"{label}.{name}.{n}", v)
            for n, v in value.items()
        }


def leaves(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Leaves:
    """Take a call's arguments apart.

    Args:
        names: of the positional arguments.
        args: positional arguments.
        kwargs: keyword arguments and options.

    Raises:
        BackendError: something among them that is not known here.
    """
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float] = {}

    def tensor(label: str, value: torch.Tensor) -> torch.Tensor:
        tensors[_once(label, tensors)] = value
        return value

    def number(label: str, value: float) -> float:
        numbers[_once(label, numbers)] = value
        return value

    walk = _Walk(tensor, number)
    walk.call(names, args, kwargs)
    return Leaves(tensors, numbers, walk.constants, tuple(args), dict(kwargs), names)


def _once(label: str, known: Iterable[str]) -> str:
    assert label not in known, f"{label} twice"
    return label


# --- the quick pass


class Seen:
    """A call's key and its parts, in the order of :class:`Leaves`."""

    __slots__ = ("key", "numbers", "pointers", "tensors")

    def __init__(self, phase: str) -> None:
        self.key: list[Any] = [phase]
        self.tensors: list[torch.Tensor] = []
        self.pointers: list[int] = []
        self.numbers: list[float] = []


_FIELDS: dict[type, tuple[str, ...]] = {}


def read(phase: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Seen | None:
    """A call's key, or None where the call must go the ordinary way.

    That is: a subclass of Tensor, a tensor that wants a gradient or has no strides, or an argument
    that is not known.
    """
    seen = Seen(phase)
    gradients = torch.is_grad_enabled()
    try:
        for value in args:
            if not _read(value, seen, gradients):
                return None
        for name, value in kwargs.items():
            seen.key.append(name)
            if name == SIZES and value:
                sizes = tuple(value.items())
                hash(sizes)
                seen.key.append(sizes)
            elif not _read(value, seen, gradients):
                return None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # a sparse tensor, sizes that are none: checks say what is wrong
    return seen


def _read(value: Any, seen: Seen, gradients: bool, inside: bool = False) -> bool:
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if gradients and value.requires_grad:
            return False
        pointer = value.data_ptr()
        seen.key += (value.shape, value.stride(), value.dtype, value.device, pointer % 16 == 0)
        seen.tensors.append(value)
        seen.pointers.append(pointer)
        return True
    if kind in _CONSTANTS or isinstance(value, (enum.Enum, torch.dtype)):
        seen.key.append(value)
        return True
    seen.key.append(kind)
    if kind is float or kind is int:
        (seen.key if inside else seen.numbers).append(value)
        return True
    return _read_inside(kind, value, seen, gradients)


def _read_inside(kind: type, value: Any, seen: Seen, gradients: bool) -> bool:
    """A cache, a pool or a mapping by name."""
    if isinstance(value, Mapping):
        seen.key.append(tuple(value))
        return all([_read(v, seen, gradients, True) for v in value.values()])
    names = _FIELDS.get(kind)
    if names is None:
        if not is_dataclass(value):
            return False
        names = _FIELDS[kind] = tuple(f.name for f in fields(value))
    return all([_read(getattr(value, name), seen, gradients, True) for name in names])
