"""The library's recurrences: arguments, and each paper's formula as a loop over tokens in fp64.

Nothing here is shared with the package. The loops work on matrices as the papers write them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.strategies import randn

Tensors = dict[str, torch.Tensor]
Formula = Callable[[Tensors, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Dims:
    """Sizes of one call; ``hk`` heads of keys, each shared by ``g`` heads of values."""

    b: int = 2
    t: int = 7
    hk: int = 2
    g: int = 1
    k: int = 6
    v: int = 5
    n: int = 1

    @property
    def heads(self) -> int:
        return self.hk * self.g


@dataclass(frozen=True)
class Recurrence:
    """One op of the library.

    Attributes:
        name: of the op.
        draw: arguments in fp64, the state ``s`` among them.
        formula: final state and output, both fp64, of fp64 arguments.
        grouped: whether value heads may share keys.
        flag: whether it has the flag ``l2norm``.
        scaled: whether it takes ``scale``, of which the usual one is ``K ** -0.5``.
    """

    name: str
    draw: Callable[[int, Dims], Tensors]
    formula: Formula
    grouped: bool = False
    flag: bool = False
    scaled: bool = True

    def __repr__(self) -> str:
        return self.name


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def outer(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrices ``a b^T``."""
    return a[..., :, None] * b[..., None, :]


