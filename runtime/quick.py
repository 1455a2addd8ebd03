"""A call held to an earlier one by a function that is written out for its arguments.

Reading a signature (:func:`attncc.runtime.signature.read`) costs the host more than some launches
do. Mostly a call comes again with tensors of the same layouts, so the signature that came last is
tried first: types and constants as they were, tensors by :mod:`attncc.runtime.unrolled`. What is
not accepted may still be known: its signature is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from attncc.runtime.signature import SIZES, Layout
from attncc.runtime.unrolled import accepts

Take = Callable[[Sequence[Any], Mapping[str, Any], list[Any], list[int], bool], list[float] | None]
"""Takes arguments whose number and names are right, a frame and addresses to fill in, and whether
gradients are on; gives the host numbers, or None where something is otherwise."""


def take(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Take | None:
    """Write out the comparison with a call; None where only a signature tells arguments apart.

    Args:
        args: positional arguments; nothing of them is kept.
        kwargs: arguments and options by name, likewise.
    """
    if kwargs.get(SIZES):
        return None
    made = _Written()
    first, rest = made.variables(len(args)), made.variables(len(kwargs))
    made.lines += [f"{first}= args"] if args else []
    made.lines += [f"{rest}= kwargs.values()"] if kwargs else []
    variables = (first + rest).replace(",", "").split()
    values = (*args, *kwargs.values())
    if not all([made.visit(*pair) for pair in zip(variables, values, strict=True)]):
        return None
    made.names["fits"] = accepts([*enumerate(made.layouts)], made.tensors)
    tensors = "".join(f"{name}, " for name in made.places)
    made.refuse(f"not fits(({tensors}), frame, pointers, gradients)")
    made.lines.append(f"return [{', '.join(made.numbers)}]")
    text = "def take(args, kwargs, frame, pointers, gradients):\n    "
    exec(compile(text + "\n    ".join(made.lines), "<a repeated call>", "exec"), made.names)
    found: Take = made.names["take"]
    return found


@dataclass(slots=True)
class _Written:
    """The function as far as it is written; it goes through arguments as a signature does.

    Attributes:
        lines: of its body.
        names: what they refer to.
        places: variables that hold tensors, in the order of a frame.
        tensors: what they hold now.
        layouts: of these.
        numbers: variables that hold host numbers.
    """

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    _count: int = 0

    def variables(self, count: int) -> str:
        """New variables, each followed by a comma."""
        first, self._count = self._count, self._count + count
        return "".join(f"x{i}, " for i in range(first, self._count))

    def constant(self, value: Any) -> str:
        """The name of a value."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def refuse(self, condition: str) -> None:
        """Something is otherwise."""
        self.lines += [f"if {condition}:", "    return None"]

    def visit(self, name: str, value: Any, *, inside: bool = False) -> bool:
        """Compare one value; False for what is not known here."""
        kind = type(value)
        if kind is torch.Tensor:
            self.places.append(name)
            self.tensors.append(value)
            self.layouts.append(Layout.of(value))
            return True
        if value is None or kind is bool or isinstance(value, (Enum, torch.dtype)):
            self.refuse(f"{name} is not {self.constant(value)}")
            return True
        self.refuse(f"type({name}) is not {self.constant(kind)}")
        if kind is float or kind is int:
            if not inside:
                self.numbers.append(name)
                return True
        elif kind is not str:
            return self._inside(name, value)
        self.refuse(f"{name} != {self.constant(value)}")
        return True

    def _inside(self, name: str, value: Any) -> bool:
        """A cache, a pool or a mapping by name."""
        if isinstance(value, Mapping):
            self.refuse(f"tuple({name}) != {self.constant(tuple(value))}")
            held, source = tuple(value.values()), f"{name}.values()"
        elif is_dataclass(value):
            labels = [f.name for f in fields(value)]
            held = tuple(getattr(value, label) for label in labels)
            source = "".join(f"{name}.{label}, " for label in labels)
        else:
            return False
        variables = self.variables(len(held))
        self.lines += [f"{variables}= {source}"] if held else []
        each = zip(variables.replace(",", "").split(), held, strict=True)
        return all([self.visit(*pair, inside=True) for pair in each])
