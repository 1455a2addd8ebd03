"""Keys of a block in the order in which warps copy them: every key once, a warp's in few pages."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from attncc import ops
from attncc.codegen.emit import paging
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_reads import rows_by_warp
from attncc.codegen.plan_softmax import TiledPlan, plan_softmax
from attncc.codegen.quantised import E4M3, Scaled
from attncc.dsl.axes import PAGE, paged, scales_of

PROGRAM = ops.attention.declaration.trace()
FORM = analyse(PROGRAM).softmax
LANGUAGE = SimpleNamespace(
    arange=np.arange,
    broadcast_to=np.broadcast_to,
    reshape=lambda x, shape: np.asarray(x).reshape(shape),
)


def plan_of(page: int, dim: int = 128, dtype: str = "bf16", **change: object) -> TiledPlan:
    """A decode step's plan through pages."""
    names = ("q", "k", "v", "o", "new_k", "new_v")
    held = {t.name: t.pattern for t in PROGRAM.tensors}
    spec = Spec(
        dtypes=tuple((n, dtype) for n in names),
        static=tuple(sorted({"D": dim, "E": dim, "G": 4, PAGE: page}.items())),
        lengths=True, aligned=frozenset(names), target="sm_90", buckets=(("T", 1),),
        pages=tuple((n, paged(held[n])) for n in ("k", "v")),
    )  # fmt: skip
    plans = plan_softmax(PROGRAM, FORM, replace(spec, **change), "decode")
    return plans.split


def with_tile(page: int, keys: int, warps: int, dim: int) -> TiledPlan:
    plan = replace(plan_of(page, dim), block_n=keys, num_warps=warps)
    return replace(plan, warp_rows=rows_by_warp(plan))


def run(lines: tuple[str, ...], **names: object) -> dict[str, np.ndarray]:
    """The variables that printed lines leave, with arrays for Triton's tensors."""
    space = {"tl": LANGUAGE, **names}
    exec("\n".join(lines), space)
    return space


@pytest.mark.parametrize("page", [4, 8, 16, 32, 64])
@pytest.mark.parametrize(("keys", "warps"), [(128, 8), (128, 4), (64, 4), (64, 8), (32, 1)])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_each_row_of_a_tile_is_one_key_of_the_page_that_holds_it(page, keys, warps, dim):
    plan = with_tile(page, keys, warps, dim)
    order = run(paging.order_lines(plan))["offs_n"]
    assert sorted(order) == list(range(keys))
    if page < keys:
        pages = 100 + np.arange(keys // page)
        found = run((f"page = {paging._each_row(plan)}",), pages=pages)["page"]
        assert (found == 100 + order // page).all()
    if not plan.warp_rows:
        assert (order == np.arange(keys)).all()
        return
    rows = 512 // (2 * dim) or 1  # of 16 bytes a thread
    warp = np.arange(keys) // rows % warps
    for w in range(warps):
        own = np.unique(order[warp == w] // page)
        assert len(own) == max(1, keys // warps // page)


def test_pages_that_divide_no_block_keep_the_order_of_the_history():
    assert plan_of(24).warp_rows == 0
    assert plan_of(256).warp_rows == 0  # a block lies in one page
    assert plan_of(16).warp_rows == 2
    assert plan_of(16, dim=64).warp_rows == 4


def test_pairs_of_columns_are_for_e4m3_with_one_scale_a_row():
    def stored(block: int, dim: int = 128) -> TiledPlan:
        held = {t.name: t.pattern for t in PROGRAM.tensors}
        own = tuple(
            Scaled(n, a, block, scales_of(paged(held[n]), a), "fp32", "fp16", "bf16")
            for n, a in (("k", "D"), ("v", "E"))
        )
        types = {"q": "bf16", "o": "bf16", "k": E4M3, "v": E4M3, "new_k": "bf16", "new_v": "bf16"}
        return plan_of(16, dim, quantised=own, dtypes=tuple(types.items()))

    assert stored(128).paired and stored(128).warp_rows == 4
    assert not stored(64).paired and not stored(16, 16).paired and not plan_of(16).paired
