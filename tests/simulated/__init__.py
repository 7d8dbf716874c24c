"""Stand-ins for the language of Gluon kernels, to run their partitions on a CPU: memory, barriers, scalars, and a clock.

Gluon has no interpreter.  What is checked with these is the protocol: who waits for whom, and what is where at which time.  A
partition is a thread; one of them runs at a time, and wherever it waits or lingers a seed says who goes on, by a clock of the
simulation's own.  So a seed is one order of events, a deadlock is seen at once, and nothing takes time by itself.
"""

import heapq
import itertools
import random
import threading
import types

import pytest

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)


class Anything:
    """Tensors and layouts, whose values do not matter here."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **options):
        return self

    def _same(self, *other):
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __ge__ = __eq__ = __and__ = __or__ = _same
    __truediv__ = __rtruediv__ = _same
    __hash__ = None


class Number(int):
    """A scalar of the kernel: an int that may be cast, and meet numbers of lanes."""

    def to(self, dtype):
        return self

    def __mul__(self, other):
        return Number(int(self) * int(other)) if isinstance(other, int) else NotImplemented

    def __add__(self, other):
        return Number(int(self) + int(other)) if isinstance(other, int) else NotImplemented

    def __sub__(self, other):
        return Number(int(self) - int(other)) if isinstance(other, int) else NotImplemented

    def __floordiv__(self, other):
        return Number(int(self) // int(other)) if isinstance(other, int) else NotImplemented

    def __mod__(self, other):
        return Number(int(self) % int(other)) if isinstance(other, int) else NotImplemented

    __rmul__, __radd__ = __mul__, __add__


class Waiting:
    """A thread that goes on when ready() holds; the one that was made last unwinds first after a failure."""

    made = itertools.count()
    present = threading.local()

    def __init__(self, ready, what, number):
        self.ready, self.what, self.number, self.turn = ready, what, number, threading.Lock()
        self.turn.acquire()


class Memory:
    """What the threads of a run share: the clock, what is to come, who waits for what, the first failure.

    pace: how much longer than usual threads linger."""

    pace = 1.0

    def __init__(self, seed):
        self.random, self.failure = random.Random(seed), None
        self.now, self.coming, self.waiting, self.order = 0.0, [], [], itertools.count()

    def fail(self, what):
        self.failure = self.failure or what
        raise AssertionError(what)

    def later(self, delay, act):
        """act() when `delay` of the clock is over; what fails there ends the run."""
        heapq.heappush(self.coming, (self.now + delay, next(self.order), act))

    def nap(self, longest=2.0):
        """Now and then the thread that runs is slow."""
        if self.random.random() < 0.3:
            due = self.now + self.random.random() * longest * self.pace
            self.later(due - self.now, lambda: None)
            self.until(lambda: self.now >= due, "its own time")

    linger = nap  # of one that reads a tile in parts

    def until(self, ready, what):
        """The thread that runs goes on when ready() holds, often at once, and others until then."""
        if not self.failure and ready() and self.random.random() < 0.7:
            return
        own = Waiting(ready, what, getattr(Waiting.present, "number", -1))
        self.waiting.append(own)
        chosen = self.pass_on()
        if chosen is not own:
            own.turn.acquire()
        if self.failure:
            raise AssertionError(self.failure)

    def pass_on(self):
        """Choose who goes on, and let it."""
        while not self.failure:
            able = [one for one in self.waiting if one.ready()]
            if able:
                chosen = self.random.choice(able)
                break
            if not self.coming:
                self.failure = f"deadlock: {', '.join(one.what for one in self.waiting)}"
                break
            self.now, _, act = heapq.heappop(self.coming)
            try:
                act()
            except AssertionError as problem:
                self.failure = self.failure or str(problem)
        if self.failure:
            chosen = max(self.waiting, key=lambda one: one.number)
        self.waiting.remove(chosen)
        chosen.turn.release()
        return chosen


def run_threads(memory, works):
    """Run all, one at a time; the first failure of any of them, or a deadlock, is raised."""
    left, starting = len(works), []

    def guarded(work, own):
        nonlocal left
        Waiting.present.number = own.number
        own.turn.acquire()
        try:
            if not memory.failure:
                work()
        except BaseException as problem:
            memory.failure = memory.failure or repr(problem)
        left -= 1
        memory.pass_on()

    for work in works:
        own = Waiting(lambda: True, "its beginning", next(Waiting.made))
        starting.append(threading.Thread(target=guarded, args=(work, own), daemon=True))
        memory.waiting.append(own)
    for thread in starting:
        thread.start()
    memory.until(lambda: left == 0, "the end of the others")


class Barrier:
    missing = ""  # barriers of this name are not waited for: a planted fault

    def __init__(self, memory, name, count):
        self.memory, self.name, self.count = memory, name, count
        self.phase, self.arrived, self.bytes = 0, 0, 0

    def arrive(self, expected=0, copied=0):
        self.bytes += expected - copied
        self.arrived += not copied
        if self.arrived > self.count or self.bytes < 0:
            self.memory.fail(f"{self.name}: {self.arrived} arrivals, {self.bytes} bytes to come")
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0

    def wait(self, parity):
        if self.name.split("[")[0] == self.missing:
            return
        self.memory.nap()
        self.memory.until(lambda: (self.phase & 1) != parity, f"{self.name} at phase {self.phase}, parity {parity}")


class Turn:
    """A named barrier of two warpgroups, of which one waits and one passes by."""

    missing = False

    def __init__(self, memory, name):
        self.memory, self.name, self.arrived = memory, name, 0

    def arrive(self):
        self.arrived += not self.missing
        if self.arrived > 1:
            self.memory.fail(f"{self.name}: two arrivals without a wait complete it")

    def sync(self):
        if not self.missing:
            self.memory.nap()
            self.memory.until(lambda: self.arrived, self.name)
        self.arrived = 0


class Ring:
    """Buffers, views or barriers by number."""

    def __init__(self, items, dtype=None):
        self.items, self.dtype = list(items), dtype

    def index(self, i):
        return self.items[i]


def barriers(memory, **counts):
    """A ring for each name, of (number, arrivals)."""
    return [Ring(Barrier(memory, f"{name}[{i}]", n) for i in range(many)) for name, (many, n) in counts.items()]


class Note:
    """Integers in shared memory."""

    def __init__(self):
        self.values = {}

    def index(self, i):
        return types.SimpleNamespace(
            store=lambda value: self.values.__setitem__(i, value), load=lambda layout: self.values[i]
        )

    def store(self, value):
        self.index(0).store(value)

    def load(self, layout):
        return self.values[0]


class Offsets:
    """A pointer to packed offsets."""

    def __init__(self, values, i=0):
        self.values, self.i = values, int(i)

    def __add__(self, offset):
        return Offsets(self.values, self.i + offset)


class Panels:
    """Panels in shared memory: what was copied to each, and how many products read it; tiles of `width` of them."""

    def __init__(self, memory, name, number, width=1):
        self.memory, self.name, self.width, self.dtype = memory, name, width, Anything()
        self.content, self.readers = [None] * number, [0] * number

    def index(self, i):
        return types.SimpleNamespace(fill=lambda content: self.fill(i, content))

    def fill(self, i, content):
        if self.readers[i]:
            self.memory.fail(f"{self.name}[{i}] is written while it is read")
        self.content[i] = content


class Tile:
    """Some panels as one operand: those of a slot, or those that are named."""

    def __init__(self, buffers, slot=0, panels=None):
        self.buffers = buffers
        self.panels = range(slot * buffers.width, (slot + 1) * buffers.width) if panels is None else panels

    def permute(self, order):
        return self

    def held(self):
        return [self.buffers.content[i] for i in self.panels]

    def reading(self, number):
        for i in self.panels:
            self.buffers.readers[i] += number


def tiles_of(buffers, *view):
    """A ring of buffers as tiles."""
    return types.SimpleNamespace(index=lambda slot: Tile(buffers, slot))


def own_functions(names, functions):
    """The kernels' own functions (module, names) over these names, which they join."""
    for module, some in functions:
        for name in some:
            fn = getattr(module, name).fn
            names[name] = types.FunctionType(fn.__code__, names, name, fn.__defaults__)
    return names


