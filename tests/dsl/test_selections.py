"""Selections: what they mean, and what is refused."""

import pytest
import torch

import attncc.dsl.api as ac
from attncc.dsl.errors import SelectionError, SymbolicError
from attncc.dsl.interp import interpret
from attncc.dsl.library.sparse_mla import sparse_mla
from tests.dsl.test_errors import mistake
from tests.strategies import randn


def check(error, cls, line="", **parts):
    """The class, its fields, and the user's line in the message."""
    assert type(error) is cls
    assert {name: getattr(error, name) for name in parts} == parts
    assert line in str(error) and __file__ in str(error)


def test_a_top_k_over_something_that_is_no_history():
    def heads(q=ac.Activation("B T H D"), c=ac.Cache("B S D")):
        return ac.sum(q[ac.topk(ac.sum(q, "D"), "H", k=2)], "D")

    check(
        mistake(heads, out="B T J"), SelectionError, 'ac.topk(ac.sum(q, "D"), "H", k=2)',
        op="heads", axis="H", expected="one of: S", found="H",
    )  # fmt: skip

    def elements(q=ac.Activation("B T D"), k=ac.Cache("B S D"), v=ac.Cache("B S E")):
        J = ac.topk(v, "E", k=2)
        return ac.dot(q, ac.sum(k * ac.sum(v[J], J), "S"), "D")

    check(mistake(elements, out="B T"), SelectionError, axis="E", expected="one of: S", found="E")

    def tokens(q=ac.Activation("B T")):
        return ac.topk(q, "T", k=2)

    found = mistake(tokens, out="B J")
    check(found, SelectionError, axis="T", expected="one of: (no history)", found="T")


def test_rows_of_another_history_are_not_picked():
    def other_axis(k=ac.Cache("B S"), m=ac.Memory("B M D")):
        return m[ac.topk(k, "S", k=2)]

    check(
        mistake(other_axis, out="B J M D"), SelectionError, 'm[ac.topk(k, "S", k=2)]', axis="S",
        expected="a tensor with S", found="B M D",
    )  # fmt: skip

    def other_owner(k=ac.Cache("B S"), m=ac.Memory("B S D")):
        return m[ac.topk(k, "S", k=2)]

    found = mistake(other_owner, out="B J D")
    check(found, SelectionError, axis="S", expected="cache", found="memory")

    def twice(k=ac.Cache("B S"), c=ac.Cache("B S D")):
        J = ac.topk(k, "S", k=2)
        return c[J][J]

    check(mistake(twice, out="B J D"), SelectionError, axis="S", found="B J D")


@pytest.mark.parametrize("k", [0, -1, True, 2.0])
def test_at_least_one_row_is_picked(k):
    def f(c=ac.Cache("B S")):
        return ac.topk(c, "S", k=k)

    check(mistake(f, out="B J"), SymbolicError, expected="a whole number from 1", found=repr(k))


def test_the_dense_score_with_a_scattered_mask_is_the_same():
    """The form of DeepSeek-V3.2-Exp's Python reference, written out with torch."""
    B, T, S, H, Hi, Di, R, P, k = 2, 5, 23, 3, 4, 8, 6, 4, 7
    shapes = {
        "qi": (B, T, Hi, Di), "w": (B, T, Hi), "ki": (B, S, Di), "qc": (B, T, H, R),
        "qr": (B, T, H, P), "c": (B, S, R), "r": (B, S, P),
    }  # fmt: skip
    x = {n: randn(i, *shape).double() for i, (n, shape) in enumerate(shapes.items())}
    scale = 0.2

    @ac.op(out="B T H R")
    def gathers(
        qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di"),
        qc=ac.Activation("B T H R"), qr=ac.Activation("B T H P"), c=ac.Cache("B S R"),
        r=ac.Cache("B S P"), scale=ac.param(),
    ):  # fmt: skip
        index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
        J = ac.topk(index, "S", k=k, where=ac.causal)
        score = (ac.dot(qc, c[J], "R") + ac.dot(qr, r[J], "P")) * scale
        return ac.dot(ac.softmax(score, J), c[J], J)

    causal = torch.arange(S) <= torch.arange(T)[:, None] + S - T
    index = (torch.einsum("bthd,bsd->bths", x["qi"], x["ki"]).relu() * x["w"][..., None]).sum(2)
    index = index.masked_fill(~causal, -torch.inf)
    picked = index.topk(k, dim=-1)[1]
    mask = torch.full_like(index, -torch.inf).scatter_(-1, picked, 0.0).masked_fill(~causal, -9e99)
    score = torch.einsum("bthr,bsr->bths", x["qc"], x["c"])
    score = (score + torch.einsum("bthp,bsp->bths", x["qr"], x["r"])) * scale
    want = (score + mask[:, :, None]).softmax(-1) @ x["c"][:, None]

    sizes = {"B": B, "T": T, "S": S, "H": H, "Hi": Hi, "Di": Di, "R": R, "P": P}
    got = interpret(gathers.trace(), {**x, "scale": scale}, sizes).outputs["o"]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_library_picks_after_the_heads_are_added_up():
    text = str(sparse_mla.trace().outputs[0].value)
    assert "TopK" in text and "k=2048" in text
