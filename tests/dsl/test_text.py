"""The canonical text: what goldens, dumps and cache keys print."""

import dataclasses

import pytest

import attncc.dsl.api as ac
from attncc.dsl.ir import Input, Kind, Lifetime, Lit
from attncc.dsl.library.attention import attention
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.dsl.text import nodes_text, program_text


def test_attention(golden):
    golden("attention.txt", program_text(attention.trace()))


def test_gated_delta_rule(golden):
    golden("gated_delta_rule.txt", program_text(gated_delta_rule.trace()))


def test_places_in_files_and_names_of_variables_do_not_matter():
    @ac.op(out="B T (Hkv G) E")
    def attention(
        q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
        scale=ac.param(default=ac.rsqrt(ac.size("D"))),
    ):  # fmt: skip
        logits = ac.dot(q, k, "D")
        logits = logits * scale
        seen = ac.index("S") <= ac.index("T")

        return ac.dot(ac.softmax(logits, "S", where=seen), v, "S")

    from attncc.dsl.library.attention import attention as other

    assert program_text(attention.trace()) == program_text(other.trace())
    assert attention.trace() == other.trace()
    assert attention.trace().loc != other.trace().loc


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda q: q * 2, lambda q: q * 2.0),
        (lambda q: q * 2, lambda q: q + 2),
        (lambda q: q - 2, lambda q: 2 - q),
        (lambda q: q * 0.1, lambda q: q * 0.1000000001),
        (lambda q: ac.cumsum(q, "T"), lambda q: ac.cumsum(q, "H")),
        (lambda q: ac.amax(q, "T") + q, lambda q: ac.amin(q, "T") + q),
        (lambda q: ac.softmax(q, "T"), lambda q: ac.softmax(q, "T", where=q > 0)),
        (lambda q: ac.softmax(q, "T"), lambda q: ac.softmax(q, "T", sink=0.0)),
        (lambda q: ac.take(q, "T", ac.index("T")), lambda q: ac.take(q, "T", ac.index("T") - 1)),
    ],
)
def test_different_bodies_print_differently(one, other):
    def text(body):
        def f(q=ac.Activation("B T H")):
            return body(q)

        return program_text(ac.op(out="B T H")(f).trace())

    assert text(one) != text(other)


def test_how_many_rows_are_picked_is_part_of_the_text():
    def text(k):
        def f(c=ac.Cache("B S H")):
            return ac.sum(c[J := ac.topk(ac.sum(c, "H"), "S", k=k)], J)

        return program_text(ac.op(out="B H")(f).trace())

    assert text(2) != text(3) and text(2) == text(2)


def test_presence_layout_and_kind_are_part_of_the_text():
    full, bare = (program_text(gated_delta_rule.trace(g)) for g in (None, frozenset({"s"})))
    assert " g [B T (Hk G)] default=0.0\n" in full
    assert " g [B T (Hk G)] default=0.0 absent\n" in bare

    program = attention.trace()
    whole = dataclasses.replace(program.tensors[0], kind=Kind.INT)
    other = dataclasses.replace(program, tensors=(whole, *program.tensors[1:]))
    assert program_text(other) != program_text(program)
    one, two = (nodes_text(Input("w", (), Lifetime.PARAMETER, k)) for k in (Kind.INT, Kind.REAL))
    assert one != two


def test_a_literal_prints_every_digit_and_its_kind():
    assert [nodes_text(Lit(v)).splitlines()[0] for v in (1, 1.0, True, 0.1, 1e-30, -0.0)] == [
        f"  %0 = lit {text} : []" for text in ("1", "1.0", "True", "0.1", "1e-30", "-0.0")
    ]


def test_a_shared_expression_is_printed_once():
    @ac.op(out="B T")
    def f(x=ac.Activation("B T")):
        y = ac.exp(x)
        return y * y + y

    assert program_text(f.trace()).count(" exp ") == 1
