"""Stand-ins for the language of Gluon kernels, to run their partitions as threads on a CPU: memory, barriers, scalars.

Gluon has no interpreter.  What is checked with these is the protocol: who waits for whom, and what is where at which time.
"""

import contextlib
import random
import threading
import time
import types

PATIENCE = 20.0  # seconds until a wait counts as a deadlock


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
    """A scalar of the kernel: an int that may be cast."""

    def to(self, dtype):
        return self

    def __mul__(self, other):
        return Number(int(self) * int(other))

    def __add__(self, other):
        return Number(int(self) + int(other))

    def __sub__(self, other):
        return Number(int(self) - int(other))

    __rmul__, __radd__ = __mul__, __add__


class Memory:
    """Barriers, buffers and global integers of one program, behind one lock."""

    def __init__(self, seed):
        self.changed = threading.Condition()
        self.random = random.Random(seed)
        self.failure = None

    def nap(self):
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 2e-3)

    linger = nap  # of one that reads a tile in parts

    def fail(self, what):
        self.failure = self.failure or what
        self.changed.notify_all()
        raise AssertionError(what)

    def until(self, ready, what):
        """Called with the lock held."""
        if not self.changed.wait_for(lambda: self.failure or ready(), PATIENCE):
            self.fail(f"deadlock: {what}")
        if self.failure:
            raise AssertionError(self.failure)


class Barrier:
    def __init__(self, memory, name, count):
        self.memory, self.name, self.count = memory, name, count
        self.phase, self.arrived, self.bytes = 0, 0, 0

    def _settle(self):
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0
            self.memory.changed.notify_all()

    def arrive(self, expected=0, copied=0):
        with self.memory.changed:
            self.bytes += expected - copied
            self.arrived += not copied
            if self.arrived > self.count or self.bytes < 0:
                self.memory.fail(f"{self.name}: {self.arrived} arrivals, {self.bytes} bytes to come")
            self._settle()

    def wait(self, parity):
        self.memory.nap()
        with self.memory.changed:
            self.memory.until(lambda: (self.phase & 1) != parity, f"{self.name} at phase {self.phase}, parity {parity}")


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


class Turn:
    """A named barrier of two warpgroups, of which one waits and one passes by."""

    def __init__(self, memory, name):
        self.memory, self.name, self.arrived = memory, name, 0

    def arrive(self):
        with self.memory.changed:
            self.arrived += 1
            if self.arrived > 1:
                self.memory.fail(f"{self.name}: two arrivals without a wait complete it")
            self.memory.changed.notify_all()

    def sync(self):
        self.memory.nap()
        with self.memory.changed:
            self.memory.until(lambda: self.arrived, self.name)
            self.arrived = 0


class Offsets:
    """A pointer to packed offsets."""

    def __init__(self, values, i=0):
        self.values, self.i = values, int(i)

    def __add__(self, offset):
        return Offsets(self.values, self.i + offset)


class Panels:
    """Panels in shared memory: what was copied to each, and how many products read it; tiles of `width` of them."""

    def __init__(self, memory, name, number, width=1):
        self.memory, self.name, self.width = memory, name, width
        self.content, self.readers = [None] * number, [0] * number

    def index(self, i):
        return types.SimpleNamespace(fill=lambda content: self.fill(i, content))

    def fill(self, i, content):
        with self.memory.changed:
            if self.readers[i]:
                self.memory.fail(f"{self.name}[{i}] is written while it is read")
            self.content[i] = content


class Tile:
    """The panels of one tile."""

    def __init__(self, buffers, slot):
        self.buffers, self.panels = buffers, range(slot * buffers.width, (slot + 1) * buffers.width)

    def permute(self, order):
        return self

    def held(self):
        return [self.buffers.content[i] for i in self.panels]

    def reading(self, number):
        for i in self.panels:
            self.buffers.readers[i] += number


class Streams:
    """What a launch does besides its own: copies that arrive some time, products that read until they are waited for.

    Needs memory, local.open (the tiles of each product that is not waited for) and bytes_of(desc), of a copy."""

    mbarrier = types.SimpleNamespace(
        wait=lambda bar, parity: bar.wait(parity), expect=lambda bar, size: bar.arrive(expected=size),
        arrive=lambda bar, count: bar.arrive(),
    )  # fmt: skip

    def copy(self, desc, place, barrier, panel):
        panel.fill(None)

        def arrive():
            time.sleep(self.memory.random.random() * 1e-3)
            with contextlib.suppress(AssertionError):  # noted in memory.failure
                panel.fill((desc, *(int(p) for p in place)))
                barrier.arrive(copied=self.bytes_of(desc))

        threading.Thread(target=arrive, daemon=True).start()

    def wait_products(self, pending, deps):
        self.memory.nap()
        while len(self.local.open) > pending:
            with self.memory.changed:
                for tile in self.local.open.pop(0):
                    tile.reading(-1)
        return deps[0] if len(deps) == 1 else deps


def run_threads(memory, works):
    """Run all at once; the first failure of any of them, or a deadlock, is raised."""
    failures = []

    def guarded(work):
        try:
            work()
        except BaseException as problem:
            failures.append(problem)
            with memory.changed:
                memory.failure = memory.failure or repr(problem)
                memory.changed.notify_all()

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    assert not failures, failures[0]
    assert not any(thread.is_alive() for thread in threads)
