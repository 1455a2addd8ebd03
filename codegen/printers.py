"""Who prints the expressions of each template, and the generated file of a plan.

A printer's module is imported when a file has to be printed; where the store has what a plan
compiles to, none is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from attncc.codegen.plan import KernelPlan
from attncc.codegen.render import Source, render

PRINTERS: dict[str, tuple[str, str]] = {
    "triton/softmax_tiled.py.jinja": ("softmax", "tiled_code"),
    "gluon/softmax_prefill.py.jinja": ("gluon_softmax", "warp_code"),
    "gluon/softmax_shared.py.jinja": ("gluon_shared", "shared_code"),
    "gluon/select_shared.py.jinja": ("gluon_picked", "picked_code"),
    "cutedsl/softmax_prefill.py.jinja": ("cutedsl_softmax", "cute_code"),
    "triton/softmax_merge.py.jinja": ("softmax_finish", "merge_code"),
    "triton/append.py.jinja": ("append", "append_code"),
    "triton/select_score.py.jinja": ("selected", "score_code"),
    "triton/select_count.py.jinja": ("selected", "stage_code"),
    "triton/select_pick.py.jinja": ("selected", "stage_code"),
    "triton/select_sort.py.jinja": ("selected", "sort_code"),
    "triton/select_fold.py.jinja": ("gathered", "gather_code"),
    "triton/scan_step.py.jinja": ("step", "emit"),
    "triton/scan_running.py.jinja": ("running", "emit"),
    "triton/window.py.jinja": ("window", "emit"),
    "triton/pointwise.py.jinja": ("pointwise", "emit"),
    "triton/chunk_table.py.jinja": ("chunk_table", "chunk_table_code"),
    "triton/affine_prepare.py.jinja": ("solve", "emit_prepare"),
    "triton/affine_mix.py.jinja": ("mix", "emit_mix"),
    "triton/affine_state.py.jinja": ("carry", "emit_state"),
    "triton/affine_start.py.jinja": ("segments", "emit_start"),
    "triton/affine_bases.py.jinja": ("across", "emit_bases"),
    "triton/affine_columns.py.jinja": ("across", "emit_columns"),
    "gluon/affine_state.py.jinja": ("gluon_state", "warp_state_code"),
    "gluon/affine_systems.py.jinja": ("gluon_systems", "systems_code"),
    "gluon/affine_systems_blocks.py.jinja": ("gluon_systems", "systems_code"),
    "gluon/affine_keys.py.jinja": ("gluon_keys", "keys_code"),
    "gluon/affine_solve.py.jinja": ("gluon_keys", "inverse_code"),
    "cutedsl/affine_state.py.jinja": ("cutedsl_state", "cute_state_code"),
}
"""By skeleton: module of ``codegen.emit`` and its function from the plan to the printed pieces.

The function's annotations name the plan and the pieces whose fields the skeleton may use.
"""


def printer(template: str) -> Callable[[Any], object]:
    """The function that prints a template's expressions."""
    module, name = PRINTERS[template]
    found: Callable[[Any], object] = getattr(import_module(f"attncc.codegen.emit.{module}"), name)
    return found


def source(plan: KernelPlan) -> Source:
    """The generated file of a plan; nothing is printed until its text is asked for."""
    return render(plan, _print)


def _print(plan: KernelPlan) -> object:
    return printer(plan.template)(plan)
