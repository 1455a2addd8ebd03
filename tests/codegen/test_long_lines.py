"""Long lines of generated code are broken, and the code stays what it was."""

import ast
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncc.codegen.long_lines import WIDTH, break_lines
from attncc.dsl.errors import RefusedError
from tests.drawn.score import draw_score
from tests.gluon_ops import CASES, CROWDED

NAMES = st.sampled_from(["row_valid[:, None]", "at_Hkv", 'float("-inf")', "'a, (b'", "1.0"])
SIZES = {"D": 64, "E": 64, "D2": 64, "F": 64, "G": 3, "H": 4, "Hkv": 2, "L": 4}


def grown(inner):
    """Calls, parentheses, lists and operators."""
    several = st.lists(inner, min_size=1, max_size=4)
    return st.one_of(
        several.map(lambda x: f"tl.where({', '.join(x)})"),
        several.map(lambda x: f"[{', '.join(x)}]"),
        st.tuples(inner, st.sampled_from("&|+-*<"), inner).map(lambda x: f"({' '.join(x)})"),
        inner.map(lambda x: f"~({x})"),
    )


EXPRESSIONS = st.recursive(NAMES, grown, max_leaves=60)


def code_lines(text):
    """Lines that are neither comments nor part of a docstring."""
    quoted = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            quoted |= set(range(node.lineno, node.end_lineno + 1)) if "\n" in node.value else set()
    lines = enumerate(text.splitlines(), 1)
    return [x for at, x in lines if at not in quoted and not x.lstrip().startswith("#")]


@given(st.lists(EXPRESSIONS, min_size=1, max_size=3), st.sampled_from(["", "  # [m] why, (so"]))
def test_breaking_changes_no_token(values, comment):
    lines = [f"    x{i} = {value}{comment}" for i, value in enumerate(values)]
    text = "\n".join(['def kernel(x):\n    """Text.\n\n    More (of it.\n    """', *lines, ""])
    broken = break_lines(text)
    assert ast.dump(ast.parse(broken)) == ast.dump(ast.parse(text))
    assert broken.count("\n") >= text.count("\n") and broken.endswith("\n")


def test_arguments_come_on_lines_of_their_own():
    text = f"    x = tl.load({'a' * 60}, mask=({'b' * 40}), other=0.0)  # [m] values\n"
    assert break_lines(text).splitlines() == [
        "    # [m] values",
        "    x = tl.load(",
        f"        {'a' * 60},",
        f"        mask=({'b' * 40}),",
        "        other=0.0",
        "    )",
    ]
    assert break_lines(text.replace("a" * 60, "a")) == text.replace("a" * 60, "a")


@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("name", [*CASES, *CROWDED])
def test_generated_files_have_no_long_line_of_code(name, backend):
    op = {**CASES, **CROWDED}[name]
    for text in op.source(sizes=SIZES, backend=backend).values():
        assert all(len(line) <= WIDTH for line in code_lines(text))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_declarations_have_no_long_line_of_code(seed):
    drawn = draw_score(Random(seed), (64,))
    try:
        texts = drawn.op.source(sizes=SIZES).values()
    except RefusedError:
        return
    for text in texts:
        assert all(len(line) <= WIDTH for line in code_lines(text))
