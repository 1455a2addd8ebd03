"""Each test draws its own inputs again, whatever ran before it and in which process."""

import os
import zlib

import pytest
import torch

import attncc as ac
from attncc.runtime import api
from tests.gpu.checking import on_cpu

PLAIN = (torch.Tensor, ac.StatePool, float, int, torch.dtype, type(None))


@pytest.fixture(autouse=True)
def seeded(request):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def checked_by_the_tests(request, monkeypatch):
    """These tests are checks themselves: kernels need none before their first launch."""
    if request.path.name != "test_selfcheck.py":
        monkeypatch.setattr("attncc.runtime.selfcheck.suspicion", lambda entry, plan: None)


@pytest.fixture(autouse=True)
def oracles_of_scans_on_the_cpu(monkeypatch):
    """See :func:`tests.gpu.checking.on_cpu`; results come back to the device."""
    on_the_spot = api.Op.reference

    def reference(self, *args, **kwargs):
        values = [v for v in (*args, *kwargs.values()) if not isinstance(v, PLAIN)]
        if values or self.declaration.trace().scan is None:
            return on_the_spot(self, *args, **kwargs)
        found = on_the_spot(self, *on_cpu(args), **on_cpu(kwargs))
        if isinstance(found, torch.Tensor):
            return found.cuda()
        return type(found)(*(x.cuda() for x in found))

    monkeypatch.setattr(api.Op, "reference", reference)


def pytest_runtest_logreport(report):
    """A line a test that passed (or has nothing to run on here), for ``spread.py --done``."""
    path = os.environ.get("ATTNCC_TEST_DONE")
    if path and (report.passed if report.when == "call" else report.skipped):
        with open(path, "a") as file:
            file.write(f"{report.nodeid}\n")
