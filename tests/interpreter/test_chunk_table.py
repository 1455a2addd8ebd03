"""The kernel that cuts packed sequences into chunks, beside what torch says."""

import pytest
import torch

from attncc.codegen.plan_chunks import PLACES, SEQUENCES, plan_chunk_table
from attncc.codegen.printers import source
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.runtime.kernels import load
from attncc.runtime.tables import tile_capacity, tile_table

TOKENS = 16
PROGRAM = gated_delta_rule.trace()
MANY = [n % 3 * (n % 37) for n in range(2 * SEQUENCES + 7)]


@pytest.mark.parametrize(
    "lengths",
    [[0], [16], [0, 0, 1], [5, 0, 16, 33, 0], [TOKENS * PLACES, 1], [TOKENS * PLACES * 3 + 5],
     [0] * SEQUENCES + [40], MANY],
    ids=["empty", "one chunk", "last", "some", "full program", "three programs", "late", "many"],
)  # fmt: skip
def test_every_chunk_has_its_place(lengths: list[int]) -> None:
    plan = plan_chunk_table(PROGRAM, TOKENS)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    n, tokens = len(lengths), sum(lengths)
    capacity = tile_capacity(tokens, n, TOKENS)
    chunks = torch.full((2 * capacity + 2,), 77, dtype=torch.int32)
    first = torch.full((n + 2,), 77, dtype=torch.int32)
    given = {"cu_seqlens": cu, "chunks": chunks, "first_chunks": first, "n_B": n}
    load(source(plan)).launch((-(-capacity // PLACES),), given | {"capacity": capacity})
    assert torch.equal(chunks[:-2].view(-1, 2), tile_table(cu, TOKENS, tokens))
    counts = [-(-length // TOKENS) for length in lengths]
    assert first[:-1].tolist() == [sum(counts[:i]) for i in range(n + 1)]
    assert chunks[-2:].tolist() == [77, 77] and first[-1] == 77  # nothing behind either
