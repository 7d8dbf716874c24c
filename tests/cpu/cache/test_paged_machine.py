"""PagedKVCache as a state machine: any sequence of calls, against a dictionary of what each sequence was given."""

from collections import Counter
from typing import ClassVar

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cases.paged import audit, rows_of, snapshot
from tilefold import OutOfPages, PagedKVCache
from tilefold.errors import ValueRangeError

LAYERS, MOST = 2, 28


class Machine(RuleBasedStateMachine):
    """The model: sequence -> the numbers that its tokens were given, one row each.  A row holds number * LAYERS + layer, and V
    its negative."""

    happened: ClassVar = Counter()  # over all runs: a machine that never copies a page proves nothing about copies

    @initialize(
        pages=st.integers(8, 24), size=st.sampled_from([1, 2, 3, 4, 8]), lengths=st.lists(st.integers(0, 7), max_size=3)
    )
    def start(self, pages, size, lengths):
        self.cache = PagedKVCache(LAYERS, 1, 1, num_pages=pages, page_size=size, max_sequences=6, max_tokens=MOST,
                                  dtype=torch.float32, device="cpu")  # fmt: skip
        self.model, self.batches, self.drawn = {}, [], 0
        for _ in lengths:
            self.model[self.cache.add()] = []
        made = self.attempt(lambda: self.cache.batch(list(self.model), lengths, max_new=40), OutOfPages)
        if made is not None:
            self.write(made)
            self.batches.append((made, [self.cache.allocator.find(id) for id in self.model]))

    def attempt(self, call, *refusals):
        """The call's result, or None if it was refused, which must have changed nothing."""
        before, shared = snapshot(self.cache.allocator), self.cache.statistics().pages_shared
        try:
            found = call()
            self.happened["shared page given up"] += self.cache.statistics().pages_shared < shared
            return found
        except refusals as error:
            self.happened[type(error).__name__] += 1
            assert snapshot(self.cache.allocator) == before
            return None

    def some(self, data, most=4, swapped=False):
        """Distinct sequences, nearly always of those that can be used as asked, so that refusals do not crowd out the rest."""
        ids = sorted(self.model)
        fit = [id for id in ids if self.cache.is_swapped(id) == swapped]
        if fit and data.draw(st.integers(0, 15)):
            ids = fit
        return data.draw(st.lists(st.sampled_from(ids), unique=True, min_size=1, max_size=most))

    def resident(self, id):
        return not self.cache.is_swapped(id)

    @precondition(lambda self: len(self.model) < 6)
    @rule(id=st.sampled_from([None, None, None, None, None, 2, 17]))
    def add(self, id):
        full, taken = len(self.model) == 6, id in self.model
        made = self.attempt(lambda: self.cache.add(id), ValueRangeError)
        assert (made is None) == (full or taken)
        if made is not None:
            assert id in (None, made)
            self.model[made] = []

    def write(self, batch):
        """Numbers never seen before, into the new rows of every layer."""
        numbers = list(range(self.drawn, self.drawn + batch.total))
        self.drawn += batch.total
        k = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1) * LAYERS
        for layer in range(LAYERS):
            for pages, x in ((self.cache.k[layer], k + layer), (self.cache.v[layer], -k - layer)):
                pages.view(-1, *pages.shape[2:]).index_copy_(0, batch.slot_mapping, x)  # no kernel: thousands of steps
        for id, count in zip(batch.sequences, batch.counts, strict=True):
            self.model[id] += numbers[:count]
            del numbers[:count]
        self.check(batch)

    def check(self, batch):
        table, page = batch.block_table.tolist(), self.cache.page_size
        rows = []
        for row, id, count in zip(table, batch.sequences, batch.counts, strict=True):
            n = self.cache.length(id)
            rows += [row[j // page] * page + j % page for j in range(n - count, n)]
            assert tuple(row[: -(-n // page)]) == self.cache.pages(id)
        assert batch.slot_mapping.tolist() == rows
        assert batch.cache_seqlens.tolist() == [self.cache.length(id) for id in batch.sequences]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def batch(self, data):
        ids = self.some(data)
        counts = [data.draw(st.integers(0, 4)) for _ in ids]
        made = self.attempt(lambda: self.cache.batch(ids, counts, max_new=40), OutOfPages, ValueRangeError)
        if made is not None:
            self.write(made)
            self.batches = [*self.batches[-2:], (made, [self.cache.allocator.find(id) for id in ids])]
            return
        if all(self.resident(id) for id in ids) and all(
            len(self.model[i]) + n <= MOST for i, n in zip(ids, counts, strict=True)
        ):
            # what is needed at the least: new pages, were there no copies to make
            size = self.cache.page_size
            new = [
                -(-(len(self.model[i]) + n) // size) - len(self.cache.pages(i))
                for i, n in zip(ids, counts, strict=True)
            ]
            assert sum(new) + len(ids) > self.cache.free_pages

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def next(self, data):
        alive = [each for each in self.batches if all(one.state == "resident" for one in each[1])]
        batch, records = data.draw(st.sampled_from(alive if alive and data.draw(st.integers(0, 15)) else self.batches))
        counts = [data.draw(st.integers(0, 3)) for _ in records]
        alive = all(one.state == "resident" for one in records)
        moved = self.attempt(lambda: batch.next(counts), OutOfPages, ValueRangeError)
        assert moved is None or alive
        if moved is not None:
            self.happened["next"] += 1
            self.write(batch)

    @precondition(lambda self: 0 < len(self.model) < 6 or (self.model and self.drawn % 5 == 4))
    @rule(data=st.data(), whole=st.booleans())
    def share(self, data, whole):
        (id,) = self.some(data, 1)
        tokens = len(self.model[id]) if whole else data.draw(st.integers(0, len(self.model[id])))
        used = self.cache.free_pages
        share = (lambda: self.cache.fork(id)) if whole else (lambda: self.cache.share_prefix(id, tokens))
        made = self.attempt(share, ValueRangeError)
        assert (made is None) == (len(self.model) == 6 or not self.resident(id))
        assert self.cache.free_pages == used
        if made is not None:
            self.model[made] = self.model[id][:tokens]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        (id,) = self.some(data, 1)
        length = data.draw(st.integers(0, len(self.model[id])))
        if self.resident(id):
            self.cache.truncate(id, length)
            del self.model[id][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        (id,) = self.some(data, 1)
        self.cache.free(id)
        del self.model[id]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap_out(self, data):
        self.swapped_out(*self.some(data, 1))

    @precondition(lambda self: self.sharing())
    @rule(data=st.data())
    def swap_out_a_shared_one(self, data):
        """By itself, since of all sequences few share pages."""
        self.swapped_out(data.draw(st.sampled_from(self.sharing())))

    def sharing(self):
        """The sequences on the device that have a page together with another."""
        owners = self.cache.allocator.owners
        return [id for id in self.model if self.resident(id) and any(owners(page) > 1 for page in self.cache.pages(id))]

    def swapped_out(self, id):
        stays = any(self.cache.allocator.owners(page) > 1 for page in self.cache.pages(id))
        if self.attempt(lambda: self.cache.swap_out(id), ValueRangeError):
            self.happened["swapped out with shared pages" if stays else "swapped out"] += 1
        assert not self.resident(id)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap_in(self, data):
        (id,) = self.some(data, 1, swapped=True)
        if not self.resident(id):
            self.happened["swapped in"] += bool(self.attempt(lambda: self.cache.swap_in(id), OutOfPages))

    @rule()
    def defragment(self):
        self.happened["moved"] += bool(self.cache.defragment())
        assert self.cache.statistics().holes == 0

    @invariant()
    def every_row_is_there(self):
        if not hasattr(self, "cache"):
            return
        audit(self.cache.allocator)
        self.happened["steps"] += 1
        assert set(self.cache.sequences) == set(self.model)
        for id, numbers in self.model.items():
            assert self.cache.length(id) == len(numbers)
            if self.resident(id):
                for layer in range(LAYERS):
                    k, v = rows_of(self.cache, id, layer)
                    want = [n * LAYERS + layer for n in numbers]
                    assert k.flatten().tolist() == want
                    assert v.flatten().tolist() == [-n for n in want]

    def teardown(self):
        if hasattr(self, "cache"):
            for id in list(self.model):
                self.cache.free(id)
            assert self.cache.free_pages == self.cache.num_pages
            assert not self.cache._pool._host


# A failing run is short enough to be read; making it shorter would take minutes.
RUN = settings(
    max_examples=max(200, settings().max_examples), stateful_step_count=60, phases=(Phase.reuse, Phase.generate)
)


def test_any_sequence_of_calls():
    Machine.happened.clear()
    run_state_machine_as_test(Machine, settings=RUN)
    assert len(Machine.happened) == 9, Machine.happened
    assert min(Machine.happened.values()) >= 10, Machine.happened
