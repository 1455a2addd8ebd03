"""Shared memory of the chunk kernels: the plan's bound holds, and what does not fit is an error."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attncc.codegen.emit.scan_sources import choose_plans, sources_of, split_sources
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import (
    Choice,
    ChunkedPlans,
    plan_chunked,
)
from attncc.codegen.plan_scan import StepPlan
from attncc.codegen.render import Source
from attncc.codegen.target import SHARED, shared_limit
from attncc.codegen.tiles import choose_tiles
from attncc.dsl.errors import ToolchainError
from attncc.dsl.ir import Program
from attncc.runtime import affine
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.compile import build_artifact
from attncc.runtime.kernels import compile_source, load
from attncc.runtime.store import Store
from tests.compile.test_affine import PROGRAM, assert_bounded, spec
from tests.drawn.seeded import drawing


def drawn(seed: int) -> tuple[Program, AffineForm, Spec]:
    """The program of a seed's call, its table, and what the call fixes."""
    found = drawing(seed)
    call, _ = bind(found.drawn.op.declaration, (), dict(found.kwargs))
    form = analyse(call.program).affine
    assert form is not None
    return call.program, form, affine.completed(call, spec_of(call))


def sources(plans: ChunkedPlans) -> Iterator[Source]:
    yield from {s.entry: s for s in [*sources_of(plans), *split_sources(plans)]}.values()


@pytest.fixture
def unassembled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a kernel takes is known once it is lowered, before most of the time has gone.

    Neither LLVM's passes nor PTX nor a cubin are made; Triton's cache is one of the test's own.
    """
    import triton.knobs
    from triton._C.libtriton import llvm
    from triton.backends.nvidia.compiler import CUDABackend

    def unprinted(_: CUDABackend, __: object, metadata: dict[str, str], *___: object) -> str:
        metadata["name"] = "unprinted"  # which Triton reads out of the PTX
        return ""

    monkeypatch.setattr(llvm, "optimize_module", lambda *_, **__: None)
    monkeypatch.setattr(CUDABackend, "make_ptx", unprinted)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_, **__: b"")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.parametrize("seed", [4, 66, 86])
@pytest.mark.usefixtures("unassembled")
def test_kernels_of_many_rows_fit_and_the_bound_holds(seed: int) -> None:
    program, form, given = drawn(seed)
    plans = plan_chunked(program, form, given)
    assert isinstance(plans, ChunkedPlans)
    for source in sources(plans):
        kernel = compile_source(source, load(source).function, 90)
        assert_bounded(kernel, source.plan, program, form, given)


@pytest.mark.parametrize(("size", "dtype"), [(256, "bf16"), (128, "fp32")])
@pytest.mark.usefixtures("unassembled")  # the other two: test_affine.py
def test_the_bound_holds_for_head_dims(size: int, dtype: str) -> None:
    given, form = spec(dtype, size), analyse(PROGRAM).affine
    assert form is not None
    plans = plan_chunked(PROGRAM, form, given)
    assert isinstance(plans, ChunkedPlans)
    for source in sources(plans):
        kernel = compile_source(source, load(source).function, 90)
        assert_bounded(kernel, source.plan, PROGRAM, form, given)


def test_what_is_not_assembled_takes_what_it_takes(request: pytest.FixtureRequest) -> None:
    form = analyse(PROGRAM).affine
    assert form is not None
    plans = plan_chunked(PROGRAM, form, spec("bf16", 128))
    assert isinstance(plans, ChunkedPlans)
    state = sources_of(plans)[-1]  # assembled for test_affine.py too
    whole = compile_source(state, load(state).function, 90)
    request.getfixturevalue("unassembled")
    lowered = compile_source(state, load(state).function, 90)
    assert whole.asm["ptx"] and not lowered.asm["ptx"]
    assert lowered.metadata.shared == whole.metadata.shared


def test_a_smaller_target_gets_smaller_kernels() -> None:
    form = analyse(PROGRAM).affine
    assert form is not None
    large = plan_chunked(PROGRAM, form, spec("bf16", 128))
    small = plan_chunked(PROGRAM, form, replace(spec("bf16", 128), target="sm_86"))
    assert isinstance(large, ChunkedPlans)
    assert isinstance(small, ChunkedPlans)
    assert small.state.num_stages < large.state.num_stages


@pytest.mark.parametrize("target", [*SHARED, "sm_60"])
def test_tiles_of_a_score_keep_to_the_same_limits(target: str) -> None:
    found = choose_tiles(target, 2, (256,), 256, 1 << 20, -1)
    keys = found.num_stages * found.block_n * 512
    assert 2 * (found.block_m * 256 + keys) <= max(shared_limit(target), 2 * (128 * 256 + 16 * 512))


def test_a_target_without_the_memory_steps_and_says_why() -> None:
    form = analyse(PROGRAM).affine
    assert form is not None
    given = replace(spec("fp32", 256), target="sm_75")
    refused = plan_chunked(PROGRAM, form, given)
    assert isinstance(refused, Refusal)
    assert "bytes of shared memory, and a program on sm_75 has 65536" in refused.reason
    assert isinstance(choose_plans(PROGRAM, analyse(PROGRAM), given, chunked=True), StepPlan)


def test_a_kernel_that_takes_too_much_is_an_error_when_it_is_built(tmp_path: Path) -> None:
    form = analyse(PROGRAM).affine
    assert form is not None
    plans = plan_chunked(PROGRAM, form, spec("bf16", 256), Choice(width=64, stages=3))
    assert isinstance(plans, ChunkedPlans)
    source = sources_of(plans)[-1]
    with pytest.raises(ToolchainError) as raised:
        build_artifact(source, "sm_90", Store(tmp_path))
    text = str(raised.value)
    for part in ("gated_delta_rule", source.entry, "at most 232448 bytes", "3 stages"):
        assert part in text, text
