"""The compile tier: no kernel is assembled twice."""

from collections.abc import Iterator

import pytest

from tests.compile import assembled


@pytest.fixture(autouse=True, scope="session")
def assembled_once(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    cache = getattr(pytestconfig, "cache", None)
    folder = tmp_path_factory.mktemp("assembled") if cache is None else cache.mkdir("assembled")
    with pytest.MonkeyPatch.context() as patch:
        assembled.install(patch, folder)
        yield
