"""The ledger of an op or a layer: each object, who makes and reads it, its lifetime, its bytes."""

from attncc.dsl.ledger.choices import Choices, Scaled
from attncc.dsl.ledger.derive import graph_of, ledger
from attncc.dsl.ledger.model import Entry, Formula, Growth, Held, Item, Ledger, Peak, Phase, lives

__all__ = [
    "Choices",
    "Entry",
    "Formula",
    "Growth",
    "Held",
    "Item",
    "Ledger",
    "Peak",
    "Phase",
    "Scaled",
    "graph_of",
    "ledger",
    "lives",
]
