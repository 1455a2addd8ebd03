"""Kernel plans: everything a template may see, frozen and free of any dialect.

A plan is made from a program's form and a :class:`Spec` (dtypes, static sizes, layouts, options).
It fixes one compiled kernel: batch, lengths, page counts and slots are run-time arguments and never
part of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import TypeVar

from attncc.codegen.plan_table import RULE, PlanTable
from attncc.codegen.quantised import Scaled
from attncc.dsl.axes import Pattern
from attncc.dsl.ir import NodeBase, Program
from attncc.dsl.text import nodes_text, program_text

FORMAT = "1"
"""Version of the plan text; it is part of every key."""


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A tensor parameter: pointer ``{name}_ptr``, strides ``{name}_s0 ...`` in elements.

    The innermost memory axis is dense, so its stride is not passed.

    Attributes:
        name: base name of the parameters.
        pattern: memory axes as the kernel sees them (packed calls: without ``B``).
        dtype: element type by Triton's name (``bf16``, ``fp16``, ``fp32``, ``fp8e4nv``, ``i32``,
            ``i64``, ``u8``).
        written: the kernel stores to it.
        aligned: pointer and every stride are multiples of 16 bytes and of 16 elements.
    """

    name: str
    pattern: Pattern
    dtype: str
    written: bool = False
    aligned: bool = True

    @property
    def pointer(self) -> str:
        """Name of the pointer parameter."""
        return f"{self.name}_ptr"

    @property
    def strides(self) -> tuple[str, ...]:
        """Names of the stride parameters, outermost first."""
        return tuple(f"{self.name}_s{i}" for i in range(self.pattern.rank - 1))

    @property
    def steps(self) -> tuple[str, ...]:
        """Text of the strides, outermost first."""
        return self.strides


@dataclass(frozen=True, slots=True)
class DenseArg(TensorArg):
    """A tensor whose rows lie end to end: their addresses cost no product at run time.

    Attributes:
        inner: the last strides, in elements, outermost first; those further out vary.
    """

    inner: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        """Text of the strides, outermost first."""
        outer = self.strides[: self.pattern.rank - 1 - len(self.inner)]
        return (*outer, *map(str, self.inner))


@dataclass(frozen=True, slots=True)
class ScalarArg:
    """A number given at run time; ``type`` is ``i32``, ``i64`` or ``fp32``."""

    name: str
    type: str


Arg = TensorArg | ScalarArg


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of a kernel's parameter list, in order."""

    name: str
    type: str
    divisible: bool = False


