"""The tables of measured plans: who decides, how near is near, and what a table may say."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import attncc as ac
from attncc.codegen.plan import Dialect, plan_text
from attncc.codegen.plan_table import (
    NEAR,
    PLANS,
    RULE,
    Family,
    Measured,
    PlanTable,
    TableEntry,
    Time,
    Wanted,
    committed,
    decide,
    describe,
    find_entry,
    parse_table,
    table_text,
)
from attncc.codegen.render import render
from attncc.runtime.backends import sources, spec_of
from attncc.runtime.key import key_of
from attncc.runtime.samples import Sample, Trait, sample_call
from attncc.runtime.sources import call_sources

FACTS = (("dtype", "bf16"), ("phase", "decode"))
MEASURED = Measured("a GPU", (("triton", "3.6.0"),), "0", "events", (Time("work", 1.0),))


def entry(name, sizes=(), facts=FACTS, choose=(("block_n", 32),), family=Family.SOFTMAX):
    return TableEntry(name, family, facts, sizes, choose, MEASURED)


def nearest(entries, facts=FACTS, **sizes):
    found = PlanTable(tuple(entries)).nearest(Wanted(Family.SOFTMAX, facts, tuple(sizes.items())))
    return found and found.id


def test_distance_is_doublings_to_the_nearer_end_of_a_range():
    held = entry("a", (("keys", 1024, 4096.0), ("rows", 8, math.inf)))
    wanted = Wanted(Family.SOFTMAX, FACTS, (("keys", 2048), ("rows", 4)))
    assert held.distance(wanted) == 1.0
    assert held.distance(replace(wanted, sizes=(("keys", 32768), ("rows", 1 << 20)))) == 3.0
    assert held.distance(replace(wanted, sizes=(("keys", 2048),))) == math.inf
    assert held.distance(replace(wanted, facts=(("dtype", "fp16"), FACTS[1]))) == math.inf
    assert held.distance(replace(wanted, family=Family.AFFINE)) == math.inf


def test_the_nearest_entry_wins_whatever_the_order():
    few, many = entry("few", (("keys", 64, 64.0),)), entry("many", (("keys", 1024, 1024.0),))
    for entries in ([few, many], [many, few]):
        assert nearest(entries, keys=128) == "few"
        assert nearest(entries, keys=512) == "many"
        assert nearest(entries, keys=256) == "many"  # as near to both: the larger sizes
        assert nearest(entries, keys=int(1024 * 2**NEAR)) == "many"
        assert nearest(entries, keys=int(2048 * 2**NEAR)) is None
    special = entry("special", (("keys", 1024, 1024.0),))
    general = entry("general", (("keys", 1024, 1024.0),), facts=FACTS[:1])
    assert nearest([general, special], keys=1024) == "special"
    assert nearest([entry("b"), entry("a")]) == "a"


def test_the_callers_table_comes_before_the_committed_one():
    held = find_entry("softmax-decode-bf16-128", "sm_90", None)
    wanted = Wanted(Family.SOFTMAX, held.facts)
    assert decide(wanted, "sm_90", None) == (held.id, held.choose)
    own = PlanTable((entry("own", facts=held.facts),))
    assert decide(wanted, "sm_90", own) == ("own", (("block_n", 32),))
    assert decide(wanted, "sm_86", None) == (RULE, ())
    assert find_entry("own", "sm_90", own).id == "own"
    assert find_entry(RULE, "sm_90", own) is None


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.json")), ids=lambda p: p.stem)
def test_committed_tables_say_how_each_entry_was_measured(path):
    table = parse_table(path.read_text(), path.name, path.stem)
    assert table.entries and table_text(table.entries, path.stem) == path.read_text()
    for held in table.entries:
        measured = held.measured
        assert measured.gpu and measured.commit and measured.how
        assert {"triton", "torch", "python"} <= dict(measured.versions).keys()
        assert all(t.work and t.ms > 0 for t in measured.times), held.id


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2"),
        ({"target": "sm_100"}, "sm_100"),
        ({"entries": [{"id": "x"}]}, "family"),
        ({"choose": {"block_q": 1}}, "block_q"),
        ({"choose": {"block_n": True}}, "block_n = True"),
        ({"choose": {"block_n": 0}}, "block_n = 0"),
        ({"family": "affine_warp", "choose": {"consumers": 3}}, "consumers = 3"),
        ({"family": "affine_warp", "choose": {"loaders": 5}}, "loaders = 5"),
        ({"family": "affine_warp", "choose": {"reader": 1}}, "reader = 1"),
        ({"family": "softmax_warp", "choose": {"dialect": "triton"}}, "dialect = 'triton'"),
        ({"choose": {}}, "fixes something"),
        ({"sizes": {"keys": [8, 4]}}, "from 8 to 4"),
        ({"id": RULE}, "name of its own"),
    ],
)
def test_what_is_no_table_is_refused_with_its_entry_and_field(change, says):
    data = json.loads(table_text((entry("x"),), "sm_90"))
    for key, value in change.items():
        (data if key in data else data["entries"][0])[key] = value
    with pytest.raises(ValueError, match=says):
        parse_table(json.dumps(data), "mine.json", "sm_90")


def test_two_entries_of_one_name_are_refused():
    data = json.loads(table_text((entry("x"),), "sm_90"))
    data["entries"] *= 2
    with pytest.raises(ValueError, match="two entries"):
        parse_table(json.dumps(data), "mine.json", "sm_90")


def gdn(**sizes):
    """The kernels of gated delta rule for a call of these sizes, by phase."""
    sample = Sample({"K": 128, "V": 128, "G": 2, "T": 4096, **sizes}, dtypes={"g": "fp32"})
    call = sample_call(ac.ops.gated_delta_rule.declaration, sample)
    spec = replace(spec_of(call), target="sm_90", dialect=Dialect.TRITON)
    return {s.plan.phase: s.plan for s in call_sources(call, "prefill", spec=spec)}


def test_committed_entries_decide_plans_and_are_in_their_text():
    few, many = gdn(B=1, Hk=8), gdn(B=8, Hk=16)
    assert few["state"].chosen == "affine-bf16-128x128-few-systems"
    assert (few["state"].tile[-1].block, few["state"].num_stages) == (32, 3)
    assert many["state"].chosen == "affine-bf16-128x128-many-systems"
    assert (many["state"].tile[-1].block, many["state"].num_stages) == (64, 2)
    assert f"chosen = {few['state'].chosen}\n" in plan_text(few["state"])
    assert {few[p].chosen for p in ("prepare", "mix", "local", "summary")} == {RULE}
    assert {gdn(B=1, K=64)[p].chosen for p in ("state", "prepare")} == {RULE}


def test_who_decided_is_part_of_the_key():
    [source] = sources(
        ac.ops.attention.declaration, sizes={"D": 128, "E": 128, "G": 4}, phase="decode"
    )[:1]
    assert source.plan.chosen == "softmax-decode-bf16-128"
    other = render(replace(source.plan, chosen=RULE), lambda plan: plan)
    names = [n for n, _, _ in key_of(source, "sm_90").differences(key_of(other, "sm_90"))]
    assert names == ["kernel", "plan"]


def test_an_entry_fixes_what_it_names_and_the_rule_the_rest():
    sample = Sample({"D": 64, "E": 64, "G": 4}, "decode")
    call = sample_call(ac.ops.attention.declaration, sample)
    spec = spec_of(call)
    [plain] = [s.plan for s in call_sources(call, "decode", spec=spec)][:1]
    facts = (("dtype", "bf16"), ("dots", "64"), ("phase", "decode"))
    own = PlanTable((entry("own", facts=facts, choose=(("block_n", 128), ("num_stages", 2))),))
    [tuned] = [s.plan for s in call_sources(call, "decode", spec=replace(spec, tuned=own))][:1]
    assert (plain.chosen, tuned.chosen) == (RULE, "own")
    assert (tuned.block_n, tuned.num_stages) == (128, 2)
    assert (tuned.block_m, tuned.num_warps) == (plain.block_m, plain.num_warps)


@pytest.mark.parametrize("said", [(), (("pages", "true"),)])
@pytest.mark.parametrize("group", [4, 64])  # few rows find pages ahead of their keys, and many not
def test_an_entry_without_a_word_of_pages_was_measured_without_them(said, group):
    call = sample_call(
        ac.ops.attention.declaration,
        Sample({"D": 128, "E": 128, "G": group}, "decode", traits=frozenset({Trait.PAGED})),
    )
    own = PlanTable((entry("own", facts=(*FACTS, *said), choose=(("num_stages", 3),)),))
    [split] = [
        s.plan for s in call_sources(call, "decode", spec=replace(spec_of(call), tuned=own))
        if s.plan.phase == "decode_split"
    ]  # fmt: skip
    assert split.chosen == "own" and split.pages_ahead is (group == 4)
    assert split.num_stages == (3 if said or group == 4 else 5)
    dense = PlanTable((entry("dense", facts=(*FACTS, ("pages", "false"))),))
    whole, *_ = call_sources(call, "decode", spec=replace(spec_of(call), tuned=dense))
    assert whole.plan.chosen != "dense"


def test_pages_of_other_sizes_are_doublings_away():
    small, large = (entry(f"{n}", (("page", n, float(n)),)) for n in (16, 128))
    assert nearest([small, large], page=32) == "16" and nearest([small, large], page=64) == "128"
    assert nearest([small, large]) is None


def test_a_description_says_who_decided_and_what_else_was_tried():
    table = committed("sm_90")
    text = describe(find_entry("affine-bf16-128x128-few-systems", "sm_90", None), "sm_90")
    assert "width=32" in text and "0.82 ms, width=64 1.22" in text and "H200" in text
    assert table is not None and "no entry of sm_100" in describe(None, "sm_100")


def test_explain_names_the_entry_or_the_rule():
    text = ac.ops.attention.explain(sizes={"D": 128, "E": 128, "G": 4}, phase="decode")
    assert "chosen by entry softmax-decode-bf16-128 (block_n=128" in text
    text = ac.ops.attention.explain(sizes={"D": 64, "E": 64, "G": 4}, phase="decode")
    assert "chosen by the rule: no entry of sm_90" in text


def test_the_wheel_carries_the_tables():
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    held = {p for g in patterns["package-data"]["attncc"] for p in root.glob(g)}
    assert {p.name for p in PLANS.iterdir() if p.suffix == ".json"} <= {p.name for p in held}
