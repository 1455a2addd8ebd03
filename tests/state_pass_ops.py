"""Ops whose state pass has a warp-specialised form, and random arguments of theirs."""

import torch

import attncc as ac


@ac.op(scan="T", out="B T H V")
def two_rows(
    q=ac.Activation("B T H K"), k=ac.Activation("B (T N) H K"), v=ac.Activation("B (T N) H V"),
    g=ac.Activation("B T H", default=0), beta=ac.Activation("B (T N) H", default=1),
    s=ac.State("B H K V"),
):  # fmt: skip
    """Updates of one token one after the other."""
    s = ac.exp(g) * s
    for kj, vj, bj in ac.unroll("N", k, v, beta):
        s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


@ac.op(scan="T", out="B T H V")
def read_first(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), beta=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    """A correction that reads the state before its decay."""
    e = beta * (v - ac.dot(s, k, "K"))
    s = ac.exp(g) * s + k * e
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def read_early(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), beta=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    """A read-out of the state that a token finds, before its decay and its update."""
    found = ac.dot(s, q, "K")
    s = ac.exp(g) * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, found


@ac.op(scan="T", out="B T H V")
def linear(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    """Nothing to solve: linear attention with a decay a head."""
    s = ac.exp(g) * s + k * v
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


@ac.op(scan="T", out="B T H V")
def skipped(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), beta=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    """Values at a rate of their own, and past the state: what is written stands in the output."""
    s = ac.exp(g) * s + k * (beta * v)
    return s, ac.dot(s, q, "K") + 0.5 * v


@ac.op(scan="T", out="B T H V")
def gated_output(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    gate=ac.Activation("B T H"), b=ac.Activation("B T H K"), s=ac.State("B H V K"),
):  # fmt: skip
    """No decay, two vectors a row, a gated output, and the state's other layout."""
    s = s + k * (v - ac.dot(s, b, "K"))
    return s, ac.dot(s, q, "K") * ac.sigmoid(gate)


OPS = {
    "delta": ac.ops.gated_delta_rule, "two_rows": two_rows, "read_first": read_first,
    "read_early": read_early, "linear": linear, "gated_output": gated_output,
}  # fmt: skip
MORE = {"skipped": skipped}
"""Ops of the Gluon form alone."""


def arguments(name, batch, tokens, heads, key, value, dtype=torch.bfloat16, device="cpu", rows=2):
    """Random arguments of an op, and an initial state."""

    def unit(*shape):
        x = torch.randn(shape, device=device)
        return torch.nn.functional.normalize(x, dim=-1).to(dtype)

    wide = heads * 2 if name == "delta" else heads
    many = tokens * rows if name == "two_rows" else tokens
    q, k = unit(batch, tokens, heads, key), unit(batch, many, heads, key)
    v = torch.randn(batch, many, wide, value, device=device).to(dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(batch, tokens, wide, device=device) + 2)
    beta = torch.rand(batch, many, wide, device=device)
    more = {
        "linear": (g,),
        "gated_output": (torch.randn_like(g).to(dtype), unit(batch, tokens, heads, key)),
    }.get(name, (g, beta))
    sides = (value, key) if name == "gated_output" else (key, value)
    return (q, k, v, *more), torch.randn(batch, wide, *sides, device=device)
