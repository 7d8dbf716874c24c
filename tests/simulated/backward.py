"""One launch of a Gluon kernel of the backward pass: memory, copies, products, counters, and who reads what when.

A tile's value is the set of the boxes that went into it; an accumulator's is the list of its products.  What is held: nobody
waits for ever; no buffer and no kept row is written while it is read; every result is made once.  What the results have to be,
and which functions of a kernel run, a subclass says."""

from simulated import Anything, Launch, Number, Ring, barriers, own_functions, run_threads

FULL, CAUSAL, WINDOW = 0, 1, 2
DIM, PANELS, SLOTS = 128, 2, 2
TILES = 2 * SLOTS + 2
SUM_SLOTS = TILES * PANELS // (PANELS + 1)
GARBAGE = 77777777  # what lies in memory that nobody wrote
ZEROS = frozenset(["zeros"])  # what TMA gives past the end


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


GRADIENTS = tuple(map(Output, ("dq", "dk", "dv")))


class View:
    """Some panels as one operand of a product."""

    def __init__(self, panels):
        self.panels = panels

    def permute(self, order):
        return self

    def tags(self):
        contents = (panel.content for panel in self.panels)
        return frozenset().union(*(one if isinstance(one, frozenset) else {one} for one in contents))

    def load(self, layout):
        return Value(frozenset(panel.content for panel in self.panels))

    def reading(self, number):
        for panel in self.panels:
            panel.readers += number


class Panel(View):
    """A buffer in shared memory: what it holds, and how many read it."""

    def __init__(self, memory, name, content=None):
        super().__init__([self])
        self.memory, self.name, self.content, self.readers = memory, name, content, 0

    def fill(self, content):
        if self.readers:
            self.memory.fail(f"{self.name} is written while it is read")
        self.content = content

    def slice(self, begin, size):
        return self

    def store(self, value):  # dS, for TMA
        self.fill(value.tags)


