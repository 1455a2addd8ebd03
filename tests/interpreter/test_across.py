"""Outputs that read an affine state across its updates' axis, in generated kernels on the CPU."""

from dataclasses import replace

import pytest
import torch

from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.runtime import affine
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.across_ops import OJA, oja, queries, two_queries
from tests.codegen import gluon_machine
from tests.gpu.checking import check, eager
from tests.interpreter.test_gluon_affine import flat
from tests.tolerance import assert_close


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def phases(op, args, **more):
    call, _ = bind(op.declaration, (), {**args, **more})
    return [s.plan.phase for s in call_sources(call, "prefill", "sm_90")]


@pytest.mark.parametrize("gate", [1.0, 8.0])
def test_groups_of_heads_and_gates_that_forget(gate):
    args, s = oja(70, 1, 2, 16, 32, gate=gate)
    assert phases(OJA, args)[-3:] == ["state", "across_bases", "across"]
    check(OJA, **args, s=s)


def test_packed_sequences_without_a_gate_and_sizes_that_are_no_power_of_two():
    args, _ = oja(70, 1, 1, 24, 20, gate=0)
    own = {n: x[0] for n, x in args.items()}
    s = torch.randn(3, 1, 24, 20)
    got = check(OJA, **own, s=s, cu_seqlens=torch.tensor([0, 66, 66, 70]))
    assert torch.equal(got["s"][1], s[1])


def test_two_reads_and_a_norm_over_them():
    args, s = queries(67, 1, 16, 32)
    assert phases(two_queries, args)[-1] == "across"
    check(two_queries, **args, s=s)


def test_a_few_tokens_and_fp32_are_stepped():
    args, _ = oja(9, 1, 1, 16, 16, dtype=torch.float32)
    assert phases(OJA, args)[-2:] == ["step", "pointwise"]  # in parts
    few, _ = oja(4, 1, 1, 16, 16)
    assert phases(OJA, few) == ["step"]


def test_systems_in_gluon(monkeypatch):
    launch, seen = affine.launch, []

    def played(kernel, programs, values):
        plan = kernel.plan
        seen.append((plan.phase, plan.dialect))
        if plan.dialect is Dialect.TRITON:
            return launch(kernel, programs, values)
        text, entry = kernel.source.text, kernel.source.entry
        return gluon_machine.run(text, entry, programs, flat(plan, values), 0)

    monkeypatch.setattr(affine, "launch", played)
    args, s = oja(70, 1, 1, 64, 64, gate=3.0)
    exact, rough = OJA.reference(**args, s=s)._asdict(), eager(OJA, (), {**args, "s": s})
    call, _ = bind(OJA.declaration, (), {**args, "s": s})
    affine.run(call, analyse(call.program), replace(spec_of(call), target="sm_90"), "prefill")
    assert ("systems", Dialect.GLUON) in seen and seen[-1] == ("across", Dialect.TRITON)
    for name, tensor in {**call.final_states, **call.outputs}.items():
        assert_close(tensor, exact[name], rough[name], tensor.dtype, name)
