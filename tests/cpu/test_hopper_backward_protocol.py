"""The protocol of the Gluon kernel of the backward pass on CPU threads: its own functions, with values that say what made them.

A tile's value is the set of the boxes that went into it; an accumulator's is the list of its products.  What is held: nobody
waits for ever; every sum is over the pairs that the lists name, in their order, of tiles that belong together; no buffer and no
kept row is written while it is read; every piece of work is done once.
"""

import contextlib
import itertools
import random
import threading
import time
import types

import pytest

import gluon_threads
from gluon_threads import Anything, Barrier, Memory, Number, run_threads

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import backward_parts, backward_work, parts
from tilefold.kernels.hopper import sparse_backward as kernel

DIM, PANELS, SLOTS = 128, 2, 2
TILES = 2 * SLOTS + 2
SUM_SLOTS = TILES * PANELS // (PANELS + 1)
GARBAGE = 77777777  # what lies in memory that nobody wrote


class Value:
    """A tile in registers: what went into it; of an accumulator, its products in order."""

    def __init__(self, tags=frozenset(), log=()):
        self.tags, self.log = tags, log

    def _with(self, other):
        return Value(self.tags | getattr(other, "tags", frozenset()), self.log)

    __mul__ = __rmul__ = __sub__ = __add__ = _with

    def to(self, dtype):
        return self


class Pointer:
    """Into a list of numbers; what is past its end is garbage."""

    def __init__(self, numbers, at=0):
        self.numbers, self.at = numbers, at

    def __add__(self, offset):
        return Pointer(self.numbers, self.at + int(offset))

    def load(self):
        return self.numbers[self.at] if self.at < len(self.numbers) else GARBAGE


class Output:
    """A gradient in memory."""

    def __init__(self, name):
        self.name = name

    def __add__(self, offset):
        return self


class Panel:
    """A buffer in shared memory: what it holds, and how many read it."""

    def __init__(self, memory, name):
        self.memory, self.name, self.content, self.readers = memory, name, None, 0

    def fill(self, content):
        with self.memory.changed:
            if self.readers:
                self.memory.fail(f"{self.name} is written while it is read")
            self.content = content

    def slice(self, begin, size):
        return self

    def load(self, layout):
        return Value(frozenset([self.content]))

    def store(self, value):  # dS, for the copy engine
        self.fill(value.tags)

    def permute(self, order):
        return Tile([self])


class Tile:
    def __init__(self, panels):
        self.panels = panels

    def permute(self, order):
        return self


class Ring:
    def __init__(self, items, dtype=None):
        self.items, self.dtype = items, dtype

    def index(self, i):
        return self.items[i]


