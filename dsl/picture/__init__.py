"""Dataflow of an op or a layer as a picture, training and inference side by side.

The language is the source document's: a filled dot is an activation, a double circle is kept across
steps, a square is an operation.
"""

from attncc.dsl.picture.figure import Edge, Figure, Mark, Vertex, figure
from attncc.dsl.picture.lines import text
from attncc.dsl.picture.place import Placed, place
from attncc.dsl.picture.svg import svg

__all__ = ["Edge", "Figure", "Mark", "Placed", "Vertex", "figure", "place", "svg", "text"]
