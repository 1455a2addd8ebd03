"""The store under several processes, kills, damage, foreign owners and missing entries."""

import os
import pickle
import signal
import stat
import threading
import time
import typing
from dataclasses import replace
from pathlib import Path

import pytest

import attncc as ac
from attncc.codegen import printers
from attncc.dsl.errors import MissingArtifactError, ToolchainError
from attncc.runtime import backends, compile, entry, kernels, store
from attncc.runtime.entry import KERNEL, KEY, BadEntryError, ForeignEntryError, read_entry
from attncc.runtime.key import SOURCE_ONLY, key_of, parse_key
from attncc.runtime.loader import parameter_format
from attncc.runtime.manifest import MANIFEST, Manifest, parse_manifest, serves
from attncc.runtime.store import Built, Store, StoreWarning

SIZES = {"D": 64, "E": 64, "G": 1}
SOURCE = backends.sources(ac.ops.attention.declaration, sizes=SIZES, phase="decode")[-1]


def built(target="sm_90", content=b"cubin"):
    """What a compiler would give."""
    manifest = Manifest(SOURCE.entry, target, "sm_90a", (("x_ptr", "*bf16"),), 4, 1024)
    return Built(manifest, {manifest.artifact: content})


class Compiler:
    """A compiler that leaves a line in a file each time, so that processes can be counted."""

    def __init__(self, log, seconds=0.0):
        self.log = log
        self.seconds = seconds

    def __call__(self, folder):
        assert (folder / KERNEL).read_text() == SOURCE.text
        with self.log.open("a") as f:
            f.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return built()

    @property
    def runs(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def place(tmp_path):
    return Store(tmp_path / "root")


@pytest.fixture
def compiler(tmp_path):
    return Compiler(tmp_path / "log")


def get(place, compiler):
    return place.get(key_of(SOURCE, "sm_90"), SOURCE, compiler)


def find(place):
    return place.find(key_of(SOURCE, "sm_90"))


def in_child(work):
    """Run something in a forked child; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def status_of(pid):
    return os.waitpid(pid, 0)[1]


def test_an_entry_is_readable_private_and_complete(place, compiler):
    found = get(place, compiler)
    assert found.folder.parent == place.base and not found.bundled
    assert stat.S_IMODE(found.folder.stat().st_mode) == 0o700
    assert found.kernel.read_text() == SOURCE.text
    assert set(os.listdir(found.folder)) == {
        KERNEL, KEY, "program.txt", "plan.txt", MANIFEST, "kernel.sm_90.cubin",
    }  # fmt: skip
    assert parse_key((found.folder / KEY).read_text()) == key_of(SOURCE, "sm_90")
    assert parse_manifest((found.folder / MANIFEST).read_bytes()) == found.manifest
    again = get(place, compiler)
    assert again == found and compiler.runs == 1


def test_the_plan_names_a_kernel_and_its_line_in_the_users_file_does_not():
    def declared():
        @ac.op(out="B T H E")
        def scored(q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H E")):
            return ac.dot(ac.softmax(ac.tanh(ac.dot(q, k, "D")), "S"), v, "S")

        return backends.sources(scored.declaration, sizes=SIZES, phase="decode")[-1]

    def again():
        @ac.op(out="B T H E")
        def scored(q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H E")):
            return ac.dot(ac.softmax(ac.tanh(ac.dot(q, k, "D")), "S"), v, "S")

        return backends.sources(scored.declaration, sizes=SIZES, phase="decode")[-1]

    one, other = declared(), again()
    assert key_of(one, "sm_90") == key_of(other, "sm_90")
    assert one.text != other.text  # the lines that its comments name
    assert key_of(one, SOURCE_ONLY) != key_of(other, SOURCE_ONLY)
    assert key_of(one, "sm_90") != key_of(SOURCE, "sm_90")
    assert key_of(SOURCE, "sm_100") != key_of(SOURCE, "sm_90")


def test_eight_processes_compile_once(place, tmp_path):
    compiler = Compiler(tmp_path / "log", seconds=0.3)
    pids = [in_child(lambda: get(place, compiler)) for _ in range(8)]
    assert [status_of(p) for p in pids] == [0] * 8
    assert compiler.runs == 1 and find(place) is not None


def test_threads_compile_once(place, tmp_path):
    compiler = Compiler(tmp_path / "log", seconds=0.1)
    threads = [threading.Thread(target=get, args=(place, compiler)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.runs == 1


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("point", ["write_file", "sync_folder", "set_aside"])
def test_a_kill_in_mid_publish_leaves_no_entry(place, compiler, point):
    def work():
        def build(folder):
            made = compiler(folder)
            setattr(store, point, die)
            return made

        get(place, build)

    status = status_of(in_child(work))
    assert os.WIFSIGNALED(status) and compiler.runs == 1
    left = [p.name for p in place.base.iterdir() if not p.name.startswith(".")]
    assert left == [] and find(place) is None
    assert get(place, compiler).manifest.entry == SOURCE.entry  # the lock died with its holder
    assert compiler.runs == 2


def test_a_kill_while_writing_the_artifact_leaves_no_entry(place, compiler):
    def half(path, data):
        path.write_bytes(data[: len(data) // 2])
        die()

    def work():
        def build(folder):
            store.write_file = half
            return compiler(folder)

        get(place, build)

    assert os.WIFSIGNALED(status_of(in_child(work)))
    assert find(place) is None and get(place, compiler) and find(place) is not None


@pytest.mark.parametrize("name", [KERNEL, KEY, MANIFEST, "kernel.sm_90.cubin"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_entry_is_set_aside_and_made_again(place, compiler, name, damage):
    folder = get(place, compiler).folder
    path = folder / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert find(place) is None
    with pytest.raises(BadEntryError):
        read_entry(folder)
    again = get(place, compiler)
    assert compiler.runs == 2 and again.folder == folder and find(place) == again
    assert [p.name for p in place.base.glob(".bad-*")] == [f".bad-{folder.name}.0"]


def test_a_manifest_is_data_and_stays_inside_its_entry():
    good = built().manifest.to_json()
    assert parse_manifest(good.encode()) == built().manifest
    outside = good.replace('"files": {}', '"files": {"../x": "0"}')
    maps = good.replace('"tensor_maps": "none"', '"tensor_maps": "host"')
    for text in ("", "[]", "{}", good.replace('"num_warps": 4', '"num_warps": "4"'), outside, maps):
        with pytest.raises(ValueError):
            parse_manifest(text.encode())


def test_a_root_that_cannot_be_written_costs_a_warning(tmp_path, compiler):
    (tmp_path / "file").write_text("")
    place = Store(tmp_path / "file" / "root")
    with pytest.warns(StoreWarning, match="cannot be kept"):
        found = get(place, compiler)
    assert found.kernel.read_text() == SOURCE.text and found.files["kernel.sm_90.cubin"] == b"cubin"


@pytest.mark.parametrize("point", ["write_file", "sync_folder"])
def test_a_full_disk_costs_a_warning(place, compiler, monkeypatch, point):
    real = getattr(store, point)

    def full(path, *args):
        if place.base in path.parents:
            raise OSError(28, "No space left on device")
        return real(path, *args)

    monkeypatch.setattr(store, point, full)
    with pytest.warns(StoreWarning, match="No space left"):
        found = get(place, compiler)
    assert found.kernel.read_text() == SOURCE.text and find(place) is None
    assert [p for p in place.base.iterdir() if not p.name.startswith(".")] == []


def test_somebody_elses_entry_is_neither_loaded_nor_moved(place, compiler, monkeypatch):
    folder = get(place, compiler).folder
    real = os.lstat

    def foreign(path, **kwargs):
        found = list(real(path, **kwargs))
        if Path(path) == folder:
            found[4] = 4242
        return os.stat_result(found)

    monkeypatch.setattr(entry.os, "lstat", foreign)
    with pytest.raises(ForeignEntryError, match="owned by user 4242"):
        read_entry(folder)
    assert find(place) is None
    with pytest.warns(StoreWarning, match="owned by user 4242"):
        found = get(place, compiler)
    assert found.folder != folder and folder.exists() and compiler.runs == 2


def test_an_entry_everybody_may_write_is_not_loaded(place, compiler):
    folder = get(place, compiler).folder
    for where in (folder, folder.parent):
        where.chmod(0o777)
        assert find(place) is None
        where.chmod(0o700)
    assert find(place) is not None


def test_a_bundle_is_read_and_never_written(tmp_path, compiler):
    get(Store(tmp_path / "bundle"), compiler)
    before = sorted(p.name for p in (tmp_path / "bundle").rglob("*"))
    place = Store(tmp_path / "own", (tmp_path / "bundle",))
    assert get(place, compiler).bundled and compiler.runs == 1
    assert sorted(p.name for p in (tmp_path / "bundle").rglob("*")) == before
    assert not (tmp_path / "own").exists()


def test_a_bundle_serves_whatever_compiler_is_installed(tmp_path, compiler, monkeypatch):
    get(Store(tmp_path), compiler)
    monkeypatch.setattr("attncc.runtime.key.triton_version", lambda: "0.0.0")
    assert key_of(SOURCE, "sm_90")["triton"] == "0.0.0"
    assert find(Store(tmp_path)) is None  # an own root compiles with its own compiler
    found = find(Store(tmp_path / "own", (tmp_path,)))
    assert found is not None and found.bundled


def test_expect_hit_prints_what_differs_from_the_nearest_entry(place, compiler, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(place.root))
    monkeypatch.setenv("ATTNCC_EXPECT_HIT", "1")
    with pytest.raises(MissingArtifactError, match="no entry comes near it"):
        compile.artifact(SOURCE, "sm_90")
    get(place, compiler)
    before = kernels.compilations()
    assert compile.artifact(SOURCE, "sm_90").manifest.target == "sm_90"
    with pytest.raises(MissingArtifactError) as caught:
        compile.artifact(SOURCE, "sm_100")
    assert kernels.compilations() == before
    assert caught.value.differences == (("target", "sm_100", "sm_90"),)
    assert "target: wanted sm_100, it has sm_90" in str(caught.value)
    assert "attncc build attention --target sm_100" in str(caught.value)
    assert isinstance(caught.value, LookupError)
    assert pickle.loads(pickle.dumps(caught.value)).differences == caught.value.differences
    folder = place.base / key_of(SOURCE, "sm_90").folder
    (folder / "kernel.sm_90.cubin").write_bytes(b"other")
    with pytest.raises(MissingArtifactError, match=r"not usable: .*cubin is not what"):
        compile.artifact(SOURCE, "sm_90")


def test_a_fork_starts_without_its_parents_state(place, compiler):
    kernel = kernels.load(SOURCE)
    kernel.launchers[0, None] = lambda grid, values: None
    held, release = threading.Event(), threading.Event()

    def hold():
        from attncc.runtime.locks import process_lock

        with process_lock():
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def work():
        signal.alarm(20)
        assert kernel.launchers == {} and kernels.compilations() == 0
        get(place, compiler)

    try:
        assert status_of(in_child(work)) == 0
    finally:
        release.set()
        thread.join()
        kernel.launchers.clear()
    assert find(place) is not None


def test_a_real_kernel_is_compiled_once_and_names_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))
    before = kernels.compilations()
    found = compile.artifact(SOURCE, "sm_90")
    assert kernels.compilations() == before + 1
    again = compile.artifact(SOURCE, "sm_90")
    assert kernels.compilations() == before + 1 and again == found
    assert found.manifest.family == "sm_90a" and found.manifest.shared_bytes > 0
    assert set(found.manifest.versions) == {"triton", "ptxas", "python"}
    assert found.manifest.tensor_maps in ("none", "device")
    maps = found.manifest.tensor_maps == "device"
    assert maps <= (found.manifest.scratch_bytes > 0)  # a map that a program encodes needs room
    assert found.files["kernel.sm_90.cubin"][:4] == b"\x7fELF"
    names = {str(p).encode() for p in (tmp_path, Path.home(), Path(__file__).parents[2])}
    for name, content in found.files.items():
        assert not any(n in content for n in names), name


@pytest.mark.parametrize(
    ("family", "runs", "not_on"),
    [("sm_90a", [90], [100, 89]), ("sm_100a", [100], [103, 90]), ("sm_100f", [100, 103], [120]),
     ("sm_80", [80, 86, 89], [75, 90]), ("", [], [90])],
)  # fmt: skip
def test_a_family_serves_its_own_devices(family, runs, not_on):
    assert all(serves(family, c) for c in runs)
    assert not any(serves(family, c) for c in not_on)


def test_a_kernel_whose_tensor_maps_the_host_makes_is_not_stored():
    class Compiled:
        asm: typing.ClassVar = {"ptx": ".target sm_90a\n", "cubin": b""}

    record = {"num_ctas": 1, "tensordesc_meta": [{"block_size": [64]}]}
    with pytest.raises(ToolchainError, match="not a kernel this loader knows"):
        compile._built(SOURCE, "sm_90", Compiled(), record)


def test_parameters_lie_at_their_own_alignment_before_two_scratch_pointers():
    parameters = (("a", "*bf16"), ("n", "i32"), ("s", "i64"), ("x", "fp32"), ("m", "i32"))
    text, offsets = parameter_format(Manifest("k", "sm_90", parameters=parameters))
    assert offsets == [0, 8, 16, 24, 28, 32, 40] and text == "@QiqfiQQ"
    with pytest.raises(ToolchainError, match="unknown type"):
        parameter_format(Manifest("k", "sm_90", parameters=(("x", "fp64"),)))
    with pytest.raises(ToolchainError, match="no such target"):
        compile.artifact(SOURCE, "hopper")


def test_the_first_folder_is_written_and_the_others_are_bundles(monkeypatch, tmp_path):
    roots = [str(tmp_path / n) for n in ("own", "one", "two")]
    monkeypatch.setenv("ATTNCC_CACHE_DIR", os.pathsep.join(roots))
    assert store.current() == Store(Path(roots[0]), (Path(roots[1]), Path(roots[2])))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ATTNCC_CACHE_DIR", os.pathsep + roots[1])
    assert store.current() == Store(tmp_path / "attncc", (Path(roots[1]),))
    monkeypatch.delenv("ATTNCC_CACHE_DIR")
    assert store.current() == Store(tmp_path / "attncc")


def test_a_read_only_file_system_costs_a_warning(place, compiler, monkeypatch):
    real = store.tempfile.mkdtemp

    def read_only(*args, dir=None, **kwargs):
        if dir is not None and Path(dir) == place.base:
            raise OSError(30, "Read-only file system")
        return real(*args, dir=dir, **kwargs)

    monkeypatch.setattr(store.tempfile, "mkdtemp", read_only)
    with pytest.warns(StoreWarning, match="Read-only file system"):
        found = get(place, compiler)
    assert found.files["kernel.sm_90.cubin"] == b"cubin" and find(place) is None


@pytest.mark.parametrize("at", [0, -1])
def test_one_flipped_bit_anywhere_in_an_artifact_is_seen(place, compiler, at):
    path = get(place, compiler).folder / "kernel.sm_90.cubin"
    data = bytearray(path.read_bytes())
    data[at] ^= 0x80
    path.write_bytes(bytes(data))
    assert find(place) is None and get(place, compiler) and compiler.runs == 2


def test_a_link_in_an_entrys_place_is_not_followed(place, compiler, tmp_path):
    folder = get(place, compiler).folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert find(place) is None
    with pytest.raises(ForeignEntryError, match="not a folder"):
        read_entry(folder)


def test_the_tables_of_plans_are_part_of_the_sources(tmp_path, monkeypatch):
    from attncc.runtime import key

    (tmp_path / "codegen" / "plans").mkdir(parents=True)
    for name in ("dsl", "templates"):
        (tmp_path / name).mkdir()
    table = tmp_path / "codegen" / "plans" / "sm_90.json"
    table.write_text("{}")
    monkeypatch.setattr(key, "_PACKAGE", tmp_path)
    key.fingerprint.cache_clear()
    before = key.fingerprint()
    table.write_text('{"entries": []}')
    key.fingerprint.cache_clear()
    assert key.fingerprint() != before
    monkeypatch.undo()
    key.fingerprint.cache_clear()


def test_what_another_version_printed_alike_is_not_compiled_again(place, tmp_path, monkeypatch):
    first = compile.build_artifact(SOURCE, "sm_90", place)
    before = compile.compilations()
    monkeypatch.setattr("attncc.runtime.key.fingerprint", lambda: "another")
    assert key_of(SOURCE, "sm_90") != first.key
    again = compile.build_artifact(SOURCE, "sm_90", Store(tmp_path / "new", (place.root,)))
    assert compile.compilations() == before
    assert again.key == key_of(SOURCE, "sm_90") and again.folder != first.folder
    assert again.manifest.artifact in again.files and read_entry(again.folder) == again
    cubin = first.manifest.artifact
    assert again.files[cubin] == first.files[cubin] and again.files[KEY] != first.files[KEY]

    other = replace(SOURCE.plan, num_stages=SOURCE.plan.num_stages + 1)
    compile.build_artifact(printers.source(other), "sm_90", place)  # another kernel is
    assert compile.compilations() == before + 1
