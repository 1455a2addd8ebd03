"""Scans that carry something else than one affine state: several objects, windows, diagonals."""

from typing import Any

import torch

import attncc as ac
from tests.strategies import randn

# --- element-wise states


@ac.op(scan="T", out="B T H D")
def hgrn(x=ac.Activation("B T H D"), f=ac.Activation("B T H D"), s=ac.State("B H D")):
    f = ac.sigmoid(f)
    s = f * s + (1 - f) * x
    return s, s


@ac.op(scan="T", out="B T D")
def selective(
    x=ac.Activation("B T D"), dt=ac.Activation("B T D"), b=ac.Activation("B T N"),
    c=ac.Activation("B T N"), a=ac.Param("D N"), d=ac.Param("D"), h=ac.State("B D N"),
):  # fmt: skip
    """A decay per channel and state element (Mamba-1)."""
    dt = ac.softplus(dt)
    h = ac.exp(dt * a) * h + dt * x * b
    return h, ac.dot(h, c, "N") + d * x


@ac.op(scan="T", out="B T H")
def skips(x=ac.Activation("B T H"), w=ac.Activation("B T H"), s=ac.State("B H")):
    """A step towards x where w says so; a reset by position; the old state in the output."""
    new = ac.where(w > 0.0, s + w * (x - s), s / 2.0)
    new = ac.where(ac.eq(ac.index("T"), 3), 0.0, new)
    return new, new - s


# --- several states


@ac.op(scan="T", out="B T H V")
def normalised(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H", default=0), s=ac.State("B H K V"), z=ac.State("B H K"),
):  # fmt: skip
    """Linear attention with its normaliser."""
    k = ac.exp(k)
    s = ac.exp(g) * s + k * v
    z = ac.exp(g) * z + k
    return s, z, ac.dot(s, ac.exp(q), "K") / ac.dot(z, ac.exp(q), "K")


@ac.op(scan="T", out={"o": "B T H V", "p": "B T H"})
def two_memories(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    beta=ac.Activation("B T H"), w=ac.Activation("B T H K"), fast=ac.State("B H K V"),
    slow=ac.State("B H K V"),
):  # fmt: skip
    """Two affine states; the outputs mix their reads and sum them over V."""
    e = beta * (v - ac.dot(fast, k, "K"))
    fast = fast + k * e
    slow = ac.exp(w) * slow + k * v
    near, far = ac.dot(fast, q, "K"), ac.dot(slow, q, "K")
    return fast, slow, ac.silu(near) * far + e, ac.sum(near * far, "V") + ac.dot(slow, q, v, "K V")


@ac.op(scan="T", out="B T H V")
def cascade(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), second=ac.State("B H K V"), first=ac.State("B H K V"),
):  # fmt: skip
    """The second state stores what the first one reads; declared in the other order."""
    first = ac.exp(g) * first + k * (v - ac.dot(first, k, "K"))
    second = 0.9 * second + q * ac.tanh(ac.dot(first, q, "K"))
    return second, first, ac.dot(second, k, "K")


@ac.op(scan="T", out="B T H V")
def one_way(
    k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), a=ac.Activation("B T H"),
    m=ac.State("B H K V"), s=ac.State("B H K V"),
):  # fmt: skip
    """Momentum without corrections: both states are element-wise, one after the other."""
    m = 0.8 * m + k * v
    s = a * s + m
    return m, s, ac.dot(s, k, "K")


@ac.op(scan="T", out="B T H V")
def momentum(
    k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), m=ac.State("B H K V"),
    s=ac.State("B H K V"),
):  # fmt: skip
    """Momentum of the delta rule: the states take each other."""
    m = 0.8 * m + k * (v - ac.dot(s, k, "K"))
    s = 0.95 * s + 0.3 * m
    return m, s, ac.dot(s, k, "K")


# --- windows


