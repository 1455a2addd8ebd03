"""What every tier shares: the profile of hypothesis, and which tests this process can run."""

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent

# A loaded machine of two cores says nothing about one example's time.
settings.register_profile("attncc", deadline=None, print_blob=True)
settings.load_profile("attncc")


def pytest_report_header() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "numpy"))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def has_gluon() -> bool:
    from attncc.runtime.dialects import gluon_problem

    return gluon_problem() is None


def has_cutedsl() -> bool:
    from attncc.runtime.compile_cutedsl import cutedsl_problem

    return cutedsl_problem() is None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    other_tier = "compile" if interpreted else "interpreter"  # one process cannot be both
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    foreign = [i for i in items if i.path.relative_to(TESTS).parts[0] == other_tier]
    if any(i.get_closest_marker("gluon") for i in items) and not has_gluon():
        foreign += [i for i in items if i.get_closest_marker("gluon")]
    if any(i.get_closest_marker("cutedsl") for i in items) and not has_cutedsl():
        foreign += [i for i in items if i.get_closest_marker("cutedsl")]
    if foreign:
        config.hook.pytest_deselected(items=foreign)
        items[:] = [i for i in items if i not in foreign]
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        if tier == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and (interpreted or not has_gpu()):
            item.add_marker(no_gpu)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing"
    )
    parser.addoption(
        "--examples", type=int, help="random declarations a property draws, other ones in each run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--examples"):
        from tests.examples import CHOSEN

        CHOSEN[:] = [config.getoption("--examples")]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with ``tests/golden/<name>``, or write it with ``--update-golden``."""

    def check(name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, (
            "run with --update-golden and read the diff"
        )

    return check
