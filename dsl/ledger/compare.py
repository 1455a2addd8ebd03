"""Several ops or layers beside each other: the joint comparison of the source document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Layer, LayerObject, NodeKind
from attncc.dsl.ledger.derive import Subject, graph_of
from attncc.dsl.ledger.size import symbol

QUESTIONS = (
    "History in training", "Kept in inference", "Grows with the context",
    "Main read of a decode step", "Context parallelism", "Ulysses (heads)", "Ring (sequence)",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """What a graph says of how an op may be spread and what it keeps.

    Attributes:
        graph: operations and objects.
        histories: caches, in order.
        memories: foreign sequences, which do not grow.
        states: matrix states and other carries of fixed size.
        windows: bounded carries.
        picked: histories of which a query reads selected rows only.
        scanned: histories that are read whole.
        crossed: axes that are summed before a top-k and that no history has (indexer heads).
        selects: whether there is a top-k.
    """

    graph: Layer
    histories: tuple[LayerObject, ...]
    memories: tuple[LayerObject, ...]
    states: tuple[LayerObject, ...]
    windows: tuple[LayerObject, ...]
    picked: tuple[LayerObject, ...]
    scanned: tuple[LayerObject, ...]
    crossed: tuple[str, ...]
    selects: bool

    @property
    def rows(self) -> tuple[LayerObject, ...]:
        """What has a row for each token: own histories and foreign ones."""
        return (*self.histories, *self.memories)


def facts(subject: Subject) -> Facts:
    """Read a declaration or layer."""
    graph = graph_of(subject)
    histories = _of(graph, Lifetime.CACHE)
    picked = tuple(o for o in histories if _only_gathered(graph, o))
    return Facts(
        graph, histories, _of(graph, Lifetime.MEMORY), _of(graph, Lifetime.STATE),
        _of(graph, Lifetime.WINDOW), picked,
        tuple(o for o in histories if o not in picked), tuple(_crossed(graph, histories)),
        any(n.kind is NodeKind.TOPK for n in graph.nodes),
    )  # fmt: skip


def compare(subjects: Sequence[Subject]) -> list[tuple[str, ...]]:
    """Rows of the joint comparison: a question, then each subject's answer."""
    every = [facts(s) for s in subjects]
    rules = (_training, _kept, _growth, _reads, _context, _heads, _ring)
    return [
        (question, *(rule(f) for f in every))
        for question, rule in zip(QUESTIONS, rules, strict=True)
    ]


def _of(graph: Layer, lifetime: Lifetime) -> tuple[LayerObject, ...]:
    return tuple(o for o in graph.objects if o.lifetime is lifetime)


def _only_gathered(graph: Layer, held: LayerObject) -> bool:
    kinds = {n.kind for n in graph.consumers(held.name)} - {NodeKind.APPEND}
    return kinds == {NodeKind.GATHER}


def _crossed(graph: Layer, histories: tuple[LayerObject, ...]) -> Iterator[str]:
    """Axes that vanish on the way to a top-k though no history has them."""
    own = {a for o in histories for a in o.pattern.axes}
    wanted = [i for n in graph.nodes if n.kind is NodeKind.TOPK for i in n.inputs]
    seen: dict[str, None] = {}
    while wanted:
        for node in graph.producers(wanted.pop()):
            made = {a for name in node.outputs for a in graph.object(name).pattern.axes}
            read = [a for name in node.inputs for a in graph.object(name).pattern.axes]
            inside = all(graph.object(name).fused for name in node.outputs)
            if inside:
                seen.update(dict.fromkeys(a for a in read if a not in made | own))
                wanted.extend(node.inputs)
    return iter(seen)


def _listed(objects: Iterable[LayerObject]) -> str:
    return ", ".join(o.symbol for o in objects)


def _training(f: Facts) -> str:
    parts = []
    if f.rows:
        parts.append(f"{_listed(f.rows)} of the whole batch: activations")
    if f.states:
        parts.append(f"activations of chunks, {_listed(f.states)} where chunks begin")
    if f.windows and not f.states:
        parts.append(f"the batch's own rows in place of {_listed(f.windows)}")
    return "; ".join(parts) or "activations only"


def _kept(f: Facts) -> str:
    kept = (*f.rows, *f.states, *f.windows)
    return ", ".join(f"{o.symbol} [{o.pattern}]" for o in kept) or "nothing"


def _growth(f: Facts) -> str:
    if not f.histories:
        return "no: fixed size" if f.rows or f.states or f.windows else "no"
    import sympy

    rows = sympy.Add(
        *(
            sympy.Mul(*(symbol(a) for a in o.pattern.axes if a not in ("B", "S")))
            for o in f.histories
        )
    )
    many = f", {len(f.histories)} histories" if f.selects else ""
    each = sympy.factor(rows)
    return f"yes: S * {f'({each})' if each.is_Add else each} elements{many}"


def _reads(f: Facts) -> str:
    parts = []
    if f.scanned:
        bounded = [o for o in f.scanned if o.reach is not None]
        whole = [o for o in f.scanned if o.reach is None]
        parts += [f"all of {_listed(whole)}"] if whole else []
        parts += [f"the last {bounded[0].reach} rows of {_listed(bounded)}"] if bounded else []
    parts += [f"all of {_listed(f.memories)}"] if f.memories else []
    if f.picked:
        sizes = dict(f.graph.sizes)
        k = next((n for a, n in sizes.items() if a.startswith("J")), None)
        parts.append(f"the {k} selected rows of {_listed(f.picked)}")
    if f.states or f.windows:
        parts.append(f"{_listed((*f.states, *f.windows))}, of fixed size")
    return "; ".join(parts) or "its inputs"


def _context(f: Facts) -> str:
    if f.selects:
        return f"one global top-k, then the selected rows of {_listed(f.picked)}"
    if f.states:
        return f"{_listed(f.states)} at the boundary, or a prefix scan of (A, B)"
    if f.rows:
        return f"every rank's {_listed(f.rows)}: partials (m, l, u) are merged"
    return f"the last rows of {_listed(f.windows)} go to the next rank" if f.windows else "local"


def _heads(f: Facts) -> str:
    if f.crossed:
        return f"the sum over {' '.join(f.crossed)} is reduced over ranks before the top-k"
    if f.states:
        return f"heads are independent: each has its own {_listed(f.states)}"
    return "heads are split, then attention is local" if f.rows else "channels are split"


def _ring(f: Facts) -> str:
    if f.selects:
        return f"shards of {_listed(f.histories)}, and a global top-k"
    if f.states or f.windows:
        return f"nothing goes round: {_listed((*f.states, *f.windows))} is passed on"
    return f"blocks of {_listed(f.rows)} go round" if f.rows else "local"