@ac.op(scan="T", out="B T D")
def short_convolution(
    x=ac.Activation("B T D"), w=ac.Param("D W"), bias=ac.Param("D", default=0),
    win=ac.Window("B D W"),
):  # fmt: skip
    win = ac.push(win, x, "W")
    return win, ac.silu(ac.dot(win, w, "W") + bias)


@ac.op(scan="T", out="B T D")
def stacked(
    x=ac.Activation("B T D"), w=ac.Param("W D"), u=ac.Param("X D"), one=ac.Window("B W D"),
    two=ac.Window("B X D"),
):  # fmt: skip
    """Two windows; the second one's rows come from the first, and one row is picked."""
    one = ac.push(one, x, "W")
    y = ac.silu(ac.dot(one, w, "W"))
    two = ac.push(two, y, "X")
    first = next(iter(ac.unroll("X", two)))
    return one, two, x + ac.dot(two, u, "X") + first + ac.amax(one, "W")


@ac.op(scan="T", out="B T H V")
def convolved_delta(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    beta=ac.Activation("B T H"), w=ac.Param("H K W"), win=ac.Window("B H K W"),
    s=ac.State("B H K V"),
):  # fmt: skip
    """A convolution inside the recurrence."""
    win = ac.push(win, k, "W")
    k = ac.silu(ac.dot(win, w, "W"))
    k = k * ac.rsqrt(ac.dot(k, k, "K") + 1e-6)
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return win, s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def fed_back(
    k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), w=ac.Param("H W V"),
    win=ac.Window("B H W V"), s=ac.State("B H K V"),
):  # fmt: skip
    """The window holds what the state read, and the state takes the window."""
    win = ac.push(win, ac.dot(s, k, "K"), "W")
    s = 0.9 * s + k * (v - ac.dot(win, w, "W"))
    return win, s, ac.dot(s, k, "K")


# --- heads


@ac.op(scan="T", out="B T (H Gq Gv) V")
def either_side(
    q=ac.Activation("B T (H Gq) K"), k=ac.Activation("B (T N) (H Gq) K"),
    v=ac.Activation("B (T N) (H Gv) V"), g=ac.Activation("B T (H Gq Gv)", default=0),
    beta=ac.Activation("B (T N) (H Gq Gv)", default=1), s=ac.State("B (H Gq Gv) K V"),
):  # fmt: skip
    """The gated delta product where query heads or value heads are more."""
    s = ac.exp(g) * s
    for kj, vj, bj in ac.unroll("N", k, v, beta):
        s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


