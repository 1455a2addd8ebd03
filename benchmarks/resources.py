"""What compiled kernels of the benchmarks need: registers, shared memory, spills; no GPU needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import line

HEAD = (
    "op, phase",
    "dims",
    "kernel",
    "dialect",
    "target",
    "warps",
    "registers",
    "shared",
    "spills",
)
TARGETS = ("sm_90", "sm_100")
HIDDEN = ("B", "T", "S", "H", "Gq", "Gv")
"""Axes that a line does not tell: lengths, and heads where others have them."""


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels of one op that a group of the benchmarks times.

    Attributes:
        op: the library's name of it.
        phase: ``prefill`` or ``decode``.
        sizes: head dims, groups, and lengths that steer the choice of a plan.
        backend: ``auto`` for what the tables of plans choose on the target.
        packed: of packed sequences.
    """

    op: str
    phase: str
    sizes: Mapping[str, int]
    backend: str = "auto"
    packed: bool = False


SOFTMAX = {"D": 128, "E": 128, "G": 4, "Hkv": 8}
LATENT = {"H": 128, "D": 128, "P": 64, "R": 512, "V": 128}
SCAN = {"K": 128, "V": 128}
LONG = {"B": 1, "T": 32768}
RULE = {**SCAN, **LONG, "Hk": 16, "G": 2}
ALONE = {**SCAN, **LONG, "Hk": 16, "H": 16, "G": 1, "Gq": 1, "Gv": 1}
WORKS = (
    Work("attention", "decode", {**SOFTMAX, "B": 64, "S": 8192}),
    Work("attention", "prefill", {**SOFTMAX, "B": 1, "T": 16384, "S": 16384}),
    Work("attention", "prefill", {**SOFTMAX, "B": 1, "T": 16384, "S": 16384}, "triton"),
    Work("attention", "prefill", {**SOFTMAX, "B": 1, "T": 16384, "S": 16384}, "cutedsl"),
    Work("soft_cap", "prefill", {**SOFTMAX, "B": 2, "T": 8192, "S": 8192}),
    Work("alibi", "prefill", {**SOFTMAX, "B": 2, "T": 8192, "S": 8192}),
    Work("document_attention", "prefill", {**SOFTMAX, "B": 2, "T": 8192, "S": 8192}),
    Work("gated_delta_rule", "prefill", RULE),
    Work("gated_delta_rule", "prefill", RULE, "triton"),
    Work("gated_delta_rule", "prefill", RULE, "cutedsl"),
    Work("gated_delta_rule", "prefill", {**RULE, "B": 16}, packed=True),
    Work("gated_delta_rule", "decode", {**RULE, "B": 128, "T": 1}),
    *(Work("gated_delta_product", "prefill", {**ALONE, "N": n}) for n in (2, 3)),
    *(Work(op, "prefill", ALONE) for op in ("kda", "gla", "delta_rule", "mamba2")),
    Work("mla", "decode", {**LATENT, "B": 32, "S": 8192}),
    Work("short_conv", "prefill", {"D": 4096, "W": 4, "B": 8, "T": 4096}),
)


def rows(
    works: tuple[Work, ...] = WORKS, targets: tuple[str, ...] = TARGETS
) -> Iterator[list[str]]:
    """A line of :data:`HEAD` for each kernel; a refusal is one line with its reason."""
    from attncc import ops
    from attncc.dsl.errors import AttnccError
    from attncc.runtime.backends import sources
    from attncc.runtime.compile import build_artifact
    from attncc.runtime.store import Store

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for work in works:
            declaration = getattr(ops, work.op).declaration
            for target in targets:
                asked = "" if work.backend == "auto" else f", {work.backend}"
                begin = [f"{work.op} {work.phase}{asked}", _dims(work)]
                try:
                    found = sources(
                        declaration, sizes=work.sizes, target=target, phase=work.phase,
                        backend=work.backend, packed=work.packed,
                    )  # fmt: skip
                    for source in found:
                        made = build_artifact(source, target, store, measure=True).manifest
                        yield [
                            *begin, source.plan.phase, source.plan.dialect.value, made.family,
                            str(made.num_warps), str(made.registers), str(made.shared_bytes),
                            "-" if made.spill_bytes is None else str(made.spill_bytes),
                        ]  # fmt: skip
                except AttnccError as error:
                    reason = str(error).splitlines()[0]
                    yield [*begin, f"refused: {reason}", "-", target, *["-"] * 4]


def _dims(work: Work) -> str:
    told = " ".join(f"{axis}{n}" for axis, n in work.sizes.items() if axis not in HIDDEN)
    return f"{told}, packed" if work.packed else told


def markdown(found: Iterator[list[str]]) -> str:
    """The table; repeated cells of an op are left out."""
    lines = [line(HEAD), line(["---"] * len(HEAD))]
    before: list[str] = []
    for row in found:
        same = row[:2] == before
        before = row[:2]
        lines.append(line(["", "", *row[2:]] if same else row))
    return "\n".join(lines) + "\n"
