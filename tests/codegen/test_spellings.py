"""Spellings of one update share a flat table, for the recurrences of the field."""

from collections.abc import Callable
from typing import Any

import pytest

import attncc.dsl.api as ac
from attncc.codegen.forms import AffineForm
from attncc.codegen.passes.find_affine import find_affine
from attncc.dsl.build import declare

Body = Callable[..., Any]


def table(update: Body, decay: str = "B T H") -> AffineForm:
    """The table of an update of q, k, v, a log gate, beta; outputs read the new state."""

    def op(
        q=ac.Activation("B T H K"), k=ac.Activation("B T (N) H K"), v=ac.Activation("B T (N) H V"),
        g=ac.Activation(decay), beta=ac.Activation("B T (N) H"), w=ac.Activation("B T H K"),
        s=ac.State("B H K V"),
    ):  # fmt: skip
        rows = list(ac.unroll("N", k, v, beta))
        found = update(s, rows, g, q, w)
        return found if isinstance(found, tuple) else (found, ac.dot(found, q, "K"))

    form = find_affine(declare(op, out="B T H V", scan="T").trace())
    assert isinstance(form, AffineForm), str(form)
    return form


def shape(form: AffineForm) -> tuple[list[tuple[int, int, int, bool]], list[tuple[int, int]]]:
    """Slots and rows seen of each row and read-out, and which rows read."""
    rows = [(r.read_slot, r.write_slot, r.rows_visible, r.b is not None) for r in form.rows]
    return rows, [(r.slot, r.rows_visible) for r in form.reads]


# --- one row: gated delta rule, and KDA where the gate has the active axis


