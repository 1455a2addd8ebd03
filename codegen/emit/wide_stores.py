"""Prints stores that come after a change of layout, so that a thread stores 16 bytes at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.plan import TensorArg

WIDE, WIDE_ROWS, WIDE_COLUMNS = "WIDE", "WIDE_ROWS", "WIDE_COLUMNS"
LAYOUTS = {("m", "e"): WIDE, ("m",): WIDE_ROWS, ("e",): WIDE_COLUMNS}
"""Names of the layouts by the dimensions of what is stored."""


@dataclass(slots=True)
class LaterStores(Printer):
    """A printer whose stores stand apart: places of axes have another layout there.

    A value takes the type that it is stored in before its layout changes.

    Attributes:
        later: lines with the stores.
    """

    later: list[str] = field(default_factory=list)

    def store(self, arg: TensorArg, value: Var, also: list[Var] | None = None) -> None:
        """Store a value to a tensor at the current places, in the tensor's dtype."""
        layout = LAYOUTS.get(value.dims)
        if layout is not None:
            cast = f"({value.text}).to({arg.pointer}.dtype.element_ty)"
            value = self.name(f"tl.convert_layout({cast}, {layout})", value.dims, "left")
        lines, self.lines = self.lines, self.later
        Printer.store(self, arg, value, also)
        self.lines = lines