class Dialect(Enum):
    """What language a kernel is generated in, where there is a choice."""

    TRITON = "triton"
    GLUON = "gluon"
    CUTEDSL = "cutedsl"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a call fixes of a kernel besides the program.

    Attributes:
        dtypes: element type of each tensor of the signature by name.
        static: sizes compiled in (head dims, group, N, W).
        packed: sequences lie end to end along T (``cu_seqlens``); tensors have no ``B`` axis then.
        lengths: a history's length per sequence comes from the device (caches with spare room).
        aligned: names of tensors whose pointer and strides are multiples of 16 bytes and elements.
        dense: names of states, given and final, each of whose sequences lies in one piece.
        return_lse: the natural-log lse is also written.
        target: ``sm_90`` and the like; plans may differ between targets.
        buckets: sizes rounded up to powers of two, for the choice between plans only.
        given_states: states the caller gives (others start at zero).
        pages: memory axes of each history that lies in pages, by name (axes ``pages`` and ``page``;
            the size of ``page`` is in ``static``).
        pools: states that live in the slots of a pool.
        token_slots: those of them whose value after every token goes to a slot of its own.
        quantised: histories that are stored as e4m3 beside scales.
        tuned: the caller's own table of measured plans, looked at before the committed one.
        dialect: that of a tiled prefill; None lets the tables of measured plans decide.
        chained: kernels that can be are ``chained`` (:class:`KernelPlan`); not in Triton's
            interpreter.
    """

    dtypes: tuple[tuple[str, str], ...]
    static: tuple[tuple[str, int], ...]
    packed: bool = False
    lengths: bool = False
    aligned: frozenset[str] = frozenset()
    dense: frozenset[str] = frozenset()
    return_lse: bool = False
    target: str = "sm_90"
    buckets: tuple[tuple[str, int], ...] = ()
    given_states: frozenset[str] = frozenset()
    pages: tuple[tuple[str, Pattern], ...] = ()
    pools: frozenset[str] = frozenset()
    token_slots: frozenset[str] = frozenset()
    quantised: tuple[Scaled, ...] = ()
    tuned: PlanTable | None = None
    dialect: Dialect | None = None
    chained: bool = False

    def dtype(self, name: str) -> str:
        """Element type of a tensor."""
        return dict(self.dtypes)[name]

    def operand(self, name: str) -> str:
        """Element type that matrix products take a tensor as."""
        wide = {s.name: s.operand for s in self.quantised}
        return wide.get(name) or self.dtype(name)

    def size(self, axis: str) -> int:
        """A static size.

        Raises:
            KeyError: the axis is sized at run time.
        """
        return dict(self.static)[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """Base of every family's plan.

    Attributes:
        op: name of the declaration.
        phase: what the kernel does (``prefill``, ``decode``, ``merge``, ``prepare``, ``state``,
            ``step`` ...).
        template: path of the skeleton below ``templates/``.
        program: the declaration as traced.
        args: parameters in order.
        static: sizes compiled in.
        num_warps: warps of one program instance.
        num_stages: depth of load pipelining.
        precision: how fp32 operands multiply in ``tl.dot`` (``ieee``, ``tf32``, ``tf32x3``).
        chosen: who made the free choices: ``rule``, or the id of an entry of a table.
        chained: it may be launched while the kernel ahead of it still runs, and waits for that
            one's end itself, before it reads or writes anything.
    """

    op: str
    phase: str
    template: str
    program: Program
    args: tuple[Arg, ...]
    static: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int
    precision: str
    chosen: str = RULE
    chained: bool = False

    @property
    def kernel(self) -> str:
        """Name of the generated kernel: ``<op>__<phase>__<8 hex>``."""
        return kernel_name(self, hashlib.sha256(plan_text(self).encode()).hexdigest())

    @property
    def dialect(self) -> Dialect:
        """The language of the template."""
        return Dialect(self.template.partition("/")[0])

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameter list: each tensor's pointer and strides, then scalars."""
        found: list[Parameter] = []
        for arg in self.args:
            if isinstance(arg, ScalarArg):
                found.append(Parameter(arg.name, arg.type))
                continue
            found.append(Parameter(arg.pointer, f"*{arg.dtype}", arg.aligned))
            found.extend(Parameter(s, "i64", arg.aligned) for s in arg.strides)
        return tuple(found)

    def tensor(self, name: str) -> TensorArg:
        """The tensor parameter of that name.

        Raises:
            KeyError: there is none.
        """
        for arg in self.args:
            if isinstance(arg, TensorArg) and arg.name == name:
                return arg
        raise KeyError(name)


def _text(value: object) -> str:
    if isinstance(value, NodeBase):
        return nodes_text(value)  # type: ignore[arg-type]
    if isinstance(value, Program):
        return program_text(value)
    if isinstance(value, Pattern):
        return f"[{value}]"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(
            f"{f.name}={_text(getattr(value, f.name))}" for f in fields(value) if f.name != "loc"
        )
        return f"{type(value).__name__}({inner})"
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(v) for v in value) + ")"
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(map(str, value))) + "}"
    return str(value)


CHAINED = frozenset(
    f"triton/{name}.py.jinja"
    for name in (
        "softmax_tiled", "softmax_merge", "append", "scan_step", "select_score", "select_count",
        "select_pick", "select_sort", "select_fold", "pointwise",
    )
)  # fmt: skip
"""Skeletons of kernels that can wait for the one ahead: those of decode, which are short."""


_P = TypeVar("_P", bound=KernelPlan)


def in_chain(plan: _P, spec: Spec) -> _P:
    """The plan, chained if the call allows it and its skeleton can be."""
    return replace(plan, chained=True) if spec.chained and plan.template in CHAINED else plan


def kernel_name(plan: KernelPlan, digest: str) -> str:
    """``<op>__<phase>__<8 hex>``, from the hash of the plan's text."""
    return f"{plan.op}__{plan.phase}__{digest[:8]}"


def plan_text(plan: KernelPlan) -> str:
    """Canonical text of a plan, one field a line: what keys and names are made from."""
    lines = [f"format = {FORMAT}", f"plan = {type(plan).__name__}"]
    lines += [f"{f.name} = {_text(getattr(plan, f.name))}" for f in fields(plan)]
    return "\n".join(lines) + "\n"
