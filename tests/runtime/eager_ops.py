"""Ops and helpers of the torch lowering's tests."""

from dataclasses import replace
from typing import Any

import torch

import attncc as ac
from attncc.codegen.forms import AffineForm
from attncc.codegen.pipeline import analyse
from attncc.runtime.bind import bind
from attncc.runtime.call import Call
from attncc.runtime.eager.run import run
from attncc.runtime.reference import run_reference
from attncc.runtime.trial import as_kernels as as_kernels  # what calls are held to
from tests.tolerance import max_error

# --- softmax folds


@ac.op(out="B T (Hkv G) E")
def soft_cap(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    cap=ac.param(default=5.0),
):  # fmt: skip
    score = ac.tanh(ac.dot(q, k, "D") * ac.rsqrt("D") / cap) * cap
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def alibi(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    slopes=ac.Param("(Hkv G)"),
):  # fmt: skip
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slopes * (ac.index("S") - ac.index("T"))
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def sink_window(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    sink=ac.Param("(Hkv G)"), w=ac.param(default=7, integer=True),
):  # fmt: skip
    near = ac.causal & (ac.index("T") - ac.index("S") < w)
    p = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=near, sink=sink)
    return ac.dot(p, v, "S")


@ac.op(out="B T H D")
def documents(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H D"), doc=ac.Cache("B S")
):
    same = ac.eq(ac.at_query(doc, "S"), doc)
    return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=ac.causal & same), v, "S")


