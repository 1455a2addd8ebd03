"""What a call does on the device, noted while it runs once, so that it can be done again.

A call that is recorded runs as always. Every kernel launch is noted with its grid and its values in
parameter order, each tensor as a place: a tensor of the call, one that a noted step made, or a
workspace. Device work that is no kernel of ours is a *step*, a function marked with
:func:`step`, and is done again each time: nothing that was computed from device values is kept.
What is none of these cannot be recorded, and the recorder says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch

from attncc.dsl.errors import BackendError
from attncc.runtime.recording import (
    Buffer,
    Grid,
    Launch,
    Number,
    Place,
    Recording,
    Register,
    Step,
    Value,
    Wait,
)

if TYPE_CHECKING:
    from attncc.runtime.kernels import Kernel

P = ParamSpec("P")
R = TypeVar("R")


class _Marked:
    """A host number that knows which argument it is; computing with it would lose that."""

    index: int

    def _computed(self, *_: object) -> NoReturn:
        raise BackendError(
            "the call cannot be prepared: the host computes with a number that may be replaced"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _computed
    __pow__ = __rpow__ = __neg__ = __abs__ = __bool__ = _computed


class _MarkedFloat(_Marked, float):
    pass


class _MarkedInt(_Marked, int):
    pass


_MarkedFloat.__name__, _MarkedInt.__name__ = "float", "int"  # errors name what the caller gave


def marked(value: float, index: int) -> float:
    """A number that a launch can be traced back from."""
    made = _MarkedInt(value) if isinstance(value, int) else _MarkedFloat(value)
    made.index = index
    return made


def plain(value: float) -> float:
    """The number itself."""
    return float(value) if isinstance(value, float) else int(value)


_CURRENT: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def current() -> Recorder | None:
    """The recorder of the call that this thread is in, if it is recorded."""
    return _CURRENT.get()


class NotRecorded(Exception):
    """A call that was to be recorded if possible; nothing of it has run."""


def refuse(reason: str) -> None:
    """Say, before anything has run, that a call cannot be recorded; nothing if none is.

    Raises:
        BackendError: the call is being prepared.
        NotRecorded: it is recorded for the case that it comes again.
    """
    recorder = _CURRENT.get()
    if recorder is not None:
        if not recorder.strict:
            raise NotRecorded(reason)
        raise BackendError(f"the call cannot be prepared: {reason}", op=recorder.op)


def step(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function of tensors and host numbers as one that a recording does again.

    It reads nothing else, and writes what it returns or (in place) its arguments.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        made = function(*args, **kwargs)
        recorder = _CURRENT.get()
        if recorder is not None:
            recorder.step(function, args, kwargs, made)
        return made

    return run


def workspace(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room that kernels of one call leave results in for each other; not initialised."""
    made = torch.empty(size, dtype=dtype, device=device)
    recorder = _CURRENT.get()
    if recorder is not None:
        recorder.workspace(made)
    return made


