"""The ledger of a declaration or a layer, in one phase."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError
from attncc.dsl.layers import Layer
from attncc.dsl.ledger.choices import Choices
from attncc.dsl.ledger.entries import entries
from attncc.dsl.ledger.expand import op_layer
from attncc.dsl.ledger.inline import flatten, in_training
from attncc.dsl.ledger.model import Ledger, Phase
from attncc.dsl.ledger.peak import peak
from attncc.dsl.ledger.size import measure

Subject = Declaration | Layer
"""What has a ledger."""


def graph_of(
    subject: Subject, sizes: Mapping[str, int] | None = None, given: frozenset[str] | None = None
) -> Layer:
    """Operations and objects of an op or a layer, ops taken apart.

    Args:
        subject: the declaration, or the composition.
        sizes: those that an op's body unrolls are taken from here.
        given: an op's optional inputs that are present; those of a usual call when None.

    Raises:
        ArgumentError: no such optional input.
        LayerError: the layer's nodes and objects do not fit together.
    """
    optional: list[str] = []
    expected = "none: a layer says itself what its ops are given"
    if isinstance(subject, Declaration):
        optional = [t.name for t in subject.tensors if t.optional]
        expected = f"one of: {' '.join(optional) or '(none)'}"
    unknown = sorted((given or frozenset()).difference(optional))
    if unknown:
        raise ArgumentError(
            "no such optional input",
            op=subject.name,
            argument=unknown[0],
            expected=expected,
        )
    if isinstance(subject, Layer):
        return flatten(subject)
    fixed = tuple((a, n) for a, n in (sizes or {}).items() if a in subject.asked)
    return op_layer(subject, given, fixed)


def ledger(
    subject: Subject,
    sizes: Mapping[str, int] | None = None,
    phase: Phase = Phase.DECODE,
    layers: int = 1,
    choices: Choices | None = None,
) -> Ledger:
    """Every object of an op or a layer: who makes and reads it, how long it lives, its bytes.

    Args:
        subject: the declaration, or the composition.
        sizes: of every axis; None for formulas alone. T is 1 in decode and S is T in a prefill
            where nothing is said; ``chunk``, ``splits`` and ``segments`` are a plan's choices.
        phase: prefill, decode or train.
        layers: how many layers have caches, states, parameters and saved activations of their own.
        choices: storage and what else bytes depend on.

    Raises:
        ArgumentError, UnknownSizeError, SizeError: a size that is none, missing, or another than
            the declaration's own.
        CacheInTrainingError: a cache's storage, pages or rows asked for in training.
        EvictionError, TokenIndexError: rows dropped that a query may read; rows of a state.
        LayerError: the layer's nodes and objects do not fit together.
    """
    chosen = Choices() if choices is None else choices
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ArgumentError(
            "a number of layers", op=subject.name, argument="layers", expected="1 or more",
            found=repr(layers),
        )  # fmt: skip
    graph = graph_of(subject, sizes, chosen.given)
    if phase is Phase.TRAIN:
        graph = in_training(graph)
    by = measure(graph, sizes, phase)
    found = entries(graph, by, chosen, layers)
    groups = groups_of(subject, graph)
    return Ledger(
        subject.name, phase, layers, by.sizes, found, peak(graph, by, chosen, found, groups), graph
    )


def groups_of(subject: Subject, graph: Layer) -> dict[str, str]:
    """By node of a graph, the kernel (an op) or module (a layer's node) that it is part of."""
    if isinstance(subject, Declaration):
        return {n.name: subject.name for n in graph.nodes}
    ops = {n.name for n in subject.nodes if n.op is not None}
    heads = {n.name: n.name.partition(".")[0] for n in graph.nodes}
    return {name: head if head in ops else name for name, head in heads.items()}
