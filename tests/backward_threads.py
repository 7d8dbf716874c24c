"""One launch of a Gluon kernel of the backward pass on CPU threads: memory, copies, products, counters, and who reads what when.

A tile's value is the set of the boxes that went into it; an accumulator's is the list of its products.  What is held: nobody
waits for ever; no buffer and no kept row is written while it is read; every result is made once.  What the results have to be,
and which functions of a kernel run, a subclass says.
"""

import contextlib
import threading
import time
import types

from gluon_threads import Anything, Barrier, Memory, run_threads

DIM, PANELS, SLOTS = 128, 2, 2
TILES = 2 * SLOTS + 2
SUM_SLOTS = TILES * PANELS // (PANELS + 1)
GARBAGE = 77777777  # what lies in memory that nobody wrote
ZEROS = frozenset(["zeros"])  # what the copy engine gives past the end


class Value:
    """A tile in registers: what went into it; of an accumulator, its products in order."""

    type = Anything()

    def __init__(self, tags=frozenset(), log=()):
        self.tags, self.log = tags, log

    def _with(self, other):
        return Value(self.tags | getattr(other, "tags", frozenset()), self.log)

    __mul__ = __rmul__ = __sub__ = _with

    def __add__(self, earlier):
        """A sum goes on that another program has begun."""
        return Value(self.tags | earlier.tags, (*earlier.log, *self.log))

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

    def load(self, layout):
        return Value(frozenset(panel.content for panel in self.panels))

    def permute(self, order):
        return self


class Ring:
    def __init__(self, items, dtype=None):
        self.items, self.dtype = items, dtype

    def index(self, i):
        return self.items[i]


class Launch:
    """Items drawn from one counter, by so many places at a time.  A subclass has `items`, `batches`, `rooms`, `room_rows`,
    `group`, `q_units`, `heads`, `functions` (of which modules), `names` (stand-ins beside those here) and `program`."""

    def __init__(self, seed):
        self.memory = Memory(seed)
        self.kept, self.reading = {}, {}
        self.made, self.local = {}, threading.local()

    # ------------------------------------------------------------ the language

    def namespace(self):
        run = self
        gl = types.SimpleNamespace(
            **dict.fromkeys(("float32", "int64", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), Anything()),
            constexpr=None, static_range=range, num_warps=lambda: 4, minimum=min, maximum=max,
            where=lambda c, a, b: a if c else b, zeros=lambda *args: Value(), exp2=lambda x: x, expand_dims=lambda x, axis: x,
            convert_layout=lambda x, layout: x,
            load=lambda pointer, mask=True, other=0: pointer.load() if mask else other,
            store=lambda pointer, value: pointer.store(value),
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
            "await_room": run.await_room, "await_keys": run.await_keys, "await_queries": run.await_queries,
            "await_copies": lambda: run.wait_copies("written"),
            "count_keys": lambda progress, batch: run.count(1 + batch),
            "count_queries": lambda progress, batch, batches: run.count(1 + batches + batch),
            "store_accumulator": run.store, **self.names(),
        }  # fmt: skip
        for module, functions in self.functions:
            for name in functions:
                made = getattr(module, name).fn
                names[name] = types.FunctionType(made.__code__, names, name, made.__defaults__)
        return self.finished(names)

    def names(self):
        """More stand-ins."""
        return {}

    def finished(self, names):
        """The names, some of them perhaps wrapped."""
        return names

    def draw(self):
        with self.memory.changed:
            self.progress[0] += 1
            return self.progress[0] - 1

    late: tuple[str, ...] = ()  # what a test has come long after all others

    def later(self, work, late=False):
        slow = (
            10 if late or self.memory.random.random() < 0.1 else 1
        )  # now and then one comes long after those behind it

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
                    panel.content = self.kept.get(row) if row < self.rooms * self.room_rows else ZEROS
                    self.reading[row] -= 1
            else:
                panel.fill((desc, *(int(p) for p in place)))
            barrier.arrive(copied=512 if desc == "stat" else 8192)

        self.later(arrive, desc in self.late)

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

    def await_queries(self, progress, batch, batches, query_items):
        self._await(1 + batches + batch, query_items)

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

    def store(self, out, acc, rows, stride, dtype, columns=None):
        with self.memory.changed:
            key = out.name, self.local.item
            if key in self.made:
                self.memory.fail(f"{key} was made before")
            self.made[key] = acc.log

    # ------------------------------------------------------------ what is wanted

    def boxes(self, side, h, unit):
        return frozenset((side, 0, h, unit * 64, p * 64) for p in range(PANELS))

    def units_of_statistics(self):
        """Of a head."""
        return self.q_units

    def made_of(self, h, q, k):
        """Scores of a pair of units: k, q and its statistics; dS of it: everything."""
        statistics = frozenset([("stat", (h * self.units_of_statistics() + q) * 128)])
        p = self.boxes("k", h // self.group, k) | self.boxes("q", h, q) | statistics
        return p, p | self.boxes("v", h // self.group, k) | self.boxes("do", h, q)

    # ------------------------------------------------------------ threads

    def buffers(self, sum_slots=SUM_SLOTS):
        """Shared memory of a program: pool, statistics, dS, and the barriers in the kernels' order."""
        memory = self.memory
        pool = Ring([Panel(memory, f"panel {i}") for i in range(TILES * PANELS)], Anything())
        statistics = Ring([Panel(memory, f"statistics {i}") for i in range(SLOTS)])
        ring = max(SLOTS, sum_slots)
        sizes = {"kv_full": 1, "q_full": ring, "do_full": SLOTS, "empty": ring, "done": 1}
        bars = [Ring([Barrier(memory, f"{name}[{i}]", 1) for i in range(number)]) for name, number in sizes.items()]
        return pool, statistics, Panel(memory, "dS"), bars

    def begin(self, item):
        """Of a consumer's thread."""
        self.local.item, self.local.open = item, []

    def place(self):
        """One place of the device: one program after the other."""
        while (item := self.draw()) < self.items:
            run_threads(self.memory, self.program(item))

    def run(self, places):
        self.progress = [0] * (1 + 2 * self.batches)
        run_threads(self.memory, [self.place] * places)
