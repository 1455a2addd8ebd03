"""A fixed sample of random declarations through the generated kernels, on the CPU."""

import pytest
import torch

from tests.drawn.seeded import drawing
from tests.gpu.checking import check

SEEDS = range(16)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_declaration_runs_as_generated(seed: int) -> None:
    drawn = drawing(
        seed, dims=(16, 32), lengths=(1, 5, 17, 40, 65), dtypes=(torch.float32, torch.float16)
    )
    print(drawn)
    check(drawn.drawn.op, **drawn.kwargs)
