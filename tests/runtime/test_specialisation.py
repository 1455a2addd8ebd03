"""Batch, lengths, pages and slots are data: many different calls need one kernel of each kind."""

import random
from collections import defaultdict

import pytest
import torch

import attncc as ac
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources

BF16 = torch.bfloat16


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


def attention(r, tokens, cache=None):
    batch, held = r.randint(1, 9), max(tokens, r.choice([16, 100, 513, 2000]))
    rows = held if cache is None else tokens
    q, k, v = empty(batch, tokens, 8, 64), empty(batch, rows, 2, 64), empty(batch, rows, 2, 64)
    options = {} if cache is None else {"cache": cache(r, batch, held)}
    return bind(ac.ops.attention.declaration, (q, k, v), options)[0]


def dense(r, batch, held):
    sizes = {"B": batch, "Hkv": 2, "D": 64, "E": 64}
    return ac.DenseCache.allocate(ac.ops.attention, sizes=sizes, capacity=held)


def pages(r, batch, held):
    sizes = {"B": batch, "Hkv": 2, "D": 64, "E": 64}
    most = batch * -(-held // 16) + r.randint(0, 9)
    return ac.PagedCache.allocate(ac.ops.attention, sizes=sizes, capacity=held, page=16, pages=most)


def delta(r, tokens, pooled=False, batch=None):
    batch = batch or r.randint(1, 9)
    qk, v = empty(2, batch, tokens, 8, 64), empty(batch, tokens, 16, 64)
    gates = empty(batch, tokens, 16, dtype=torch.float32), empty(batch, tokens, 16)
    slots = batch + r.randint(0, 50)
    places = torch.randperm(slots, dtype=torch.int32)[:batch]
    state = (ac.StatePool(empty(slots, 16, 64, 64), places),) if pooled else ()
    return bind(ac.ops.gated_delta_rule.declaration, (*qk, v, *gates, *state), {})[0]


CALLS = {
    "decode": ("decode", lambda r: attention(r, 1)),
    "decode with a cache": ("decode", lambda r: attention(r, 1, dense)),
    "decode in pages": ("decode", lambda r: attention(r, 1, pages)),
    "long prompts": ("prefill", lambda r: attention(r, r.randint(600, 2000))),
    # Few and many states have plans of their own.
    "recurrent prefill": ("prefill", lambda r: delta(r, r.randint(9, 500), batch=8)),
    "recurrent step": ("decode", lambda r: delta(r, 1)),
    "recurrent step in a pool": ("decode", lambda r: delta(r, 1, pooled=True)),
}


@pytest.mark.parametrize("kind", CALLS)
def test_fifty_calls_need_the_same_kernels(kind):
    phase, make = CALLS[kind]
    r, found = random.Random(kind), defaultdict(set)
    for _ in range(50):
        sources = call_sources(make(r), phase, "sm_90")
        for source in sources:
            found[source.plan.phase].add(source.digest)
    # Two where both forms of a kernel may be launched: alone or beside another, one token or more.
    forms = {"systems": 2, "state": 2, "step": 2}
    assert found and {n: len(d) for n, d in found.items()} == {n: forms.get(n, 1) for n in found}
    assert {s.digest for s in sources} == set().union(*found.values())
