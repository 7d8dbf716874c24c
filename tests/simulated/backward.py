"""One launch of a Gluon kernel of the backward pass: memory, copies, products, counters, and who reads what when.

A tile's value is the set of the boxes that went into it; an accumulator's is the list of its products.  What is held: nobody
waits for ever; no buffer and no kept row is written while it is read; every result is made once.  What the results have to be,
and which functions of a kernel run, a subclass says."""

from types import SimpleNamespace

from simulated import Anything, Launch, Number, Ring, barriers, own_classes, own_functions, run_threads
from tilefold.kernels.hopper import (
    backward_config,
    backward_consumer,
    backward_epilogue,
    backward_mask,
    backward_pipeline,
    backward_producer,
    backward_scheduler,
    backward_wide_consumer,
    ds_ring,
    parts,
    pipeline,
    recompute,
)

FULL, CAUSAL, WINDOW = 0, 1, 2
DIM, PANELS, SLOTS = 128, 2, 2
GARBAGE = 77777777  # what lies in memory that nobody wrote
ZEROS = frozenset(["zeros"])  # what TMA gives past the end
FUNCTIONS = (
    (parts, ("load_panels",)),
    (backward_pipeline, ("first_stage", "next_stage")),
    (backward_scheduler, ("work_of_number",)),
    (ds_ring, ("rows_of_split", "place_of_keys", "make_ds_ring", "row_of_pair")),
    (backward_producer, ("produce_keys", "produce_queries", "produce")),
    (backward_consumer, ("issue_scores", "first_products", "key_step", "zero_gradient", "consume_keys", "store_keys",
                         "zero_columns", "add_pairs", "wait_sums",
                         "consume_queries", "store_sum", "consume")),
)  # fmt: skip
CLASSES = (
    (pipeline, ("Stage",)),
    (backward_config, ("BackwardConfig",)),
    (backward_mask, ("Lengths", "BackwardMask")),
    (backward_scheduler, ("BackwardTile", "Drawn", "Counters", "SplitScheduler", "PackedScheduler")),
    (backward_pipeline, ("BackwardPipeline",)),
    (ds_ring, ("DsTiles", "DsRing", "PackedDsRing")),
    (recompute, ("Recompute",)),
    (backward_epilogue, ("Gradient", "SplitSums")),
)


WIDE_FUNCTIONS = (
    *FUNCTIONS,
    (backward_wide_consumer, ("probabilities", "clear_tail", "publish_clear", "consume_dv", "gradient", "issue_columns",
                              "wait_columns", "store_columns", "consume_dk", "consume")),
)  # fmt: skip
WIDE_CLASSES = (*CLASSES, (backward_wide_consumer, ("Exchange",)))


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
    """A gradient in memory, from a column on: strides are 0."""

    def __init__(self, name, first=0):
        self.name, self.first = name, first

    def __add__(self, offset):
        return Output(self.name, self.first + int(offset))


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


class Handed(Panel):
    """Where P is on its way to the other consumer: all of it, of one tile."""

    def load(self, layout):
        return Value(self.content or frozenset(["nothing"]))