@ac.op(out="B T H E")
def difference(
    q1=ac.Activation("B T H D"), q2=ac.Activation("B T H D"), k1=ac.Cache("B S H D"),
    k2=ac.Cache("B S H D"), v=ac.Cache("B S H E"), lam=ac.Param("H"),
):  # fmt: skip
    a = ac.softmax(ac.dot(q1, k1, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    b = ac.softmax(ac.dot(q2, k2, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    return 0.5 * (ac.dot(a, v, "S") - lam * ac.dot(b, v, "S"))


@ac.op(out="B T H D")
def forgetting(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H D"), f=ac.Cache("B S H")
):
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + ac.between(f, "S")
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T H D")
def cross(q=ac.Activation("B T H D"), k=ac.Memory("B S H D"), v=ac.Memory("B S H D")):
    return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S"), v, "S")


@ac.op(out={"o": "B T H E", "n": "B T H R"})
def two_values(
    q=ac.Activation("B T H D"), k=ac.Cache("B S D"), v=ac.Cache("B S E"), r=ac.Cache("B S R"),
    gate=ac.Activation("B T H"),
):  # fmt: skip
    prefix = (ac.index("S") < 3) | ac.causal
    p = ac.softmax(ac.dot(q, k, "D"), "S", where=prefix)
    return ac.sigmoid(gate) * ac.dot(p, v, "S"), -ac.dot(p, r, "S")


@ac.op(out="B T H R")
def sparse(
    qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di"),
    q=ac.Activation("B T H R"), c=ac.Cache("B S R"),
):  # fmt: skip
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    J = ac.topk(index, "S", k=5, where=ac.causal)
    return ac.dot(ac.softmax(ac.dot(q, c[J], "R"), J), c[J], J)


@ac.op(out={"o": "B T H D", "mean": "B H D"})
def across_queries(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H D"),
    f=ac.Activation("B T H"),
):  # fmt: skip
    warm = 1 + ac.tanh(ac.cumsum(f, "T"))
    score = warm * ac.dot(q, k, "D") + ac.at_query(ac.cumsum(k, "S"), "S") / ac.size("T")
    o = ac.dot(ac.softmax(0.05 * ac.sum(score, "D"), "S", where=ac.causal), v, "S")
    return o, ac.sum(o, "T") / ac.size("T")


@ac.op(out="B T H D")
def warmed(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H D"),
    f=ac.Activation("B T H"),
):  # fmt: skip
    warm = 1 + ac.tanh(ac.cumsum(f, "T"))
    p = ac.softmax(warm * ac.dot(q, k, "D"), "S", where=ac.causal)
    return ac.dot(p, v, "S") / ac.size("T") + ac.index("T") * warm


@ac.op(out="B T H D")
def twice(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H D"),
    k2=ac.Cache("B S H D"), v2=ac.Cache("B S H D"),
):  # fmt: skip
    first = ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=ac.causal), v, "S")
    return q + ac.dot(ac.softmax(ac.dot(first, k2, "D"), "S", where=ac.causal), v2, "S")


@ac.op(out="B H D")
def pooled(q=ac.Param("H D"), k=ac.Memory("B S H D"), v=ac.Memory("B S H D")):
    return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S"), v, "S")


# --- affine states


@ac.op(scan="T", out="B T H V")
def delta_product(
    q=ac.Activation("B T H K"), k=ac.Activation("B (T N) H K"), v=ac.Activation("B (T N) H V"),
    g=ac.Activation("B T H", default=0), beta=ac.Activation("B (T N) H", default=1),
    s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.exp(g) * s
    for kj, vj, bj in ac.unroll("N", k, v, beta):
        s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def linear_alpha(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    a=ac.Activation("B T H"), beta=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    s = a * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def kda(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K"), beta=ac.Activation("B T H"), s=ac.State("B H V K"),
):  # fmt: skip
    s = ac.exp(g) * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T (H G) V")
def retention(
    q=ac.Activation("B T (H G) K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.exp(g) * s + k * v
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


@ac.op(scan="T", out="B T H V")
def rwkv7(
    r=ac.Activation("B T H K"), w=ac.Activation("B T H K"), k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"), a=ac.Activation("B T H K"), b=ac.Activation("B T H K"),
    s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.exp(w) * s + b * ac.dot(s, a, "K") + k * v
    return s, ac.dot(s, r, "K")


@ac.op(scan="T", out={"mid": "B T H V", "end": "B T H V"})
def two_slots(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    a=ac.Activation("B T H"), c=ac.Activation("B T H K"), s=ac.State("B H K V"),
):  # fmt: skip
    s = a * s
    s = s + k * (v - ac.dot(s, k, "K"))
    mid = ac.dot(s, q, "K")
    s = c * s
    s = s + q * (0.5 * ac.dot(s, k, "K"))
    return s, mid, ac.dot(s, q, "K") + v


@ac.op(scan="T", out="B T H V")
def by_position(k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), s=ac.State("B H K V")):
    s = ac.where(ac.index("T") < 5, 0.9, -0.5) * s + k * v
    return s, ac.dot(s, k, "K")


@ac.op(scan="T", out={"o": "B T (H G) V", "c": "B T H"})
def constants(
    a=ac.Param("H K"),
    b=ac.Param("H K"),
    q=ac.Param("H G K"),
    w=ac.Param("H G"),
    v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
):
    s = 0.9 * s + a * (v - 0.1 * ac.dot(s, b, "K"))
    return s, ac.dot(s, q, "K") * w, ac.sum(v * v, "V")


@ac.op(scan="T", out="B T H V")
def forgets_only(q=ac.Activation("B T H K"), a=ac.Activation("B T H"), s=ac.State("B H K V")):
    s = a * s
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def two_active(
    q=ac.Activation("B T H K L"), k=ac.Activation("B T H K"), l=ac.Activation("B T H L"),
    v=ac.Activation("B T H V"), g=ac.Activation("B T H K"), s=ac.State("B H K L V"),
):  # fmt: skip
    s = ac.exp(g) * s
    s = s + k * l * (v - ac.dot(s, k, l, "K L"))
    return s, ac.dot(s, q, "K L")


# --- scans that are not affine


@ac.op(scan="T", out="B T H V")
def squashed(k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), s=ac.State("B H K V")):
    s = ac.tanh(0.9 * s + k * v)
    return s, ac.dot(s, k, "K") * (ac.index("T") + 1)


@ac.op(scan="T", out="B T H V")
def momentum(
    k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), m=ac.State("B H K V"),
    s=ac.State("B H K V"),
):  # fmt: skip
    m = 0.8 * m + k * (v - ac.dot(s, k, "K"))
    s = 0.95 * s + 0.3 * m
    return m, s, ac.dot(s, k, "K")


@ac.op(scan="T", out="B T H V")
def convolved(
    k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), w=ac.Param("H K W"),
    win=ac.Window("B H K W"), s=ac.State("B H K V"),
):  # fmt: skip
    win = ac.push(win, k, "W")
    x = ac.silu(ac.dot(win, w, "W"))
    s = 0.9 * s + x * v
    return win, s, ac.dot(s, x, "K")


# --- helpers


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 along the last axis."""
    return torch.nn.functional.normalize(x, dim=-1)


def call_of(op: Any, *args: Any, double: bool = False, **kwargs: Any) -> Call:
    """A bound call; ``double`` repeats it with every real tensor in fp64."""
    call, _ = bind(op.declaration, args, kwargs)
    if not double:
        return call

    def up(tensors: Any) -> dict[str, torch.Tensor]:
        return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}

    return replace(
        call, tensors=up(call.tensors), outputs=up(call.outputs), new_rows=up(call.new_rows),
        final_states=up(call.final_states), dtype=torch.float64,
        lse=None if call.lse is None else call.lse.double(),
    )  # fmt: skip


def results(call: Call) -> dict[str, torch.Tensor]:
    """What a call wrote, by name."""
    found = {**call.final_states, **call.outputs}
    return found if call.lse is None else {**found, "lse": call.lse}


def check(op: Any, *args: Any, chunk: int = 64, **kwargs: Any) -> None:
    """The lowering equals the interpreter: in fp64 to its rounding, in fp32 to fp32's."""
    for double, bound in ((True, 1e-11), (False, 4e-6)):
        call = call_of(op, *args, double=double, **kwargs)
        oracle = run_reference(call, torch.float64)
        for tensor in results(call).values():
            tensor.fill_(torch.nan)
        run(call, analyse(call.program), chunk=chunk)
        for name, value in results(call).items():
            want = oracle[name]
            finite = want[want.isfinite()].abs()
            scale = max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
            error = max_error(value, want, name)
            assert error <= bound * scale, f"{op} {name}: {error:.2e} of {scale:.2e}"


def affine_form(op: Any, call: Call) -> AffineForm:
    """The affine form, which the op must have."""
    analysis = analyse(call.program)
    assert analysis.affine is not None, (op, analysis.refusals)
    return analysis.affine
