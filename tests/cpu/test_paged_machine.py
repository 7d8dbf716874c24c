"""PagedKVCache as a state machine: any sequence of calls, against a dictionary of what each sequence was given."""

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_cases import audit, rows_of, snapshot
from tilefold import OutOfPages, PagedKVCache
from tilefold.errors import ValueRangeError
from tilefold.paged.access import append_packed

LAYERS, MOST = 2, 20


class Machine(RuleBasedStateMachine):
    """The model: sequence -> the numbers that its tokens were given, one row each.  A row holds number * LAYERS + layer, and V
    its negative."""

    @initialize(pages=st.integers(1, 14), size=st.sampled_from([1, 2, 3, 4, 8]))
    def start(self, pages, size):
        self.cache = PagedKVCache(LAYERS, 1, 1, num_pages=pages, page_size=size, max_sequences=5, max_tokens=MOST,
                                  dtype=torch.float32, device="cpu")  # fmt: skip
        self.model, self.batches, self.drawn = {}, [], 0

    def attempt(self, call, *refusals):
        """The call's result, or None if it was refused, which must have changed nothing."""
        before = snapshot(self.cache.allocator)
        try:
            return call()
        except refusals:
            assert snapshot(self.cache.allocator) == before
            return None

    def some(self, data, least=0):
        return data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=least, max_size=4))

    def resident(self, id):
        return not self.cache.is_swapped(id)

    @rule(id=st.none() | st.integers(0, 9))
    def add(self, id):
        full, taken = len(self.model) == 5, id in self.model
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
            caches = self.cache.k[layer], self.cache.v[layer]
            append_packed(caches, k + layer, -k - layer, batch, None, None, False)
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
        counts = [data.draw(st.integers(0, 7)) for _ in ids]
        made = self.attempt(lambda: self.cache.batch(ids, counts, max_new=40), OutOfPages, ValueRangeError)
        if made is not None:
            self.write(made)
            self.batches = [*self.batches[-2:], (made, [self.cache.allocator.find(id) for id in ids])]
            return
        if all(self.resident(id) for id in ids) and all(len(self.model[i]) + n <= MOST for i, n in zip(ids, counts)):
            # what is needed at the least: new pages, were there no copies to make
            size = self.cache.page_size
            new = [-(-(len(self.model[i]) + n) // size) - len(self.cache.pages(i)) for i, n in zip(ids, counts)]
            assert sum(new) + len(ids) > self.cache.free_pages

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def next(self, data):
        batch, records = data.draw(st.sampled_from(self.batches))
        counts = [data.draw(st.integers(0, 3)) for _ in records]
        alive = all(one.state == "resident" for one in records)
        moved = self.attempt(lambda: batch.next(counts), OutOfPages, ValueRangeError)
        assert moved is None or alive
        if moved is not None:
            self.write(batch)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), whole=st.booleans())
    def share(self, data, whole):
        (id,) = self.some(data, 1)[:1]
        tokens = len(self.model[id]) if whole else data.draw(st.integers(0, len(self.model[id])))
        used = self.cache.free_pages
        share = (lambda: self.cache.fork(id)) if whole else (lambda: self.cache.share_prefix(id, tokens))
        made = self.attempt(share, ValueRangeError)
        assert (made is None) == (len(self.model) == 5 or not self.resident(id))
        assert self.cache.free_pages == used
        if made is not None:
            self.model[made] = self.model[id][:tokens]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        (id,) = self.some(data, 1)[:1]
        length = data.draw(st.integers(0, len(self.model[id])))
        if self.resident(id):
            self.cache.truncate(id, length)
            del self.model[id][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        (id,) = self.some(data, 1)[:1]
        self.cache.free(id)
        del self.model[id]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap_out(self, data):
        (id,) = self.some(data, 1)[:1]
        self.attempt(lambda: self.cache.swap_out(id), ValueRangeError)
        assert not self.resident(id)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap_in(self, data):
        (id,) = self.some(data, 1)[:1]
        if not self.resident(id):
            self.attempt(lambda: self.cache.swap_in(id), OutOfPages)

    @rule()
    def defragment(self):
        self.cache.defragment()
        assert self.cache.statistics().holes == 0

    @invariant()
    def every_row_is_there(self):
        if not hasattr(self, "cache"):
            return
        audit(self.cache.allocator)
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


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=max(20, settings().max_examples // 2), stateful_step_count=40)
