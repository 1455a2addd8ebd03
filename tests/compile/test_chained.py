"""Kernels of decode that may be launched early: they wait before they touch memory."""

import re

import pytest

import attncc as ac
from attncc.runtime import backends
from attncc.runtime.kernels import compile_source, load
from attncc.runtime.samples import Sample, Trait, sample_call
from attncc.runtime.sources import call_sources

MEMORY = re.compile(r"\b(ld\.global|st\.global|cp\.async|atom\.|red\.|ld\.param.*\bcp)")
OPS = {
    "attention": {"D": 64, "E": 64, "G": 4, "Hkv": 2, "B": 2, "S": 4096},
    "gated_delta_rule": {"K": 128, "V": 128, "G": 2, "Hk": 4, "B": 2},
}


def sources(name, target, *traits):
    sample = Sample(OPS[name], "decode", traits=frozenset(traits))
    return call_sources(sample_call(getattr(ac.ops, name).declaration, sample), "decode", target)


@pytest.mark.parametrize(
    ("name", "traits"),
    [("attention", ()), ("attention", (Trait.CACHE,)), ("gated_delta_rule", ())],
)
def test_they_wait_before_they_read_or_write(name, traits):
    found = sources(name, "sm_90", *traits)
    assert found
    for source in found:
        assert source.plan.chained
        ptx = compile_source(source, load(source).function, 90).asm["ptx"]
        wait = ptx.index("griddepcontrol.wait")
        first = MEMORY.search(ptx)
        assert first is not None and wait < first.start()
        assert wait < ptx.index("griddepcontrol.launch_dependents")


def test_older_targets_and_the_interpreter_have_kernels_that_do_not():
    for source in sources("attention", "sm_80"):
        assert not source.plan.chained and "gdc" not in source.text
    sample = Sample(OPS["attention"], "decode")
    call = sample_call(ac.ops.attention.declaration, sample)
    assert not backends.spec_of(call).chained  # its tensors are on the CPU
