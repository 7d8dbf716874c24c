"""The protocol of the block-sparse Gluon kernel of the backward pass on CPU threads: its own functions, with values that say
what made them (backward_threads).

Held here: every sum is over the pairs that the lists name, in their order, of tiles that belong together; every piece of work is
done once.
"""

import itertools
import random
import types

import pytest

import gluon_threads
from backward_threads import DIM, GARBAGE, SLOTS, SUM_SLOTS, TILES, Launch, Output, Pointer
from gluon_threads import Barrier, Number

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import backward_parts, backward_work, parts
from tilefold.kernels.hopper import sparse_backward as kernel


class Run(Launch):
    """One launch over random lists of `heads` query heads in groups; capacity is that of the longest list."""

    def __init__(self, seed, lists, group, kv_blocks, per_q, per_k, batch_heads, rooms):
        super().__init__(seed)
        self.lists, self.group = lists, group
        self.per_q, self.per_k, self.batch_heads, self.rooms = per_q, per_k, batch_heads, rooms
        self.heads, self.q_blocks, self.kv_blocks = len(lists), len(lists[0]), kv_blocks
        self.q_units, self.kv_units = self.q_blocks * per_q, kv_blocks * per_k
        self.capacity = max(1, *(len(x) for rows in lists for x in rows))
        self.turned = [[[i for i, x in enumerate(rows) if n in x] for n in range(kv_blocks)] for rows in lists]
        self.batches = self.heads // group // batch_heads
        self.room_rows = batch_heads * group * self.q_units * self.capacity * per_k * 64
        batch = batch_heads * self.kv_units
        self.delay = min(batch + 5, max(1, rooms - 1) * batch)
        self.items = self.batches * (batch + batch_heads * group * self.q_units)

    def places(self, n, h):
        rows = self.lists[h]
        return [i * self.per_q * self.capacity + rows[i].index(n) for i in self.turned[h][n]]

    functions = (
        (backward_work, ("work_of_item",)),
        (parts, ("load_panels",)),
        (backward_parts, ("next_slot", "load_keys", "load_queries", "wait_tile", "first_products", "key_tile",
                          "finish_keys", "load_kept", "add_kept", "produce_sums", "consume_sums")),
        (kernel, ("_produce_keys", "_consume_keys", "_keep_row", "_valid_queries", "_produce", "_consume")),
    )  # fmt: skip

    def names(self):
        return {
            "place_of_item": lambda item, units, heads: (
                Number(item % units), Number(item // units // heads), Number(item // units % heads)),
            "list_of_block": lambda lists, block, b, h: (
                Pointer(lists[h][block] if lists[h][block] else [GARBAGE]), len(lists[h][block])),
            "list_of_item": lambda lists, block, b, h: Pointer(self.places(block, h)),
        }  # fmt: skip

    # ------------------------------------------------------------ what is wanted

    def expected(self, place):
        """{output: its products} of a piece of work."""
        keys, batch, place = place
        if not keys:
            unit = batch * self.batch_heads * self.group * self.q_units + place
            h, q = unit // self.q_units, unit % self.q_units
            listed = [n * self.per_k + e for n in self.lists[h][q // self.per_q] for e in range(self.per_k)]
            return {"dq": [(self.made_of(h, q, k)[1], self.boxes("k", h // self.group, k)) for k in listed]}
        unit = batch * self.batch_heads * self.kv_units + place
        hk, k = unit // self.kv_units, unit % self.kv_units
        dv, dk = [], []
        for h in range(hk * self.group, (hk + 1) * self.group):
            listed = [i * self.per_q + e for i in self.turned[h][k // self.per_k] for e in range(self.per_q)]
            if not listed:  # units past the end, with the last row of the statistics
                empty = frozenset([("stat", self.heads * self.q_units * 128)])
                p = self.boxes("k", hk, k) | self.boxes("q", h, self.q_units) | empty
                ds = p | self.boxes("v", hk, k) | self.boxes("do", h, self.q_units)
                dv += [(p, self.boxes("do", h, self.q_units))] * self.per_q
                dk += [(ds, self.boxes("q", h, self.q_units))] * self.per_q
            for q in listed:
                p, ds = self.made_of(h, q, k)
                dv.append((p, self.boxes("do", h, q)))
                dk.append((ds, self.boxes("q", h, q)))
        return {"dv": dv, "dk": dk}

    # ------------------------------------------------------------ threads

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        pool, statistics, ds, bars = self.buffers()
        work = self.heads, self.group, self.q_units, self.kv_units, self.heads * self.q_units
        order = self.batch_heads, self.batches, self.delay, self.rooms
        zeros = (Number(0),) * 6

        def produce():
            names["_produce"]("q", "do", "k", "v", "stat", "kept", None, pool, statistics, *bars, self.lists, self.turned, work,
                              self.capacity, order, self.room_rows, item,
                              DIM, SLOTS, SUM_SLOTS, self.per_q, self.per_k)  # fmt: skip

        def consume():
            self.begin(item)
            names["_consume"](
                *(Output(name) for name in ("dq", "dk", "dv")), *(Number(0),) * 3, "keep", pool, statistics, ds, *bars,
                self.lists, Turned(self.turned), work, self.capacity, order, self.room_rows, item,
                zeros[:3], zeros, zeros[:4], self.rooms * self.room_rows, 1.0, 1 << 20, 1 << 20,
                DIM, TILES, SLOTS, SUM_SLOTS, self.per_q, self.per_k, False, False, False)  # fmt: skip

        return produce, consume

    def __call__(self, places):
        self.run(places)
        work_of_item = self.namespace()["work_of_item"]
        key_items, query_items = self.batch_heads * self.kv_units, self.batch_heads * self.group * self.q_units
        wanted = {}
        for item in range(self.items):
            place = work_of_item(item, key_items, query_items, self.batches, self.delay)
            wanted |= {(name, item): tuple(log) for name, log in self.expected(place).items()}
        assert self.made == wanted
        assert self.progress[1:] == [key_items] * self.batches + [query_items] * self.batches


class Turned(list):
    """The transposed lists, which the kernel also takes apart as seven arguments to look its places up."""

    def __iter__(self):
        return iter((None,) * 7)


def random_lists(seed, heads, q_blocks, kv_blocks):
    draw = random.Random(seed)
    counts = [0, 1, kv_blocks, *(draw.randrange(kv_blocks + 1) for _ in range(q_blocks))]
    return [[draw.sample(range(kv_blocks), draw.choice(counts)) for _ in range(q_blocks)] for _ in range(heads)]


@pytest.mark.parametrize(("per_q", "per_k"), [(1, 1), (2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("places", [1, 3, 7])
@pytest.mark.parametrize(
    ("heads", "group", "batch_heads", "rooms"), [(4, 1, 1, 2), (4, 1, 1, 3), (4, 2, 2, 1), (6, 3, 1, 2)]
)
def test_protocol(per_q, per_k, places, heads, group, batch_heads, rooms):
    lists = random_lists(places, heads, 3, 4)
    Run(places, lists, group, 4, per_q, per_k, batch_heads, rooms)(places)


@pytest.mark.parametrize(
    "missing",
    ["kv_full", "q_full", "do_full", "empty", "done", "await_room", "await_keys", "wait_copies"],
)
def test_a_missing_wait_is_found(monkeypatch, missing):
    """The check itself: who does not wait for one kind of barrier or counter is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    if missing == "kv_full":  # else they have come, as a rule, when what was asked for after them has
        monkeypatch.setattr(Run, "late", ("k", "v"))
    if hasattr(Run, missing):
        monkeypatch.setattr(Run, missing, lambda self, *args: None)
    else:
        waits = Barrier.wait
        skipped = [f"{missing}[{i}]" for i in range(SUM_SLOTS)]
        monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if self.name in skipped else waits(self, parity))

    def several() -> None:
        for seed in range(100):  # threads race as they like: the first fault ends it
            Run(seed, random_lists(seed, 4, 3, 4), 1, 4, 2, 2, 1, 2)(14)  # more units than any ring has slots

    with pytest.raises(AssertionError):
        several()


def test_order():
    """Every piece of work has one number; what a piece waits for comes before it; both kinds are mixed."""
    names = {"gl": types.SimpleNamespace(maximum=max, minimum=min, where=lambda c, a, b: a if c else b)}
    work = types.FunctionType(backward_work.work_of_item.fn.__code__, names)
    for keys, queries, batches, rooms in itertools.product((1, 3), (1, 2, 5), (1, 2, 5), (2, 3, 4)):
        for delay in range(keys, (rooms - 1) * keys + 1):
            order = [work(i, keys, queries, batches, delay) for i in range(batches * (keys + queries))]
            assert sorted(order) == sorted(
                [(True, b, i) for b in range(batches) for i in range(keys)]
                + [(False, b, i) for b in range(batches) for i in range(queries)]
            )
            last = {kind_batch[:2]: i for i, kind_batch in enumerate(order)}
            for i, (is_keys, batch, _) in enumerate(order):
                assert is_keys or last[True, batch] < i
                assert not is_keys or batch < rooms or last[False, batch - rooms] < i
    mixed = [work(i, 8, 16, 9, 10)[0] for i in range(10, 10 + 24 * 7)]
    assert all(sum(mixed[i : i + 3]) == 1 for i in range(0, len(mixed), 3))