def times(m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Matrices times vectors."""
    return (m @ x[..., None])[..., 0]


def eye(m: torch.Tensor) -> torch.Tensor:
    return torch.eye(m.shape[-1], dtype=m.dtype)


def wide(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, T, H, ...]`` with every head repeated for its group."""
    return x.repeat_interleave(heads // x.shape[2], 2)


def over(
    x: Tensors, heads: int, step: Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold ``step`` over the tokens; it sees ``[B, heads, ...]`` of one token."""
    rows = {n: wide(y, heads) if y.dim() > 2 else y for n, y in x.items() if n != "s"}
    s, out = x["s"], []
    for t in range(next(iter(rows.values())).shape[1]):
        s, o = step(s, {n: y[:, t] for n, y in rows.items()})
        out.append(o)
    return s, torch.stack(out, 1)


# --- arguments


def vectors(seed: int, d: Dims, *names: str, rows: int = 1) -> Tensors:
    """Unit vectors ``[B, T * rows, Hk, K]``."""
    return {n: unit(randn(seed + i, d.b, d.t * rows, d.hk, d.k)) for i, n in enumerate(names, 1)}


def values(seed: int, d: Dims, rows: int = 1) -> Tensors:
    return {"v": randn(seed + 11, d.b, d.t * rows, d.heads, d.v)}


def gate(seed: int, *shape: int) -> torch.Tensor:
    """Natural logarithms of decays."""
    return torch.nn.functional.logsigmoid(randn(seed + 12, *shape) + 2)


def rate(seed: int, *shape: int) -> torch.Tensor:
    """Rates up to 2."""
    return 2 * randn(seed + 13, *shape).sigmoid()


def state(seed: int, d: Dims) -> Tensors:
    return {"s": randn(seed + 14, d.b, d.heads, d.k, d.v)}


def linear_arguments(seed: int, d: Dims) -> Tensors:
    return {**vectors(seed, d, "q", "k"), **values(seed, d), **state(seed, d)}


def retnet_arguments(seed: int, d: Dims) -> Tensors:
    gamma = 1 - 2.0 ** (-5 - torch.arange(d.hk, dtype=torch.float64))
    return {**linear_arguments(seed, d), "gamma": gamma}


def mamba2_arguments(seed: int, d: Dims) -> Tensors:
    return {
        "x": randn(seed + 1, d.b, d.t, d.heads, d.v), "dt": randn(seed + 2, d.b, d.t, d.heads),
        "a_log": randn(seed + 3, d.heads) / 2, "b": randn(seed + 4, d.b, d.t, d.hk, d.k) / 2,
        "c": randn(seed + 5, d.b, d.t, d.hk, d.k) / 2, "d": randn(seed + 6, d.heads),
        "dt_bias": randn(seed + 7, d.heads), "s": randn(seed + 8, d.b, d.heads, d.v, d.k),
    }  # fmt: skip


def gla_arguments(seed: int, d: Dims) -> Tensors:
    return {**linear_arguments(seed, d), "g": gate(seed, d.b, d.t, d.hk, d.k)}


def delta_arguments(seed: int, d: Dims) -> Tensors:
    return {**linear_arguments(seed, d), "beta": rate(seed, d.b, d.t, d.heads)}


def gdn_arguments(seed: int, d: Dims) -> Tensors:
    return {**delta_arguments(seed, d), "g": gate(seed, d.b, d.t, d.heads)}


def gdp_arguments(seed: int, d: Dims) -> Tensors:
    return {
        **vectors(seed, d, "q"), "k": vectors(seed, d, "k", rows=d.n)["k"],
        **values(seed, d, d.n), "g": gate(seed, d.b, d.t, d.heads),
        "beta": rate(seed, d.b, d.t * d.n, d.heads), **state(seed, d),
    }  # fmt: skip


def raw_arguments(seed: int, d: Dims) -> Tensors:
    """What a layer's projections and convolutions give, before norms and gates."""
    found = linear_arguments(seed, d)
    heads = {n: randn(seed + i, d.b, d.t, d.heads) for i, n in enumerate(("a", "b"), 21)}
    model = {n: randn(seed + i, d.heads) / 2 for i, n in enumerate(("a_log", "dt_bias"), 31)}
    return {**found, "q": 3 * found["q"], "k": found["k"] / 2, **heads, **model}


def net_arguments(seed: int, d: Dims) -> Tensors:
    z, w = randn(seed + 41, d.b, d.t, d.heads, d.v), randn(seed + 42, d.v)
    return {**raw_arguments(seed, d), "z": z, "w": w}


def kda_arguments(seed: int, d: Dims) -> Tensors:
    return {**delta_arguments(seed, d), "g": gate(seed, d.b, d.t, d.heads, d.k)}


def rwkv7_arguments(seed: int, d: Dims) -> Tensors:
    found = {**vectors(seed, d, "r", "k", "b"), **values(seed, d), **state(seed, d)}
    kappa, learning = found["b"], randn(seed + 13, d.b, d.t, d.hk, d.k).sigmoid()
    w = -(0.5**0.5) * randn(seed + 12, d.b, d.t, d.hk, d.k).sigmoid()
    return {**found, "w": w, "a": -kappa, "b": kappa * learning}


def hgrn_arguments(seed: int, d: Dims) -> Tensors:
    g = gate(seed, d.b, d.t, d.v)
    candidate = randn(seed + 11, d.b, d.t, d.v)
    return {"x": (1 - g.exp()) * candidate, "g": g, "s": randn(seed + 14, d.b, d.v)}


def comba_arguments(seed: int, d: Dims) -> Tensors:
    found = gdn_arguments(seed, d)
    feedback = randn(seed + 15, d.hk).sigmoid()
    return {**found, "p": found["k"] * feedback[:, None], "d": feedback / 3}


def oja_arguments(seed: int, d: Dims) -> Tensors:
    found = delta_arguments(seed, d)
    return {**found, "v": unit(found["v"]), "g": gate(seed, d.b, d.t, d.heads, d.v)}


# --- formulas; S is K x V, or V x K where the comment says so


def linear(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        s = s + outer(y["k"], y["v"])
        return s, times(s.mT, y["q"])

    return over(x, heads, step)


def retention(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    gamma = x["gamma"][:, None, None]

    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        s = gamma * s + outer(y["k"], y["v"])
        return s, times(s.mT, y["q"])

    return over({n: y for n, y in x.items() if n != "gamma"}, heads, step)


def state_space(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """S is V x K: the paper's P x N."""
    a = -x["a_log"].exp()
    skip, bias = (x.get(n, torch.zeros(heads, dtype=a.dtype)) for n in ("d", "dt_bias"))

    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        delta = torch.log1p((y["dt"] + bias).exp())
        s = (delta * a).exp()[..., None, None] * s + delta[..., None, None] * outer(y["x"], y["b"])
        return s, times(s, y["c"]) + skip[:, None] * y["x"]

    tokens = {n: x[n] for n in ("x", "b", "c", "s")}
    return over({**tokens, "dt": x["dt"][..., None]}, heads, lambda s, y: step(
        s, {**y, "dt": y["dt"][..., 0]}
    ))  # fmt: skip


def gated_linear(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        s = torch.diag_embed(y["g"].exp()) @ s + outer(y["k"], y["v"])
        return s, times(s.mT, y["q"])

    return over(x, heads, step)


def product(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``S <- alpha S``, then N times ``S <- (I - beta k k^T) S + beta k v^T``."""
    count = x["k"].shape[1] // max(x["q"].shape[1], 1)
    beta = x.get("beta", torch.ones(*x["v"].shape[:2], heads, dtype=x["v"].dtype))
    g = x.get("g", torch.zeros(*x["q"].shape[:2], heads, dtype=x["v"].dtype))
    rows = {"k": x["k"], "v": x["v"], "beta": beta}
    rows = {n: y.unflatten(1, (-1, count)).movedim(2, -1) for n, y in rows.items()}

    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        s = y["g"].exp()[..., None] * s
        for j in range(count):
            k, b = y["k"][..., j], y["beta"][..., j, None, None]
            s = (eye(outer(k, k)) - b * outer(k, k)) @ s + b * outer(k, y["v"][..., j])
        return s, times(s.mT, y["q"])

    return over({**rows, "q": x["q"], "g": g[..., None], "s": x["s"]}, heads, step)


def raw_product(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule of normed q and k, with the decay of Mamba-2 and the rate a sigmoid."""
    g = -x["a_log"].exp() * torch.log1p((x["a"] + x["dt_bias"]).exp())
    q, k = (x[n] / (x[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in ("q", "k"))
    beta = 1 / (1 + (-x["b"]).exp())
    s, o = product({"q": q, "k": k, "v": x["v"], "g": g, "beta": beta, "s": x["s"]}, heads)
    return s, o * q.shape[-1] ** -0.5


def net(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its read-out over its root mean square, times a weight, gated by ``z``'s SiLU."""
    s, o = raw_product(x, heads)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * x.get("w", 1.0)
    return s, o * x["z"] / (1 + (-x["z"]).exp())


def kimi(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        k, b = y["k"], y["beta"][..., None]
        erase = eye(outer(k, k)) - b * outer(k, k)
        s = erase @ torch.diag_embed(y["g"].exp()) @ s + b * outer(k, y["v"])
        return s, times(s.mT, y["q"])

    return over({**x, "beta": x["beta"][..., None]}, heads, step)


def goose(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """V x K: ``S (diag(w) - kappa^T (a * kappa)) + v^T k`` with row vectors."""

    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        kappa, replaced = -y["a"], y["b"]
        s = s @ (torch.diag_embed(y["w"].exp()) - outer(kappa, replaced)) + outer(y["v"], y["k"])
        return s, times(s, y["r"])

    s, o = over({**x, "s": x["s"].mT}, heads, step)
    return s.mT, o


def hierarchical(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    h, out = x["s"], []
    for t in range(x["x"].shape[1]):
        h = x["g"][:, t].exp() * h + x["x"][:, t]
        out.append(h)
    return h, torch.stack(out, 1)


def closed_loop(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """V x K: ``S (alpha - beta p k^T) + beta v k^T``, read with ``q - d k``."""
    correction = wide(x["d"][None, None], heads)[0, 0][:, None] if "d" in x else 0.0

    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        k, b, alpha = y["k"], y["beta"][..., None], y["g"].exp()[..., None]
        s = s @ (alpha * eye(s) - b * outer(y["p"], k)) + b * outer(y["v"], k)
        return s, times(s, y["q"] - correction * k)

    tokens = {n: x[n] for n in ("q", "k", "v", "p")}
    heads_of = {n: x[n][..., None] for n in ("g", "beta")}
    s, o = over({**tokens, **heads_of, "s": x["s"].mT}, heads, step)
    return s.mT, o


def oja(x: Tensors, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    def step(s: torch.Tensor, y: Tensors) -> tuple[torch.Tensor, ...]:
        v, b = y["v"], y["beta"][..., None]
        kept = torch.diag_embed(y["g"].exp()) @ (eye(outer(v, v)) - b * outer(v, v))
        s = s @ kept + b * outer(y["k"], v)
        return s, times(s.mT, y["q"])

    return over({**x, "beta": x["beta"][..., None]}, heads, step)


RECURRENCES = (
    Recurrence("linear_attention", linear_arguments, linear, flag=True),
    Recurrence("retnet", retnet_arguments, retention),
    Recurrence("mamba2", mamba2_arguments, state_space, grouped=True, scaled=False),
    Recurrence("gla", gla_arguments, gated_linear),
    Recurrence("delta_rule", delta_arguments, product, flag=True),
    Recurrence("gated_delta_rule", gdn_arguments, product, grouped=True, flag=True),
    Recurrence("raw_gated_delta_rule", raw_arguments, raw_product, grouped=True, scaled=False),
    Recurrence("gated_delta_net", net_arguments, net, grouped=True, scaled=False),
    Recurrence("gated_delta_product", gdp_arguments, product, grouped=True, flag=True),
    Recurrence("kda", kda_arguments, kimi, grouped=True, flag=True),
    Recurrence("rwkv7", rwkv7_arguments, goose, scaled=False),
    Recurrence("hgrn", hgrn_arguments, hierarchical, scaled=False),
    Recurrence("comba", comba_arguments, closed_loop, grouped=True),
    Recurrence("gated_oja", oja_arguments, oja, grouped=True, flag=True),
)
BY_NAME = {r.name: r for r in RECURRENCES}


def exact(r: Recurrence, args: dict[str, Any], d: Dims) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula's state and output of a call with these arguments, flag and scale included."""
    x = {n: y.double() for n, y in args.items() if isinstance(y, torch.Tensor)}
    if args.get("l2norm"):
        for n in ("q", "k"):
            x[n] = x[n] / (x[n].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    s, o = r.formula(x, d.heads)
    return s, o * args.get("scale", d.k**-0.5 if r.scaled else 1.0)
