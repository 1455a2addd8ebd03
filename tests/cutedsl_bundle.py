"""``python -m tests.cutedsl_bundle FOLDER``: builds ahead what the GPU tier and benchmarks launch.

No GPU is needed: each call is made here, on the CPU, up to where its kernels would be launched.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from attncc.runtime import backends
from attncc.runtime.adapters import gdp
from attncc.runtime.bundle import Outcome, Work, build_bundle
from attncc.runtime.key import key_of
from attncc.runtime.sources import call_sources
from tests import cutedsl_state_calls
from tests.cutedsl_calls import CALLS, LONG, NO_LSE
from tests.gdp_document import arguments

TARGET = "sm_90"


@contextmanager
def harvested(found: dict[str, Work]) -> Iterator[None]:
    """While this lasts, calls on the CPU note their kernels instead of running."""

    def note(call, analysis, spec, phase, *, parts=None):
        for source in call_sources(call, phase, spec=spec):
            found.setdefault(key_of(source, TARGET).digest, Work(source, TARGET))

    before = backends.run_kernels, backends.has_triton
    backends.run_kernels, backends.has_triton = note, lambda call: True
    try:
        yield
    finally:
        backends.run_kernels, backends.has_triton = before


def of_tests() -> None:
    """The calls of ``tests/gpu/test_cutedsl.py`` and ``test_cutedsl_affine.py``."""
    states = cutedsl_state_calls.CALLS.values()
    for make in (*CALLS.values(), *LONG.values(), NO_LSE, *states):
        op, args, kwargs = make("cpu")
        op.prefill(*args, **kwargs, backend="cutedsl")
    for shape in cutedsl_state_calls.PRODUCTS.values():
        options = {"output_final_state": True, "backend": "cutedsl"}
        gdp.chunk_gated_delta_product(**arguments(shape, "cpu"), **options)


def of_rows(*groups: str) -> None:
    """The cases of ``python -m benchmarks`` about this dialect, and all of the named groups."""
    from benchmarks.groups import load

    own = [c for group in ("prefill", "gdn_prefill") for c in load(group) if c.backend == "cutedsl"]
    others = [c for group in groups for c in load(group) if not c.backend]
    for case in own + others:
        case.ours(case.build(torch.device("cpu")), "cutedsl").fn()


def of_benchmarks() -> None:
    """Those of ``python -m benchmarks --backend cutedsl`` and ``python -m benchmarks.dialects``."""
    from benchmarks import dialects

    of_rows("prefill", "prefill_mods")
    chooser = dialects.Chooser()
    for case in dialects.cases():
        inputs = case.build(torch.device("cpu"))
        for name in dialects.CHOICES:
            chooser.with_choice(name, case.ours(inputs, "cutedsl").fn)()


def main() -> int:
    """Run the command; 1 if a kernel could not be built."""
    p = argparse.ArgumentParser(prog="python -m tests.cutedsl_bundle", description=__doc__)
    p.add_argument("folder", type=Path)
    p.add_argument(
        "--without-benchmarks", action="store_true", help="of those, the rows of this dialect only"
    )
    options = p.parse_args()
    found: dict[str, Work] = {}
    parts: list[Callable[[], None]] = [of_tests]
    parts += [of_rows] if options.without_benchmarks else [of_benchmarks]
    with harvested(found):
        for part in parts:
            part()
    print(f"{len(found)} kernels", flush=True)
    failed: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        if outcome.error is not None:
            failed.append(outcome)
        print(
            f"{outcome.work.source.entry} {outcome.seconds:.1f} s {outcome.error or ''}", flush=True
        )

    build_bundle(found.values(), options.folder, done)
    print(f"{len(found)} kernels, {len(failed)} failed", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