class Run:
    """One launch over random lists of `heads` query heads in groups; capacity is that of the longest list."""

    def __init__(self, seed, lists, group, kv_blocks, per_q, per_k, batch_heads, rooms):
        self.memory, self.lists, self.group = Memory(seed), lists, group
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
        self.progress = [0] * (1 + 2 * self.batches)
        self.kept, self.reading, self.writing = {}, {}, 0
        self.made, self.local = {}, threading.local()

    def places(self, n, h):
        rows = self.lists[h]
        return [i * self.per_q * self.capacity + rows[i].index(n) for i in self.turned[h][n]]

    # ------------------------------------------------------------ the language

    def namespace(self):
        run = self
        gl = types.SimpleNamespace(
            **dict.fromkeys(("float32", "int64", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), Anything()),
            constexpr=None, static_range=range, num_warps=lambda: 4, minimum=min, maximum=max,
            where=lambda c, a, b: a if c else b, zeros=lambda *args: Value(), exp2=lambda x: x, expand_dims=lambda x, axis: x,
            convert_layout=lambda x, layout: x,
            load=lambda pointer, mask=True, other=0: pointer.load() if mask else other,
        )  # fmt: skip
        names = {
            "gl": gl, "UNIT": 64, "PANEL": 64, "STATISTICS": 128, "LOG2E": 1.0, "range": range,
            "mbarrier": types.SimpleNamespace(
                wait=lambda bar, parity: bar.wait(parity), expect=lambda bar, size: bar.arrive(expected=size),
                arrive=lambda bar, count, pred=True: bar.arrive() if pred else None,
            ),
            "tma_load": run.copy_in, "tma_store": run.copy_out, "tma_store_wait": lambda pending: run.wait_copies(),
            "fence_async_shared": lambda: None, "opaque": lambda x: x,
            "wgmma": run.product, "wgmma_wait": run.wait_products,
            "tiles_of": lambda pool, tiles, dim: Ring([Tile(pool.items[i * PANELS : (i + 1) * PANELS]) for i in range(tiles)]),
            "place_of_item": lambda item, units, heads: (
                Number(item % units), Number(item // units // heads), Number(item // units % heads)),
            "list_of_block": lambda lists, block, b, h: (
                Pointer(lists[h][block] if lists[h][block] else [GARBAGE]), len(lists[h][block])),
            "list_of_item": lambda lists, block, b, h: Pointer(run.places(block, h)),
            "await_room": run.await_room, "await_keys": run.await_keys, "await_copies": lambda: run.wait_copies("written"),
            "count_keys": lambda progress, batch: run.count(1 + batch),
            "count_queries": lambda progress, batch, batches: run.count(1 + batches + batch),
            "store_accumulator": run.store,
        }  # fmt: skip
        for module, functions in (
            (backward_work, ("work_of_item",)),
            (parts, ("load_panels",)),
            (backward_parts, ("next_slot", "produce_sums", "consume_sums")),
            (kernel, ("_produce_keys", "_consume_keys", "_key_tile", "_wait_tile", "_keep_row", "_valid_queries", "_produce",
                      "_consume")),
        ):  # fmt: skip
            for name in functions:
                made = getattr(module, name).fn
                names[name] = types.FunctionType(made.__code__, names, name, made.__defaults__)
        return names

    def draw(self):
        with self.memory.changed:
            self.progress[0] += 1
            return self.progress[0] - 1

    def later(self, work):
        slow = 10 if self.memory.random.random() < 0.1 else 1  # now and then one comes long after those behind it

        def act():
            time.sleep(self.memory.random.random() * 1e-3 * slow)
            with contextlib.suppress(AssertionError):  # noted in memory.failure
                work()

        threading.Thread(target=act, daemon=True).start()

    def copy_in(self, desc, place, barrier, panel):
        panel.fill(None)
        row = int(place[0])
        if desc == "kept":
            with self.memory.changed:
                self.reading[row] = self.reading.get(row, 0) + 1

        def arrive():
            if desc == "kept":
                with self.memory.changed:
                    panel.content = self.kept.get(row)
                    self.reading[row] -= 1
            else:
                panel.fill((desc, *(int(p) for p in place)))
            barrier.arrive(copied=512 if desc == "stat" else 8192)

        self.later(arrive)

    def copy_out(self, desc, place, panel):
        row = int(place[0])
        copies = self.local.__dict__.setdefault("copies", [])
        state = {"panel": panel, "read": False, "written": False}
        copies.append(state)
        with self.memory.changed:
            panel.readers += 1

        def write():
            with self.memory.changed:
                value, panel.readers, state["read"] = panel.content, panel.readers - 1, True
                self.memory.changed.notify_all()
            time.sleep(self.memory.random.random() * 1e-3)
            with self.memory.changed:
                if row < self.rooms * self.room_rows:  # past the end nothing is written
                    if self.reading.get(row):
                        self.memory.fail(f"row {row} is written while it is read")
                    self.kept[row] = value
                state["written"] = True
                self.memory.changed.notify_all()

        self.later(write)

    def wait_copies(self, key="read"):
        with self.memory.changed:
            copies = self.local.__dict__.setdefault("copies", [])
            self.memory.until(lambda: all(c[key] for c in copies), f"copies {key}")

    def count(self, at):
        with self.memory.changed:
            self.progress[at] += 1
            self.memory.changed.notify_all()

    def _await(self, at, wanted):
        with self.memory.changed:
            self.memory.until(lambda: self.progress[at] >= wanted, f"counter {at} of {wanted}")

    def await_room(self, progress, batch, rooms, query_items, batches):
        if batch >= rooms:
            self._await(1 + batches + batch - rooms, query_items)

    def await_keys(self, progress, batch, key_items):
        self._await(1 + batch, key_items)

    def product(self, a, b, acc, use_acc=True, is_async=True):
        reads = [p for t in (a, b) if not isinstance(t, Value) for p in (t.panels if isinstance(t, Tile) else [t])]
        with self.memory.changed:
            for panel in reads:
                panel.readers += 1
        self.local.open.append(reads)

        def tags(t):
            if isinstance(t, Value):
                return t.tags
            panels = t.panels if isinstance(t, Tile) else [t]
            return frozenset().union(*(p.content if isinstance(p.content, frozenset) else {p.content} for p in panels))

        pair = tags(a), tags(b)
        return Value(pair[0] | pair[1], (*acc.log, pair) if use_acc else (pair,))

    def wait_products(self, pending, deps):
        self.memory.nap()
        while len(self.local.open) > pending:
            with self.memory.changed:
                for panel in self.local.open[0]:
                    panel.readers -= 1
            self.local.open.pop(0)
        return deps if len(deps) > 1 else deps[0]

    def store(self, out, acc, rows, stride, dtype):
        with self.memory.changed:
            key = out.name, self.local.item
            if key in self.made:
                self.memory.fail(f"{key} was made before")
            self.made[key] = acc.log

    # ------------------------------------------------------------ what is wanted

    def boxes(self, side, h, unit):
        return frozenset((side, 0, h, unit * 64, p * 64) for p in range(PANELS))

    def made_of(self, h, q, k):
        """Scores of a pair of units: k, q and its statistics; dS of it: everything."""
        statistics = frozenset([("stat", (h * self.q_units + q) * 128)])
        p = self.boxes("k", h // self.group, k) | self.boxes("q", h, q) | statistics
        return p, p | self.boxes("v", h // self.group, k) | self.boxes("do", h, q)

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
        memory, names = self.memory, self.namespace()
        pool = Ring([Panel(memory, f"panel {i}") for i in range(TILES * PANELS)], Anything())
        statistics = Ring([Panel(memory, f"statistics {i}") for i in range(SLOTS)])
        ds = Panel(memory, "dS")
        sizes = {"kv_full": 1, "q_full": SUM_SLOTS, "do_full": SLOTS, "empty": SUM_SLOTS, "done": 1}
        bars = [Ring([Barrier(memory, f"{name}[{i}]", 1) for i in range(number)]) for name, number in sizes.items()]
        work = self.heads, self.group, self.q_units, self.kv_units, self.heads * self.q_units
        order = self.batch_heads, self.batches, self.delay, self.rooms
        zeros = (Number(0),) * 6

        def produce():
            names["_produce"]("q", "do", "k", "v", "stat", "kept", None, pool, statistics, *bars, self.lists, self.turned, work,
                              self.capacity, order, self.room_rows, item,
                              DIM, SLOTS, SUM_SLOTS, self.per_q, self.per_k)  # fmt: skip

        def consume():
            self.local.item, self.local.open = item, []
            names["_consume"](
                *(Output(name) for name in ("dq", "dk", "dv")), *(Number(0),) * 3, "keep", pool, statistics, ds, *bars,
                self.lists, Turned(self.turned), work, self.capacity, order, self.room_rows, item,
                zeros[:3], zeros, zeros[:4], self.rooms * self.room_rows, 1.0, 1 << 20, 1 << 20,
                DIM, TILES, SLOTS, SUM_SLOTS, self.per_q, self.per_k, False, False, False)  # fmt: skip

        return produce, consume

    def place(self):
        """One place of the device: one program after the other."""
        while (item := self.draw()) < self.items:
            run_threads(self.memory, self.program(item))

    def __call__(self, places):
        run_threads(self.memory, [self.place] * places)
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
    if hasattr(Run, missing):
        monkeypatch.setattr(Run, missing, lambda self, *args: None)
    else:
        waits = Barrier.wait
        skipped = [f"{missing}[{i}]" for i in range(SUM_SLOTS)]
        monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if self.name in skipped else waits(self, parity))

    def several() -> None:
        for seed in range(10):
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
