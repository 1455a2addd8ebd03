"""Prepared calls: bound, planned and laid out once, then launched at little cost to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from attncc.dsl.errors import ArgumentError, BackendError, OverlapError, SizeError
from attncc.dsl.ir import Kind
from attncc.runtime import knobs
from attncc.runtime.recorded import Apart, Recorded, gather, record
from attncc.runtime.recording import KEPT, Buffer, Recording
from attncc.runtime.replay import Frame, Replay, replay_of
from attncc.runtime.signature import PLAIN, Layout, leaves
from attncc.runtime.unrolled import Accepts, accepts

if TYPE_CHECKING:
    from attncc.runtime.api import Op


PATTERNS = 16
"""Sets of names, in order, for which the comparison of layouts is kept written out."""


class Prepared:
    """A call that can be run again at little cost to the host; made by ``Op.prepare``.

        step = ops.gated_delta_rule.prepare(q, k, v, g, beta, s=pool, out=o, phase="decode")
        step()                                     # the same tensors, with what they hold now
        step(q=q2, out=o2)                         # others of the same layout, for this run only

    Replacements are named as in a call: tensors, ``cache``, a pool, ``cu_seqlens``, ``out`` and
    host numbers. Each tensor has to have the shape, strides, dtype and device of the one it stands
    for, and an address of 16 bytes where that had one; else an error, and nothing runs. Results are
    the caller's ``out``, else new tensors. It runs on torch's current stream (which waits for what
    a long prompt has on a stream beside it), also while a CUDA graph is captured, and from several
    threads and streams. A tensor of the preparation is used at
    the address it had then, so its storage must not be resized. Values on the device (lengths,
    tables, slots, ``cu_seqlens``) are never looked at, unless the check knob was set when it was
    prepared: each run is an ordinary call then. It knows no gradient, and it does not survive a
    fork.
    """

    def __init__(self, op: Op, phase: str, recorded: Recorded, replay: Replay) -> None:
        self._op, self._phase = op, phase
        self._leaves = recorded.leaves
        self._replay, self._loaded = replay, KEPT.loaded
        self._checked = knobs.check()
        recording = replay.recording
        tensors = list(recorded.leaves.tensors.values())
        self._labels = [*recorded.leaves.tensors]
        layouts = [Layout.of(t) for t in tensors]
        self._pointers = [t.data_ptr() for t in tensors]
        self._pointers += [0] * (recording.registers - len(tensors))
        self._frame = replay.frame(tensors)
        self._memory = [t.detach() for t in tensors]  # stays, should a tensor get another
        self._registers = {label: i for i, label in enumerate(self._labels)}
        fresh = [b.register for b in recording.fresh]
        self._outputs(recording, layouts)
        self._layouts = layouts
        self._apart = Apart(layouts, self._pointers, (*recorded.given, *recorded.pools, *fresh))
        self._separate = self._pointers
        self._numbers = list(recorded.leaves.numbers.values())
        self._single = recording.results[0][1] if len(recording.results) == 1 else None
        self._accepts: dict[tuple[str, ...], Accepts] = {}

    def _outputs(self, recording: Recording, layouts: list[Layout]) -> None:
        """Results by the labels ``out`` and ``out[name]``, whoever allocates them."""
        fresh = {b.register: b for b in recording.fresh}
        for register in range(len(layouts), recording.registers):
            b = fresh.get(register, Buffer(register, (0,), torch.float32))
            layouts.append(Layout.dense(b.shape, b.dtype, layouts[0].device))
        first = self._op.declaration.outputs[0][0]
        for name, register in recording.results:
            if name == "lse":
                continue
            self._registers.setdefault(f"out[{name}]", register)
            if name == first:
                self._registers.setdefault("out", register)

    def __repr__(self) -> str:
        return f"<prepared {self._op.declaration.name} {self._phase}({', '.join(self._labels)})>"

    def __call__(self, **replacements: Any) -> Any:
        """Run the call once more.

        Args:
            **replacements: arguments that take others' places, for this run only.

        Returns:
            What the op returns.

        Raises:
            ArgumentError: no such argument, or one of another kind; nothing ran.
            SizeError: a tensor of another layout; nothing ran.
            OverlapError: a tensor that is written shares memory with another; nothing ran.
            BackendError: the process was forked since.
        """
        if self._loaded != KEPT.loaded:
            self._forked()
        replay, pointers, numbers = self._replay, self._pointers, self._numbers
        if not (replacements or self._checked):
            frame = self._frame if replay.static else self._frame.copy()
        else:
            frame, pointers = self._frame.copy(), pointers.copy()
            fits = self._accepts.get(tuple(replacements))
            if fits is None or not fits(
                replacements.values(), frame, pointers, torch.is_grad_enabled()
            ):
                numbers = self._replace(replacements, frame, pointers)
            if pointers != self._separate:
                self._hold_apart(pointers)
            if self._checked:
                return self._ordinary(frame, numbers)
        with replay.lock:
            replay.bind(pointers, numbers)
            replay.run(frame)
        if self._single is not None:
            return frame[self._single]
        return self._gather(frame)

    def _replace(
        self, replacements: Mapping[str, Any], frame: Frame, pointers: list[int]
    ) -> list[float]:
        """Put other arguments into a frame after checks; returns the host numbers."""
        numbers = self._numbers
        plain = True
        for label, value in replacements.items():
            register = self._registers.get(label)
            if register is None or type(value) not in PLAIN:
                numbers = self._other(label, value, frame, pointers, numbers)
                plain = False
            else:
                self._tensor(label, register, value, frame, pointers)
        names = tuple(replacements)
        if plain and names not in self._accepts and len(self._accepts) < PATTERNS:
            registers = [self._registers[n] for n in names]
            wanted = [(r, self._layouts[r]) for r in registers]
            self._accepts[names] = accepts(wanted, [*replacements.values()])
        return numbers

    def _tensor(
        self, label: str, register: int, tensor: torch.Tensor, frame: Frame, pointers: list[int]
    ) -> None:
        differences = self._layouts[register].differences(tensor)
        if differences:
            name, want, found = differences[0]
            raise SizeError(
                f"the call was prepared for another {name}",
                op=self._op.declaration.name, argument=label, expected=want, found=found,
                help="prepare one call for each layout",
            )  # fmt: skip
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ArgumentError(
                "a prepared call knows no gradient",
                op=self._op.declaration.name, argument=label,
                help="call it under torch.no_grad() or torch.inference_mode()",
            )  # fmt: skip
        frame[register], pointers[register] = tensor, tensor.data_ptr()

    def _hold_apart(self, pointers: list[int]) -> None:
        clash = self._apart.clash(pointers)
        if clash is not None:
            labels = {register: label for label, register in reversed(self._registers.items())}
            raise OverlapError(
                "a tensor that is written shares memory with another argument",
                op=self._op.declaration.name, argument=labels[clash[0]],
                expected="separate memory", found=f"overlap with {labels[clash[1]]}",
            )  # fmt: skip
        self._separate = pointers

    def _gather(self, frame: Frame) -> Any:
        results = self._replay.recording.results
        named: dict[str, Any] = {name: frame[register] for name, register in results}
        return gather(self._op, named, partial=self._replay.recording.partial)

    # -- replacements that are no plain tensors, and mistakes

    def _other(
        self, label: str, value: Any, frame: Frame, pointers: list[int], numbers: list[float]
    ) -> list[float]:
        """A cache, a pool, a mapping of outputs, or a host number; returns the numbers then."""
        op = self._op.declaration.name
        if label in self._leaves.numbers:
            return self._number(label, value, numbers)
        found = leaves([label], [value], {})
        if found.numbers and label in self._registers:
            self._kind(label, "a tensor", type(value).__name__)
        unknown = [n for n in found.tensors if n not in self._registers]
        if unknown or found.numbers:
            raise ArgumentError(
                "not an argument of the prepared call",
                op=op, argument=next(iter((*unknown, *found.numbers))),
                expected=", ".join((*self._registers, *self._leaves.numbers)),
            )  # fmt: skip
        if label != "out" and not label.startswith("out["):
            self._same_constants(label, found.constants)
        for name, tensor in found.tensors.items():
            if type(tensor) not in PLAIN:
                self._kind(name, "a plain tensor", type(tensor).__name__)
            self._tensor(name, self._registers[name], tensor, frame, pointers)
        return numbers

    def _number(self, label: str, value: Any, numbers: list[float]) -> list[float]:
        tensor = next(t for t in self._op.declaration.tensors if t.name == label)
        whole = tensor.kind is Kind.INT
        if type(value) is not int and (whole or type(value) is not float):
            self._kind(label, "int" if whole else "float", type(value).__name__)
        index = [*self._leaves.numbers].index(label)
        return [*numbers[:index], value, *numbers[index + 1 :]]

    def _same_constants(self, label: str, found: Mapping[str, Any]) -> None:
        """Types, names and layouts inside a cache or a pool, and plain options."""
        inside = (f"{label}.", f"{label}:", f"{label}[")
        wanted = {
            n: v for n, v in self._leaves.constants.items() if n == label or n.startswith(inside)
        }
        if wanted != found:
            self._kind(label, wanted or "a tensor", dict(found) or "a tensor")

    def _kind(self, label: str, expected: object, found: object) -> NoReturn:
        raise ArgumentError(
            "another kind of argument than the call was prepared with",
            op=self._op.declaration.name, argument=label, expected=expected, found=found,
        )  # fmt: skip

    def _ordinary(self, frame: Frame, numbers: list[float]) -> Any:
        """An ordinary call with the same arguments, which looks at values."""
        tensors = [t for t in frame[: len(self._labels)] if t is not None]
        args, kwargs = self._leaves.rebuilt(tensors, numbers)
        inputs = self._replay.recording.inputs
        new = {
            name: frame[register]
            for name, register in self._replay.recording.results
            if register >= inputs and frame[register] is not None
        }
        if new:
            given = kwargs.get("out") or {}
            kwargs["out"] = {**given, **new} if isinstance(given, Mapping) else given
        return self._op.ordinary(self._phase, args, kwargs)

    def _forked(self) -> NoReturn:
        raise BackendError(
            "the call was prepared in another process", op=self._op.declaration.name,
            help="prepare it again after the fork",
        )  # fmt: skip


def prepare(op: Op, phase: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
    """Run a call once and keep what a repetition needs; see ``Op.prepare``."""
    recorded = record(op, phase, args, kwargs, strict=True)
    assert recorded.recording is not None
    return Prepared(op, phase, recorded, replay_of(recorded.recording))
