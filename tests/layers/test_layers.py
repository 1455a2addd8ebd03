"""Decoders on the CPU, small; ``tests/gpu/test_layers.py`` has them at length."""

import pytest
import torch

from tests.layers.decoding import check
from tests.nn.plain import Shape

SMALL = Shape(width=48, heads=2, group=2, dim=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["attention", "delta"])
def test_prefill_and_decode_equal_the_layer_in_fp64(kind: str, dtype: torch.dtype) -> None:
    check(kind, SMALL, prefill=200, decode=40, dtype=dtype, backend="torch")


def test_a_layer_that_selects_rows() -> None:
    check("sparse", SMALL, prefill=60, decode=10, dtype=torch.float32, page=16, backend="torch")


@pytest.mark.parametrize("kind", ["attention", "delta"])
def test_a_prompt_shorter_than_the_convolution(kind: str) -> None:
    check(kind, SMALL, prefill=2, decode=9, dtype=torch.float32, backend="torch")
