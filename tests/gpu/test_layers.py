"""Decoder layers of random weights on the GPU: 1000 tokens of prefill, 256 of decode, in bf16."""

import pytest
import torch

from tests.gpu.checking import DEVICE
from tests.layers.decoding import check
from tests.nn.plain import Shape

pytestmark = pytest.mark.gpu
LARGE = Shape(width=256, heads=2, group=4, dim=64)


@pytest.mark.parametrize("kind", ["attention", "delta"])
def test_prefill_of_1000_and_decode_of_256_equal_the_layer_in_fp64(kind):
    check(
        kind, LARGE, prefill=1000, decode=256, dtype=torch.bfloat16, device=DEVICE, backend="triton"
    )
