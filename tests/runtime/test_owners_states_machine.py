"""Random lives of sequences in slots against lists of numbers: states, windows, drafts."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import attncc as ac
from tests.runtime.owner_ops import DIM, WIDTH, rows_of, tally

WEIGHTS = torch.tensor([1.0, 100.0, 10000.0])
ROWS, DRAFTS = 3, 3


class States(RuleBasedStateMachine):
    """What the owner does beside a model that keeps every sequence as a list of its rows."""

    @initialize(slots=st.integers(4, 12))
    def start(self, slots):
        self.slots = slots
        self.owner = ac.StateOwner.allocate(
            tally, sizes={"D": DIM, "W": WIDTH}, slots=slots, dtype=torch.float32
        )
        for pool in self.owner.pools.values():
            pool.fill_(torch.nan)  # a new sequence must not see what lay there
        self.batch = self.owner.batch(ROWS)
        self.drafting = self.owner.batch(ROWS, tokens=DRAFTS)
        self.model: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}
        self.numbers = itertools.count(1)

    # --- the model

    def _settled(self):
        return [h for h in self.model if h not in self.drafts]

    def _outputs(self, handles, new):
        """What the op says of each new row, from the lists alone."""
        found = []
        for h, numbers in zip(handles, new, strict=True):
            held = list(self.model[h])
            for n in numbers:
                held.append(n)
                last = ([0] * WIDTH + held)[-WIDTH:]
                convolved = sum(w * x for w, x in zip(WEIGHTS.tolist(), last, strict=True))
                found.append(sum(held) + convolved)
        return torch.tensor(found)[:, None].expand(-1, DIM)

    def _new(self, counts):
        return [[next(self.numbers) % 50 for _ in range(n)] for n in counts]

    @contextmanager
    def _only(self, slots) -> Iterator[None]:
        """A step that may write some slots and no other."""
        before = {n: p.clone() for n, p in self.owner.pools.items()}
        yield
        others = [s for s in range(self.slots) if s not in slots]
        for name, pool in self.owner.pools.items():
            assert torch.equal(before[name][others].nan_to_num(9), pool[others].nan_to_num(9))

    @contextmanager
    def _room(self, wanted) -> Iterator[None]:
        """A step that takes slots: if there are too few, it says so and changes nothing."""
        if wanted <= self.owner.free:
            yield
            return
        free, slots = self.owner.free, [self.owner.slot_of(h) for h in self.owner.handles]
        with self._only([]), pytest.raises(ac.ExhaustedError) as caught:
            yield
        assert (caught.value.wanted, caught.value.free) == (wanted, free)
        assert caught.value.missing == wanted - free and caught.value.unit == "slot"
        assert self.owner.free == free
        assert slots == [self.owner.slot_of(h) for h in self.owner.handles]

    def _run(self, new, arguments):
        counts = [len(x) for x in new]
        x = rows_of(list(itertools.chain(*new)))
        cu = torch.tensor([0, *itertools.accumulate(counts)])
        return tally(x, WEIGHTS, **arguments, cu_seqlens=cu, backend="torch")

    def _dense(self, rows, new, arguments):
        """A batch of fixed size; rows without a sequence bring rows that nobody may see."""
        given = iter(new)
        width = len(new[0])
        each = [next(given) if r is not None else [999] * width for r in rows]
        x = torch.stack([rows_of(numbers) for numbers in each])
        return tally.decode(x, WEIGHTS, **arguments, backend="torch")

    def _rows(self, data):
        found = data.draw(st.permutations([*self._settled(), None, None]))[:ROWS]
        return [*found, *[None] * (ROWS - len(found))]

    # --- steps

    @rule()
    def add(self):
        with self._room(1):
            self.model[self.owner.add()] = []

    @precondition(lambda self: self._settled())
    @rule(data=st.data())
    def call(self, data):
        handles = data.draw(st.permutations(self._settled()))[:3]
        new = self._new([data.draw(st.integers(0, 5)) for _ in handles])
        want = self._outputs(handles, new)
        with self._only([self.owner.slot_of(h) for h in handles]):
            assert torch.equal(self._run(new, self.owner.view(handles)), want)
        for h, numbers in zip(handles, new, strict=True):
            self.model[h] += numbers

    @precondition(lambda self: self._settled())
    @rule(data=st.data(), tokens=st.integers(1, 2))
    def call_batch(self, data, tokens):
        rows = self._rows(data)
        live = [h for h in rows if h is not None]
        new = self._new([tokens] * len(live)) or [[0] * tokens]
        self.batch.set(rows)
        with self._only([self.owner.slot_of(h) for h in live]):
            o = self._dense(rows, new, self.batch.arguments)
        kept = [i for i, r in enumerate(rows) if r is not None]
        assert torch.equal(o[kept].flatten(0, 1), self._outputs(live, new[: len(live)]))
        for h, numbers in zip(live, new, strict=False):
            self.model[h] += numbers

    @precondition(lambda self: self._settled())
    @rule(data=st.data())
    def speculate(self, data):
        handles = data.draw(st.permutations(self._settled()))[:2]
        new = self._new([data.draw(st.integers(0, 4)) for _ in handles])
        want = self._outputs(handles, new)
        kept = {h: self.owner.slot_of(h) for h in handles}
        with self._room(sum(map(len, new))):
            arguments = self.owner.speculate(handles, [len(x) for x in new])
            out = arguments["total"].out_slots.flatten().tolist()
            with self._only([s for s in out if s >= 0]):
                assert torch.equal(self._run(new, arguments), want)
            assert kept == {h: self.owner.slot_of(h) for h in handles}
            self.drafts |= dict(zip(handles, new, strict=True))

    @precondition(lambda self: self.drafts)
    @rule(data=st.data())
    def accept(self, data):
        handles = data.draw(st.permutations(list(self.drafts)))
        handles = handles[: data.draw(st.integers(1, len(handles)))]
        counts = [data.draw(st.integers(0, len(self.drafts[h]))) for h in handles]
        with self._only([]):
            self.owner.accept(handles, counts)
        for h, n in zip(handles, counts, strict=True):
            self.model[h] += self.drafts.pop(h)[:n]

    @precondition(lambda self: self._settled())
    @rule(data=st.data())
    def speculate_batch(self, data):
        rows = self._rows(data)
        live = [h for h in rows if h is not None]
        new = self._new([DRAFTS] * len(live)) or [[0] * DRAFTS]
        self.drafting.set(rows)
        with self._room(DRAFTS * len(live)):
            self.drafting.speculate()
            out = self.drafting.arguments["total"].out_slots
            with self._only([s for s in out.flatten().tolist() if s >= 0]):
                o = self._dense(rows, new, self.drafting.arguments)
            kept = [i for i, r in enumerate(rows) if r is not None]
            assert torch.equal(o[kept].flatten(0, 1), self._outputs(live, new[: len(live)]))
            counts = [data.draw(st.integers(0, DRAFTS)) for _ in rows]
            with self._only([]):
                self.drafting.accept(counts)
            assert (out == -1).all(), "a replay now must write nowhere"
            accepted = [n for r, n in zip(rows, counts, strict=True) if r is not None]
            for h, numbers, n in zip(live, new, accepted, strict=False):
                self.model[h] += numbers[:n]

    @precondition(lambda self: self._settled())
    @rule(data=st.data())
    def fork(self, data):
        handle = data.draw(st.sampled_from(self._settled()))
        with self._room(1):
            self.model[self.owner.fork(handle)] = list(self.model[handle])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data):
        handle = data.draw(st.sampled_from(list(self.model)))
        with self._only([]):
            self.owner.release(handle)
        del self.model[handle]
        self.drafts.pop(handle, None)

    # --- what always holds

    @invariant()
    def every_state_is_where_it_belongs(self):
        for handle, rows in getattr(self, "model", {}).items():
            slot = self.owner.slot_of(handle)
            assert (self.owner.pools["total"][slot] == sum(rows)).all()
            last = ([0] * WIDTH + rows)[len(rows) + 1 :]
            assert (self.owner.pools["win"][slot] == torch.tensor(last)).all()

    @invariant()
    def every_slot_has_one_owner(self):
        if not hasattr(self, "owner"):
            return
        assert sorted(self.model) == sorted(self.owner.handles)
        used = [self.owner.slot_of(h) for h in self.model]
        used += [s for h in self.model for s in self.owner.sequence(h).drafts or ()]
        assert len(set(used)) == len(used) == self.slots - self.owner.free
        assert all(0 <= s < self.slots for s in used)
        drafts = {h: len(x) for h, x in self.drafts.items()}
        speculating = {h: self.owner.sequence(h).drafts for h in self.model}
        assert drafts == {h: len(d) for h, d in speculating.items() if d is not None}


TestStates = States.TestCase
TestStates.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
