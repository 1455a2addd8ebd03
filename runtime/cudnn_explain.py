"""What an explanation says of cuDNN: the graph of a call, or why there is none."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from attncc.codegen.emit.cudnn import SEQLENS, GraphPlan, Laid, describe_graph
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.dsl.axes import Pattern
from attncc.dsl.ir import Lifetime, Program
from attncc.runtime.cudnn_found import package_problem, problem, target_problem
from attncc.runtime.cudnn_graph import built
from attncc.runtime.outputs import shape_of

_USUAL = {"B": 8, "T": 4096}
"""Sizes that steer nothing here; heads that are not given count as 8."""


def typical_graph(program: Program, spec: Spec) -> GraphPlan | Refusal:
    """The graph of packed, dense tensors with the sizes and dtypes of a spec."""
    form = analyse(program).affine
    if form is None:
        return Refusal("cuDNN has no such node: not one affine state", program.loc)
    tensors = [t for t in program.tensors if not t.scalar]
    given = [t for t in tensors if not t.optional or t.name in program.given]
    patterns = {t.name: _packed(t.pattern) for t in given}
    patterns |= {o.name: _packed(o.pattern) for o in program.outputs}
    patterns |= {f"final {t.name}": t.pattern for t in tensors if t.lifetime is Lifetime.STATE}
    axes = [a for p in patterns.values() for a in p.axes]
    sizes = {a: 8 for a in axes} | _USUAL | dict(spec.static)
    dtypes = dict(spec.dtypes)
    laid = {
        n: _dense(p, sizes, dtypes.get(n.removeprefix("final "), "fp32"))
        for n, p in patterns.items()
    }
    laid[SEQLENS] = Laid(Pattern((("i",),)), (sizes["B"] + 1,), (1,), "i32")
    scalars = {t.name: 1.0 for t in program.tensors if t.scalar}
    return describe_graph(program, form, laid, sizes, scalars)


def _packed(pattern: Pattern) -> Pattern:
    return pattern.without("B") if "T" in pattern.axes else pattern


def _dense(pattern: Pattern, sizes: Mapping[str, int], dtype: str) -> Laid:
    dims = shape_of(pattern, sizes)
    return Laid(pattern, dims, _strides(dims), dtype)


def _strides(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(dims[:0:-1], lambda a, b: a * b, initial=1))[::-1]


def cudnn_lines(program: Program, spec: Spec, phase: str) -> list[str]:
    """Lines for a scan: the node, or what stands in the way, in cuDNN's words where it is here."""
    if program.scan is None or phase != "prefill":
        return []
    found = typical_graph(program, spec)
    if isinstance(found, Refusal):
        return [f"  no cuDNN graph: {found}"]
    missing = target_problem(spec.target) or package_problem()
    if missing is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        missing = problem(device)
        if missing is None and isinstance(got := built(found, device), str):
            missing = got
    if missing is not None:
        return [f"  no cuDNN graph: {missing}"]
    rows = dict(found.attributes)["num_householder"]
    return [f"  as a cuDNN graph (backend='cudnn', packed): node {found.node}, {rows} rows a token"]
