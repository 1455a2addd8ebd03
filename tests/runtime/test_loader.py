"""Loading and launching artifacts, with a driver that only writes down what it is asked."""

import contextlib
import ctypes
from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.plan import TensorArg
from attncc.dsl.errors import ToolchainError
from attncc.runtime import backends, compile, kernels, loader
from attncc.runtime.driver import Cuda
from attncc.runtime.kernels import Kernel
from attncc.runtime.loader import DriverLauncher, Route, TritonLauncher
from attncc.runtime.store import Store

SIZES = {"D": 64, "E": 64, "G": 1}
SOURCES = backends.sources(ac.ops.attention.declaration, sizes=SIZES, phase="decode")
MERGE, WHOLE = SOURCES[-1], SOURCES[0]
STREAM, CONTEXT, FUNCTION = 77, 5, 9
MODULE, INVALID_CONTEXT, INVALID_IMAGE = 3, 201, 200
GIVES = {
    "cuDevicePrimaryCtxRetain": CONTEXT, "cuModuleLoadData": MODULE, "cuModuleGetFunction": FUNCTION
}  # fmt: skip


class Driver:
    """Enough of ``libcuda``; ``asked`` holds every call, with plain values."""

    def __init__(self):
        self.asked = []
        self.failing = {}

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def answer(*args):
            self.asked.append((name, tuple(getattr(x, "value", x) for x in args)))
            if name == "cuGetErrorName":
                args[1]._obj.value = f"error {args[0]}".encode()
            elif name in GIVES:
                args[0]._obj.value = GIVES[name]
            return self.failing.pop(name, 0)

        return answer

    def calls(self, name):
        return [args for asked, args in self.asked if asked == name]


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(loader, "cuda", lambda: Cuda(made))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(loader, "raw_stream", lambda device: STREAM)
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
    [(_, image)] = driver.calls("cuModuleLoadData")
    assert image == entry.files[entry.manifest.artifact]
    [(_, *wanted)] = driver.calls("cuModuleGetFunction")
    assert wanted == [MODULE, WHOLE.entry.encode()]
    assert driver.calls("cuCtxSetCurrent") == [(CONTEXT,)]
    assert entry.manifest.shared_bytes > 48 * 1024
    most = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.calls("cuFuncSetAttribute") == [(FUNCTION, most, entry.manifest.shared_bytes)]


def launched(driver, launcher):
    """What the device would find behind each parameter's pointer."""
    [args] = driver.calls("cuLaunchKernelEx")  # a kernel of decode is chained
    kinds = [kind for _, kind in launcher.parameters] + ["*", "*"]
    kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}, kinds
    pointers = list(args[2]._obj)
    types_ = [kinds[0].get(kind, ctypes.c_uint64) for kind in kinds[1]]
    return args[0]._obj, [t.from_address(p).value for t, p in zip(types_, pointers, strict=True)]


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
    config, values = launched(driver, manifest)
    assert [*config.grid, *config.block] == [7, 2, 1, 32 * manifest.num_warps, 1, 1]
    assert (config.shared, config.stream) == (manifest.shared_bytes, STREAM)
    assert values == [*want, 0, 0]
    kernel.launch((0,), args, Route.DRIVER)
    assert len(driver.calls("cuLaunchKernelEx")) == 1  # an empty grid launches nothing


def test_a_thread_without_a_context_gets_torchs_and_other_failures_are_errors(driver, entries):
    entry = entries[MERGE.entry]
    launcher = DriverLauncher(entry, 0)
    values = [0] * len(entry.manifest.parameters)
    driver.failing["cuLaunchKernelEx"] = INVALID_CONTEXT
    before = len(driver.calls("cuCtxSetCurrent"))
    launcher((1, 1, 1), values)
    assert len(driver.calls("cuLaunchKernelEx")) == 2
    assert len(driver.calls("cuCtxSetCurrent")) == before + 1
    driver.failing["cuLaunchKernelEx"] = INVALID_IMAGE
    with pytest.raises(ToolchainError, match="error 200"):
        launcher((1, 1, 1), values)
    driver.failing["cuModuleLoadData"] = INVALID_IMAGE
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


def test_a_value_that_does_not_fit_its_parameter_is_an_error(driver, entries):
    entry = entries[MERGE.entry]
    launcher = DriverLauncher(entry, 0)
    kinds = [kind for _, kind in entry.manifest.parameters]
    values = [1 << 40 if kind == "i32" else 0 for kind in kinds]
    with pytest.raises(ToolchainError, match=rf"{MERGE.entry}: a value does not fit"):
        launcher((1, 1, 1), values)
    assert not driver.calls("cuLaunchKernelEx")


def test_an_old_driver_launches_chained_kernels_one_after_another(driver, entries):
    class Old(Driver):
        def __getattr__(self, name):
            if name == "cuLaunchKernelEx":
                raise AttributeError(name)
            return super().__getattr__(name)

    old, entry = Old(), entries[MERGE.entry]
    function = loader.function_of(entry.manifest, FUNCTION)
    assert function.chained
    launch, arguments = Cuda(old).call(function, (3, 2, 1), (ctypes.c_void_p * 1)(), STREAM)
    assert launch(*arguments) == 0
    assert len(old.calls("cuLaunchKernel")) == 1


def test_the_driver_loads_unless_triton_is_asked_for(driver, entries):
    entry = entries[MERGE.entry]
    assert isinstance(loader.load_entry(entry, MERGE, 0), DriverLauncher)
    assert isinstance(loader.load_entry(entry, MERGE, 0, Route.TRITON), TritonLauncher)
