"""A small decoder: an embedding, one layer of ``attncc.nn`` with its residual, an output head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attncc as ac
from tests.nn.plain import PLAIN, Shape, double, module


@dataclass(frozen=True)
class Decoder:
    """Tokens to logits, so that greedy decoding has something to choose.

    Attributes:
        kind: the layer, by its name in ``tests.nn.plain``.
        shape: its sizes.
        layer: the module.
        embed: [vocabulary, width].
        head: [width, vocabulary].
    """

    kind: str
    shape: Shape
    layer: ac.nn.LayerModule
    embed: Tensor
    head: Tensor

    def __call__(self, tokens: Tensor, kept: ac.nn.Kept) -> Tensor:
        """Logits of tokens that come after those that are kept."""
        x = self.embed[tokens]
        phase = "prefill" if tokens.shape[1] > 1 else "decode"
        return (x + self.layer(x, kept=kept, phase=phase)) @ self.head

    def whole(self, tokens: Tensor, *, exact: bool) -> Tensor:
        """Logits of whole sequences in plain PyTorch: in fp64, or in the weights' dtype."""
        weights = {n: p.detach() for n, p in self.layer.named_parameters()}
        embed, head = self.embed, self.head
        if exact:
            weights, embed, head = double(weights), embed.double(), head.double()
        x = embed[tokens]
        return (x + PLAIN[self.kind](weights, x, self.shape)) @ head


def decoder(
    kind: str, shape: Shape, vocabulary: int, dtype: torch.dtype, device: str, **options: Any
) -> Decoder:
    """Random weights of a fixed seed."""
    g = torch.Generator().manual_seed(0)
    embed = torch.randn(vocabulary, shape.width, generator=g).to(device, dtype)
    head = torch.randn(shape.width, vocabulary, generator=g) * shape.width**-0.5
    layer = module(kind, shape, dtype, device, **options)
    return Decoder(kind, shape, layer, embed, head.to(device, dtype))
