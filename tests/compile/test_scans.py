"""No kernel has a scan of the layouts that Triton lowers wrongly."""

import pytest

import attncc as ac
from attncc.dsl.errors import ToolchainError
from attncc.runtime import scans
from attncc.runtime.backends import sources
from attncc.runtime.kernels import compile_source, load

TTGIR = """
#blocked = #ttg.blocked<{{sizePerThread = [{each}], threadsPerWarp = [{lanes}], \
warpsPerCTA = [{warps}], order = [1, 0]}}>
      %inside_1 = "tt.scan"(%inside_0) <{{axis = 0 : i32, reverse = false}}> ({{
      ^bb0(%a: f32 loc(unknown), %b: f32 loc(unknown)):
        %c = arith.mulf %a, %b : f32 loc(#loc9)
        tt.scan.return %c : f32 loc(#loc8)
      }}) : (tensor<16x16xf32, #blocked>) -> tensor<16x16xf32, #blocked> loc(#loc8)
"""


@pytest.mark.parametrize(
    ("each", "lanes", "warps", "count"),
    [
        ("1, 8", "4, 8", "1, 1", 1),  # wrong on a GPU
        ("1, 1", "2, 16", "1, 1", 0),  # these two were right there
        ("1, 8", "4, 8", "2, 1", 0),
    ],
)
def test_copies_along_a_faster_dimension_are_found(each, lanes, warps, count) -> None:
    text = TTGIR.format(each=each, lanes=lanes, warps=warps)
    assert len(scans.scans(text)) == 1
    assert len(scans.faults(text)) == count


def test_what_cannot_be_read_is_an_error() -> None:
    text = TTGIR.format(each="1, 1", lanes="2, 16", warps="1, 1").replace("}) : (", "}) -> (")
    with pytest.raises(ToolchainError, match="scans"):
        scans.faults(text)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [(ac.ops.raw_gated_delta_rule, {"K": 64, "V": 64, "G": 2}), (ac.ops.kda, {"K": 64, "V": 64})],
)
def test_systems_have_none_and_the_planned_warps(op, sizes) -> None:
    sizes = {"G": 1, **sizes}
    seen = 0
    for source in sources(op.declaration, target="sm_90", sizes=sizes, backend="triton"):
        if source.plan.phase in ("prepare", "mix"):
            kernel = compile_source(source, load(source).function, 90)
            assert scans.faults(kernel.asm["ttgir"]) == []
            assert kernel.metadata.num_warps == source.plan.num_warps
            seen += len(scans.scans(kernel.asm["ttgir"]))
    assert seen >= 8