def own_classes(names, classes):
    """The kernels' own aggregates (module, names) over these names, which they join: plain classes with the same methods."""
    for module, some in classes:
        for name in some:
            made = getattr(module, name)
            own = {key: value.fn for key, value in vars(made).items() if hasattr(value, "fn")}
            own["__init__"] = made.hash_attrs[0].fn  # Triton puts it nowhere else
            methods = {key: types.FunctionType(fn.__code__, names, key, fn.__defaults__) for key, fn in own.items()}
            names[name] = type(name, (), methods)
    return names


class Launch:
    """What every launch does: copies that arrive some time, products that read until they are waited for, its own functions.

    Needs memory, local.open (the tiles of each product that is not waited for) and bytes_of(desc), of a copy."""

    late: tuple[str, ...] = ()  # what comes long after all others
    mbarrier = types.SimpleNamespace(
        wait=lambda bar, parity, pred=True: bar.wait(parity) if pred else None,
        expect=lambda bar, size: bar.arrive(expected=size),
        arrive=lambda bar, count, pred=True: bar.arrive() if pred else None,
    )  # fmt: skip

    def __init__(self, seed):
        self.memory, self.local, self.counter, self.made = Memory(seed), threading.local(), 0, []

    def language(self, without=(), **more):
        """`gl`; without: names that stand for anything."""
        names = {
            **dict.fromkeys(("float32", "int32", "int64", "NVMMADistributedLayout", "DotOperandLayout"), Anything()),
            **dict.fromkeys(("NVMMASharedLayout", "BlockedLayout", "SliceLayout", *without), Anything()),
            "constexpr": lambda x: x, "static_range": range, "num_warps": lambda: 4, "minimum": min, "maximum": max,
            "where": lambda c, a, b: a if c else b, "convert_layout": lambda x, layout: x,
        }  # fmt: skip
        return types.SimpleNamespace(**{**names, **more})

    def names(self, gl):
        """What every kernel calls."""
        return {
            "gl": gl, "range": range, "len": len, "min": min, "max": max, "LOG2E": 1.0, "mbarrier": self.mbarrier,
            "tma_load": self.copy, "wgmma": self.product, "wgmma_wait": self.wait_products,
        }  # fmt: skip

    def launch(self, programs):
        """The threads of so many programs at once."""
        run_threads(self.memory, [work for p in range(programs) for work in self.program(p, programs)])

    def draw(self):
        self.counter += 1
        return self.counter - 1

    def later(self, act, late=False):
        """Now and then what is late comes long after those behind it."""
        slow = 10 if late or self.memory.random.random() < 0.1 else 1
        self.memory.later(self.memory.random.random() * slow, act)

    def content_of(self, desc, *place):
        """What lies where a copy of these coordinates has come."""
        return desc, *place

    def copy(self, desc, place, barrier, panel):
        panel.fill(None)

        def arrive():
            panel.fill(self.content_of(desc, *map(int, place)))
            barrier.arrive(copied=self.bytes_of(desc))

        self.later(arrive, desc in self.late)

    def read(self, *tiles):
        """Tiles that a product reads from now until it is waited for."""
        for tile in tiles:
            tile.reading(1)
        self.local.open.append(tiles)

    def wait_products(self, pending, deps):
        self.memory.nap()
        while len(self.local.open) > pending:
            for tile in self.local.open.pop(0):
                tile.reading(-1)
        return deps if len(deps) > 1 else deps[0]