class Backward(Launch):
    """Items drawn from one counter, by so many places at a time.  A subclass has `items`, `batches`, `rooms`, `room_rows`,
    `group`, `q_units`, `heads`, `functions` (of which modules), `more` (stand-ins beside those here) and `program`."""

    functions: tuple = ()
    counted = (
        "await_room",
        "await_keys",
        "await_queries",
    )  # waits for counters in memory, each of which a test leaves out

    def __init__(self, seed):
        super().__init__(seed)
        self.kept, self.reading, self.made = {}, {}, {}

    # ------------------------------------------------------------ the language

    def namespace(self):
        gl = self.language(
            zeros=lambda *args: Value(), exp2=lambda x: x, expand_dims=lambda x, axis: x,
            load=lambda pointer, mask=True, other=0: pointer.load() if mask else other,
            store=lambda pointer, value: pointer.store(value),
        )  # fmt: skip
        names = self.names(gl) | {
            "UNIT": 64, "PANEL": 64, "STATISTICS": 128, "FULL": FULL, "CAUSAL": CAUSAL, "WINDOW": WINDOW,
            "tma_store": self.copy_out, "tma_store_wait": lambda pending: self.wait_copies(),
            "fence_async_shared": lambda: None, "opaque": lambda x: x, "cut_if_needed": lambda s, *args: s,
            "tiles_of": lambda pool, tiles, dim: Ring(View(pool.items[i * PANELS : (i + 1) * PANELS]) for i in range(tiles)),
            "await_room": self.await_room, "await_keys": self.await_keys, "await_queries": self.await_queries,
            "await_copies": lambda: self.wait_copies("written"),
            "count_keys": lambda progress, batch: self.count(1 + batch),
            "count_queries": lambda progress, batch, batches: self.count(1 + batches + batch),
            "store_accumulator": self.store, **self.more(),
        }  # fmt: skip
        return own_functions(names, self.functions)

    def more(self):
        """More stand-ins."""
        return {}

    @staticmethod
    def cast(names, *functions):
        """What these functions return are scalars, which can be cast."""

        def numbers(found):
            return tuple(map(numbers, found)) if isinstance(found, tuple) else Number(found)

        for name in functions:
            names[name] = lambda *args, inner=names[name]: numbers(inner(*args))
        return names

    def draw(self):
        self.progress[0] += 1
        return self.progress[0] - 1

    def bytes_of(self, desc):
        return 512 if desc == "stat" else 8192

    def copy(self, desc, place, barrier, panel):
        if desc != "kept":
            super().copy(desc, place, barrier, panel)
            return
        panel.fill(None)
        row = int(place[0])
        self.reading[row] = self.reading.get(row, 0) + 1

        def arrive():
            panel.content = self.kept.get(row) if row < self.rooms * self.room_rows else ZEROS
            self.reading[row] -= 1
            barrier.arrive(copied=self.bytes_of(desc))

        self.later(arrive, desc in self.late)

    def copies(self):
        """Those that the present thread began."""
        return self.local.__dict__.setdefault("copies", [])

    def copy_out(self, desc, place, panel):
        row, state = int(place[0]), {"read": False, "written": False}
        self.copies().append(state)
        panel.readers += 1

        def write():
            value, panel.readers, state["read"] = panel.content, panel.readers - 1, True
            self.memory.later(self.memory.random.random(), lambda: arrive(value))

        def arrive(value):
            if row < self.rooms * self.room_rows:  # past the end nothing is written
                if self.reading.get(row):
                    self.memory.fail(f"row {row} is written while it is read")
                self.kept[row] = value
            state["written"] = True

        self.later(write)

    def wait_copies(self, key="read"):
        copies = self.copies()
        self.memory.until(lambda: all(c[key] for c in copies), f"copies {key}")

    def count(self, at):
        self.progress[at] += 1

    def _await(self, at, wanted):
        self.memory.until(lambda: self.progress[at] >= wanted, f"counter {at} of {wanted}")

    def await_room(self, progress, batch, rooms, query_items, batches):
        if batch >= rooms:
            self._await(1 + batches + batch - rooms, query_items)

    def await_keys(self, progress, batch, key_items):
        self._await(1 + batch, key_items)

    def await_queries(self, progress, batch, batches, query_items):
        self._await(1 + batches + batch, query_items)

    def product(self, a, b, acc, use_acc=True, is_async=True):
        self.read(*(t for t in (a, b) if isinstance(t, View)))
        pair = tuple(t.tags() if isinstance(t, View) else t.tags for t in (a, b))
        return Value(pair[0] | pair[1], (*acc.log, pair) if use_acc else (pair,))

    def record(self, key, log):
        if key in self.made:
            self.memory.fail(f"{key} was made before")
        self.made[key] = log

    def store(self, out, acc, rows, stride, dtype, columns=None):
        self.record((out.name, self.local.item), acc.log)

    # ------------------------------------------------------------ what is wanted

    def boxes(self, side, h, unit):
        return frozenset((side, 0, h, unit * 64, p * 64) for p in range(PANELS))

    def units_of_statistics(self):
        """Of a head."""
        return self.q_units

    def made_of(self, h, q, k, row=None):
        """Scores of a pair of units: k, q and its statistics, of a row; dS of it: everything."""
        row = h * self.units_of_statistics() + q if row is None else row
        p = self.boxes("k", h // self.group, k) | self.boxes("q", h, q) | {("stat", row * 128)}
        return p, p | self.boxes("v", h // self.group, k) | self.boxes("do", h, q)

    # ------------------------------------------------------------ threads

    def buffers(self, sum_slots=SUM_SLOTS):
        """Shared memory of a program: pool, statistics, dS, and the barriers in the kernels' order."""
        memory, ring = self.memory, max(SLOTS, sum_slots)
        pool = Ring((Panel(memory, f"panel {i}") for i in range(TILES * PANELS)), Anything())
        statistics = Ring(Panel(memory, f"statistics {i}") for i in range(SLOTS))
        bars = barriers(memory, kv_full=(1, 1), q_full=(ring, 1), do_full=(SLOTS, 1), empty=(ring, 1), done=(1, 1))
        return pool, statistics, Panel(memory, "dS"), bars

    def begin(self, item):
        """Of a consumer's thread."""
        self.local.item, self.local.open, self.local.stored = item, [], 0

    def place(self):
        """One place of the device: one program after the other."""
        while (item := self.draw()) < self.items:
            run_threads(self.memory, self.program(item))

    def run(self, places):
        self.progress = [0] * (1 + 2 * self.batches)
        run_threads(self.memory, [self.place] * places)
