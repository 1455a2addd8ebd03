"""The step of one token a sequence: no loop, and no input waits for another."""

from __future__ import annotations

import pytest
import torch

import attncc as ac
from attncc.codegen.emit.scan_sources import scan_sources, sources_of
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_scan import StepPlan, plan_step
from attncc.runtime.affine import completed
from attncc.runtime.bind import bind
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.sources import call_sources, spec_for

DELTA = ac.ops.gated_delta_rule.declaration


def spec_of(**options: object) -> Spec:
    program = DELTA.trace()
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    names |= {"s_initial", "s_final"}
    dtypes = {n: "fp32" if n[0] in "gbs" else "bf16" for n in sorted(names)}
    given = {
        "dtypes": tuple(dtypes.items()), "static": (("G", 2), ("K", 128), ("V", 128)),
        "aligned": frozenset(names), "given_states": frozenset({"s"}),
        "buckets": (("systems", 1024), ("tokens", 1)),
    }  # fmt: skip
    return Spec(**given | options)


def text_of(plan: object) -> str:
    assert isinstance(plan, StepPlan)
    [own] = sources_of(plan)
    return own.text


def test_inputs_are_asked_for_behind_the_state_and_before_any_of_them_is_used():
    plan = plan_step(DELTA.trace(), spec_of())
    text = text_of(plan)
    body = text[text.rindex("def ") :]
    body = body[body.index("tl.load(") :]
    found = [body.index(f"{name}_ptr") for name in ("q", "k", "v", "g", "beta")]
    assert plan.single and "for t in" not in body
    assert body.index("s_initial_ptr") < min(found) and max(found) < body.index("floor(")


def test_every_row_of_an_unrolled_token_is_asked_for_early():
    program = ac.ops.gated_delta_product.declaration.trace(None, {"N": 2})
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    static = (("Gq", 1), ("Gv", 1), ("K", 64), ("N", 2), ("V", 64))
    types = tuple((n, "fp32") for n in sorted(names | {"s_initial", "s_final"}))
    spec = spec_of(dtypes=types, static=static)
    text = text_of(plan_step(program, spec))
    assert text.rindex("tl.load(") < text.index("tl.sum(")


@pytest.mark.parametrize("options", [{"buckets": (("systems", 1024),)}, {"packed": True}])
def test_several_tokens_keep_their_loop(options):
    plan = plan_step(DELTA.trace(), spec_of(**options))
    assert not plan.single and "for t in range(length)" in text_of(plan)


def test_a_call_of_no_token_is_not_taken_for_one_of_one_token():
    for tokens in (0, 1, 2):
        args = [torch.zeros(1, tokens, 2, 32, dtype=torch.bfloat16)] * 3
        call, _ = bind(DELTA, args, {"s": torch.zeros(1, 2, 32, 32)})
        found = dict(completed(call, spec_for(call, "sm_90")).buckets)
        assert found.get("tokens") == (1 if tokens == 1 else None)


def test_what_is_built_ahead_has_both_steps():
    call = sample_call(DELTA, Sample({"K": 64, "V": 64, "G": 1}, "decode"))
    kinds = {s.plan.single for s in call_sources(call, "decode", "sm_90")}
    assert kinds == {True, False}
    program = DELTA.trace()
    spec = spec_of(buckets=(("B", 1), ("T", 1)))
    [own] = scan_sources(program, analyse(program), spec, "decode")
    assert own.plan.single
