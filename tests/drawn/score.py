"""Random softmax folds: scores of one or two contractions, masks, sinks, one or two values."""

from random import Random

from tests.drawn.source import Body, Drawn

WHOLE = ("ac.index('T')", "ac.index('S')")


class Fold(Body):
    """The body of an op over a history."""

    def __init__(self, r: Random, dims: tuple[int, ...], *, plain: bool, causal: bool) -> None:
        super().__init__(r)
        grouped = r.choice((True, True, False))
        self.shared = r.choice((False, False, True))  # one key head for every query head
        self.heads = "(Hkv G)" if grouped and not self.shared else "H"
        self.key = "" if self.shared else ("Hkv" if grouped else "H")
        self.plain = plain
        self.causal = causal
        self.foreign = not plain and not causal and self.chance(8)
        self.history = "Memory" if self.foreign else "Cache"
        self.sizes = {"H": r.choice((1, 2)), "Hkv": r.choice((1, 2)), "G": r.choice((1, 2, 3))}
        self.sizes |= {a: r.choice(dims) for a in ("D", "D2", "E", "F")}

    def past(self, stem: str, pattern: str, role: str) -> str:
        return self.some(stem, pattern, role, lifetime=self.history)

    # -- score

    def contraction(self, q: str, k: str, axis: str) -> str:
        query = self.arg(q, f"B T {self.heads} {axis}", "value")
        key = self.arg(k, f"B S {self.key} {axis}", "value", self.history)
        return f'ac.dot({query}, {key}, "{axis}")'

    def score(self) -> str:
        x = f'{self.contraction("q", "k", "D")} * ac.rsqrt("D")'
        if self.chance(25):
            x = f'({x} + {self.contraction("r", "l", "D2")} * ac.rsqrt("D2"))'
        forms = [
            lambda: x,
            lambda: f"{x} * {self.some('scale', '', 'scale', lifetime='param', default=0.7)}",
            lambda: f"ac.tanh({x} / {self.cap()}) * {self.cap()}",
            lambda: f"{x} + {self.slope()} * {self.distance()}",
            lambda: f"{x} + {self.past('c', f'B S {self.key}', 'value')}",
            lambda: f"{x} * ac.sigmoid({self.some('u', f'B T {self.heads}', 'value')})",
            lambda: f"ac.where(ac.index('S') < 2, {x} + 1.0, {x})",
            lambda: f"ac.relu({x}) - {self.slope()}",
        ]
        if not self.foreign:
            forms.append(lambda: f"{x} - 0.1 * abs({self.aged()} - {self.age()})")
        return self.wide(x) if self.chance(12) else self.r.choice(forms)()

    def wide(self, x: str) -> str:
        """Scores that need more than element-wise code over loads."""
        if self.plain or self.foreign:
            return x
        self.tags.add("wide score")
        gate = self.past("f", f"B S {self.key}", "gate")
        table = self.some("table", f"{self.heads} L", "value", lifetime="Param")
        self.sizes["L"] = 4
        return self.pick(
            (
                f'{x} + ac.between({gate}, "S")',
                f'{x} + ac.take({table}, "L", ac.minimum({self.distance(-1)}, 3))',
            )
        )

    def cap(self) -> str:
        return self.some("cap", "", "cap", lifetime="param", default=5.0)

    def slope(self) -> str:
        return self.some("slope", self.heads, "coef", lifetime="Param")

    def distance(self, sign: int = 1) -> str:
        if self.foreign:
            return "ac.index('S')"
        return f"({WHOLE[1]} - {WHOLE[0]})" if sign > 0 else f"({WHOLE[0]} - {WHOLE[1]})"

    def age(self) -> str:
        return self.past("age", "B S", "value")

    def aged(self) -> str:
        return f'ac.at_query({self.age()}, "S")'

    # -- mask

    def band(self) -> str:
        width = self.some("width", "", "width", lifetime="param", default=3)
        forms = [
            "ac.causal",
            f"({self.distance(-1)} < {width})",
            f"(ac.index('S') < {self.pick(('2', width))})",
            "(2 * ac.index('S') >= ac.index('T'))",
            f"(ac.index('S') > ac.index('T') - {width})",
            "(ac.index('S') <= ac.index('T') - 2)",
        ]
        return f"(ac.index('S') < {width})" if self.foreign else self.pick(forms)

    def predicate(self) -> str:
        doc = self.past("doc", "B S", "label")
        if self.foreign:
            return f"({self.past('seen', f'B S {self.key}', 'value')} > -1.0)"
        forms = [
            f'ac.eq(ac.at_query({doc}, "S"), {doc})',
            f"({self.past('seen', f'B S {self.key}', 'value')} > -1.0)",
            f"({self.aged()} >= {self.age()})",
            f"({self.age()} < {self.some('bar', f'B T {self.heads}', 'value')})",
        ]
        return self.pick(forms)

    def mask(self, depth: int = 2) -> str:
        if depth == 0 or self.chance(40):
            return self.band() if self.chance(65) else self.predicate()
        if self.chance(15):
            return f"~{self.mask(depth - 1)}"
        join = self.pick(("&", "&", "|"))
        return f"({self.mask(depth - 1)} {join} {self.mask(depth - 1)})"

    # -- outputs

    def softmax(self) -> str:
        score = self.let("x", self.score())
        where = f", where={self.mask()}" if self.chance(85) else ""
        if self.causal:
            where = f", where=ac.causal & {self.mask()}"
        sink = ""
        if self.chance(25):
            sink = f", sink={self.some('sink', self.heads, 'value', lifetime='Param')}"
        return self.let("p", f'ac.softmax({score}, "S"{where}{sink})')

    def fold(self, p: str, axis: str) -> str:
        return f'ac.dot({p}, {self.past("v", f"B S {self.key} {axis}", "value")}, "S")'

    def output(self, o: str, axis: str) -> str:
        forms = [
            lambda: o,
            lambda: f"-{o} * 0.5",
            lambda: f"ac.sigmoid({self.some('u', f'B T {self.heads}', 'value')}) * {o}",
            lambda: f"{o} + {self.some('res', f'B T {self.heads} {axis}', 'value')}",
            lambda: f"{o} * {self.some('gain', f'{self.heads} {axis}', 'coef', lifetime='Param')}",
            lambda: f"ac.silu({o})",
        ]
        return self.r.choice(forms)()


def draw_score(
    r: Random, dims: tuple[int, ...] = (2, 4, 5, 8), *, plain: bool = False, causal: bool = False
) -> Drawn:
    """An op over the history S.

    Args:
        r: makes the choices.
        dims: what D, D2, E and F are chosen from.
        plain: one fold and one output of element-wise code, which kernels have had from the start.
        causal: no query sees a later key, so that a sequence may be cut.
    """
    b = Fold(r, dims, plain=plain, causal=causal)
    p = b.softmax()
    o = b.fold(p, "E")
    outputs = [("o", "E", o)]
    kind = 0 if plain else b.r.choice((0, 0, 0, 0, 1, 2))
    if kind == 1:
        b.tags.add("two values")
        outputs.append(("n", "F", b.output(b.fold(p, "F"), "F")))
    elif kind == 2:
        b.tags.add("two softmaxes")
        outputs = [("o", "E", f"{o} - 0.5 * {b.fold(b.softmax(), 'E')}")]
    outputs[0] = ("o", "E", b.output(outputs[0][2], "E"))
    if len(outputs) == 1 and kind == 0:
        b.tags.add("lse")
    if b.foreign:
        b.tags.add("foreign")
    return b.finish((), *((n, f"B T {b.heads} {axis}", x) for n, axis, x in outputs))
