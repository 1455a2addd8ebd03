"""Random declarations: most have generated kernels, and the others say why not and where."""

from collections import Counter
from random import Random

from attncc.codegen.affine_checks import chunk_refusal, decays_each, read_slots
from attncc.codegen.pipeline import analyse, kernel_sources
from attncc.dsl.errors import RefusedError
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests.drawn.affine import draw_affine
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


def test_rows_and_reads_beside_a_decay_per_element_are_worked_on_in_chunks() -> None:
    """What still keeps a table of that kind from it is the layout, or a read that has no form."""
    kinds: Counter[str] = Counter()
    for seed in range(200):
        r = Random(seed)
        drawn = draw_affine(r, spoil=0)
        program = drawn.op.declaration.trace(None, dict(drawn.sizes))
        form = analyse(program).affine
        if form is None or not decays_each(form):
            continue
        ahead = 0 in [*read_slots(form), *(x.slot for x in form.reads)]
        refused = chunk_refusal(program, form)
        if refused is None:
            kinds["ahead"] += ahead
            kinds["rows"] += len(form.rows) > 1
        else:
            kinds[refused.reason] += 1
    assert kinds.pop("ahead") >= 8 and kinds.pop("rows") >= 8, kinds
    assert set(kinds) <= {
        "a decay per K behind a read of its token's own update",
        "a read-out has an axis the state lacks", "a read vector has a passive axis",
        "two decays with a read between them within one token",
    }  # fmt: skip
