"""``M_peak``, itemised as the source document's formula.

    M_peak = M_model_state + M_saved_activation + M_persistent_cache_or_state
           + max_t(M_operator_workspace(t) + M_comm_buffer(t)) + M_allocator_margin

One device, one layer's operators at a time; the document is "Attention Cache and Sequence
Parallelism", section on the joint comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from attncc.dsl.errors import ArgumentError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Layer
from attncc.dsl.ledger.choices import Choices
from attncc.dsl.ledger.model import Entry, Held, Item, Peak, Phase
from attncc.dsl.ledger.size import Measure
from attncc.dsl.ledger.ways import first_and_last

_SMALL, _FINE, _COARSE = 1 << 20, 512, 2 << 20
"""Blocks of torch's allocator: multiples of 512 bytes up to 1 MiB, of 2 MiB above."""


def peak(
    graph: Layer, by: Measure, choices: Choices, entries: Sequence[Entry],
    groups: Mapping[str, str],
) -> Peak:  # fmt: skip
    """The most memory at any time of a step.

    Args:
        graph: operations and objects.
        by: how axes are counted.
        choices: of storage, optimizer, buffers.
        entries: the ledger's.
        groups: by node, the kernel or module that it is part of: its inputs and outputs are there
            together.
    """
    train = by.phase is Phase.TRAIN
    weights = [e for e in entries if e.lifetime is Lifetime.PARAMETER]
    counted = {f"d{e.name}" for e in weights}  # the gradients of weights belong to the model
    every = [e for e in entries if e.lifetime is not Lifetime.PARAMETER]
    every = [e for e in every if e.lifetime is not Lifetime.GRADIENT or e.name not in counted]
    kept = [e for e in every if e.persistent and e.lifetime is not Lifetime.CONTROL]
    tables = [e for e in every if e.persistent and e not in kept]
    passing = [e for e in every if not e.persistent and e.held is Held.MEMORY]
    lasting = [e for e in passing if e.lifetime is not Lifetime.GRADIENT and not e.at]
    saved = [e for e in lasting if not choices.recompute or _comes_in(graph, e)] if train else []
    again = [replace(e, times=1) for e in lasting if train and e not in saved]
    steps = tuple(dict.fromkeys(groups[n.name] for n in graph.nodes))
    moving = [e for e in passing if e not in saved and not (train and e in lasting)]
    _known_steps(by, steps, choices)
    step, live = _fullest(graph, steps, groups, moving, choices)
    live += again
    at = f"backward of {step}" if train else step
    items = [
        _model_state(by, choices, weights, train), _sum("M_saved_activation", by, saved),
        _sum("M_persistent_cache_or_state", by, kept),
        _sum("M_operator_workspace", by, live, at, choices.workspace.get(step, 0)),
        Item(
            "M_comm_buffer", "0 on one rank" if not choices.comm else f"at {at}",
            choices.comm.get(step, 0), (at,),
        ),
    ]  # fmt: skip
    blocks = [*weights, *saved, *kept, *live]
    return Peak((*items, _margin(by, choices, tables, blocks, items)))


def _comes_in(graph: Layer, entry: Entry) -> bool:
    """Whether no operation of the graph makes an object, so that it cannot be made again."""
    inside = any(o.name == entry.name for o in graph.objects)
    return inside and not any(graph.producers(entry.name))


def _model_state(by: Measure, choices: Choices, weights: list[Entry], train: bool) -> Item:
    plain = _sum("M_model_state", by, weights)
    if not train or not weights or plain.bytes is None:
        more = " (weights, gradients, optimizer)" if train and weights else ""
        return Item(plain.name, plain.formula + more, plain.bytes, plain.of)
    elements = sum(e.bytes // e.dtype.bytes for e in weights)
    text = f"2 * ({plain.formula}) + {choices.optimizer} * elements"
    return Item(plain.name, text, 2 * plain.bytes + choices.optimizer * elements, plain.of)


def _sum(name: str, by: Measure, entries: Iterable[Entry], at: str = "", more: int = 0) -> Item:
    found = [e for e in entries if e.held is Held.MEMORY]
    parts = [e.size.text if e.times == 1 else f"layers * {e.size.text}" for e in found]
    parts += [str(more)] if more else []
    number = None if by.sizes is None else sum(e.bytes for e in found) + more
    text = " + ".join(parts) or "0"
    return Item(name, f"at {at}: {text}" if at else text, number, tuple(e.name for e in found))


def _known_steps(by: Measure, steps: Sequence[str], choices: Choices) -> None:
    """Refuse buffers of what is no node.

    Raises:
        ArgumentError: a name that no kernel or module has.
    """
    for name in (*choices.comm, *choices.workspace):
        if name not in steps:
            raise ArgumentError(
                "no such node", op=by.name, argument=name, expected=", ".join(steps)
            )


def _fullest(
    graph: Layer, steps: Sequence[str], groups: Mapping[str, str], moving: Sequence[Entry],
    choices: Choices,
) -> tuple[str, list[Entry]]:  # fmt: skip
    """The step with the most bytes of passing objects and buffers, and those objects."""
    spans = [_span(graph, steps, groups, e) for e in moving]
    best: tuple[int, str, list[Entry]] | None = None
    for t, step in enumerate(steps):
        live = [e for e, (a, b) in zip(moving, spans, strict=True) if a <= t <= b]
        total = sum(e.bytes for e in live) + choices.comm.get(step, 0)
        total += choices.workspace.get(step, 0)
        if best is None or total > best[0]:
            best = (total, step, live)
    if best is None:
        return "", []
    return best[1], best[2]


def _span(
    graph: Layer, steps: Sequence[str], groups: Mapping[str, str], entry: Entry
) -> tuple[int, int]:
    """First and last step at which an object (or its gradient, in reverse) is in memory."""
    names = {o.name for o in graph.objects}
    name = entry.name
    if entry.lifetime is Lifetime.GRADIENT and name.startswith("d"):
        name = name[1:]
    if entry.at:
        return steps.index(groups[entry.at]), steps.index(groups[entry.at])
    if name not in names:
        return 0, len(steps) - 1
    first, last = first_and_last(graph, name)
    order = [steps.index(groups[n.name]) for n in graph.nodes]
    start = order[first] if first >= 0 else 0
    end = order[last] if 0 <= last < len(order) else len(steps) - 1 if last >= 0 else start
    return start, end


def rounded(size: int) -> int:
    """What torch's allocator gives for a block of a size."""
    unit = _FINE if size <= _SMALL else _COARSE
    return ceil(size / unit) * unit


def _margin(
    by: Measure, choices: Choices, tables: Sequence[Entry], blocks: Iterable[Entry],
    items: Sequence[Item],
) -> Item:  # fmt: skip
    """What management takes: tables, blocks rounded up, fragments."""
    name, text = "M_allocator_margin", "blocks rounded up (512 B to 1 MiB, 2 MiB above)"
    if tables:
        text = f"{', '.join(t.name for t in tables)}; {text}"
    if choices.margin:
        text += f" + {choices.margin:g} of the rest"
    if by.sizes is None:
        return Item(name, text, None)
    lost = sum(e.times * (rounded(e.size.number) - e.size.number) for e in blocks)
    lost += sum(e.times * rounded(e.size.number) for e in tables)
    rest = sum(i.bytes or 0 for i in items)
    return Item(name, text, lost + int(choices.margin * rest))
