"""From a plan and its printed expressions to source text: the one module that knows Jinja.

A skeleton sees the fields of its plan, the plan's ``kernel`` and ``parameters``, and the fields of
the family's printed code; anything else is an error. After rendering the text must parse as Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncc.codegen.long_lines import break_lines
from attncc.codegen.plan import KernelPlan, plan_text

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
DERIVED = ("kernel", "parameters")


@dataclass(frozen=True, slots=True)
class Source:
    """A generated file: text, name of its entry, and the plan it came from."""

    text: str
    entry: str
    plan: KernelPlan

    @property
    def digest(self) -> str:
        """Hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def _indent(text: str | tuple[str, ...], by: int) -> str:
    """Printed lines as one block: joined, each but the first indented by ``by`` spaces."""
    lines = text.splitlines() if isinstance(text, str) else list(text)
    return ("\n" + " " * by).join(lines)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2  # here: importing attncc does not need it, and it takes as long as the rest

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["block"] = _indent
    return env


def context(plan: KernelPlan, code: object) -> dict[str, Any]:
    """Names a template may use."""
    names = {f.name: getattr(plan, f.name) for f in fields(plan)}
    names |= {name: getattr(plan, name) for name in DERIVED}
    names |= {f.name: getattr(code, f.name) for f in fields(code)}  # type: ignore[arg-type]
    return names


def render(plan: KernelPlan, code: object) -> Source:
    """Fill the plan's template.

    Args:
        plan: the frozen plan.
        code: the family's printed expressions (a frozen dataclass of strings and tuples of lines).

    Returns:
        The source; its text parses as Python.
    """
    text = break_lines(_environment().get_template(plan.template).render(context(plan, code)))
    ast.parse(text)
    return Source(text, plan.kernel, plan)


def template_variables() -> Iterator[tuple[str, set[str], set[str]]]:
    """For each template: its name, the names it uses, and the names its plan and code offer."""
    import jinja2.meta

    from attncc.codegen.pipeline import TEMPLATE_TYPES

    env = _environment()
    for name in sorted(env.list_templates(filter_func=lambda n: n.endswith(".py.jinja"))):
        source = (TEMPLATES / name).read_text()
        used = jinja2.meta.find_undeclared_variables(env.parse(source))
        plan_type, code_type = TEMPLATE_TYPES[name]
        offered = {f.name for f in fields(plan_type)} | {f.name for f in fields(code_type)}
        yield name, used, offered | set(DERIVED)


def key_text(source: Source) -> str:
    """What identifies a generated file: its plan's canonical text."""
    return plan_text(source.plan)
