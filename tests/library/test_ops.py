"""``attncc.ops``: every file of the library is one op of that name."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import attncc as ac
from attncc.dsl import library

FILES = sorted(p.stem for p in Path(library.__path__[0]).glob("*.py") if p.stem != "__init__")


def test_every_file_is_an_op_and_there_are_no_others() -> None:
    assert list(ac.ops.__all__) == FILES == dir(ac.ops)
    with pytest.raises(AttributeError, match="the library has no op 'nothing'; it has alibi"):
        _ = ac.ops.nothing
    assert ac.ops.kda is ac.ops.kda


@pytest.mark.parametrize("name", FILES)
def test_an_op_is_named_as_its_file_is_short_and_says_what_it_takes(name: str) -> None:
    declaration = getattr(ac.ops, name).declaration
    module = import_module(f"{library.__name__}.{name}")
    assert declaration.name == name and declaration.doc and module.__doc__
    function = ast.parse(inspect.getsource(declaration.body)).body[0]
    assert isinstance(function, ast.FunctionDef)
    words, *_ = function.body
    lines = inspect.getsource(declaration.body).splitlines()
    assert 3 <= len(lines) - (words.end_lineno - words.lineno + 1) <= 25
