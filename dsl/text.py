"""The canonical text of a program: one line a node, the same for equal programs.

Goldens, dumps, cache keys and ``op.explain()`` print this and nothing else. Places in files are
left out.
"""

from __future__ import annotations

from dataclasses import fields
from typing import cast

from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Fn, Input, Kind, Lit, Map, Node, NodeBase, Program, Tensor

INFIX = {
    Fn.ADD: "+", Fn.SUB: "-", Fn.MUL: "*", Fn.DIV: "/", Fn.MOD: "%", Fn.LT: "<", Fn.LE: "<=",
    Fn.GT: ">", Fn.GE: ">=", Fn.EQ: "==", Fn.NE: "!=", Fn.AND: "&", Fn.OR: "|",
}  # fmt: skip
"""Functions of two operands that formulas write between them."""


def _kind(kind: Kind) -> str:
    return "" if kind is Kind.REAL else f" {kind.value}"


def _attributes(node: Node, names: dict[Node, str]) -> str:
    parts: list[str] = []
    for f in fields(node):
        if f.name in ("loc", "_hash"):
            continue
        value = getattr(node, f.name)
        if isinstance(value, NodeBase):
            text = names[cast(Node, value)]
        elif f.name == "args":
            parts.extend(names[a] for a in value)
            continue
        elif value is None or value is False or value == ():
            continue
        elif isinstance(value, tuple):
            text = " ".join(
                names[cast(Node, v)] if isinstance(v, NodeBase) else str(v) for v in value
            )
        else:
            text = str(getattr(value, "value", value))
        parts.append(text if f.name in ("arg", "score", "table", "window") else f"{f.name}={text}")
    return ", ".join(parts)


def _line(node: Node, names: dict[Node, str], axes: dict[Node, tuple[str, ...]]) -> str:
    if isinstance(node, Map):
        head = f"{node.fn.value} {', '.join(names[a] for a in node.args)}"
    elif isinstance(node, Lit):
        head = f"lit {node.value!r}"
    elif isinstance(node, Input):
        head = f"input {node.name}{_kind(node.kind)}"
    else:
        head = f"{type(node).__name__.lower()} {_attributes(node, names)}"
    return f"{head} : [{' '.join(axes_of(node, axes))}]"


def nodes_text(*roots: Node) -> str:
    """Lines ``%i = node : [axes]`` for everything below the roots, operands first."""
    names: dict[Node, str] = {}
    axes: dict[Node, tuple[str, ...]] = {}
    lines = []
    for node in walk(*roots):
        names[node] = f"%{len(names)}"
        lines.append(f"  {names[node]} = {_line(node, names, axes)}")
    lines.append(f"  -> {' '.join(names[r] for r in roots)}")
    return "\n".join(lines)


def _default(t: Tensor) -> str:
    match t.default:
        case None:
            return ""
        case NodeBase():  # of sizes; the body has it where the argument is absent
            return " default"
        case number:
            return f" default={float(number)!r}"


def program_text(program: Program) -> str:
    """The whole program: signature, body, results."""
    head = f"op {program.name}" + (f" scan={program.scan}" if program.scan else "")
    lines = [head]
    for t in program.tensors:
        default = _default(t)
        absent = " absent" if t.optional and t.name not in program.given else ""
        shape = "scalar" if t.scalar else f"[{t.pattern}]"
        lines.append(f"  {t.lifetime.value} {t.name} {shape}{_kind(t.kind)}{default}{absent}")
    for axis, size in program.sizes:
        lines.append(f"  size {axis} = {size}")
    lines.append(nodes_text(*program.roots))
    lines.extend(f"  state {s.name}" for s in program.states)
    lines.extend(f"  output {o.name} [{o.pattern}]" for o in program.outputs)
    return "\n".join(lines) + "\n"
