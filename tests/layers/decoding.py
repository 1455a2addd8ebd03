"""What both tiers ask of a decoder: the logits, and the tokens it would choose."""

from typing import Any

import torch

from tests.layers.model import decoder
from tests.nn.plain import Shape
from tests.tolerance import max_error

VOCABULARY = 24


@torch.no_grad()
def check(
    kind: str, shape: Shape, *, prefill: int, decode: int, dtype: torch.dtype,
    device: str = "cpu", batch: int = 2, page: int | None = None, **options: Any,
) -> None:  # fmt: skip
    """Prefill, then decode teacher-forced and greedily, all against fp64 on the same weights."""
    model = decoder(kind, shape, VOCABULARY, dtype, device, **options)
    g = torch.Generator().manual_seed(1)
    total = prefill + decode
    tokens = torch.randint(VOCABULARY, (batch, total), generator=g).to(device)

    kept = model.layer.allocate(batch, total, page=page)
    logits = [model(tokens[:, :prefill], kept)]
    logits += [model(tokens[:, i : i + 1], kept) for i in range(prefill, total)]
    forced = torch.cat(logits, 1)
    exact, rough = (model.whole(tokens, exact=e) for e in (True, False))
    bound = allowed(rough, exact, dtype)
    error = max_error(forced, exact, "logits")
    assert error <= bound, f"logits: {error:.3e} > {bound:.3e}"

    kept = model.layer.allocate(batch, total, page=page)
    path = [tokens[:, :prefill]]
    chosen = [model(path[0], kept)[:, -1].argmax(-1, keepdim=True)]
    for _ in range(decode - 1):
        path.append(chosen[-1])
        chosen.append(model(path[-1], kept)[:, -1].argmax(-1, keepdim=True))
    along = torch.cat(path, 1)
    exact, rough = (model.whole(along, exact=e)[:, prefill - 1 :] for e in (True, False))
    bound = allowed(rough, exact, dtype)
    greedy, (first, second) = torch.cat(chosen, 1), exact.topk(2, -1).values.unbind(-1)
    near = first - second <= 2 * bound
    wrong = (greedy != exact.argmax(-1)) & ~near
    assert not bool(wrong.any()), f"other tokens at {wrong.nonzero()[:4].tolist()}"
    assert float(near.double().mean()) < 0.8, "a bound this wide says nothing about tokens"


def allowed(eager: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> float:
    """The contract's bound: twice the eager layer's error and the rounding of the largest logit."""
    largest = float(exact.abs().max())
    return 2 * (max_error(eager, exact, "eager logits") + torch.finfo(dtype).eps * largest)
