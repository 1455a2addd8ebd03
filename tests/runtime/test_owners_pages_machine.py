"""Random lives of sequences in pages against lists of numbers: rows, lengths, references."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
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
from tests.runtime.owner_ops import DIM, recall, rows_of
from tests.tolerance import assert_close

SIZES = {"D": DIM}
CAPACITY, ROWS = 24, 3


class Pages(RuleBasedStateMachine):
    """What the owner does beside a model that keeps every sequence as a list."""

    @initialize(page=st.sampled_from([1, 2, 4]), pages=st.integers(12, 20), data=st.data())
    def start(self, page, pages, data):
        self.page = page
        handed_out = data.draw(st.integers(8, pages))
        self.owner = ac.PageOwner.allocate(
            recall, sizes=SIZES, pages=pages, page=page, handed_out=handed_out,
            dtype=torch.float32,
        )  # fmt: skip
        self.later = pages - handed_out
        self.pages = handed_out
        self.batch = self.owner.batch(ROWS, CAPACITY)
        self.addresses = self._addresses()
        self.model: dict[int, list[int]] = {}
        self.numbers = itertools.count(1)

    def teardown(self):
        if hasattr(self, "owner"):
            for handle in self.owner.handles:
                self.owner.release(handle)
            self.batch.close()
            assert self.owner.free == self.pages

    # --- the model

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def _addresses(self) -> list[int]:
        cache = self.batch.cache
        found = [cache.block_table, cache.lengths, *cache.pages.values()]
        return [x.data_ptr() for x in found]

    def _wanted(self, handles: list[int], counts: list[int]) -> int:
        """Pages that an append takes, one sequence after the other."""
        uses = Counter(p for h in self.model for p in self.owner.pages_of(h))
        wanted = 0
        for h, n in zip(handles, counts, strict=True):
            length, own = len(self.model[h]), self.owner.pages_of(h)
            wanted += max(self._count(length + n) - len(own), 0)
            for p in own[length // self.page : self._count(length + n)] if n else ():
                wanted += uses[p] > 1
                uses[p] -= 1
        return wanted

    def _snapshot(self) -> tuple[object, ...]:
        tables = {h: self.owner.pages_of(h) for h in self.owner.handles}
        lengths = {h: self.owner.length(h) for h in self.owner.handles}
        held = {n: t.clone() for n, t in self.owner.view([]).pages.items()}
        return self.owner.free, tables, lengths, held

    @contextmanager
    def _room(self, wanted: int) -> Iterator[None]:
        """A step that takes pages: if there are too few, it says so and changes nothing."""
        if wanted <= self.owner.free:
            yield
            return
        free, tables, lengths, held = self._snapshot()
        with pytest.raises(ac.ExhaustedError) as caught:
            yield
        assert (caught.value.wanted, caught.value.free) == (wanted, free)
        assert caught.value.missing == wanted - free and caught.value.unit == "page"
        now = self._snapshot()
        assert now[:3] == (free, tables, lengths)
        assert all(torch.equal(held[n], t) for n, t in now[3].items())

    def _append(self, handles: list[int], counts: list[int], call: Callable[[list[int]], None]):
        """Append fresh numbers, and see that no shared page and no foreign row was written."""
        new = [[next(self.numbers) for _ in range(n)] for n in counts]
        wanted = self._wanted(handles, counts)
        shared = [p for p in range(self.pages) if self.owner.references(p) > 1]
        before = {n: t.clone() for n, t in self.owner.view([]).pages.items()}
        with self._room(wanted):
            call(list(itertools.chain(*new)))
            for h, numbers in zip(handles, new, strict=True):
                self.model[h] += numbers
        # Of those that share a page the last to write may have it, once the others have copies.
        still = [p for p in shared if self.owner.references(p) > 1]
        for name, t in self.owner.view([]).pages.items():
            assert torch.equal(before[name][still], t[still])

    def _averages(self, handles: list[int], counts: list[int], numbers: list[int]) -> torch.Tensor:
        """What the op says of each new token, from the lists alone."""
        given, found = iter(numbers), []
        for h, n in zip(handles, counts, strict=True):
            held = list(self.model[h])
            for _ in range(n):
                held.append(next(given))
                x = torch.tensor(held, dtype=torch.float64)
                weights = torch.softmax(DIM * held[-1] * x, 0)
                found.append(float(held[-1] + weights @ x))
        return torch.tensor(found, dtype=torch.float64)[:, None].repeat(1, DIM)

    # --- steps

    @rule(tokens=st.integers(0, 9))
    def add(self, tokens):
        with self._room(self._count(tokens)):
            self.model[self.owner.add(tokens)] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def append(self, data):
        handles = data.draw(st.permutations(list(self.model)))[: data.draw(st.integers(1, 3))]
        counts = [data.draw(st.integers(0, 6)) for _ in handles]

        def call(numbers):
            x, cu = rows_of(numbers), torch.tensor([0, *itertools.accumulate(counts)])
            with self.owner.append(handles, counts) as cache:
                o = recall(x, x, x[:, 0].contiguous(), cache=cache, cu_seqlens=cu, backend="torch")
            want = self._averages(handles, counts, numbers)
            assert_close(o, want, want.float(), torch.float32)

        self._append(handles, counts, call)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=st.integers(1, 1))
    def decode(self, data, tokens):
        fits = [h for h, held in self.model.items() if len(held) + tokens <= CAPACITY]
        fits = [h for h in fits if len(self.owner.pages_of(h)) <= self._count(CAPACITY)]
        if not fits:
            return
        rows = data.draw(st.permutations([*fits, None, None]))[:ROWS]
        live = [h for h in rows if h is not None]

        def call(numbers):
            given = iter(numbers)
            each = [next(given) if r is not None else 10**6 for r in [*rows, *[None] * ROWS][:ROWS]]
            x = rows_of(each)[:, None]
            self.batch.set(rows)
            with self.batch.append(tokens) as cache:
                recall.decode(x, x, x[..., 0].contiguous(), cache, backend="torch")
            lengths = cache.lengths.tolist()
            assert [lengths[i] for i, r in enumerate(rows) if r is not None] == [
                len(self.model[h]) + 1 for h in live
            ]

        self._append(live, [tokens] * len(live), call)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        handle = data.draw(st.sampled_from(list(self.model)))
        held = self.model[handle]
        tokens = data.draw(st.one_of(st.none(), st.integers(0, len(held))))
        free = self.owner.free
        child = self.owner.fork(handle, tokens)
        assert self.owner.free == free, "a fork takes no pages"
        self.model[child] = held[:tokens]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        handle = data.draw(st.sampled_from(list(self.model)))
        tokens = data.draw(st.integers(0, len(self.model[handle])))
        own, keeps = self.owner.pages_of(handle), data.draw(st.booleans())
        self.owner.truncate(handle, tokens, give_back=not keeps)
        del self.model[handle][tokens:]
        assert self.owner.pages_of(handle) == (own if keeps else own[: self._count(tokens)])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data):
        handle = data.draw(st.sampled_from(list(self.model)))
        self.owner.release(handle)
        del self.model[handle]

    @precondition(lambda self: self.later)
    @rule(data=st.data())
    def grow(self, data):
        more = data.draw(st.integers(1, self.later))
        self.owner.grow(more)
        self.later -= more
        self.pages += more

    # --- what always holds

    @invariant()
    def every_row_is_where_it_belongs(self):
        if not hasattr(self, "owner"):
            return
        assert sorted(self.model) == sorted(self.owner.handles)
        view = self.owner.view(list(self.model))
        assert view.lengths.tolist() == [len(x) for x in self.model.values()]
        for b, numbers in enumerate(self.model.values()):
            places = torch.arange(len(numbers))
            at = view.block_table[b, places // self.page].long(), places % self.page
            assert view.pages["k"][at][:, 0].tolist() == numbers
            assert view.pages["label"][at].tolist() == numbers

    @invariant()
    def every_page_is_counted(self):
        if not hasattr(self, "owner"):
            return
        uses = Counter(p for h in self.model for p in self.owner.pages_of(h))
        references = [self.owner.references(p) for p in range(self.pages)]
        padding = [p for p in range(self.pages) if references[p] and not uses[p]]
        assert len(padding) == ROWS and all(references[p] == 1 for p in padding)
        assert all(references[p] == uses[p] for p in uses)
        assert self.owner.free == references.count(0)
        for h, numbers in self.model.items():
            own = self.owner.pages_of(h)
            assert len(set(own)) == len(own) >= self._count(len(numbers))

    @invariant()
    def nothing_moves(self):
        if hasattr(self, "owner"):
            assert self._addresses() == self.addresses


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
