"""Kernels of rows and of short convolutions compiled for GPUs that need not be there."""

import re
from typing import Any

import pytest

import attncc as ac
from attncc.runtime.backends import sources
from attncc.runtime.inspect import Resources, resources
from attncc.runtime.kernels import compile_source, load

SIZES = {"V": 128, "D": 64, "R": 2, "L": 4096}
TURNED = (ac.ops.rope, ac.ops.rope_interleaved)
ROWS = (ac.ops.gated_rms_norm, ac.ops.rms_norm, ac.ops.l2_norm, ac.ops.silu, *TURNED)


def compiled(
    op: ac.Op, sizes: dict[str, int], capability: int = 90, **options: Any
) -> tuple[Resources, str]:
    """Resources and PTX of an op's only kernel."""
    target = f"sm_{capability}"
    (source,) = sources(op.declaration, sizes=sizes, target=target, **options)
    kernel = compile_source(source, load(source).function, capability)
    return resources(kernel, target), kernel.asm["ptx"]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("op", ROWS, ids=lambda op: op.__name__)
def test_rows_move_16_bytes_a_thread_and_spill_nothing(op: ac.Op, capability: int) -> None:
    found, ptx = compiled(op, SIZES, capability)
    assert found.spill_store_bytes == found.stack_bytes == 0
    assert found.registers <= 96
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v4\.b32", ptx)


@pytest.mark.parametrize("op", TURNED, ids=lambda op: op.__name__)
def test_pairs_are_read_once_and_turned_in_registers(op: ac.Op) -> None:
    found, ptx = compiled(op, SIZES)
    assert found.shared_bytes <= 4096  # tables of 16 bits change threads
    narrow = [x for x in re.findall(r"ld\.global\S*", ptx) if ".v4" not in x]
    assert len(narrow) <= 2  # positions
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) == 2  # 16 elements a thread


@pytest.mark.parametrize("width", [2048, 8192, 16384])
def test_a_row_as_wide_as_a_model_fits_the_registers(width: int) -> None:
    found, _ = compiled(ac.ops.rms_norm, {"V": width})
    assert found.spill_store_bytes == found.stack_bytes == 0


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_short_convolution_reads_each_row_once_and_spills_nothing(
    width: int, capability: int
) -> None:
    found, ptx = compiled(ac.ops.short_conv, {"D": 4096, "W": width}, capability)
    assert found.spill_store_bytes == found.stack_bytes == 0
    assert found.registers <= 136
    # A group of four rows, and those before the first token: nothing is read twice in the loop.
    wide = "v4" if width <= 4 else "v2"  # 8 bytes where a thread could not hold more windows
    loads = len(re.findall(rf"ld\.global\S*\.{wide}\.b32", ptx))
    ahead = len(re.findall(r"cp\.async\.c[ag]\.shared\.global.*, 0x10, ", ptx))
    # Two groups are on their way before the loop, and one more in it, unless a token looks further
    # back than a group.
    assert ahead == (3 * 4 if width <= 4 else 0)
    assert loads >= width - 1 + (0 if ahead else 4)
    assert len(re.findall(rf"st\.global\S*\.{wide}\.b32", ptx)) >= 4


@pytest.mark.parametrize("given", [frozenset({"silu", "win", "bias"}), frozenset({"win"})])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_packed_convolutions_of_any_dtype_spill_nothing(dtype: str, given: frozenset[str]) -> None:
    found, _ = compiled(
        ac.ops.short_conv, {"D": 2048, "W": 4}, dtype=dtype, packed=True, given=given
    )
    assert found.spill_store_bytes == found.stack_bytes == 0
