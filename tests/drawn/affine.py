"""Random scans: chains of decays and rows over one state, some with more than the form allows."""

from dataclasses import dataclass
from random import Random

from tests.drawn.source import Body, Drawn


@dataclass(frozen=True)
class Heads:
    """Head axes of key-side vectors, of values with the state, and of queries with outputs."""

    key: str
    value: str
    query: str
    out: str


HEADS = (
    Heads("H", "H", "H", "H"),
    Heads("Hk", "(Hk G)", "Hk", "(Hk G)"),  # value heads share keys
    Heads("H", "H", "(H G)", "(H G)"),  # query heads share states
    Heads("", "H", "", "H"),  # one key for all heads
    Heads("(H G)", "(H G)", "(H G)", "(H G)"),
)


class Scan(Body):
    """The body of one token."""

    def __init__(self, r: Random, dims: tuple[int, ...]) -> None:
        super().__init__(r)
        self.heads = r.choice(HEADS)
        self.early: list[str] = []  # reads of versions before the current one
        self.outs: list[str] = []  # read-outs for outputs
        self.keys: list[str] = []  # vectors that the body computes
        self.sizes = {"H": r.choice((1, 2)), "Hk": r.choice((1, 2)), "G": r.choice((1, 2, 3))}
        self.sizes |= {"K": r.choice(dims), "V": r.choice(dims)}

    # -- operands

    def query(self) -> str:
        return self.some("q", f"B T {self.heads.query} K", "unit")

    def key(self) -> str:
        if self.keys and self.chance(50):
            return self.pick(self.keys)
        if self.chance(10):
            return self.some("kp", f"{self.heads.key} K", "unit", lifetime="Param")
        return self.some("k", f"B T {self.heads.key} K", "unit")

    def vector(self) -> str:
        """A row or read vector."""
        k = self.key()
        scaled, added = f"({self.coef()} * {k})", f"({k} + {self.key()})"
        return self.pick((k, k, k, scaled, f"(-{k})", f"ac.silu({k})", added))

    def value(self) -> str:
        return self.some("v", f"B T {self.heads.value} V", "value")

    def coef(self) -> str:
        """A number a token and head within (0, 1), or below 2."""
        head = self.heads.value
        forms = [
            lambda: self.some("w", f"B T {head}", "coef"),
            lambda: self.some("beta", f"B T {head}", "coef", default=1.0),
            lambda: f"ac.sigmoid({self.some('z', f'B T {head}', 'value')})",
            lambda: self.some("wp", head, "coef", lifetime="Param"),
            lambda: "0.5",
        ]
        return self.r.choice(forms)()

    def read(self) -> str:
        """The state contracted with a vector, now or before."""
        if self.early and self.chance(40):
            return self.pick(self.early)
        if self.chance(25):
            return f'ac.sum(s * {self.vector()}, "K")'
        return f'ac.dot(s, {self.vector()}, "K")'

    # -- steps

    def decay(self) -> None:
        h = self.heads
        forms = [
            lambda: f"ac.exp({self.some('g', f'B T {h.value}', 'gate', default=0.0)})",
            lambda: self.some("a", f"B T {h.value}", "alpha"),
            lambda: f"ac.exp({self.some('gk', f'B T {h.value} K', 'gate')})",
            lambda: f"ac.exp({self.some('gs', f'B T {h.key} K', 'gate')})",
            lambda: f"ac.sigmoid({self.some('z', f'B T {h.value}', 'value')})",
            lambda: f"ac.exp(-ac.softplus({self.some('z', f'B T {h.value}', 'value')})"
            f" * {self.some('ap', h.value, 'coef', lifetime='Param')})",
            lambda: "0.9",
        ]  # fmt: skip
        factor = self.r.choice(forms)()
        if self.chance(20):
            factor = f"({factor} * {self.r.choice(forms)()})"
        self.lines.append(self.pick((f"s = {factor} * s", f"s = s * {factor}")))

    def reset(self) -> None:
        g = self.some("a", f"B T {self.heads.value}", "alpha")
        forms = (f"s = ac.where({g} > 0.6, 0.0, s)", f"s = ac.where({g} < 0.7, s, 0.0)")
        self.lines.append(self.pick(forms))

    def row(self) -> None:
        a, v = self.vector(), self.value()
        kind = self.r.randint(0, 6)
        if kind == 0:
            self.lines.append(f"s = s + {a} * {v}")
        elif kind == 1:
            k = self.key()  # the delta rule
            self.lines.append(f's = s + {k} * ({self.coef()} * ({v} - ac.dot(s, {k}, "K")))')
        elif kind == 2:
            self.lines.append(f"s = s - {a} * (0.5 * ({self.read()} - {v}))")
        elif kind == 3:
            w = self.coef()
            self.lines.append(f"s = s + {a} * ({w} * {v}) - {a} * ({w} * {self.read()})")
        elif kind == 4:
            self.lines.append(f"s = s + {a} * (0.3 * {self.read()})")
        elif kind == 5:
            self.lines.append(f"s = s + {self.coef()} * {a} * ({v} - 0.5 * {self.read()})")
        else:
            self.lines.append(f"s = s + {a} * ({self.coef()} * {v} + 0.2 * {self.read()})")

    def unrolled(self) -> None:
        h = self.heads
        k = self.arg("kn", f"B (T N) {h.key} K", "unit")
        v = self.arg("vn", f"B (T N) {h.value} V", "value")
        w = self.arg("bn", f"B (T N) {h.value}", "coef", default=1.0 if self.chance(50) else None)
        self.lines.append(f'for kj, vj, bj in ac.unroll("N", {k}, {v}, {w}):')
        self.lines.append(
            self.pick(
                (
                    '    s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))',
                    '    s = s + (bj * kj) * (vj - ac.dot(s, kj, "K"))',
                    "    s = s + kj * (bj * vj)",
                )
            )
        )
        self.sizes["N"] = self.r.choice((1, 2, 3))

    def spoiled(self) -> None:
        """A step outside the affine form; the sequential lowerings still run it."""
        self.tags.add("not affine")
        a, v = self.key(), self.value()
        per_value = self.some("wv", f"B T {self.heads.value} V", "coef")
        self.lines.append(
            self.pick(
                (
                    "s = ac.tanh(s)",
                    f"s = s + {a} * (ac.relu({self.read()}) - 0.5 * {v})",
                    f's = s + {a} * ({per_value} * ({v} - ac.dot(s, {a}, "K")))',
                    f"s = {per_value} * s",
                    f"s = s + 0.1 * {a} * {self.read()} * {self.read()}",
                )
            )
        )

    def windowed(self) -> None:
        """A short convolution whose result later rows may take for a key."""
        self.tags.add("not affine")
        head = self.heads.key
        key = self.some("k", f"B T {head} K", "unit")
        taps = self.arg("taps", f"{head} K W", "value", "Param")
        self.arg("win", f"B {head} K W", "state", "Window")
        self.lines.append(f'win = ac.push(win, {key}, "W")')
        self.keys.append(self.let("c", f'ac.silu(ac.dot(win, {taps}, "W"))'))
        self.sizes["W"] = self.r.choice((2, 4))

    def normaliser(self) -> None:
        """A second state that outputs divide by."""
        self.tags.add("not affine")
        h = self.heads
        self.arg("n", f"B {h.value} K", "state", "State")
        gate = self.some("g", f"B T {h.value}", "gate", default=0.0)
        self.lines.append(f"n = ac.exp({gate}) * n + {self.key()}")

    def step(self) -> None:
        """A row with what may stand before it."""
        if self.chance(15):
            self.early.append(self.let("e", f'ac.dot(s, {self.vector()}, "K")'))
        if self.chance(10):
            self.outs.append(self.let("y", f'ac.dot(s, {self.query()}, "K")'))
        if self.chance(45):
            self.decay()
        if self.chance(8):
            self.reset()
        if "N" not in self.sizes and self.chance(12):
            self.unrolled()
        else:
            self.row()

    # -- outputs

    def output(self, y: str) -> str:
        h = self.heads
        if len(self.outs) > 1 and self.chance(40):
            other = self.pick(self.outs)
            y = self.pick((f"({y} + {other})", f"({y} - 0.5 * {other})"))
        forms = [
            lambda: y,
            lambda: f'{y} * ac.rsqrt("K")',
            lambda: f"ac.sigmoid({self.some('u', f'B T {h.out} V', 'value')}) * {y}",
            lambda: f"{y} + {self.coef()} * {self.value()}",
            lambda: f"ac.tanh({y})",
            lambda: f"ac.silu({y}) * {self.coef()}",
            lambda: f"{y} * {y}",
            lambda: f"-{y} / 3.0",
        ]
        return self.r.choice(forms)()


