"""Every example runs to its end; its own assertions are the test."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


FOUND = sorted([*EXAMPLES.glob("[0-9]*.py"), EXAMPLES / "gdp_prefill.py"])


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.stem)
def test_example_runs(path, capsys):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert capsys.readouterr().out.strip()
