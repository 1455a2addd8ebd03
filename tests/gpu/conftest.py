"""Each test draws its own inputs again, whatever ran before it and in which process."""

import zlib

import pytest
import torch

from attncc.runtime import api

PLAIN = (torch.Tensor, float, int, torch.dtype, type(None))


@pytest.fixture(autouse=True)
def seeded(request):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def checked_by_the_tests(request, monkeypatch):
    """These tests are checks themselves: kernels need none before their first launch."""
    if request.path.name != "test_selfcheck.py":
        monkeypatch.setattr("attncc.runtime.selfcheck.suspicion", lambda entry, plan: None)


def elsewhere(value, device):
    """A tensor on another device; anything else as it is."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.fixture(autouse=True)
def oracles_of_scans_on_the_cpu(monkeypatch):
    """Token by token an oracle is thousands of tiny kernels, and a device that many processes share
    switches between them.
    """
    on_the_spot = api.Op.reference

    def reference(self, *args, **kwargs):
        values = [v for v in (*args, *kwargs.values()) if not isinstance(v, PLAIN)]
        if values or self.declaration.trace().scan is None:
            return on_the_spot(self, *args, **kwargs)
        args, named = (
            [elsewhere(v, "cpu") for v in args],
            {n: elsewhere(v, "cpu") for n, v in kwargs.items()},
        )
        found = on_the_spot(self, *args, **named)
        if isinstance(found, torch.Tensor):
            return found.cuda()
        return type(found)(*(x.cuda() for x in found))

    monkeypatch.setattr(api.Op, "reference", reference)
