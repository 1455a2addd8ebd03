"""Random declarations: the torch lowering means what the interpreter means.

``pytest tests/random --examples 3000`` draws other ones, and more.
"""

import torch
from hypothesis import assume, given

from attncc.codegen.pipeline import analyse
from attncc.dsl.interp import interpret
from attncc.runtime.eager.run import run
from attncc.runtime.reference import run_reference
from tests.codegen.affine_table import run_table
from tests.drawn.bounds import as_dict, hold, largest, magnitude
from tests.drawn.calls import Drawing, Point, arguments
from tests.drawn.source import Drawn
from tests.examples import examples
from tests.runtime.eager_ops import call_of, results
from tests.strategies_ops import calls, folds, randoms, scans
from tests.tolerance import max_error

EXACT = 1e-9
"""Of max |oracle|: fp64 in another order of summation, with states that grow at times."""
RANGE = 1e4
"""Well below what fp16 holds: a random state may grow without bounds."""


def same_meaning(drawing: Drawing, chunk: int = 64) -> None:
    """In fp64 the two agree to rounding; so they compute the same thing, whatever the dtype."""
    call = call_of(drawing.drawn.op, **drawing.kwargs, double=True)
    oracle = run_reference(call, torch.float64)
    for tensor in results(call).values():
        tensor.fill_(torch.nan)
    run(call, analyse(call.program), chunk=chunk)
    for name, value in results(call).items():
        error = max_error(value, oracle[name], name)
        assert error <= EXACT * magnitude(oracle), f"{name}: {error:.2e}"


def within_the_contract(drawing: Drawing) -> None:
    """As stored: narrow results err no more than twice what a token loop in fp32 does."""
    op, kwargs = drawing.drawn.op, drawing.kwargs
    found = as_dict(op(**kwargs, backend="torch"))
    exact = as_dict(op.reference(**kwargs))
    assume(all(largest(x) < RANGE for x in exact.values()))
    rough = as_dict(op.reference(**kwargs, dtype=torch.float32))
    for name, value in found.items():
        hold(value, exact[name], rough[name], name, magnitude(exact))


@examples(150)
@given(calls(scans()), randoms())
def test_a_random_scan_in_any_chunks(drawing, r):
    same_meaning(drawing, r.choice((64, 1, 2, 7, 16)))


@examples(150)
@given(calls(folds()))
def test_a_random_fold(drawing):
    same_meaning(drawing)


@examples(60)
@given(calls(scans()))
def test_a_random_scan_as_stored(drawing):
    within_the_contract(drawing)


@examples(60)
@given(calls(folds()))
def test_a_random_fold_as_stored(drawing):
    within_the_contract(drawing)


@examples(60)
@given(scans(), randoms())
def test_the_table_of_a_random_scan(drawn: Drawn, r):
    t = r.choice((0, 1, 2, 3, 6))
    sizes = {**dict(drawn.sizes), "B": 2, "T": t, "S": 0}
    tensors = arguments(r, drawn, Point(2, t, 0), torch.float32, whole=True)
    program = drawn.op.declaration.trace(frozenset(tensors), sizes)
    form = analyse(program).affine
    assert (form is None) == ("not affine" in drawn.tags)
    if form is None:
        return
    want = interpret(program, tensors, sizes)
    for name, value in run_table(program, form, tensors, sizes).items():
        oracle = {**want.states, **want.outputs}[name]
        assert max_error(value, oracle, name) <= 1e-12 * max(largest(oracle), 1.0)
