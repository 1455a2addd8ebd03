"""The affine form: spellings of one update share a table, and tables mean what bodies mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc.dsl.api as ac
from attncc.codegen.emit.scan_sources import choose_plans
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.passes.find_affine import find_affine
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import plan_chunked
from attncc.codegen.plan_scan import StepPlan, plan_step
from attncc.dsl.build import Declaration, declare
from attncc.dsl.errors import RefusedError
from attncc.dsl.interp import interpret
from tests.codegen.affine_table import run_table

Body = Callable[..., Any]


def scan(update: Body) -> Declaration:
    """An op of q, k, v, g, beta whose state is updated by a function of them."""

    def delta(
        q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
        g=ac.Activation("B T H"), beta=ac.Activation("B T H"), s=ac.State("B H K V"),
    ):  # fmt: skip
        s = update(s, k, v, g, beta)
        return s, ac.dot(s, q, "K")

    return declare(delta, out="B T H V", scan="T")


def plain(s, k, v, g, beta):
    s = ac.exp(g) * s
    return s + k * (beta * (v - ac.dot(s, k, "K")))


def read_before_decay(s, k, v, g, beta):
    return ac.exp(g) * s + k * (beta * (v - ac.exp(g) * ac.dot(s, k, "K")))


def distributed(s, k, v, g, beta):
    s = ac.exp(g) * s
    return s + k * (beta * v) - k * (beta * ac.dot(s, k, "K"))


def negated(s, k, v, g, beta):
    s = ac.exp(g) * s
    return s - k * (beta * (ac.dot(s, k, "K") - v))


def beta_on_a(s, k, v, g, beta):
    s = ac.exp(g) * s
    return s + (beta * k) * (v - ac.dot(s, k, "K"))


def beta_on_b(s, k, v, g, beta):
    s = ac.exp(g) * s
    return s + k * (beta * v - ac.dot(s, beta * k, "K"))


def reset(s, k, v, g, beta):
    s = ac.where(g < -20.0, 0.0, s)
    return s + k * (beta * (v - ac.dot(s, k, "K")))


def linear_alpha(s, k, v, g, beta):
    s = s * g
    return s + k * (beta * (v - ac.dot(s, k, "K")))


def summed(s, k, v, g, beta):
    s = ac.exp(g) * s
    return s + k * (beta * (v - ac.sum(s * k, "K")))


SPELLINGS = (
    plain, read_before_decay, distributed, negated, beta_on_a, beta_on_b, reset, linear_alpha,
    summed,
)  # fmt: skip


def table(op: Declaration) -> AffineForm:
    form = find_affine(op.trace())
    assert isinstance(form, AffineForm), str(form)
    return form


@pytest.mark.parametrize("update", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_of_the_gated_delta_rule_share_one_row(update: Body) -> None:
    form, want = table(scan(update)), table(scan(plain))
    assert form.rows == want.rows
    assert form.reads == want.reads
    assert len(form.decays) == 1
    row = form.rows[0]
    assert (row.read_slot, row.write_slot, row.rows_visible) == (1, 1, 0)


def tanh_of_state(s, k, v, g, beta):
    return ac.tanh(s) + k * v


def square(s, k, v, g, beta):
    return s * s + k * v


def product_of_reads(s, k, v, g, beta):
    return s + k * (ac.dot(s, k, "K") * ac.dot(s, k, "K"))


def swapped(s, k, v, g, beta):
    return ac.where(ac.dot(s, k, "K") > 0.0, s, 0.0) + k * v


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (tanh_of_state, "tanh of a value of the state"),
        (square, "product of two values of the state"),
        (product_of_reads, "product of two values of the state"),
        (swapped, "choice that depends on the state"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_refusal_names_the_line(update: Body, words: str) -> None:
    refusal = find_affine(scan(update).trace())
    assert isinstance(refusal, Refusal)
    assert words in refusal.reason
    assert refusal.loc.file == __file__
    assert refusal.loc.line == update.__code__.co_firstlineno + 1


def test_a_beta_per_column_with_corrections_along_the_rows_is_refused() -> None:
    def delta(
        k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), beta=ac.Activation("B T H V"),
        s=ac.State("B H K V"),
    ):  # fmt: skip
        s = s + k * (beta * (v - ac.dot(s, k, "K")))
        return s, ac.dot(s, k, "K")

    refusal = find_affine(declare(delta, out="B T H V", scan="T").trace())
    assert isinstance(refusal, Refusal)
    assert "decays or corrects by itself" in refusal.reason
    assert refusal.loc.line


SPEC = Spec(
    dtypes=tuple((n, "fp32") for n in ("q", "k", "v", "g", "beta", "w", "s", "o")),
    static=(("K", 64), ("V", 64)),
)


def test_a_read_between_a_write_and_a_decay_per_active_axis_steps_and_says_why() -> None:
    def between(
        k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), w=ac.Activation("B T H K"),
        s=ac.State("B H K V"),
    ):  # fmt: skip
        s = s + k * v
        o = ac.dot(s, k, "K")
        s = ac.exp(w) * s
        return s, o

    program = declare(between, out="B T H V", scan="T").trace()
    analysis = analyse(program)
    assert analysis.affine is not None
    refusal = plan_chunked(program, analysis.affine, SPEC)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "a decay per K behind a read of its token's own update"
    assert refusal.loc.line == between.__code__.co_firstlineno + 6
    assert isinstance(choose_plans(program, analysis, SPEC, chunked=True), StepPlan)


def test_a_body_that_fits_no_kernel_gives_both_reasons() -> None:
    def wide(k=ac.Activation("B T H K"), x=ac.Activation("B T H K"), s=ac.State("B H K V")):
        s = ac.tanh(s) + k * ac.sum(s, "V")
        return s, ac.dot(s, k, "K V")

    program = declare(wide, out="B T H", scan="T").trace()
    spec = Spec(SPEC.dtypes, static=(("K", 256), ("V", 256)))
    refusal = plan_step(program, spec)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "a tile of K 256 x V 256 does not fit a program's registers"
    with pytest.raises(
        RefusedError, match=r"tanh of a value .* does not fit a program's registers"
    ):
        choose_plans(program, analyse(program), spec, chunked=True)


# --- tables mean what bodies mean -----------------------------------------------------------------

Step = tuple[str, int]
UPDATES: dict[str, Body] = {
    "decay": lambda s, x, y, v, w: w * s,
    "write": lambda s, x, y, v, w: s + x * v,
    "correct": lambda s, x, y, v, w: s - x * (w * (ac.dot(s, y, "K") - v)),
    "mixed": lambda s, x, y, v, w: w * s + x * (w * ac.dot(s, y, "K")) * 0.5,
    "negate": lambda s, x, y, v, w: x * v - s,
    "reset": lambda s, x, y, v, w: ac.where(w > 0.3, s, 0.0),
    "early": lambda s, x, y, v, w: w * (s + (w * x) * ac.dot(s, y, "K")),
    "twice": lambda s, x, y, v, w: s + s * w - x * ac.dot(s, w * y, "K") / 2.0,
}
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(UPDATES)), st.integers(0, 2)), min_size=1, max_size=4
)


def random_body(steps: list[Step], reads: list[int]) -> Declaration:
    """A chain of decays and updates; ``reads`` says after which steps an output reads."""

    def body(
        x0=ac.Activation("B T H K"), x1=ac.Activation("B T K"), x2=ac.Activation("B T H K"),
        v=ac.Activation("B T H V"), w0=ac.Activation("B T H"), w1=ac.Activation("B T"),
        w2=ac.Activation("B T H"), s=ac.State("B H K V"),
    ):  # fmt: skip
        xs, ws = (x0, x1, x2), (w0, w1, w2)
        out = v
        for at, (kind, i) in enumerate(steps):
            y, w = xs[(i + 1) % 3], ws[i]
            s = UPDATES[kind](s, xs[i], y, v, w)
            if at in reads:
                out = out + w * ac.dot(s, y, "K")
        return s, out + ac.dot(s, x0, "K")

    return declare(body, out="B T H V", scan="T")


@settings(max_examples=60)
@given(STEPS, st.lists(st.integers(0, 3), max_size=2), st.integers(0, 99))
def test_a_random_affine_body_equals_its_table(
    steps: list[Step], reads: list[int], seed: int
) -> None:
    program = random_body(steps, reads).trace()
    form = find_affine(program)
    assert isinstance(form, AffineForm), str(form)
    sizes = {"B": 1, "T": 3, "H": 2, "K": 3, "V": 2}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        t.name: torch.rand([sizes[d[0]] for d in t.pattern.dims], generator=generator).double()
        - 0.4
        for t in program.tensors
    }
    want = interpret(program, tensors, sizes)
    for name, value in run_table(program, form, tensors, sizes).items():
        torch.testing.assert_close(value, {**want.states, **want.outputs}[name], msg=name)