def plain(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    s = ac.exp(g) * s
    return s + k * (beta * (v - ac.dot(s, k, "K")))


def gate_inside_the_read(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    return ac.exp(g) * s + k * (beta * (v - ac.dot(s, ac.exp(g) * k, "K")))


def gate_as_an_operand(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    return k * (beta * (v - ac.dot(ac.exp(g), s, k, "K"))) + s * ac.exp(g)


def distributed(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    return ac.exp(g) * s + beta * (k * v) - beta * (k * ac.dot(s, k * ac.exp(g), "K"))


def outers_added_first(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    s = ac.exp(g) * s
    return s + beta * (k * v - k * ac.dot(s, k, "K"))


def negated(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    s = -(ac.exp(g) * -s)
    return s - k * (beta * (ac.dot(s, k, "K") - v))


def beta_on_the_read(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    s = ac.exp(g) * s
    return s + k * (beta * v - ac.dot(s, k * beta, "K"))


def summed(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    s = ac.exp(g) * s
    return s + (k * beta) * (v - ac.sum(k * s, "K"))


def erase_then_write(s, rows, g, q, w):
    ((k, v, beta), _) = rows
    s = ac.exp(g) * s
    s = s - k * (beta * ac.dot(s, k, "K"))
    return s + k * (beta * v)


ONE_ROW = (
    plain, gate_inside_the_read, gate_as_an_operand, distributed, outers_added_first, negated,
    beta_on_the_read, summed, erase_then_write,
)  # fmt: skip


@pytest.mark.parametrize("decay", ["B T H", "B T H K"])
@pytest.mark.parametrize("update", ONE_ROW, ids=lambda f: f.__name__)
def test_one_row_that_reads_after_the_decay(update: Body, decay: str) -> None:
    form, want = table(update, decay), table(plain, decay)
    assert shape(form) == ([(1, 1, 0, True)], [(1, 1)])
    assert form.reads == want.reads
    assert (form.rows[0].a, form.rows[0].b) == (want.rows[0].a, want.rows[0].b)
    assert len(form.decays) == 1


# --- several rows: gated delta product


def product(s, rows, g, q, w):
    s = ac.exp(g) * s
    for k, v, beta in rows:
        s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s


def product_distributed(s, rows, g, q, w):
    first = True
    for k, v, beta in rows:
        read = ac.dot(s, ac.exp(g) * k, "K") if first else ac.dot(s, k, "K")
        s = (ac.exp(g) * s if first else s) + k * (beta * v) - beta * k * read
        first = False
    return s


def product_of_reflections(s, rows, g, q, w):
    s = s * ac.exp(g)
    for k, v, beta in rows:
        erased = s - (k * beta) * ac.sum(s * k, "K")
        s = erased + beta * (v * k)
    return s


def product_negated(s, rows, g, q, w):
    s = ac.exp(g) * s
    for k, v, beta in rows:
        e = ac.dot(k, s, "K") - v
        s = s - (e * beta) * k
    return s


@pytest.mark.parametrize("decay", ["B T H", "B T H K"])
@pytest.mark.parametrize(
    "update", [product, product_distributed, product_of_reflections, product_negated],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_row_per_update_that_sees_those_before_it(update: Body, decay: str) -> None:
    form, want = table(update, decay), table(product, decay)
    assert shape(form) == ([(1, 1, 0, True), (1, 1, 1, True)], [(1, 2)])
    assert [(r.a, r.b) for r in form.rows] == [(r.a, r.b) for r in want.rows]


# --- other recurrences


def rwkv7(s, rows, g, q, w):
    ((k, v, beta), (a, _, _)) = rows
    return w * s - (beta * a) * ac.dot(s, a, "K") + k * v


def comba(s, rows, g, q, w):
    """The correction reads with a scaled key; the output with a corrected query."""
    ((k, v, beta), _) = rows
    s = ac.exp(g) * s
    s = s + k * (beta * (v - ac.dot(s, 0.9 * k, "K")))
    return s, ac.dot(s, q - 0.1 * k, "K")


def separate_erase(s, rows, g, q, w):
    """Erase and write gates per key element."""
    ((k, v, beta), _) = rows
    s = ac.exp(g) * s
    return s - (w * k) * ac.dot(s, k, "K") + (beta * k) * v


def bonus(s, rows, g, q, w):
    """The output sees the token's own write with a weight of its own (RWKV-6)."""
    ((k, v, _), _) = rows
    return w * s + k * v, ac.dot(s + q * k * v, q, "K")


def read_before_and_error(s, rows, g, q, w):
    """Outputs from the state before the token, and the prediction error."""
    ((k, v, beta), _) = rows
    early = ac.dot(s, q, "K")
    s = ac.exp(g) * s
    e = v - ac.dot(s, k, "K")
    return s + k * (beta * e), early + ac.tanh(e)


def decayed_after(s, rows, g, q, w):
    """The decay comes last: the read lies before it."""
    ((k, v, beta), _) = rows
    return w * (s + k * (beta * (v - ac.dot(s, k, "K"))))


def masked(s, rows, g, q, w):
    ((k, v, _), _) = rows
    return ac.where(g > -1.0, s, 0.0) + k * v


@pytest.mark.parametrize(
    ("update", "rows", "reads"),
    [
        (rwkv7, [(0, 1, 0, True), (1, 1, 0, False)], [(1, 2)]),
        (comba, [(1, 1, 0, True)], [(1, 1)]),
        (separate_erase, [(1, 1, 0, True), (1, 1, 0, False)], [(1, 2)]),
        (bonus, [(1, 1, 0, False)], [(0, 0)]),
        (read_before_and_error, [(1, 1, 0, True)], [(0, 0), (1, 0)]),
        (decayed_after, [(0, 1, 0, True)], [(1, 1)]),
        (masked, [(1, 1, 0, False)], [(1, 1)]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_tables_of_other_recurrences(update: Body, rows: Any, reads: Any) -> None:
    assert shape(table(update)) == (rows, reads)


def test_an_output_may_sum_reads_over_other_axes() -> None:
    def op(q=ac.Activation("B T H K"), v=ac.Activation("B T H V"), s=ac.State("B H K V")):
        s = 0.9 * s + q * v
        read = ac.dot(s, q, "K")
        norm = ac.rsqrt(ac.dot(read, read, "V") + 1.0)
        return s, ac.dot(s, q, v, "K V") + ac.sum(read * norm, "V") + ac.amax(read, "V")

    form = find_affine(declare(op, out="B T H", scan="T").trace())
    assert isinstance(form, AffineForm), str(form)
    assert len(form.reads) == 1  # one read of the state serves all
