"""Flags, defaults of sizes, and one body over other layouts."""

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import ArgumentError, FreeAxisError, SeveralErrors, SignatureError
from attncc.dsl.ir import Contract, Fn, Input, Lit, Map, Size
from attncc.dsl.text import program_text

X = torch.arange(24.0).view(1, 2, 3, 4)


@ac.op(out="B T H")
def norm(
    x=ac.Activation("B T H D"), squared=ac.flag(), half=ac.flag(),
    scale=ac.param(default=1 / ac.size("D")),
):  # fmt: skip
    total = ac.dot(x, x, "D") if squared else ac.sum(x, "D")
    return (0.5 if half else 1.0) * total * scale


# --- flags


def test_a_flag_chooses_between_two_programs() -> None:
    square = X.square().sum(-1)
    assert torch.equal(norm(X), X.sum(-1) / 4)
    assert torch.equal(norm(X, squared=True), square / 4)
    assert torch.equal(norm(X, True, half=True), square / 8)
    assert torch.equal(norm(X, squared=False), norm(X))
    texts = {
        program_text(norm.declaration.trace(frozenset(given)))
        for given in ((), ("squared",), ("half",), ("squared", "half"))
    }
    assert len(texts) == 4


def test_flags_are_off_unless_they_are_named() -> None:
    usual = norm.declaration.trace()
    assert not usual.given and not any(isinstance(n, Contract) for n in walk_of(usual))
    on = norm.declaration.trace(frozenset({"squared"}))
    assert [n.name for n in walk_of(on) if isinstance(n, Input)] == ["x"]  # no input of its own


@pytest.mark.parametrize("value", [1, 0.0, "yes", torch.ones(1)])
def test_a_flag_is_true_or_false(value: object) -> None:
    with pytest.raises(ArgumentError, match="a flag is on or off") as caught:
        norm(X, squared=value)
    assert caught.value.argument == "squared"


def test_a_flag_in_a_traced_call() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return norm(x, squared=True) - norm(x)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), both(X))


def test_both_sides_of_a_flag_are_checked_when_the_op_is_declared() -> None:
    with pytest.raises(FreeAxisError):

        @ac.op(out="B T H")
        def wrong(x=ac.Activation("B T H D"), all_of_it=ac.flag()):
            return x if all_of_it else ac.sum(x, "D")


# --- defaults of sizes


def test_a_default_of_sizes_follows_the_sizes() -> None:
    usual = norm.declaration.trace()
    assert Size("D") in walk_of(usual) and "scale" not in usual.given
    for width in (1, 2, 4):
        x = X[..., :width].contiguous()
        assert torch.equal(norm(x), x.sum(-1) / width)
    assert torch.equal(norm(X, scale=3), 3 * X.sum(-1))
    assert torch.equal(norm(X, scale=None), norm(X))
    assert torch.equal(norm(X, scale=0), torch.zeros(1, 2, 3))
    assert "parameter scale scalar default absent\n" in program_text(usual)


def test_a_literal_default_is_a_literal() -> None:
    @ac.op(out="B T")
    def scaled(x=ac.Activation("B T"), by=ac.param(default=2.5)):
        return x * by

    root = scaled.declaration.trace(frozenset()).outputs[0].value
    assert root == Map(Fn.MUL, (Input("x", ("B", "T"), root.args[0].lifetime), Lit(2.5)))


def test_only_a_number_has_a_default_of_sizes_and_of_nothing_else() -> None:
    with pytest.raises(SignatureError, match="and of sizes alone") as caught:

        @ac.op(out="B T")
        def gated(x=ac.Activation("B T"), g=ac.Activation("B T", default=ac.size("T"))):
            return x * g

    assert caught.value.argument == "g"
    with pytest.raises(SignatureError, match="and of sizes alone"):

        @ac.op(out="B T")
        def placed(x=ac.Activation("B T"), by=ac.param(default=ac.index("T"))):  # noqa: B008
            return x * by


@pytest.mark.parametrize("default", [2.5, 2.0, ac.rsqrt("T"), 1 / ac.size("T")])
def test_a_whole_numbers_default_is_whole(default: object) -> None:
    with pytest.raises(SignatureError, match="the default of a whole number is none") as caught:

        @ac.op(out="B T")
        def shifted(x=ac.Activation("B T"), by=ac.param(default=default, integer=True)):
            return x + by

    assert caught.value.argument == "by"

    @ac.op(out="B T")
    def wide(x=ac.Activation("B T"), by=ac.param(default=ac.size("T") - 1, integer=True)):
        return x + by

    assert torch.equal(wide(torch.zeros(1, 3)), torch.full((1, 3), 2.0))


# --- other layouts


@ac.op(scan="T", out={"o": "B T H V", "n": "B T H"})
def recurrence(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    s=ac.State("B H K V"), scale=ac.param(default=1.0),
):  # fmt: skip
    s = s + k * v
    return s, ac.dot(s, q, "K") * scale, ac.dot(q, k, "K")


def rows() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 5, 3, n, generator=g) for n in (4, 4, 6))


def test_arguments_states_and_outputs_may_lie_otherwise() -> None:
    q, k, v = rows()
    turned = recurrence.with_patterns({"n": "B H T"}, s="B H V K", q="T B H K")
    s, o, n = recurrence(q, k, v)
    found = turned(q.transpose(0, 1).contiguous(), k, v, s=torch.zeros(2, 3, 6, 4))
    assert torch.allclose(found.s.mT, s) and torch.allclose(found.o, o)
    assert torch.equal(found.n.mT, n)
    assert dict(turned.declaration.outputs)["o"] == dict(recurrence.declaration.outputs)["o"]
    whole = recurrence.with_patterns("T B H V")(q, k, v).o
    assert torch.allclose(whole.transpose(0, 1), o)


def test_heads_may_be_grouped_where_the_body_allows_it() -> None:
    q, k, v = rows()
    shared = recurrence.with_patterns(
        {"o": "B T (H G) V", "n": "B T H"}, v="B T (H G) V", s="B (H G) K V"
    )
    wide = torch.cat([v, 2 * v], 3).view(2, 5, 6, 6)
    assert torch.allclose(shared(q, k, wide).o[:, :, ::2], recurrence(q, k, v).o)


def test_it_is_checked_like_any_declaration() -> None:
    with pytest.raises(SeveralErrors, match="the state comes back with other axes"):
        recurrence.with_patterns(s="B H K W")
    for wrong in ({"x": "B T"}, {"scale": "B"}):
        with pytest.raises(SignatureError, match="no layout to replace"):
            recurrence.with_patterns(**wrong)
    with pytest.raises(SignatureError, match=r"out\[p\]"):
        recurrence.with_patterns({"p": "B T"})


def walk_of(program):
    from attncc.dsl.graph import walk

    return list(walk(*program.roots))
