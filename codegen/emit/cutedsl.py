"""CuTe-DSL's spelling of printed Triton code: tiles become scalars of one thread.

A CuTe-DSL kernel is written for a thread, which holds some elements of each tile. Element-wise code
means the same for every element, so a printed line of a Triton tile is translated once, for one
element: a name with the dimension of the rows is a list of what the thread's rows have and is
indexed by ``r``; a name with the dimension of keys or of columns is the one at hand. Types are
followed, because CuTe-DSL converts numbers by other rules than Triton. What has no translation is
an error here, never a guess.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from attncc.codegen.emit.cutedsl_types import NUMBERS, REAL, SIZES, Known, Step, Stored, joined
from attncc.codegen.emit.softmax_rows import Texts
from attncc.dsl.errors import RefusedError

_TYPES = {
    "int32": "i32", "int64": "i64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16",
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_REAL_CALLS = frozenset({"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "floor"})
_WITHIN = {"maximum": "larger", "minimum": "smaller"}
_REDUCED = {"max": "largest", "min": "smallest"}


_NOTHING = Known("bool")


@dataclass(slots=True)
class Scalars:
    """Translates lines one after another; knows every name that they define.

    Attributes:
        known: names that may be used.
        listed: dimensions whose names are lists, and the index into them.
        ranges: text of ``tl.arange(0, n)`` in each place, by the name it is assigned to.
    """

    known: dict[str, Known]
    listed: Mapping[str, str]
    ranges: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    stores: dict[str, Stored] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)
    _target: str = ""
    _depth: int = 0

    def steps(self, lines: Iterable[str]) -> tuple[Step, ...]:
        """Translate printed lines; a comment line stays with the statement after it.

        Raises:
            RefusedError: a line uses something that has no translation.
        """
        text = "\n".join(lines)
        tree = ast.parse(text)
        return tuple(self._statements(tree.body, text.splitlines()))

    def expression(self, text: str) -> tuple[str, Known]:
        """Translate one expression."""
        return self._value(ast.parse(text, mode="eval").body)

    def address(self, text: str) -> str:
        """Translate the sum of a pointer and offsets: the address in bytes."""
        return self._address(ast.parse(text, mode="eval").body)[1]

    # -- statements

    def _statements(self, nodes: Sequence[ast.stmt], lines: Sequence[str]) -> Iterator[Step]:
        for node in nodes:
            notes = _notes(lines, node.lineno)
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    yield self._assign(name, value, notes)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for target, value in zip(names, values, strict=True):
                        assert isinstance(target, ast.Name)
                        yield self._assign(target.id, value, notes)
                        notes = ()
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="store"), args=args) as call):
                    yield self._store(args, call.keywords, notes)
                case ast.For(target=ast.Name(id=name), iter=ast.Call(args=args), body=body):
                    yield self._loop(name, args, body, lines, notes)
                case _:
                    raise _refused(node)

    def _assign(self, name: str, value: ast.expr, notes: Texts) -> Step:
        self._used, self._target = set(), name
        text, found = self._value(value)
        before = self.known.get(name) if self._depth else None
        if before is not None and before.type != found.type:  # a loop carries one type
            text, found = f"{NUMBERS[before.type]}({text})", Known(before.type, found.dims)
        elif found.type in ("int", "float"):
            found = Known("i32" if found.type == "int" else "fp32", found.dims)
            text = f"{NUMBERS[found.type]}({text})"
        self.known[name] = found
        return Step(name, text, found, frozenset(self._used), notes)

    def _store(self, args: list[ast.expr], words: list[ast.keyword], notes: Texts) -> Step:
        self._used, self._target = set(), ""
        pointer, address, where = self._address(args[0])
        value, what = self._value(args[1])
        mask, also = ("True", _NOTHING)
        for word in words:
            mask, also = self._value(word.value)
        dims = where.dims | what.dims | also.dims
        label = f"store{len(self.stores)}"
        self.stores[label] = Stored(pointer, address, value, mask)
        return Step("", label, Known("bool", dims), frozenset(self._used), notes)

    def _loop(
        self, name: str, args: list[ast.expr], body: list[ast.stmt], lines: Sequence[str],
        notes: Texts,
    ) -> Step:  # fmt: skip
        self._used = set()
        limits = ", ".join(self._as(*self._value(a), "i32") for a in args)
        used = frozenset(self._used)
        self.known[name] = Known("i32")
        self._depth += 1
        inner = tuple(self._statements(body, lines))
        self._depth -= 1
        return Step("", f"for {name} in cutlass.range({limits}, unroll=1):", _NOTHING, used, notes,
                    inner)  # fmt: skip

    # -- expressions

    def _value(self, node: ast.expr) -> tuple[str, Known]:
        match node:
            case ast.Name(id=name):
                return self._name(name)
            case ast.Constant(value=bool() | int() | float() as value):
                kind = type(value).__name__
                return repr(value), Known(kind)
            case ast.Subscript(value=inner):
                return self._value(inner)  # only broadcasting: names say what they vary along
            case ast.Call():
                return self._called(node)
        return self._operation(node)

    def _operation(self, node: ast.expr) -> tuple[str, Known]:
        match node:
            case ast.UnaryOp(op=op, operand=inner):
                text, found = self._value(inner)
                sign = "~" if isinstance(op, ast.Invert) else "-"
                return f"{sign}{_atom(text)}", found
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(left, op, right)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b, found = self._pair(self._value(left), self._value(right))
                text = f"{_atom(a)} {_COMPARED[type(op)]} {_atom(b)}"
                return text, Known("bool", found.dims)
        raise _refused(node)

    def _called(self, node: ast.Call) -> tuple[str, Known]:
        match node:
            case ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[kind]):
                return self._converted(inner, kind)
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(word))]):
                return f'float("{word}")', Known("float")
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                return self._call(name, node)
        raise _refused(node)

    def _name(self, name: str) -> tuple[str, Known]:
        found = self.known.get(name)
        if found is None:
            raise RefusedError(f"no CuTe-DSL text for the name {name}")
        self._used.add(name)
        index = next((i for dim, i in self.listed.items() if found.dims == {dim}), None)
        return (name if index is None else f"{name}[{index}]"), found

    def _binary(self, left: ast.expr, op: ast.operator, right: ast.expr) -> tuple[str, Known]:
        a, b = self._value(left), self._value(right)
        if isinstance(op, ast.Div):
            found = Known("fp32", a[1].dims | b[1].dims)
            return f"divided({self._as(*a, 'fp32')}, {self._as(*b, 'fp32')})", found
        if type(op) not in _OPERATORS:
            raise _refused(op)
        x, y, found = self._pair(a, b)
        return f"{_atom(x)} {_OPERATORS[type(op)]} {_atom(y)}", found

    def _pair(self, a: tuple[str, Known], b: tuple[str, Known]) -> tuple[str, str, Known]:
        """Two operands in one type: whole numbers beside real ones become fp32, as in Triton."""
        kind, dims = joined(a[1].type, b[1].type), a[1].dims | b[1].dims
        return self._as(*a, kind), self._as(*b, kind), Known(kind, dims)

    def _as(self, text: str, found: Known, kind: str) -> str:
        """The text as a number of a type; a number of the source text takes any."""
        if found.type == kind or kind in ("int", "float"):
            return text
        if found.type == "int":
            return f"{text}.0" if kind in REAL and text.isdigit() else text
        return text if found.type == "float" else f"{NUMBERS[kind]}({text})"

    def _converted(self, inner: ast.expr, kind: ast.expr) -> tuple[str, Known]:
        text, found = self._value(inner)
        assert isinstance(kind, ast.Attribute)
        if kind.attr == "element_ty":  # the store knows the type in memory
            return text, found
        wanted = _TYPES.get(kind.attr)
        if wanted is None:
            raise RefusedError(f"no CuTe-DSL text for a conversion to {kind.attr}")
        if wanted == found.type:
            return text, found
        return f"{NUMBERS[wanted]}({text})", Known(wanted, found.dims)

    def _call(self, name: str, node: ast.Call) -> tuple[str, Known]:
        args = node.args
        match name:
            case "load":
                return self._load(args, node.keywords)
            case "where":
                return self._where(args)
            case "arange":
                text, dim = self.ranges[self._target]
                return text, Known("i32", frozenset({dim}))
            case "broadcast_to" | "full" | "to_tensor":
                return self._value(args[name == "full"])
            case "max" | "min":
                return self._reduced(name, args)
            case "maximum" | "minimum" | "cdiv":
                return self._of_two(name, node)
        text, found = self._value(args[0])
        if name == "abs":
            return f"magnitude({text})", found
        if name not in _REAL_CALLS:
            raise RefusedError(f"no CuTe-DSL text for tl.{name}")
        return f"{name}({self._as(text, found, 'fp32')})", Known("fp32", found.dims)

    def _of_two(self, name: str, node: ast.Call) -> tuple[str, Known]:
        a, b, found = self._pair(*map(self._value, node.args[:2]))
        if name == "cdiv":
            return f"({_atom(a)} + {_atom(b)} - 1) // {_atom(b)}", found
        nan = ", nan=True" if node.keywords and found.type in REAL else ""
        return f"{_WITHIN[name]}({a}, {b}{nan})", found

    def _where(self, args: list[ast.expr]) -> tuple[str, Known]:
        test, tested = self._value(args[0])
        a, b, found = self._pair(self._value(args[1]), self._value(args[2]))
        kind = {"int": "i32", "float": "fp32"}.get(found.type, found.type)
        return f"where({test}, {a}, {b}, {NUMBERS[kind]})", Known(kind, found.dims | tested.dims)

    def _reduced(self, name: str, args: list[ast.expr]) -> tuple[str, Known]:
        """The largest or smallest of what a warp holds of a vector."""
        text, found = self._value(args[0])
        [dim] = found.dims
        index = self.listed[dim]
        kind = {"int": "i32", "float": "fp32"}.get(found.type, found.type)
        return f"{_REDUCED[name]}([{text} for {index} in PIECES])", Known(kind)

    # -- memory

    def _address(self, node: ast.expr) -> tuple[str, str, Known]:
        """Element type, text of the address in bytes, and what the address varies along."""
        parts = list(_terms(node))
        pointer = parts[0]
        if not isinstance(pointer, ast.Name) or not self.known[pointer.id].type.startswith("*"):
            raise _refused(node)
        self._used.add(pointer.id)
        kind, dims, texts = self.known[pointer.id].type[1:], frozenset[str](), []
        for part in parts[1:]:
            text, found = self._value(part)
            dims |= found.dims
            texts.append(f"{_atom(text)}" if found.type == "i64" else f"Int64({text})")
        at = " + ".join(texts)
        size = SIZES.get(kind)
        if size is None:
            raise RefusedError(f"no CuTe-DSL text for elements of {kind}")
        text = f"{pointer.id} + ({at}) * {size}" if at else pointer.id
        return kind, text, Known("i64", dims)

    def _load(self, args: list[ast.expr], words: list[ast.keyword]) -> tuple[str, Known]:
        kind, address, where = self._address(args[0])
        dims, more = where.dims, ""
        for word in words:
            text, found = self._value(word.value)
            dims |= found.dims
            more += f", {text}"
        return f"load({NUMBERS[kind]}, {address}{more})", Known(kind, dims)


def _terms(node: ast.expr) -> Iterator[ast.expr]:
    """The summands of a sum, as they stand."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _terms(node.left)
        yield node.right
    else:
        yield node


def _atom(text: str) -> str:
    """Text that can stand beside an operator."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return f"({text})"
    simple = (ast.Name, ast.Constant, ast.Call, ast.Subscript)
    return text if isinstance(node, simple) else f"({text})"


def _notes(lines: Sequence[str], number: int) -> Texts:
    """The comment line in front of a statement, by its number from 1."""
    before = lines[number - 2].strip() if number >= 2 else ""
    return (before,) if before.startswith("#") else ()


def _refused(node: ast.AST) -> RefusedError:
    shown = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else type(node).__name__
    return RefusedError(f"no CuTe-DSL text for {shown}")
