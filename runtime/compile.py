"""From a generated source to a compiled kernel, through the store; needs no GPU.

What is compiled depends on the plan and on nothing that a call happens to pass: the signature,
alignments and options are the plan's own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from attncc.codegen.plan import Dialect
from attncc.codegen.plan_gluon_keys import KeysPlan
from attncc.codegen.plan_gluon_systems import CrowdedSystemsPlan
from attncc.codegen.plan_scan import StepPlan
from attncc.codegen.render import Source
from attncc.codegen.target import shared_limit
from attncc.dsl.errors import MissingArtifactError, ToolchainError
from attncc.runtime import knobs, scans
from attncc.runtime.entry import KERNEL, BadEntryError, Entry, read_entry
from attncc.runtime.inspect import assembler_version, resources
from attncc.runtime.key import Key, key_of, triton_version
from attncc.runtime.locks import process_lock
from attncc.runtime.manifest import Manifest
from attncc.runtime.store import Built, Store, compiled_part, current

TRITON_RECORD = "triton.json"
"""Triton's own metadata of a kernel: its loader takes it, beside the cubin."""

_TARGET_LINE = re.compile(r"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)
_compilations = 0


def _after_fork() -> None:
    global _compilations
    _compilations = 0


os.register_at_fork(after_in_child=_after_fork)


def compilations() -> int:
    """Kernels compiled by this process so far; what the store already had does not count."""
    return _compilations


def load_function(path: Path, entry: str) -> Any:
    """The jitted function of a generated file."""
    name = f"attncc_generated.{entry}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, entry)


def ast_source(source: Source, function: Any) -> Any:
    """What Triton compiles: the function with the plan's signature and alignments."""
    plan = source.plan
    if plan.dialect is Dialect.GLUON:
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    else:
        from triton.compiler import ASTSource

    signature = {p.name: p.type for p in plan.parameters}
    attrs = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(plan.parameters) if p.divisible}
    return ASTSource(fn=function, signature=signature, constexprs={}, attrs=attrs)


def compile_source(source: Source, function: Any, capability: int) -> Any:
    """Compile a kernel for a target (``90`` is sm_90) from the plan's signature; needs no GPU.

    Args:
        source: the generated file.
        function: the jitted function of that file.
        capability: compute capability times ten.

    Returns:
        Triton's compiled kernel, with more warps than planned where a scan needs them to be right.

    Raises:
        ToolchainError: no number of warps gives scans that Triton lowers rightly.
    """
    global _compilations
    import triton
    from triton.backends.compiler import GPUTarget

    plan = source.plan
    target = GPUTarget("cuda", capability, 32)
    _compilations += 1
    for more in (1, 2, 4):
        options = {"num_warps": more * plan.num_warps, "num_stages": plan.num_stages}
        if isinstance(plan, (CrowdedSystemsPlan, KeysPlan, StepPlan)) and plan.registers:
            options["maxnreg"] = plan.registers
        compiled = triton.compile(ast_source(source, function), target=target, options=options)
        found = scans.faults(compiled.asm["ttgir"])
        if not found or plan.dialect is Dialect.GLUON:  # there a warp's work is written out
            break
    if found:
        raise ToolchainError(
            f"{source.entry}: Triton {triton.__version__} would lower a scan wrongly",
            op=plan.op, found=found[0], help="backend='torch' needs no compiler",
        )  # fmt: skip
    return compiled


@contextmanager
def _names_without_folders() -> Iterator[None]:
    """Debug information names files; their folders are a machine's own and stay out of a cubin."""
    from triton.compiler import code_generator

    line_of = code_generator.get_jit_fn_file_line

    def short(function: Any) -> tuple[str, int]:
        name, line = line_of(function)
        return Path(name).name, line

    code_generator.get_jit_fn_file_line = short
    try:
        yield
    finally:
        code_generator.get_jit_fn_file_line = line_of


def _compile_afresh(source: Source, function: Any, capability: int) -> tuple[Any, dict[str, Any]]:
    """Compile without Triton's own cache, whose entries carry this machine's paths."""
    import triton.knobs

    with ExitStack() as stack:
        stack.enter_context(process_lock())  # what follows is the process's, not the thread's
        stack.enter_context(_names_without_folders())
        stack.enter_context(triton.knobs.cache.scope())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="attncc-"))
        triton.knobs.cache.dir = folder
        compiled = compile_source(source, function, capability)
        [record] = (p for n, p in compiled.metadata_group.items() if n.endswith(".json"))
        found: dict[str, Any] = json.loads(Path(record).read_text())
    found["extern_libs"] = []  # already linked; the list holds paths
    return compiled, found


