"""Random declarations: most have generated kernels, and the others say why not and where."""

from collections import Counter

from attncc.codegen.pipeline import kernel_sources
from attncc.dsl.errors import RefusedError
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests.drawn.seeded import SEEDS, drawing


def test_most_random_declarations_have_kernels() -> None:
    """Of the seeds that ``tests/gpu/test_random.py`` runs."""
    refused: Counter[str] = Counter()
    for seed in range(0, SEEDS, 3):
        found = drawing(seed)
        call, _ = bind(found.drawn.op.declaration, (), dict(found.kwargs))
        try:
            assert kernel_sources(call.program, spec_of(call), "prefill")
        except RefusedError as error:
            assert str(error).strip(), found
            refused[str(error).splitlines()[0].split("(")[0]] += 1
    assert refused.total() < SEEDS // 3 * 0.3, refused
