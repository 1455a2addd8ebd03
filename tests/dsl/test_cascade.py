"""One softmax over several histories, and the remainder of whole numbers."""

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import MaskError, SeveralErrors, SymbolicError, UnknownAxisError
from attncc.dsl.interp import interpret
from attncc.dsl.text import program_text
from tests import score_ops as ops
from tests.strategies import randn
from tests.tolerance import max_error


def declared(expression):
    """An op whose body is one expression of ``x`` (scores on P), ``y`` (on S), ``a`` and ``k``."""

    def body(q=ac.Activation("B T H D"), a=ac.Memory("P H D"), k=ac.Cache("B S H D")):
        return expression(ac.dot(q, a, "D"), ac.dot(q, k, "D"), a, k)

    return ac.op(out="B T H D")(body)


def test_a_cascade_is_the_softmax_over_the_histories_end_to_end():
    args = ops.arguments("shared_prefix", 2, 3, 9, torch.float64)
    program = ops.shared_prefix.declaration.trace()
    sizes = {"B": 2, "T": 3, "S": 9, "P": 41, "Hkv": 2, "G": 2, "D": 32, "E": 32}
    found = interpret(program, args, sizes, return_lse=True)
    wide = {n: args[p].expand(2, -1, -1, -1) for n, p in (("k", "pk"), ("v", "pv"))}
    k, v = (torch.cat([wide[n], args[n]], 1).repeat_interleave(2, 2) for n in ("k", "v"))
    score = torch.einsum("bthd,bshd->bths", args["q"], k) / 32**0.5
    seen = torch.arange(50) <= torch.arange(47, 50)[:, None]
    score = score.masked_fill(~seen[None, :, None], -torch.inf)
    sink = args["sink"].double()[None, None, :, None].expand(2, 3, -1, 1)
    both = torch.cat([score, sink], -1)
    want = torch.einsum("bths,bshd->bthd", both.softmax(-1)[..., :-1], v)
    assert max_error(found.outputs["o"], want) < 1e-12
    assert max_error(found.lse.flatten(2), both.logsumexp(-1)) < 1e-12


def test_each_history_keeps_its_weights():
    op = declared(lambda x, y, a, k: ac.dot(ac.softmax({"P": x, "S": y})["P"], a, "P"))
    text = program_text(op.declaration.trace())
    assert text.count("softmax") == 2 and "beside=%" in text
    q, a, k = (randn(i, *n).float() for i, n in enumerate(((1, 1, 1, 4), (3, 1, 4), (1, 5, 1, 4))))
    wide, own = (x.double().flatten(0, -2) for x in (a, k))
    weights = (torch.cat([wide, own]) @ q.double().flatten()).softmax(0)
    assert max_error(op.reference(q, a, k).flatten(), weights[:3] @ wide) < 1e-12


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        (lambda x, y, a, k: ac.dot(ac.softmax({"S": y}), {"S": k}), SymbolicError),
        (lambda x, y, a, k: ac.dot(ac.softmax({"P": x, "S": y}), {"P": a}), UnknownAxisError),
        (lambda x, y, a, k: ac.dot(ac.softmax({"P": x, "S": y}), {"P": a, "S": k, "T": k}),
         UnknownAxisError),
        (lambda x, y, a, k: ac.dot(
            ac.softmax({"P": x, "S": y}, where={"Q": ac.causal}), {"P": a, "S": k}),
         UnknownAxisError),
        (lambda x, y, a, k: ac.dot(ac.softmax({"P": x, "S": y}, where=ac.causal), {"P": a, "S": k}),
         SymbolicError),
        (lambda x, y, a, k: ac.dot(
            ac.softmax({"P": x, "S": y}, where={"P": ac.index("P") <= ac.index("T")}),
            {"P": a, "S": k}), (MaskError, SeveralErrors)),
    ],
)  # fmt: skip
def test_mistakes_of_a_cascade_are_named(expression, error):
    with pytest.raises(error):
        declared(expression)


def test_the_remainder_has_the_sign_of_the_divisor():
    op = ac.op(out="B T")(_remainders)
    x = torch.arange(-4.0, 5.0)[None]
    got = op.reference(x)
    place = torch.arange(9)
    assert torch.equal(
        got[0], (place - 7).remainder(3) + (7 - place).remainder(3).double() * 10 + x[0] * 0
    )


def _remainders(x=ac.Activation("B T")):
    return (ac.index("T") - 7) % 3 + (7 - ac.index("T")) % 3 * 10.0 + x * 0