@ac.op(scan="T", out="B T (H G) V")
def shared_state(
    q=ac.Activation("B T (H G) K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    """Several query heads read one state."""
    s = ac.exp(g) * s
    s = s + k * (v - ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K")


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 along the last axis."""
    return torch.nn.functional.normalize(x, dim=-1)


Case = tuple[Any, dict[str, torch.Tensor], tuple[str, ...], tuple[str, ...]]


def cases(b: int, t: int, width: int = 4) -> dict[str, Case]:
    """Each op, its arguments, and which of them are carried or belong to the model."""
    h, k, v, d, n = 2, 6, 5, 7, 3
    r = {i: randn(i, b, t, h, k).float() for i in range(3)}
    key, query = unit(r[0]), unit(r[1])
    vec, head = randn(4, b, t, h, v).float(), randn(5, b, t, h).float()
    s, m = randn(6, b, h, k, v).float(), randn(7, b, h, k, v).float()
    x, y = randn(8, b, t, d).float(), randn(9, b, t, d).float()
    row = {i: randn(i, b, t, n).float() for i in (10, 11)}
    wide, thin = unit(randn(12, b, t, 2 * h, k)).float(), unit(randn(13, b, t * 2, h, k)).float()
    found: dict[str, Case] = {
        "hgrn": (hgrn, {"x": r[0], "f": r[1], "s": s[..., 0]}, ("s",), ()),
        "selective": (
            selective,
            {
                "x": x, "dt": y, "b": row[10], "c": row[11], "a": -randn(24, d, n).float().abs(),
                "d": randn(25, d).float(), "h": randn(14, b, d, n).float(),
            },
            ("h",), ("a", "d"),
        ),
        "skips": (skips, {"x": head, "w": head.flip(-1), "s": s[:, :, 0, 0]}, ("s",), ()),
        "normalised": (
            normalised,
            {
                "q": query, "k": key, "v": vec, "g": -head.abs(), "s": s.abs(),
                "z": 1 + m[..., 0].abs(),
            },
            ("s", "z"), (),
        ),
        "two memories": (
            two_memories,
            {
                "q": query, "k": key, "v": vec, "beta": head.sigmoid(), "w": -r[2].abs(),
                "fast": s, "slow": m,
            },
            ("fast", "slow"), (),
        ),
        "cascade": (
            cascade,
            {"q": query, "k": key, "v": vec, "g": -head.abs(), "second": m, "first": s},
            ("second", "first"), (),
        ),
        "one way": (
            one_way, {"k": key, "v": vec, "a": head.tanh(), "m": m, "s": s}, ("m", "s"), (),
        ),
        "momentum": (momentum, {"k": key, "v": vec, "m": m, "s": s}, ("m", "s"), ()),
        "convolution": (
            short_convolution,
            {
                "x": x, "w": randn(15, d, width).float(), "bias": randn(25, d).float(),
                "win": randn(16, b, d, width - 1).float(),
            },
            ("win",), ("w", "bias"),
        ),
        "stacked": (
            stacked,
            {
                "x": x, "w": randn(15, width, d).float(), "u": randn(17, 3, d).float(),
                "one": randn(16, b, width - 1, d).float(), "two": randn(18, b, 2, d).float(),
            },
            ("one", "two"), ("w", "u"),
        ),
        "convolved delta": (
            convolved_delta,
            {
                "q": query, "k": key, "v": vec, "beta": head.sigmoid(),
                "w": randn(15, h, k, width).float(), "win": randn(16, b, h, k, width - 1).float(),
                "s": s,
            },
            ("win", "s"), ("w",),
        ),
        "fed back": (
            fed_back,
            {
                "k": key, "v": vec, "w": 0.2 * randn(15, h, width, v).float(),
                "win": randn(16, b, h, width - 1, v).float(), "s": s,
            },
            ("win", "s"), ("w",),
        ),
        "more query heads": (
            either_side,
            {
                "q": wide, "k": unit(randn(19, b, t * 2, 2 * h, k)).float(),
                "v": randn(20, b, t * 2, h, v).float(), "g": -randn(21, b, t, 2 * h).float().abs(),
                "beta": randn(22, b, t * 2, 2 * h).float().sigmoid(),
                "s": randn(23, b, 2 * h, k, v).float(),
            },
            ("s",), (),
        ),
        "more value heads": (
            either_side,
            {
                "q": query, "k": thin, "v": randn(20, b, t * 2, 2 * h, v).float(),
                "g": -randn(21, b, t, 2 * h).float().abs(),
                "beta": randn(22, b, t * 2, 2 * h).float().sigmoid(),
                "s": randn(23, b, 2 * h, k, v).float(),
            },
            ("s",), (),
        ),
        "shared state": (
            shared_state,
            {"q": wide, "k": key, "v": vec, "g": -head.abs(), "s": s}, ("s",), (),
        ),
    }  # fmt: skip
    return {
        name: (op, {m: x.contiguous() for m, x in args.items()}, *rest)
        for name, (op, args, *rest) in found.items()
    }


NAMES = tuple(cases(1, 1))
SIZES = {
    "convolution": {"W": 4}, "stacked": {"W": 4, "X": 3}, "convolved delta": {"W": 4},
    "fed back": {"W": 4}, "more query heads": {"N": 2, "Gq": 2, "Gv": 1},
    "more value heads": {"N": 2, "Gq": 1, "Gv": 2},
}  # fmt: skip
"""What no argument fixes where states are not given or there are no tokens."""
