"""Ops whose histories and states can be read off: what a test appended is what lies there."""

from typing import Any

import torch

import attncc as ac
from tests.tolerance import assert_close


@ac.op(out="B T D")
def recall(q=ac.Activation("B T D"), k=ac.Cache("B S D"), label=ac.Cache("B S")):
    """The labels of a sequence, averaged: it depends on every row of its history."""
    return q + ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=ac.causal), label, "S")


@ac.op(scan="T", out="B T D")
def tally(
    x=ac.Activation("B T D"), w=ac.Param("W"), total=ac.State("B D"), win=ac.Window("B D W")
):  # fmt: skip
    """The sum of all rows, and a short convolution of the last W."""
    win = ac.push(win, x, "W")
    total = total + x
    return total, win, total + ac.dot(win, w, "W")


@ac.op(scan="T", out="B T D")
def smoothed(x=ac.Activation("B T D"), w=ac.Param("W D"), win=ac.Window("B W D")):
    """A short convolution and nothing else."""
    win = ac.push(win, x, "W")
    return win, ac.dot(win, w, "W")


DIM, WIDTH = 2, 3


def rows_of(numbers: list[int]) -> torch.Tensor:
    """Rows ``[T, D]`` that spell out whole numbers."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None].repeat(1, DIM)


def close(got: torch.Tensor, op: Any, args: Any, *index: Any, name: str = "o") -> None:
    """Hold a part of a result to the contract, beside whole sequences in one dense call."""
    exact, rough = op.reference(*args), op(*args)
    if not isinstance(exact, torch.Tensor):
        exact, rough = getattr(exact, name), getattr(rough, name)
    assert_close(got, exact[index], rough[index], rough.dtype, name)
