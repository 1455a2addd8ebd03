"""From a plan and its printed expressions to source text: the one module that knows Jinja.

A skeleton sees the fields of its plan, the plan's ``kernel`` and ``parameters``, and the fields of
the family's printed code; anything else is an error. After rendering the text must parse as Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from attncc.codegen.long_lines import break_lines
from attncc.codegen.plan import KernelPlan, kernel_name, plan_text

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
DERIVED = ("kernel", "parameters")


class Source:
    """A generated file: the plan it comes from, and its text once somebody asks for it.

    The plan and this version of the package decide every character of the code, so what is
    compiled already is found by the plan, and nothing is printed.
    """

    __slots__ = ("_printer", "_text", "digest", "entry", "plan")

    def __init__(self, plan: KernelPlan, printer: Callable[[Any], object]) -> None:
        """Args: a frozen plan, and the function that prints its expressions."""
        self.plan = plan
        self.digest = hashlib.sha256(plan_text(plan).encode()).hexdigest()
        self.entry = kernel_name(plan, self.digest)
        self._printer = printer
        self._text: str | None = None

    def __eq__(self, other: object) -> bool:
        """Whether both are one kernel; the lines that comments name may be others."""
        return self.digest == other.digest if isinstance(other, Source) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<source of {self.entry}>"

    @property
    def text(self) -> str:
        """The file; it parses as Python.

        Raises:
            RefusedError: an expression has no text in the plan's dialect.
        """
        if self._text is None:
            self._text = _filled(self.plan, self._printer(self.plan))
        return self._text


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


def render(plan: KernelPlan, printer: Callable[[Any], object]) -> Source:
    """The generated file of a plan; its template is filled when its text is asked for.

    Args:
        plan: the frozen plan.
        printer: from the plan to the family's printed expressions (a frozen dataclass of strings
            and tuples of lines).
    """
    return Source(plan, printer)


def _filled(plan: KernelPlan, code: object) -> str:
    text = break_lines(_environment().get_template(plan.template).render(context(plan, code)))
    ast.parse(text)
    return text


def template_variables() -> Iterator[tuple[str, set[str], set[str]]]:
    """For each template: its name, the names it uses, and the names its plan and code offer."""
    import jinja2.meta

    from attncc.codegen.printers import printer

    env = _environment()
    for name in sorted(env.list_templates(filter_func=lambda n: n.endswith(".py.jinja"))):
        source = (TEMPLATES / name).read_text()
        used = jinja2.meta.find_undeclared_variables(env.parse(source))
        offered = {f.name for t in get_type_hints(printer(name)).values() for f in fields(t)}
        yield name, used, offered | set(DERIVED)
