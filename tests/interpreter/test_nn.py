"""Complete layers whose ops are generated kernels, on the CPU."""

import pytest
import torch

from tests.nn.plain import Shape, module, whole
from tests.tolerance import assert_close

TINY = Shape(width=16, heads=1, group=2, dim=16, kernel=3)


@pytest.mark.parametrize("kind", ["attention", "delta"])
def test_prefill_and_decode_in_kernels(kind: str) -> None:
    with torch.no_grad():
        layer = module(kind, TINY, torch.float32, backend="triton")
        x = torch.randn(2, 12, TINY.width, generator=torch.Generator().manual_seed(0))
        exact, rough = whole(kind, layer, x, TINY)
        kept = layer.allocate(2, 16, page=8)
        outs = [layer(x[:, :9], kept=kept), layer.decode(x[:, 9:11], kept)]
        outs.append(layer.decode(x[:, 11:], kept))
        assert_close(torch.cat(outs, 1), exact, rough, torch.float32)
