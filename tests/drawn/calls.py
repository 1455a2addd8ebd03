"""Arguments of calls to drawn declarations: lengths, dtypes, strides, what is absent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import torch

from attncc.dsl.axes import Pattern, parse
from tests.drawn.source import Arg, Drawn

LENGTHS = (0, 1, 2, 3, 5, 8, 17, 33, 63, 64, 65, 100, 130)
SHORT = (0, 1, 2, 3, 5, 8, 17)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HISTORY = ("Cache", "Memory")
FP32 = ("gate", "alpha", "coef")  # roles whose tensors may stay fp32 beside narrower operands


@dataclass(frozen=True, repr=False)
class Drawing:
    """A declaration and one call of it."""

    drawn: Drawn
    kwargs: Mapping[str, Any]
    note: str

    def __repr__(self) -> str:
        return f"{self.drawn!r}# {self.note}\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def values(role: str, shape: Sequence[int], g: torch.Generator) -> torch.Tensor:
    """Values as an argument of that role has them, in fp32."""
    x = torch.randn(list(shape), generator=g)
    match role:
        case "unit":
            return torch.nn.functional.normalize(x, dim=-1)
        case "coef":
            return x.sigmoid()
        case "alpha":
            return x.tanh()
        case "gate":
            return -x.abs()
        case "label":
            return x.gt(0.3).int()
        case _:
            return x


def restrided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in other memory; the innermost axis stays dense."""
    if how == "swapped" and x.dim() > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "sliced" and x.dim() > 1:
        wide = x.new_zeros([*x.shape[:-1], x.shape[-1] + 3])
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if how == "strided" and x.dim() > 1:
        return torch.stack([x, x], 1)[:, 1]
    return x


def shape_of(pattern: Pattern, sizes: Mapping[str, int]) -> list[int]:
    shape = []
    for dim in pattern.dims:
        n = 1
        for axis in dim:
            n *= sizes[axis]
        shape.append(n)
    return shape


def scalar(arg: Arg, r: Random) -> Any:
    match arg.role:
        case "width":
            return r.choice((1, 2, 7, 40))
        case "cap":
            return r.choice((2.0, 30.0))
        case _:
            return r.choice((0.0, 0.25, 1.5))


@dataclass(frozen=True)
class Point:
    """Where a call stands: sizes of B, T, S, or lengths of packed sequences."""

    batch: int
    tokens: int
    history: int
    lengths: tuple[int, ...] | None = None
    histories: tuple[int, ...] | None = None


def draw_point(r: Random, drawn: Drawn, lengths: Sequence[int] = LENGTHS) -> Point:
    """Dense or packed, of any lengths."""
    if r.randint(0, 3) < 3:
        t = r.choice(lengths)
        s = t + r.choice((0, 0, 1, 9, 40, -1, -3)) if not drawn.scan else 0
        return Point(r.choice((1, 2, 2, 3, 0)), t, max(s, 0))
    each = tuple(r.choice(lengths) for _ in range(r.randint(1, 3)))
    more = tuple(max(n + r.choice((0, 1, 9, -1)), 0) for n in each)
    past = more if not drawn.scan and r.randint(0, 1) else each
    return Point(len(each), sum(each), sum(past), each, past)


def arguments(
    r: Random, drawn: Drawn, point: Point, dtype: torch.dtype, *, device: str = "cpu",
    whole: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Tensors and numbers of one call; ``whole`` leaves nothing out and restrides nothing."""
    sizes = {**dict(drawn.sizes), "B": point.batch, "T": point.tokens, "S": point.history}
    g = torch.Generator().manual_seed(r.randint(0, 2**31 - 1))
    found: dict[str, Any] = {}
    for arg in drawn.args:
        absent = (arg.default is not None or arg.role == "state") and r.randint(0, 3) == 3
        if absent and not whole:
            continue
        if arg.lifetime == "param":
            found[arg.name] = scalar(arg, r)
            continue
        pattern = parse(arg.pattern)
        if arg.lifetime == "Window":  # W rows in the body, W - 1 kept
            sizes = {**sizes, "W": sizes["W"] - 1}
        if point.lengths is not None and {"T", "S"} & set(pattern.axes):
            pattern = pattern.without("B")
        x = values(arg.role, shape_of(pattern, sizes), g)
        if arg.role == "gate" and x.numel() and r.randint(0, 7) == 7:
            x.view(-1)[:: r.choice((7, 50))] = -torch.inf
        if arg.role == "state":
            x = x.to(r.choice((torch.float32, torch.float32, torch.bfloat16)))
        elif x.is_floating_point() and not (arg.role in FP32 and r.randint(0, 1)):
            x = x.to(dtype)
        how = "dense" if whole else r.choice(("dense", "dense", "swapped", "sliced", "strided"))
        found[arg.name] = restrided(x.to(device), how)
    return found


def options(drawn: Drawn, point: Point, *, device: str = "cpu") -> dict[str, Any]:
    """What a call needs beside its tensors."""
    found: dict[str, Any] = {}
    if point.lengths is not None:
        found["cu_seqlens"] = offsets(point.lengths, device)
    if point.histories is not None and not drawn.scan:
        found["cu_seqlens_k"] = offsets(point.histories, device)
    found["sizes"] = dict(drawn.sizes)
    return found


def offsets(lengths: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """cu_seqlens of lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def draw_call(
    r: Random, drawn: Drawn, lengths: Sequence[int] = LENGTHS, *, device: str = "cpu",
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Drawing:  # fmt: skip
    """One call of a declaration."""
    point, dtype = draw_point(r, drawn, lengths), r.choice(dtypes)
    kwargs = arguments(r, drawn, point, dtype, device=device) | options(drawn, point, device=device)
    if "lse" in drawn.tags and r.randint(0, 1):
        kwargs["return_lse"] = True
    given = ", ".join(
        f"{n} {str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else f"{n}={x}"
        for n, x in kwargs.items()
    )
    return Drawing(drawn, kwargs, f"{point}: {given}")
