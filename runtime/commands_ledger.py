"""``attncc ledger`` and the pictures of ``attncc show --graph``."""

from __future__ import annotations

import importlib
from enum import Enum
from typing import Annotated, Any

import torch
import typer

from attncc.dsl.layers import Layer
from attncc.dsl.ledger.compare import compare
from attncc.dsl.ledger.derive import Subject
from attncc.dsl.ledger.show import aligned, grid
from attncc.runtime.caches import Storage
from attncc.runtime.cli_arguments import UsageError, listed, named, op_of, sizes_of
from attncc.runtime.console import Json, Sizes, Without, emit, plain
from attncc.runtime.ledger import ledger, subject_of
from attncc.runtime.quantised import Quantised

STORAGE: dict[str, Storage] = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": Quantised(),
    **{f"e4m3/{block}": Quantised(block=block) for block in (32, 64, 128)},
    **{
        f"e4m3/{block}/ue8m0": Quantised(block=block, scale="ue8m0") for block in (32, 64, 128)
    },
}  # fmt: skip
"""What a history may be stored as on the command line: a dtype, or e4m3[/BLOCK[/ue8m0]]."""


class Drawn(Enum):
    """Forms of a picture."""

    SVG = "svg"
    TEXT = "text"


def layers() -> dict[str, Layer]:
    """The library's layers by name."""
    module = importlib.import_module("attncc.dsl.library.layers")
    found: dict[str, Layer] = module.LAYERS
    return found


def subject_named(name: str) -> Subject:
    """A library op or layer by name, or ``module:attribute`` of the user's own.

    Raises:
        UsageError: there is none.
    """
    known = layers()
    if name in known:
        return known[name]
    if ":" not in name:
        try:
            return op_of(name).declaration
        except UsageError as error:
            raise UsageError(f"{error}; layers are {', '.join(known)}") from None
    try:
        return subject_of(named(name))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name!r}: {error}") from None


def drawn(name: str, form: Drawn) -> str:
    """The dataflow of an op or layer, training and inference side by side."""
    from attncc.dsl.picture import svg, text

    subject = subject_named(name)
    return svg(subject) if form is Drawn.SVG else text(subject)


def ledger_command(
    subject: Annotated[
        list[str], typer.Argument(help="A library op or layer by name, or module:attribute.")
    ],
    phase: Annotated[str, typer.Option(help="prefill, decode or train.")] = "decode",
    sizes: Sizes = None,
    layers: Annotated[int, typer.Option(help="Layers that each keep their own.")] = 1,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16, or of one object: k=e4m3/64, s=bf16.")
    ] = None,
    without: Without = None,
    page: Annotated[int | None, typer.Option(help="Rows of a page of the histories.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Rows kept of a history: k=1024.")] = None,
    compared: Annotated[bool, typer.Option("--compare", help="Several beside each other.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown tables.")] = False,
    json: Json = False,
) -> None:
    """Print every object of an op or layer: who makes and reads it, its lifetime, its bytes.

    Without --sizes bytes are formulas.
    """
    subjects = [subject_named(name) for name in subject]
    if compared:
        given = {"--sizes": sizes, "--dtype": dtype, "--without": without, "--page": page}
        given |= {"--keep": keep, "--layers": layers != 1, "--phase": phase != "decode"}
        unused = [name for name, value in given.items() if value]
        if unused:
            raise UsageError(f"--compare is of declarations alone and takes no {unused[0]}")
        _comparison(subjects, markdown, json)
        return
    if len(subjects) > 1:
        raise UsageError("one op or layer, or several with --compare")
    options: dict[str, Any] = {"page": page, "keep": _rows(keep)}
    if without:
        options["given"] = _given(subjects[0], listed(without))
    if dtype:
        options["dtype"] = _storage(dtype)
    known = sizes_of(",".join(sizes)) if sizes else None
    found = ledger(subjects[0], known, phase, layers, **options)
    if json:
        emit(found.data())
    else:
        plain(found.markdown() if markdown else found.text())


def _comparison(subjects: list[Subject], markdown: bool, json: bool) -> None:
    rows = compare(subjects)
    head = ("", *(s.name for s in subjects))
    if json:
        emit({s.name: {r[0]: r[i + 1] for r in rows} for i, s in enumerate(subjects)})
    else:
        plain("\n".join(grid(head, rows) if markdown else aligned(head, rows)))


def _given(subject: Subject, absent: list[str]) -> frozenset[str]:
    """An op's usual optional inputs but those that are absent.

    Raises:
        UsageError: a layer, whose ops' inputs it composes itself, or no such optional input.
    """
    if isinstance(subject, Layer):
        raise UsageError("--without is for ops: a layer says itself what its ops are given")
    optional = {t.name for t in subject.tensors if t.optional}
    for name in absent:
        if name not in optional:
            raise UsageError(f"no optional input {name!r}: {', '.join(sorted(optional))}")
    usual = {t.name for t in subject.tensors if t.usual}
    return frozenset(optional & usual - set(absent))


def _rows(values: list[str] | None) -> dict[str, int]:
    found = {}
    for part in listed(values or []):
        name, _, rows = part.partition("=")
        if not rows.isdigit():
            raise UsageError(f"--keep takes HISTORY=ROWS; found {part!r}")
        found[name] = int(rows)
    return found


def _storage(values: list[str]) -> Storage | dict[str, Storage]:
    """``bf16``, or storages by name.

    Raises:
        UsageError: no such storage, or one for all beside one of a name.
    """
    common: list[Storage] = []
    single: dict[str, Storage] = {}
    for part in listed(values):
        name, equals, storage = part.rpartition("=")
        if storage not in STORAGE:
            raise UsageError(f"no storage {storage!r}: {', '.join(STORAGE)}")
        if equals:
            single[name] = STORAGE[storage]
        else:
            common.append(STORAGE[storage])
    if len(common) > 1 or (common and single):
        raise UsageError("one storage for all, or storages by name")
    return common[0] if common else single
