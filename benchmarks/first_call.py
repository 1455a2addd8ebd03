"""What a new process pays: imports and the first call, each timed in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from benchmarks.case import Inputs, Work

LIMIT_S = 180
"""A process that takes longer is stopped; the row says so."""
INSTALLED = ("torch", "triton", "sympy")
"""Packages whose bytecode is there before anything is measured, as after an installation."""


class ProcessError(RuntimeError):
    """A measured process failed, or took too long."""


def work(
    inputs: Inputs, who: str, field: str, backend: str = "triton", *, warm: bool, times: int = 1
) -> Work:
    """A work whose time is measured in new processes.

    The processes that gave the answer count too: a cold one takes seconds.

    Args:
        inputs: q, k and v of a decode call, which every process computes and gives back.
        who: ``attncc``, ``flex`` or ``torch``.
        field: which of its times: ``first_ms`` or ``import_ms``.
        backend: of our call.
        warm: compiled kernels were stored by an earlier process, whose time does not count; else
            the store is empty.
        times: the least number of processes whose median is the time.
    """
    from benchmarks.case import Work

    device = inputs["q"].device
    kept = tempfile.TemporaryDirectory(prefix="attncc-bench-") if warm else None
    found: list[float] = []

    def fn() -> dict[str, torch.Tensor]:
        with _folder(kept) as folder:
            result = _process({n: inputs[n] for n in "qkv"}, who, backend, folder)
        found.append(float(result[field]))
        return {"o": result["o"].to(device)}

    def measure() -> float:
        while len(found) < times + warm:
            fn()
        return median(found[warm:])

    return Work(fn, measure=measure)


@cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    """Where all processes keep bytecode, as an installation does, whatever this machine does."""
    made = tempfile.TemporaryDirectory(prefix="attncc-bench-")
    found = [spec for name in INSTALLED if (spec := find_spec(name)) is not None]
    places = [place for spec in found for place in spec.submodule_search_locations or ()]
    if places:  # its exit code is about files that are no modules of this Python
        command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *places]
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": made.name}
        subprocess.run(command, env=environment, capture_output=True, check=False)
    return made


@contextmanager
def _folder(kept: tempfile.TemporaryDirectory[str] | None) -> Iterator[Path]:
    if kept is not None:
        yield Path(kept.name)
        return
    with tempfile.TemporaryDirectory(prefix="attncc-bench-") as name:
        yield Path(name)


def _process(
    tensors: Mapping[str, torch.Tensor], who: str, backend: str, folder: Path
) -> dict[str, Any]:
    import torch

    from attncc.runtime.knobs import CACHE_DIR

    with tempfile.TemporaryDirectory(prefix="attncc-bench-") as name:
        data, out = Path(name) / "inputs.pt", Path(name) / "output.pt"
        torch.save({n: t.cpu() for n, t in tensors.items()}, data)
        where = str(next(iter(tensors.values())).device)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            CACHE_DIR: str(folder / "attncc"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "PYTHONPYCACHEPREFIX": _bytecode().name,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "benchmarks.first_call", who, backend, where]
        try:
            done = subprocess.run(
                [*command, str(data), str(out)], env=environment, capture_output=True, text=True,
                timeout=LIMIT_S, check=False, cwd=Path(__file__).resolve().parents[1],
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ProcessError(f"took more than {LIMIT_S} s") from error
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
            raise ProcessError(f"exit {done.returncode}: {said}")
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found | {"o": torch.load(out)}


def main(who: str, backend: str, where: str, data: str, out: str) -> dict[str, float]:
    """The measured process: times in ms; the first call's comes after imports and CUDA's start."""
    start = time.perf_counter()
    import torch

    if who == "attncc":
        import attncc  # noqa: F401
    times = {"import_ms": (time.perf_counter() - start) * 1e3}
    call = _CALLS[who](backend)
    import triton  # noqa: F401  (the first call imports it otherwise)

    cuda = where.startswith("cuda")
    inputs = {n: t.to(where) for n, t in torch.load(data).items()}
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        result = call(inputs)
    if cuda:
        torch.cuda.synchronize()
    times["first_ms"] = (time.perf_counter() - start) * 1e3
    torch.save(result.cpu(), out)
    return times


def _attncc(backend: str) -> Callable[[Mapping[str, Any]], Any]:
    from attncc import ops

    return lambda x: ops.attention.decode(x["q"], x["k"], x["v"], backend=backend)


def _flex(backend: str) -> Callable[[Mapping[str, Any]], Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    def call(x: Mapping[str, Any]) -> Any:
        q, k, v = (x[n].transpose(1, 2) for n in "qkv")
        compiled = torch.compile(flex_attention, dynamic=False)
        return compiled(q, k, v, enable_gqa=True).transpose(1, 2)

    return call


def _torch(backend: str) -> Callable[[Mapping[str, Any]], Any]:
    from torch.nn.functional import scaled_dot_product_attention

    def call(x: Mapping[str, Any]) -> Any:
        q, k, v = (x[n].transpose(1, 2) for n in "qkv")
        return scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return call


_CALLS = {"attncc": _attncc, "flex": _flex, "torch": _torch}

if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
