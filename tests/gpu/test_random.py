"""Random declarations through the generated kernels: one declaration and one call a seed.

A declaration that has no kernel is skipped with the compiler's reason; how many may be, a test
without a GPU counts (tests/random/test_kernels.py).
"""

import pytest

from attncc.dsl.errors import BackendError
from tests.drawn.seeded import SEEDS, drawing
from tests.gpu.checking import DEVICE, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_declaration_runs_as_generated(seed):
    drawn = drawing(seed, device=DEVICE)
    print(drawn)  # pytest shows it where the test fails
    try:
        check(drawn.drawn.op, **drawn.kwargs)
    except BackendError as refused:
        pytest.skip(str(refused).splitlines()[0])