class Backward(Launch):
    """Work tiles drawn from one counter, by so many places at a time.  A subclass has `items`, `segments`, `slots`, `slot_rows`,
    `group`, `q_units`, `heads`, `functions` and `classes` (of which modules), `more` (stand-ins beside those here) and
    `program`."""

    functions: tuple = FUNCTIONS
    classes: tuple = CLASSES
    panels = panels_qk = panels_v = PANELS  # of 64 columns: of a tile, and those that head dims fill
    ring = SLOTS  # of q and of dout
    sum_counters = 0  # of sums over spans, behind the others
    counted = (
        "await_slot",
        "await_keys",
        "await_queries",
        "await_sums",
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
            "FIELDS": 12, "KEYS": 1, "QUERIES": 0, "field": lambda x: Number(x) if type(x) is int else x,
            "accumulator": lambda columns: Anything(), "tma_store": self.copy_out,
            "tma_store_wait": lambda pending: self.wait_copies(), "fence_async_shared": lambda: None, "opaque": lambda x: x,
            "_await": self._await, "_count": self.count, "await_copies": lambda: self.wait_copies("written"),
            "store_accumulator": self.store, **self.more(),
        }  # fmt: skip
        own_functions(own_classes(names, self.classes), self.functions)
        names["BackwardMask"].apply = lambda mask, s, *args: s
        names["Gradient"].add = lambda out, acc, work, first=0: self.store(
            out.out + first, acc, work.lengths.seq_k - work.tile * 64, 1, None
        )
        if "Counters" not in names:
            return names
        names["BackwardPipeline"].part = lambda pipe, i, first, panels: self.part(pipe, pipe._place(i, first), panels)
        for name in self.counted:
            own = getattr(names["Counters"], name)
            setattr(names["Counters"], name, lambda *args, own=own, name=name: getattr(self, name)(own, *args))
        return names

    def part(self, pipe, place, panels):
        assert place % panels == 0
        return View(pipe.pool.items[place : place + panels])

    def more(self):
        """More stand-ins."""
        return {}

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
            panel.content = self.kept.get(row) if row < self.slots * self.slot_rows else ZEROS
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
            if row < self.slots * self.slot_rows:  # past the end nothing is written
                if self.reading.get(row):
                    self.memory.fail(f"row {row} is written while it is read")
                self.kept[row] = value
            state["written"] = True

        self.later(write)

    def wait_copies(self, key="read"):
        copies = self.copies()
        self.memory.until(lambda: all(c[key] for c in copies), f"copies {key}")

    def count(self, at):
        self.progress[int(at)] += 1

    def _await(self, at, wanted):
        self.memory.until(lambda: self.progress[int(at)] >= wanted, f"counter {at} of {wanted}")

    def await_slot(self, own, *args):
        own(*args)

    await_keys = await_queries = await_sums = await_slot

    def product(self, a, b, acc, use_acc=True, is_async=True):
        self.read(*(t for t in (a, b) if isinstance(t, View)))
        pair = tuple(t.tags() if isinstance(t, View) else t.tags for t in (a, b))
        tags = pair[0] | pair[1]
        return Value(tags | acc.tags, (*acc.log, pair)) if use_acc else Value(tags, (pair,))

    def record(self, key, log):
        if key in self.made:
            self.memory.fail(f"{key} was made before")
        self.made[key] = log

    def store(self, out, acc, rows, stride, dtype, columns=None):
        self.record((out.name, self.local.item), acc.log)

    # ------------------------------------------------------------ what is wanted

    def boxes(self, side, h, unit):
        panels = self.panels_v if side in ("v", "do") else self.panels_qk
        return frozenset((side, 0, h, unit * 64, p * 64) for p in range(panels))

    def units_of_statistics(self):
        """Of a head."""
        return self.q_units

    def made_of(self, h, q, k, row=None):
        """Scores of a pair of units: k, q and its statistics, of a row; dS of it: everything."""
        row = h * self.units_of_statistics() + q if row is None else row
        p = self.boxes("k", h // self.group, k) | self.boxes("q", h, q) | {("stat", row * 128)}
        return p, p | self.boxes("v", h // self.group, k) | self.boxes("do", h, q)

    # ------------------------------------------------------------ threads

    def pipeline(self, names, config, consumers=1):
        """Shared memory of a program, with a barrier of its own for dout where there are two consumers; and dS on its way."""
        memory, ring = self.memory, max(config.SLOTS, config.DQ_SLOTS)
        pool = Ring((Panel(memory, f"panel {i}") for i in range((2 * self.ring + 2) * self.panels)), Anything())
        statistics = Ring(Panel(memory, f"statistics {i}") for i in range(self.ring))
        empty = "q_empty" if consumers > 1 else "empty"
        kv_full, q_full, do_full, q_empty, done = barriers(
            memory,
            kv_full=(1, 1),
            q_full=(ring, 1),
            do_full=(self.ring, 1),
            **{empty: (ring, consumers)},
            done=(1, consumers),
        )
        do_empty = barriers(memory, do_empty=(self.ring, 2))[0] if consumers > 1 else None
        cleared = barriers(memory, cleared=(self.ring, 1))[0] if consumers > 1 and config.VARLEN else None
        pipe = names["BackwardPipeline"]("q", "do", "k", "v", "stat", pool, statistics, kv_full, q_full, do_full, q_empty,
                                         do_empty, done, cleared, config)  # fmt: skip
        return pipe, names["DsTiles"]("kept", Panel(memory, "dS"), self.slots * self.slot_rows)

    def softcap(self):
        """Changes of scores, of which there are none."""
        return SimpleNamespace(scale=1.0, SOFTCAP=0, to_base_2=lambda: 1.0, capped=lambda s: (s, 1.0, 1.0))

    def exchange(self, names):
        """What one of two consumers hands to the other."""
        bars = barriers(self.memory, p_full=(1, 1), p_empty=(1, 1))
        return names["Exchange"](Handed(self.memory, "P"), *bars)

    def gradients(self, names, written=None, batch=True):
        """dq, dk and dv by strides of no matter."""
        return [names["Gradient"](out, 0 if batch else None, 0, 0, None, None, None if out.name == "dq" else written)
                for out in GRADIENTS]  # fmt: skip

    def begin(self, item):
        """Of a consumer's thread."""
        self.local.item, self.local.open, self.local.stored = item, [], 0

    def place(self):
        """One place of the device: one program after the other."""
        while (item := self.draw()) < self.items:
            run_threads(self.memory, self.program(item))

    def run(self, places):
        self.progress = [0] * (1 + 2 * self.segments + self.sum_counters)
        run_threads(self.memory, [self.place] * places)
