"""Inputs of latent attention, and a way to have either order of its contractions."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import attncc as ac
from attncc.runtime import orders, stages
from tests.strategies import randn

MLA = ac.ops.mla


@ac.op(out="B T H R")
def LATENT(
    q=ac.Activation("B T H R"), q_rope=ac.Activation("B T H P"), c=ac.Cache("B S R"),
    r=ac.Cache("B S P"), scale=ac.param(),
):  # fmt: skip
    """What is left of latent attention between its products."""
    score = (ac.dot(q, c, "R") + ac.dot(q_rope, r, "P")) * scale
    return ac.dot(ac.softmax(score, "S", where=ac.causal), c, "S")


TINY = {"H": 3, "D": 8, "P": 4, "R": 12, "V": 6}
REAL = {"H": 16, "D": 128, "P": 64, "R": 512, "V": 128}
ABSORBED = {"B": 1, "T": 1, "S": 1 << 20}
EXPANDED = {"B": 1, "T": 1 << 20, "S": 1 << 20}
FORMS = {"absorbed": ABSORBED, "expanded": EXPANDED}


@contextmanager
def forced(form: str) -> Iterator[None]:
    """Within this, the order of contractions is that of a decode step, or of a long prompt."""
    steered = FORMS[form]

    def order_of(program, sizes, phase, stored=frozenset()):
        return orders.order_of(program, {**sizes, **steered}, phase, stored)

    with mock.patch.object(stages, "order_of", order_of):
        yield


def tensors(
    seed: int, B: int, T: int, S: int, sizes: dict[str, int], dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Activations and histories of about 1, weights that keep them so."""
    H, D, P, R, V = (sizes[a] for a in "HDPRV")

    def drawn(n: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (randn(seed + n, *shape) * scale).to(device, dtype)

    return {
        "q_nope": drawn(0, B, T, H, D), "q_rope": drawn(1, B, T, H, P), "c": drawn(2, B, S, R),
        "r": drawn(3, B, S, P), "wuk": drawn(4, H, D, R, scale=R**-0.5),
        "wuv": drawn(5, H, V, R, scale=R**-0.5),
    }  # fmt: skip


def scale(sizes: dict[str, int]) -> float:
    """What models without a longer context take."""
    return float((sizes["D"] + sizes["P"]) ** -0.5)
