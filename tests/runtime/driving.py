"""A driver that writes down what it is asked, called through the C ABI as the real one is."""

import ctypes
import types
from dataclasses import dataclass, replace

import torch

from attncc.runtime import backends, kernels, replay
from attncc.runtime.driver import Cuda, Function
from attncc.runtime.kernels import Kernel
from attncc.runtime.loader import function_of
from attncc.runtime.manifest import Manifest
from attncc.runtime.prepared import Prepared
from attncc.runtime.recorded import record
from attncc.runtime.recording import Launch
from attncc.runtime.replay import DeviceEngine, Replay

KINDS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_uint64, ctypes.c_void_p,
    ctypes.c_void_p,
)  # fmt: skip
EARLY = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
NOTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
STREAM = 0x7F0011223344


@dataclass(frozen=True)
class Asked:
    """One launch as the driver saw it."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    values: tuple[float, ...]


class Library:
    """Enough of libcuda.

    ``ahead`` holds, for each launch, which earlier ones (by number) had to end before it, and
    ``passed`` the same for what a stream gets next.
    """

    def __init__(self):
        self.asked = []
        self.ahead = []
        self.passed = {}
        self.events = {}
        self.dropped = []
        self.contexts = []
        self.errors = []
        self.kinds = {}
        self._callback = LAUNCH(self._launched)  # held: C calls it
        self._early = EARLY(self._launched_early)
        # As a CDLL gives it: the caller says what it passes.
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        address = ctypes.cast(self._early, ctypes.c_void_p).value
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        self._note, self._wait = NOTE(self._noted), WAIT(self._waited)
        address = ctypes.cast(self._note, ctypes.c_void_p).value
        self.cuEventRecord = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        address = ctypes.cast(self._wait, ctypes.c_void_p).value
        self.cuStreamWaitEvent = ctypes.CFUNCTYPE(ctypes.c_int)(address)

    def cuEventCreate(self, event, flags):
        assert flags == 2  # without a time
        event._obj.value = 0xE0000 + len(self.events)
        self.events[event._obj.value] = None
        return 0

    def cuEventDestroy_v2(self, event):
        self.dropped.append(event.value)
        return 0

    def _noted(self, event, stream):
        self.events[event] = frozenset(self.passed.get(stream, ()))
        return 0

    def _waited(self, stream, event, flags):
        assert flags == 0 and self.events[event] is not None
        self.passed.setdefault(stream, set()).update(self.events[event])
        return 0

    def _launched(self, function, *rest):
        if self.errors:
            return self.errors.pop(0)
        pointers = ctypes.cast(rest[8], ctypes.POINTER(ctypes.c_void_p))
        kinds = [KINDS.get(kind, ctypes.c_uint64) for kind in self.kinds[function]]
        values = tuple(kind.from_address(pointers[i]).value for i, kind in enumerate(kinds))
        assert rest[9] is None
        passed = self.passed.setdefault(rest[7], set())
        self.ahead.append(frozenset(passed))
        passed.add(len(self.asked))
        self.asked.append(Asked(function, rest[:3], rest[3:6], rest[6], rest[7], values))
        return 0

    def _launched_early(self, config, function, pointers, extra):
        # CUlaunchConfig: seven numbers, then stream, attributes and their count at 32, 40, 48.
        numbers = (ctypes.c_uint * 7).from_address(config)
        stream, attributes = (ctypes.c_uint64 * 2).from_address(config + 32)
        assert ctypes.c_uint.from_address(config + 48).value == 1
        # Programmatic stream serialization, allowed: a number, and the value at 8.
        assert ctypes.c_int.from_address(attributes).value == 6
        assert ctypes.c_int.from_address(attributes + 8).value == 1
        return self._launched(function, *numbers, stream, pointers, extra)

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, handle, device):
        return 0

    def cuDevicePrimaryCtxRetain(self, context, handle):
        return 0

    def cuCtxSetCurrent(self, context):
        self.contexts.append(context)
        return 0

    def cuGetErrorName(self, number, text):
        text._obj.value = b"CUDA_ERROR_TEST"
        return 0

    def function(self, kernel: Kernel, scratch: int = 0) -> Function:
        """A kernel that this driver can be asked to launch."""
        plan = kernel.plan
        pairs = tuple((p.name, p.type) for p in plan.parameters)
        manifest = Manifest(
            entry=kernel.source.entry, target="sm_90", parameters=pairs, num_warps=plan.num_warps,
            shared_bytes=1234, scratch_bytes=scratch,
        )  # fmt: skip
        handle = (0x7F55 + len(self.kinds)) << 32
        self.kinds[handle] = [kind for _, kind in pairs] + ["*", "*"]
        return function_of(manifest, handle)


class Launcher:
    """Takes the place of a loaded kernel in the recorded call; keeps what it was given."""

    def __init__(self):
        self.given = []

    def __call__(self, grid, values):
        flat = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
        self.given.append((grid, tuple(flat)))


def on_a_device(monkeypatch):
    """CPU tensors pass for those of a GPU."""
    monkeypatch.setattr(backends, "has_triton", lambda call: True)
    monkeypatch.setattr(kernels, "_target", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(replay, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(Replay, "_allocate", allocate)
    monkeypatch.setattr(replay, "zeroed", lambda n, device: torch.zeros(n, dtype=torch.int32))


def allocate(self, buffer):
    """A buffer of a replay, on the CPU."""
    make = torch.zeros if buffer.zeroed else torch.empty
    return make(buffer.shape, dtype=buffer.dtype)


def prepared(monkeypatch, op, phase, *args, library=None, scratch=0, **kwargs):
    """A call prepared on a driver of this kind: the call, the driver, and what was launched."""
    library, launcher = library or Library(), Launcher()
    monkeypatch.setattr(Kernel, "launcher", lambda self, device, route=None: launcher)
    found = record(op, phase, args, {**kwargs, "backend": "triton"}, strict=True)
    recording = replace(found.recording, device=torch.device("cuda", 0))
    functions = [
        library.function(w.kernel, scratch) for w in recording.work if isinstance(w, Launch)
    ]
    engine = DeviceEngine(recording, functions, Cuda(library))
    return types.SimpleNamespace(
        call=Prepared(op, phase, found, Replay(recording, engine)),
        library=library, given=launcher.given, functions=functions, result=found.result,
    )  # fmt: skip
