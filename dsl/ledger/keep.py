"""What may be asked of a history: storage, pages, fewer rows; and the refusals, with reasons."""

from __future__ import annotations

from attncc.dsl.errors import ArgumentError, EvictionError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Layer, LayerObject, NodeKind
from attncc.dsl.ledger.choices import Choices, Scaled
from attncc.dsl.ledger.model import Phase, in_training, not_by_token
from attncc.dsl.ledger.size import Measure


def check_choices(graph: Layer, by: Measure, choices: Choices) -> None:
    """Refuse what the declaration does not allow.

    Raises:
        CacheInTrainingError: pages, quantised storage or kept rows in a training phase.
        TokenIndexError: rows of a state.
        EvictionError: rows dropped that a later query may read.
        ArgumentError: a name that the graph does not have, or a number below 1.
    """
    known = {o.name: o for o in graph.objects}
    for name in (*choices.storage, *choices.keep):
        if name not in known:
            raise ArgumentError(
                "no such object", op=graph.name, argument=name, expected=", ".join(known)
            )
    numbers = {"optimizer": choices.optimizer, "margin": choices.margin}
    for name, number in (numbers | {**choices.comm} | {**choices.workspace}).items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0:
            raise ArgumentError(
                "a number of bytes, or a part of them", op=graph.name, argument=name,
                expected="0 or more", found=repr(number),
            )  # fmt: skip
    if choices.page is not None:
        _check_page(graph, choices.page)
    if by.phase is Phase.TRAIN:
        if choices.page is not None:
            raise in_training(graph.name, "page")
        for name in (
            *choices.keep,
            *(n for n, s in choices.storage.items() if isinstance(s, Scaled)),
        ):
            raise in_training(graph.name, name)
    for name, rows in choices.keep.items():
        _check_kept(graph, by, known[name], rows)


def _check_page(graph: Layer, page: int) -> None:
    """Pages are rows of a history; one in blocks has pages of its own."""
    if isinstance(page, bool) or not isinstance(page, int) or page < 1:
        raise ArgumentError(
            "a page has rows", op=graph.name, argument="page", expected="1 or more",
            found=repr(page),
        )  # fmt: skip
    for held in graph.objects:
        if held.lifetime is Lifetime.CACHE and "S" not in held.pattern.axes:
            raise ArgumentError(
                "a history in blocks is not paged", op=graph.name, argument=held.name,
                expected="an axis S", found=f"[{held.pattern}]",
            )  # fmt: skip


def _check_kept(graph: Layer, by: Measure, held: LayerObject, rows: int) -> None:
    """Whether rows older than ``rows`` can be dropped without a later query missing them."""
    if held.lifetime is Lifetime.STATE:
        raise not_by_token(graph.name, held.name)
    if held.lifetime is not Lifetime.CACHE or not isinstance(rows, int) or rows < 1:
        raise ArgumentError(
            "rows are kept of a history", op=graph.name, argument=held.name,
            found=f"{rows} of {held.lifetime.value}",
        )  # fmt: skip
    readers = {n.kind for n in graph.consumers(held.name)}
    if NodeKind.GATHER in readers or _scores_a_selection(graph, held):
        raise EvictionError(
            "unselected rows cannot be dropped", op=graph.name, argument=held.name,
            expected="every row", found=f"{rows} rows",
            help="top-k is what one query reads, not what is kept: the next query selects anew "
            "from the whole history, and may select any row of it",
        )  # fmt: skip
    seen = None if held.reach is None else by.reach(held.reach)
    if seen is None or seen > rows:
        raise EvictionError(
            "rows that a later query reads cannot be dropped", op=graph.name, argument=held.name,
            expected="every row" if seen is None else f"at least {seen} rows", found=f"{rows} rows",
            help="a mask that bounds how far back a query sees (t - s < W) lets older rows go",
        )  # fmt: skip


def _scores_a_selection(graph: Layer, held: LayerObject) -> bool:
    """Whether a top-k is computed from a history: it has to see all of it again."""
    reached, below = {held.name}, False
    for node in graph.nodes:
        if node.kind is not NodeKind.APPEND and reached & set(node.inputs):
            below = below or node.kind is NodeKind.TOPK
            reached |= set(node.outputs)
    return below and held.reach is None