def view(made: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A view, with the word that it lies in ``base``, which no address says of one allocation."""
    recorder = _CURRENT.get()
    if recorder is not None:
        recorder.view(made, base)
    return made


def wait(lane: int, on: int) -> None:
    """Note that what a lane gets from here on comes after what another one has so far."""
    recorder = _CURRENT.get()
    if recorder is not None:
        recorder.wait(lane, on)


@contextmanager
def on_lane(lane: int) -> Iterator[None]:
    """Note launches as those of a lane."""
    recorder = _CURRENT.get()
    if recorder is None:
        yield
        return
    with recorder.on_lane(lane):
        yield


class Recorder:
    """Notes one call.

    Args:
        op: the op's name.
        inputs: the call's tensors; no two are one object, so that each says which argument it is.
        strict: a tensor that nobody knows is an error at once; else it is noted as ``refusal``.
    """

    def __init__(self, op: str, inputs: Sequence[torch.Tensor], *, strict: bool) -> None:
        self.op = op
        self.refusal: str | None = None
        self.strict = strict
        self._inputs = len(inputs)
        self._tensors = list(inputs)  # held, so that no address and no identity is used again
        self._known = {id(t): i for i, t in enumerate(inputs)}
        self._storages: dict[int, int] = {}
        self._views: dict[int, int] = {}
        self._held: list[torch.Tensor] = []
        self._work: list[Launch | Step | Wait] = []
        self._lane = 0
        self._workspaces: list[Buffer] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this, launches and steps of the thread are noted."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def _register(self, tensor: torch.Tensor) -> int:
        register = len(self._tensors)
        self._tensors.append(tensor)
        self._known[id(tensor)] = register
        if tensor.numel():
            self._storages[tensor.untyped_storage().data_ptr()] = register
        return register

    def workspace(self, tensor: torch.Tensor, *, zeroed: bool = False) -> None:
        """Note a workspace; ``zeroed``: counters that are zero before and after each launch."""
        if id(tensor) not in self._known:
            register = self._register(tensor)
            self._workspaces.append(Buffer(register, tuple(tensor.shape), tensor.dtype, zeroed))

    def allocated(self, results: Mapping[str, torch.Tensor]) -> tuple[Buffer, ...]:
        """Note the results that are not the caller's tensors."""
        return tuple(
            Buffer(self._register(t), tuple(t.shape), t.dtype)
            for t in results.values()
            if id(t) not in self._known
        )

    def register_of(self, tensor: torch.Tensor) -> int:
        """The register of a tensor that is known."""
        return self._known[id(tensor)]

    def view(self, made: torch.Tensor, base: torch.Tensor) -> None:
        """Note that a tensor lies in another one."""
        register = self._home(base)
        if register is not None and id(made) not in self._known:
            self._views[id(made)] = register
            self._held.append(made)

    def wait(self, lane: int, on: int) -> None:
        """Note that a lane waits for what another one has so far."""
        self._work.append(Wait(lane, on))

    @contextmanager
    def on_lane(self, lane: int) -> Iterator[None]:
        """Within this, launches are on a lane."""
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    def _home(self, tensor: torch.Tensor) -> int | None:
        """The register that a tensor lies in."""
        register = self._known.get(id(tensor), self._views.get(id(tensor)))
        if register is None:
            register = self._storages.get(tensor.untyped_storage().data_ptr())
        return self._viewed(tensor) if register is None else register

    def _place(self, tensor: torch.Tensor) -> Place | None:
        if id(tensor) not in self._known and not tensor.numel():
            self.workspace(tensor)  # nothing in it can be stale
        register = self._home(tensor)
        if register is None:
            return None
        offset = tensor.data_ptr() - self._tensors[register].data_ptr()
        return Place(register, offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def _viewed(self, tensor: torch.Tensor) -> int | None:
        """The one argument that something is a view of; None where it may be several."""
        storage = tensor.untyped_storage().data_ptr()
        inputs = self._tensors[: self._inputs]
        found = [i for i, t in enumerate(inputs) if t.untyped_storage().data_ptr() == storage]
        if len(found) > 1:  # pieces of one allocation: the one at the same place, all of it
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.element_size()
            found = [
                i
                for i in found
                for t in (inputs[i],)
                if (t.data_ptr(), t.shape, t.stride(), t.element_size()) == place
            ]
        return found[0] if len(found) == 1 else None

    def _unknown(self, what: str) -> None:
        reason = f"{what} is made outside the steps that are done again"
        if self.strict:
            raise BackendError(f"the call cannot be prepared: {reason}", op=self.op)
        self.refusal = self.refusal or reason

    def launch(
        self, kernel: Kernel, grid: Grid, flat: Sequence[torch.Tensor | float]
    ) -> list[torch.Tensor | float]:
        """Note a launch; returns its values with plain numbers."""
        values: list[Value] = []
        bare: list[torch.Tensor | float] = []
        for parameter, value in zip(kernel.plan.parameters, flat, strict=True):
            if isinstance(value, torch.Tensor):
                place = self._place(value)
                if place is None:
                    self._unknown(f"{parameter.name} of {kernel.source.entry}")
                    place = Place(0, 0, (), (), value.dtype)
                values.append(place)
                bare.append(value)
                continue
            number = plain(value)
            values.append(Number(value.index) if isinstance(value, _Marked) else number)
            bare.append(number)
        self._work.append(Launch(kernel, grid, tuple(values), self._lane))
        return bare

    def step(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Any,
    ) -> None:
        """Note a step, unless it gave back its argument."""
        assert not self._lane  # steps are done again on torch's current stream
        outputs = made if isinstance(made, tuple) else () if made is None else (made,)
        if outputs and all(id(t) in self._known for t in outputs):
            return

        def known(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            register = self._known.get(id(value))
            if register is None:
                self._unknown(f"an argument of {function.__name__}")
                return None
            return Register(register)

        arguments = tuple(known(a) for a in args)
        keywords = tuple((n, known(a)) for n, a in kwargs.items())
        registers = tuple(self._register(t) for t in outputs)
        self._work.append(Step(function, arguments, keywords, registers))

    def finish(
        self, results: Mapping[str, torch.Tensor], fresh: tuple[Buffer, ...], *, partial: bool
    ) -> Recording:
        """What was noted; results in the order they are returned."""
        return Recording(
            device=self._tensors[0].device,
            inputs=self._inputs,
            registers=len(self._tensors),
            work=tuple(self._work),
            workspaces=tuple(self._workspaces),
            fresh=fresh,
            results=tuple((name, self._known[id(t)]) for name, t in results.items()),
            partial=partial,
        )