def draw_affine(r: Random, dims: tuple[int, ...] = (2, 3, 5, 8), *, spoil: int = 8) -> Drawn:
    """A scan with a state ``s``.

    Args:
        r: makes the choices.
        dims: what K and V are chosen from.
        spoil: percent of declarations that are not affine.
    """
    b = Scan(r, dims)
    h = b.heads
    b.query()
    state = b.pick((f"B {h.value} K V", f"B {h.value} V K"))
    spoiled = b.chance(spoil)
    window, second = b.chance(spoil), b.chance(spoil)
    if window:
        b.windowed()
    for _ in range(r.randint(1, 3)):
        b.step()
    if spoiled:
        b.spoiled()
    if b.chance(25):
        b.decay()  # after the write
    b.outs.append(b.let("y", f'ac.dot(s, {b.query()}, "K")'))
    pattern = f"B T {h.out} V"
    if second:
        b.normaliser()
        b.outs[-1] = f'({b.outs[-1]} / (1.0 + abs(ac.dot(n, {b.query()}, "K"))))'
    outputs = [("o", pattern, b.output(b.outs[-1]))]
    if b.chance(20):
        outputs.append(("p", pattern, b.output(b.pick(b.outs))))
    if b.chance(10):  # a choice by position: pieces of a sequence count from their own start
        b.tags.add("position")
        b.lines.append('s = ac.where(ac.index("T") < 5, 0.9, -0.5) * s')
    b.arg("s", state, "state", "State")
    states = [a.name for a in b.args if a.lifetime in ("State", "Window")]
    return b.finish(states, *outputs)
