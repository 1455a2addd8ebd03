"""What the families ask the table of measured plans, and how its answer joins their rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attncc.codegen.affine_checks import decays_each
from attncc.codegen.affine_choices import Choice, storage_of
from attncc.codegen.affine_plans import ChunkedPlans
from attncc.codegen.forms import AffineForm
from attncc.codegen.plan import Spec
from attncc.codegen.plan_table import RULE, Family, Wanted, decide, find_entry
from attncc.codegen.tiles import Tiles, through_pages
from attncc.dsl.axes import PAGE

FEW_ROWS = 64
"""Up to this many rows a sequence, bandwidth decides (see ``tiles.py``)."""
GIVEN = "given"
"""Name of a choice that the caller made."""
_STATE = ("width", "transposed", "stages", "warps")


def softmax_wanted(
    spec: Spec, phase: str, dtype: str, dots: tuple[int, ...], values: str, rows: int, scores: int
) -> Wanted:
    """What a tiled fold asks for.

    Args:
        spec: of the call; the bucket ``S`` is a size, and so are the rows of a page.
        phase: ``prefill`` or ``decode``.
        dtype: element type of the operands; ``fp32`` where they differ.
        dots: padded contraction lengths.
        values: padded columns of the values; ``key`` where the key tile serves.
        rows: about how many rows a sequence has.
        scores: about how many values a score keeps of each of a tile's elements.
    """
    facts = {
        "phase": phase, "dtype": dtype, "dots": "+".join(map(str, dots)), "values": values,
        "rows": "few" if rows <= FEW_ROWS else "many", "scores": str(scores),
        "pages": str(bool(spec.pages)).lower(), "scales": _scales(spec),
    }  # fmt: skip
    sizes = {"rows": rows}
    if "S" in dict(spec.buckets):
        sizes["keys"] = dict(spec.buckets)["S"]
    if spec.pages:
        sizes["page"] = spec.size(PAGE)
    return Wanted(Family.SOFTMAX, tuple(facts.items()), tuple(sizes.items()))


def _scales(spec: Spec) -> str:
    """What has a scale of its own in quantised histories: each row, or blocks of it."""
    if not spec.quantised:
        return "none"
    rows = all(own.block == spec.size(own.axis) for own in spec.quantised)
    return "rows" if rows else "blocks"


def selected_wanted(
    family: Family, spec: Spec, phase: str, dtype: str, dots: tuple[int, ...], **facts: int
) -> Wanted:
    """What the scores of a selection, or the fold over its picks, ask for.

    Args:
        family: ``SCORES`` or ``PICKED``.
        spec: of the call; the bucket ``S`` is a size.
        phase: ``prefill`` or ``decode``.
        dtype: element type of the operands.
        dots: padded contraction lengths.
        **facts: of the tile, by name.
    """
    found = {"phase": phase, "dtype": dtype, "dots": "+".join(map(str, dots))}
    found["pages"] = str(bool(spec.pages)).lower()
    found |= {name: str(n) for name, n in facts.items()}
    keys = dict(spec.buckets).get("S")
    return Wanted(family, tuple(found.items()), () if keys is None else (("keys", keys),))


def choose_selected(spec: Spec, wanted: Wanted, rule: Tiles) -> tuple[Tiles, str]:
    """The tiles of a selection's stage, and who decided: an entry is for pages or is not."""
    chosen, fixed = decide(wanted, spec.target, spec.tuned)
    values: dict[str, Any] = dict(fixed)
    return (replace(rule, **values) if values else rule), chosen


def choose_softmax(
    spec: Spec, wanted: Wanted, rule: Tiles, *, pages_ahead: bool
) -> tuple[Tiles, str]:
    """The tiles, and who decided: what the nearest entry does not fix is the rule's.

    An entry that does not say whether the history lies in pages holds for one that does not.
    """
    chosen, fixed = decide(wanted, spec.target, spec.tuned)
    values: dict[str, Any] = dict(fixed)
    tiles = replace(rule, **values) if values else rule
    entry = find_entry(chosen, spec.target, spec.tuned)
    if not spec.pages or ("pages", "true") in (entry.facts if entry else ()):
        return tiles, chosen
    return tiles if pages_ahead else through_pages(tiles), chosen


def affine_wanted(form: AffineForm, spec: Spec, active: int, columns: int) -> Wanted:
    """What the chunk kernels ask for; the bucket ``systems`` is the size.

    Args:
        form: the flat table.
        spec: of the call.
        active: size of the state's active axis.
        columns: size of its passive one.
    """
    facts = {
        "dtype": storage_of(form, spec), "active": str(active), "columns": str(columns),
        "rows": str(len(form.rows)), "reads": str(len(form.reads)),
        "solve": str(any(r.b is not None for r in form.rows)).lower(),
        "decays": "none" if not form.decays else "each" if decays_each(form) else "one",
    }  # fmt: skip
    systems = {k: n for k, n in spec.buckets if k == "systems"}
    return Wanted(Family.AFFINE, tuple(facts.items()), tuple(systems.items()))


def choose_affine(spec: Spec, wanted: Wanted, given: Choice | None) -> tuple[Choice, str]:
    """The caller's choice, else the nearest entry's, and who decided."""
    if given is not None:
        return given, GIVEN
    chosen, fixed = decide(wanted, spec.target, spec.tuned)
    values: dict[str, Any] = dict(fixed)
    return Choice(**values), chosen


def decided_state(choice: Choice, chosen: str, *, whole: bool) -> tuple[Choice, str]:
    """Choice and name for a kernel that carries states.

    An entry is about whole sequences; the widths of segments, of which there are always enough to
    fill the device, stay the rule's.
    """
    if chosen == GIVEN:
        return choice, chosen
    fixes = any(getattr(choice, name) is not None for name in _STATE)
    return (choice, chosen) if whole and fixes else (Choice(), RULE)


def decided_systems(choice: Choice, chosen: str) -> str:
    """Name for the kernels that solve and weigh the systems."""
    return chosen if chosen == GIVEN or choice.system_warps is not None else RULE


def chosen_segments(plans: ChunkedPlans, spec: Spec, systems: int, tokens: int) -> int | None:
    """Segments a sequence by the nearest entry; None leaves it to the rule.

    Args:
        plans: of the call.
        spec: of the call.
        systems: of all sequences.
        tokens: of a sequence, on average.
    """
    state = plans.state
    key, value = (state.axis(t.axis).size for t in state.tile)
    like = affine_wanted(state.form, spec, key, value)
    sizes = (("systems", systems), ("tokens", tokens))
    _, fixed = decide(Wanted(Family.SEGMENTS, like.facts, sizes), spec.target, spec.tuned)
    return next((int(n) for name, n in fixed if name == "segments"), None)
