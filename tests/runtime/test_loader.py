"""Loading and launching artifacts, with a driver that only writes down what it is asked."""

import contextlib
import ctypes
import enum
import sys
import types
from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.plan import TensorArg
from attncc.dsl.errors import ToolchainError
from attncc.runtime import backends, compile, kernels, loader
from attncc.runtime.kernels import Kernel
from attncc.runtime.loader import DriverLauncher, Route, TritonLauncher
from attncc.runtime.store import Store

SIZES = {"D": 64, "E": 64, "G": 1}
SOURCES = backends.sources(ac.ops.attention.declaration, sizes=SIZES, phase="decode")
MERGE, WHOLE = SOURCES[-1], SOURCES[0]
STREAM, CONTEXT, FUNCTION = 77, 5, 9
Result = enum.Enum("Result", "CUDA_SUCCESS CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_INVALID_IMAGE")


ANSWERS = {
    "cuInit": (), "cuCtxGetCurrent": (0,), "cuDeviceGet": (0,),
    "cuDevicePrimaryCtxRetain": (CONTEXT,), "cuCtxSetCurrent": (), "cuModuleLoadData": (3,),
    "cuModuleGetFunction": (FUNCTION,), "cuFuncSetAttribute": (),
}  # fmt: skip


class Driver(types.ModuleType):
    """Enough of ``cuda.bindings.driver``; ``asked`` holds every call."""

    CUresult = Result
    CUfunction_attribute = enum.Enum("Attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES")

    def __init__(self):
        super().__init__("cuda.bindings.driver")
        self.asked = []
        self.failing = {}
        for name in [*ANSWERS, "cuLaunchKernel"]:
            setattr(self, name, self.answering(name))

    def answering(self, name):
        def answer(*args):
            self.asked.append((name, args))
            error = self.failing.pop(name, Result.CUDA_SUCCESS)
            return (error, *ANSWERS.get(name, ()))

        answer.__name__ = name
        return answer

    def calls(self, name):
        return [args for asked, args in self.asked if asked == name]


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    package = types.ModuleType("cuda.bindings")
    package.driver = made
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    stream = types.SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    kernels._target.cache_clear()
    yield made
    kernels._target.cache_clear()


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    place = Store(tmp_path_factory.mktemp("store"))
    return {s.entry: compile.build_artifact(s, "sm_90", place) for s in (MERGE, WHOLE)}


def test_the_driver_gets_the_cubin_and_the_shared_memory_it_needs(driver, entries):
    entry = entries[WHOLE.entry]
    loader.load_entry(entry, WHOLE, 0, Route.DRIVER)
    assert driver.calls("cuModuleLoadData") == [(entry.files[entry.manifest.artifact],)]
    assert driver.calls("cuModuleGetFunction") == [(3, WHOLE.entry.encode())]
    assert driver.calls("cuCtxSetCurrent") == [(CONTEXT,)]
    assert entry.manifest.shared_bytes > 48 * 1024
    [(function, _, size)] = driver.calls("cuFuncSetAttribute")
    assert (function, size) == (FUNCTION, entry.manifest.shared_bytes)


def launched(driver, launcher):
    """What the device would find behind each parameter's pointer."""
    [args] = driver.calls("cuLaunchKernel")
    kinds = [kind for _, kind in launcher.parameters] + ["*", "*"]
    kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}, kinds
    pointers = (ctypes.c_void_p * len(kinds[1])).from_address(args[9])
    types_ = [kinds[0].get(kind, ctypes.c_uint64) for kind in kinds[1]]
    return args, [t.from_address(p).value for t, p in zip(types_, pointers, strict=True)]


def test_a_launch_passes_pointers_strides_numbers_and_two_scratch_pointers(
    driver, entries, monkeypatch
):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(entries[MERGE.entry].folder.parents[1]))
    kernel, args, want = Kernel(MERGE), {}, []
    for number, arg in enumerate(MERGE.plan.args):
        if isinstance(arg, TensorArg):
            args[arg.name] = torch.empty([2] * arg.pattern.rank)
            want += [args[arg.name].data_ptr(), *args[arg.name].stride()[:-1]]
        else:
            args[arg.name] = number
            want.append(number)
    kernel.launch((7, 2), args, Route.DRIVER)
    manifest = entries[MERGE.entry].manifest
    given, values = launched(driver, manifest)
    block = 32 * manifest.num_warps
    assert given[:9] == (FUNCTION, 7, 2, 1, block, 1, 1, manifest.shared_bytes, STREAM)
    assert values == [*want, 0, 0]
    kernel.launch((0,), args, Route.DRIVER)
    assert len(driver.calls("cuLaunchKernel")) == 1  # an empty grid launches nothing


def test_a_thread_without_a_context_gets_torchs_and_other_failures_are_errors(driver, entries):
    entry = entries[MERGE.entry]
    launcher = DriverLauncher(entry, 0)
    values = [0] * len(entry.manifest.parameters)
    driver.failing["cuLaunchKernel"] = Result.CUDA_ERROR_INVALID_CONTEXT
    before = len(driver.calls("cuCtxSetCurrent"))
    launcher((1, 1, 1), values)
    assert len(driver.calls("cuLaunchKernel")) == 2
    assert len(driver.calls("cuCtxSetCurrent")) == before + 1
    driver.failing["cuLaunchKernel"] = Result.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(ToolchainError, match="CUDA_ERROR_INVALID_IMAGE"):
        launcher((1, 1, 1), values)
    driver.failing["cuModuleLoadData"] = Result.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(ToolchainError, match="cuModuleLoadData failed"):
        DriverLauncher(entry, 0)


def test_tritons_loader_takes_the_stores_files(entries):
    entry = entries[MERGE.entry]
    kernel = TritonLauncher(entry, MERGE)._kernel
    assert kernel.asm["cubin"] == entry.files["kernel.sm_90.cubin"]
    assert kernel.metadata.shared == entry.manifest.shared_bytes
    assert kernel.metadata.num_warps == entry.manifest.num_warps
    other = tuple((n, "0.0.0" if n == "triton" else v) for n, v in entry.key.parts)
    with pytest.raises(ToolchainError, match=r"triton 0\.0\.0"):
        TritonLauncher(replace(entry, key=replace(entry.key, parts=other)), MERGE)


def test_an_artifact_of_another_family_is_not_loaded(driver, entries, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    entry = entries[MERGE.entry]
    foreign = replace(entry, manifest=replace(entry.manifest, family="sm_100a"))
    with pytest.raises(ToolchainError, match="expected sm_103, found sm_100a"):
        loader.load_entry(foreign, MERGE, 0, Route.DRIVER)


def test_triton_is_the_default_and_the_driver_takes_what_was_built_ahead(entries, monkeypatch):
    entry = entries[MERGE.entry]
    monkeypatch.delenv("ATTNCC_EXPECT_HIT", raising=False)
    monkeypatch.setattr(loader, "has_driver_bindings", lambda: True)
    assert loader.choose_route(entry) is Route.TRITON
    assert loader.choose_route(replace(entry, bundled=True)) is Route.DRIVER
    monkeypatch.setenv("ATTNCC_EXPECT_HIT", "1")
    assert loader.choose_route(entry) is Route.DRIVER
    monkeypatch.setattr(loader, "has_driver_bindings", lambda: False)
    assert loader.choose_route(entry) is Route.TRITON