def _built(source: Source, target: str, compiled: Any, record: dict[str, Any]) -> Built:
    family = _TARGET_LINE.search(compiled.asm["ptx"])
    if family is None or record.get("num_ctas", 1) != 1 or record.get("tensordesc_meta"):
        raise ToolchainError(f"{source.entry}: not a kernel this loader knows how to launch")
    shared, limit = int(compiled.metadata.shared), shared_limit(target)
    if shared > limit:
        raise ToolchainError(
            f"the kernel {source.entry} takes more shared memory than a program on {target} has",
            op=source.plan.op,
            expected=f"at most {limit} bytes",
            found=f"{shared} bytes",
            help=f"plan: {source.plan.phase}, {source.plan.num_stages} stages, "
            f"{source.plan.num_warps} warps, chosen by {source.plan.chosen}",
        )
    manifest = Manifest(
        entry=str(compiled.metadata.name),
        target=target,
        family=family[1],
        parameters=tuple((p.name, p.type) for p in source.plan.parameters),
        num_warps=int(compiled.metadata.num_warps),
        shared_bytes=shared,
        scratch_bytes=int(record.get("global_scratch_size", 0)),
        tensor_maps="device" if "tensormap.replace" in compiled.asm["ptx"] else "none",
        chained="griddepcontrol.wait" in compiled.asm["ptx"],
        versions={
            "triton": triton_version(),
            "ptxas": assembler_version(capability_of(target)),
            "python": platform.python_version(),
        },
    )
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    return Built(manifest, {manifest.artifact: compiled.asm["cubin"], TRITON_RECORD: text.encode()})


def capability_of(target: str) -> int:
    """``sm_90`` as 90.

    Raises:
        ToolchainError: it names no target.
    """
    match = re.fullmatch(r"sm_(\d{2,3})", target)
    if match is None:
        raise ToolchainError("no such target", expected="sm_90, sm_100, ...", found=target)
    return int(match[1])


def artifact(source: Source, target: str) -> Entry:
    """The environment's store's entry of a source for a target, compiled if it may be.

    Args:
        source: the generated file.
        target: ``sm_90`` and the like.

    Raises:
        MissingArtifactError: only ahead-of-time kernels may be used, and the store lacks it.
        ToolchainError: the target is not one, or the kernel cannot be compiled.
    """
    store = current()
    if not knobs.expect_hit():
        return build_artifact(source, target, store)
    capability_of(target)
    key = key_of(source, target)
    found = store.find(key)
    if found is None:
        raise missing(store, key, source.plan.op)
    return found


def build_artifact(source: Source, target: str, store: Store, *, measure: bool = False) -> Entry:
    """A store's entry of a source for a target, compiled if it is missing.

    What another version of the generator printed alike is taken over and not compiled again.

    Args:
        source: the generated file.
        target: ``sm_90`` and the like.
        store: where to look and publish.
        measure: also note registers and spills, which takes the assembler once more.

    Raises:
        ToolchainError: the target is not one, or the kernel cannot be compiled.
    """
    capability, key = capability_of(target), key_of(source, target)

    def build(folder: Path) -> Built:
        held = store.alike(key, source.text.encode())
        if held is not None and (held.manifest.registers is not None or not measure):
            return compiled_part(held)
        if source.plan.dialect is Dialect.CUTEDSL:
            return _built_cutedsl(source, folder, target)
        function = load_function(folder / KERNEL, source.entry)
        compiled, record = _compile_afresh(source, function, capability)
        made = _built(source, target, compiled, record)
        if not measure:
            return made
        cost = resources(compiled, target)
        spills = cost.spill_store_bytes
        counted = replace(made.manifest, registers=cost.registers, spill_bytes=spills)
        return Built(counted, made.files)

    return store.get(key, source, build)


def _built_cutedsl(source: Source, folder: Path, target: str) -> Built:
    global _compilations
    from attncc.runtime.compile_cutedsl import built_cutedsl

    _compilations += 1
    return built_cutedsl(source, folder / KERNEL, target)


def missing(store: Store, key: Key, op: str) -> MissingArtifactError:
    """The error for an entry that is not there: what the nearest one has otherwise."""
    near: list[tuple[bool, int, str, Key]] = []
    unusable = []
    for folder, bundled in store.folders():
        if folder.name.rsplit("__", 1)[0] != key["kernel"].rsplit("__", 1)[0]:
            continue
        try:
            found = read_entry(folder, bundled=bundled).key
        except (BadEntryError, OSError) as error:
            unusable.append(f"{folder.name}: {error}")
            continue
        if found["target"].startswith("sm_"):
            kin = found["kernel"] != key["kernel"]
            near.append((kin, len(key.differences(found)), folder.name, found))
    where = os.pathsep.join(str(root) for root in (store.root, *store.bundles))
    help = f"build it with `attncc build {op} --target {key['target']} ...`; looked in {where}"
    if not near:
        return MissingArtifactError(key["kernel"], unusable=tuple(unusable), op=op, help=help)
    _, _, name, best = min(near, key=lambda n: n[:3])
    return MissingArtifactError(
        key["kernel"],
        key.differences(best),
        nearest=name,
        unusable=tuple(unusable),
        op=op,
        help=help,
    )
