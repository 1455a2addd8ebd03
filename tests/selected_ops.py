"""Ops with a selection, of small sizes, and their arguments."""

import torch

import attncc as ac
from tests.strategies import randn

SCALE = 0.3


@ac.op(out="B T H R")
def sparse(
    qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di"),
    qc=ac.Activation("B T H R"), qr=ac.Activation("B T H P"), c=ac.Cache("B S R"),
    r=ac.Cache("B S P"), scale=ac.param(),
):  # fmt: skip
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    J = ac.topk(index, "S", k=20, where=ac.causal)
    score = (ac.dot(qc, c[J], "R") + ac.dot(qr, r[J], "P")) * scale
    return ac.dot(ac.softmax(score, J), c[J], J)


@ac.op(out="B T J")
def picks(qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di")):
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    return ac.topk(index, "S", k=20, where=ac.causal)


@ac.op(out="B T J")
def nearest(q=ac.Activation("B T D"), k=ac.Cache("B S D")):
    near = ac.index("S") + 30 > ac.index("T")
    return ac.topk(ac.dot(q, k, "D"), "S", k=7, where=ac.causal & near)


@ac.op(out={"J": "B T J", "o": "B T (Hkv G) E"})
def grouped(
    qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di"),
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    sink=ac.Param("(Hkv G)"), gate=ac.Activation("B T (Hkv G) E"),
):  # fmt: skip
    """Picks shared by groups of heads; other keys than values; a sink, a bias and a gate."""
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi") * 0.5 + ac.index("S") * 0.001
    J = ac.topk(index, "S", k=33, where=ac.causal)
    age = (ac.index("T") - J) * -0.01
    score = ac.dot(q, k[J], "D") * ac.rsqrt("D") + age
    o = ac.dot(ac.softmax(score, J, sink=sink), v[J], J)
    return J, ac.sigmoid(gate) * o


def index_arguments(b, t, s, dtype=torch.bfloat16, heads=3, width=16, seed=0):
    """Queries, weights and keys of the index, small whole numbers: their sums are exact."""
    rng = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=rng).to(dtype)

    return {
        "qi": whole(b, t, heads, width), "w": whole(b, t, heads), "ki": whole(b, s, width)
    }  # fmt: skip


def arguments(
    b, t, s, dtype=torch.bfloat16, heads=5, width=32, part=16, seed=0, index_heads=3, index_width=16
):
    """Arguments of ``sparse``."""
    more = {
        "qc": randn(seed + 3, b, t, heads, width), "qr": randn(seed + 4, b, t, heads, part),
        "c": randn(seed + 5, b, s, width), "r": randn(seed + 6, b, s, part),
    }  # fmt: skip
    found = index_arguments(b, t, s, dtype, index_heads, index_width, seed)
    return found | {n: x.to(dtype) for n, x in more.items()} | {"scale": SCALE}


def grouped_arguments(b, t, s, dtype=torch.bfloat16, seed=0):
    """Arguments of ``grouped``."""
    more = {
        "q": randn(seed + 3, b, t, 6, 16), "k": randn(seed + 4, b, s, 2, 16),
        "v": randn(seed + 5, b, s, 2, 24), "gate": randn(seed + 7, b, t, 6, 24),
    }  # fmt: skip
    found = index_arguments(b, t, s, dtype, seed=seed)
    found |= {n: x.to(dtype) for n, x in more.items()}
    return found | {"sink": randn(seed + 6, 6).float()}
