"""The barrier protocol of the Gluon kernel on CPU threads: its own functions, with memory, barriers and products that check.

Gluon has no interpreter.  Here the partitions run as they are written, each in a thread, on stand-ins for the language: a copy
arrives later and completes its barrier, a product reads its buffer from its issue until it is waited for.  What is held:
nobody waits for ever, each product finds the block that its list names, no buffer is written while it is read, every query
block is made once, and the counter is left at 0.
"""

import random
import threading
import time
import types

import pytest

from gluon_threads import Anything, Barrier, Memory, Number, run_threads

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import parts
from tilefold.kernels.hopper import sparse_forward as kernel


class Ring:
    """Buffers (or barriers) by number; a buffer holds what was copied there and how many products read it."""

    def __init__(self, memory, name, number, make=lambda i: None, dtype=None):
        self.memory, self.name, self.dtype = memory, name, dtype
        self.items = [make(i) for i in range(number)]
        self.readers = [0] * number

    def index(self, i):
        return self.items[i] if self.items[i] is not None else Slot(self, i)


class Slot:
    def __init__(self, ring, i):
        self.ring, self.i = ring, i

    def fill(self, content):
        with self.ring.memory.changed:
            if self.ring.readers[self.i]:
                self.ring.memory.fail(f"{self.ring.name}[{self.i}] is written while it is read")
            self.ring.items_content[self.i] = content


class Tile:
    """A unit in a reinterpreted ring: the slots behind it."""

    def __init__(self, ring, first, number):
        self.ring, self.slots = ring, range(first, first + number)

    def permute(self, order):
        return self

    def slice(self, begin, rows):
        per = 128 // self.ring.run.block
        return Rows(self.ring, self.slots[begin // self.ring.run.block :: per])

    def load(self, layout):
        """As on the device, the load may be under way until a product has needed it."""
        with self.ring.memory.changed:
            return self.ring.run.begin(self)


class Rows:
    """64 rows of a unit that are loaded into registers: read until they are used."""

    def __init__(self, ring, slots):
        self.ring, self.slots = ring, slots

    def load(self, layout):
        with self.ring.memory.changed:
            for i in self.slots:
                self.ring.readers[i] += 1
        return self

    def to(self, dtype):
        return self

    def held(self):
        return [self.ring.items_content[i] for i in self.slots]

    def free(self):
        for i in self.slots:
            self.ring.readers[i] -= 1


class Tiles:
    def __init__(self, ring, number):
        self.ring, self.each = ring, len(ring.items) // number

    def index(self, i):
        return Tile(self.ring, i * self.each, self.each)


class Run:
    """One launch: `programs` of `warpgroups` consumers over random lists."""

    def __init__(self, seed, warpgroups, block, slots, lists, heads, dim=128, mixed=0):
        self.mixed = mixed
        self.memory, self.lists, self.heads = Memory(seed), lists, heads
        self.warpgroups, self.block, self.slots, self.dim = warpgroups, block, slots, dim
        self.q_blocks, self.made, self.counter, self.local = len(lists) // heads, [], 0, threading.local()
        self.seq_k = 64 * 128

    def namespace(self, program, programs):
        """The names that the kernel's functions see, with the language replaced."""
        run = self
        gl = types.SimpleNamespace(
            **dict.fromkeys(("float32", "int64", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), Anything()),
            **dict.fromkeys(("NVMMASharedLayout", "zeros", "zeros_like", "full", "arange", "expand_dims"), Anything()),
            constexpr=None, static_range=range, num_warps=lambda: 4, program_id=lambda axis: Number(program),
            num_programs=lambda axis: programs, minimum=min, maximum=max, where=lambda c, a, b: a if c else b,
        )  # fmt: skip

        def store(pointer, value):
            run.counter = value

        gl.store = store
        names = {
            "gl": gl, "UNIT": 128, "PANEL": 64, "BRANCH": 1, "BRANCH_GATE": 2, "GATE": 4,
            "LOG2E": 1.0, "LOWEST": 0.0, "range": range, "min": min, "max": max,
            "mbarrier": types.SimpleNamespace(
                wait=lambda bar, parity: bar.wait(parity),
                expect=lambda bar, size: bar.arrive(expected=size),
                arrive=lambda bar, count: bar.arrive(),
            ),
            "tma_load": run.copy, "wgmma": run.product, "wgmma_wait": run.wait_products,
            "reinterpret": lambda ring, dtype, shape, layout: Tiles(ring, shape[0]),
            "count_of_item": lambda lists, item, q_blocks, heads: len(run.lists[item]),
            "list_of_item": lambda lists, i_q, i_b, i_h: run.lists[i_h * run.q_blocks + i_q],
            "place_of_item": lambda item, q_blocks, heads: (
                Number(item % q_blocks),
                Number(0),
                Number(item // q_blocks),
            ),
            "units_of_list": lambda n, per: (max(-(-n // per), 1), max(-(-n // per), 1) * per - n),
            "entry": lambda index, i, count: index[i] if 0 <= i < count else -1,
            "draw_ticket": lambda tickets: run.draw(), "read_ticket": lambda drawn: drawn,
            "live_of_entry": lambda *args: 0, "cut_columns": lambda s, *args: s, "quad_sums": Anything(),
            "softmax_step": lambda s, m, l, scale, layout, dtype: (s, m, l, Anything()),
            "rescale": lambda acc, alpha, row: acc, "_finish": lambda out, lse, acc, m, l, branch, *args: run.finish(branch),
            "_write_note": run.write_note, "_read_note": run.read_note,
        }  # fmt: skip
        for module, name in (
            (kernel, "_load_unit"),
            (kernel, "_load_branch"),
            (parts, "load_panels"),
            (parts, "load_rows"),
        ):
            names[name] = types.FunctionType(getattr(module, name).fn.__code__, names)
        return names

    def draw(self):
        with self.memory.changed:
            self.counter += 1
            return self.counter - 1

    def write_note(self, note, item, count):
        note.update(item=item, count=count)

    def read_note(self, note):
        self.local.item, self.local.open = note["item"], []
        self.local.j = {"k": 0, "v": 0}
        return note["item"], note["count"]

    def copy(self, desc, place, barrier, slot):
        """The copy engine: some time later the buffer holds the box, and the barrier has its bytes."""
        slot.fill(None)

        def arrive():
            time.sleep(self.memory.random.random() * 1e-3)
            try:
                slot.fill((desc, *(int(p) for p in place)))
                barrier.arrive(copied=(64 if desc == "q" else self.block) * 64 * 2)
            except AssertionError:
                pass  # noted in memory.failure

        threading.Thread(target=arrive, daemon=True).start()

    def expected(self, side, j):
        """What the slots of unit j of the current item hold: boxes in the order panel, block."""
        per, entries = 128 // self.block, self.lists[self.local.item]
        missing = max(-(-len(entries) // per), 1) * per - len(entries)
        rows = [self.seq_k if i < missing else entries[i - missing] * self.block for i in range(j * per, (j + 1) * per)]
        return [(side, 0, self.local.item // self.q_blocks, row, p * 64) for p in range(self.dim // 64) for row in rows]

    def product(self, a, tile, acc, **options):
        """Reads its buffer from now until it is waited for."""
        side = tile.ring.name
        wanted = self.expected(side, self.local.j[side])
        self.local.j[side] += 1
        if side == "k":  # a is Q
            c, h = self.local.consumer, self.local.item // self.q_blocks
            row = (self.local.item % self.q_blocks * self.warpgroups + c) * 64
            q = [("q", 0, h, row, p * 64) for p in range(self.dim // 64)]
        with self.memory.changed:
            found = self.begin(tile)
            if found != wanted or (side == "k" and a != q):
                self.memory.fail(f"item {self.local.item}: {side} unit holds {found}, {wanted} was listed")
        return Anything()

    def finish(self, branch):
        """The rows of the other branch are read until the result is made."""
        if self.mixed:
            c, item = self.local.consumer, self.local.item
            row = item % self.q_blocks * 64 * self.warpgroups + c * 64 // self.block * self.block
            boxes = [("branch", 0, item // self.q_blocks, row, p * 64) for p in range(self.dim // 64)]
            self.memory.nap()
            with self.memory.changed:
                if branch.held() != boxes:
                    self.memory.fail(f"item {item}: {branch.held()} is mixed in, not {boxes}")
                branch.free()
        self.made.append(self.local.item)

    def begin(self, tile):
        """A read of a tile, open until products are waited for: what the tile holds."""
        for i in tile.slots:
            tile.ring.readers[i] += 1
        self.local.open.append(tile)
        return [tile.ring.items_content[i] for i in tile.slots]

    def wait_products(self, pending, deps):
        self.memory.nap()
        while len(self.local.open) > pending:
            tile = self.local.open.pop(0)
            with self.memory.changed:
                for i in tile.slots:
                    tile.ring.readers[i] -= 1
        return deps[0]

    def program(self, program, programs):
        """The threads of one program."""
        memory, groups, (k_slots, v_slots) = self.memory, self.warpgroups, self.slots
        panels, per, note = self.dim // 64, 128 // self.block, {}
        buffers = {"q": groups * panels, "k": k_slots * panels * per, "v": v_slots * panels * per}
        q, k, v = (Ring(memory, name, number, dtype=Anything()) for name, number in buffers.items())
        for ring in (q, k, v):
            ring.items_content, ring.run = [None] * len(ring.items), self
        shapes = {"q_full": (groups, 1), "q_empty": (groups, 1), "k_full": (k_slots, 1), "k_empty": (k_slots, groups),
                  "v_full": (v_slots, 1), "v_empty": (v_slots, groups)}  # fmt: skip
        bars = [
            Ring(memory, name, number, lambda i, name=name, count=count: Barrier(memory, f"{name}[{i}]", count))
            for name, (number, count) in shapes.items()
        ]
        names = self.namespace(program, programs)
        items, rings, sizes = len(self.lists), (q, k, v, *bars), (1 << 20, self.seq_k, self.heads, self.q_blocks)
        produce = types.FunctionType(kernel._produce.fn.__code__, names)
        consume = types.FunctionType(kernel._consume.fn.__code__, names)

        def consumer(c):
            self.local.consumer = c
            zeros = (Number(0),) * 6
            consume(note, rings, zeros[:5], None, zeros, (), sizes, 1.0, c, self.dim, self.block, groups, k_slots, v_slots,
                    False, False, False, self.mixed)  # fmt: skip

        yield lambda: produce("q", "k", "v", "branch", None, note, rings, None, sizes, 1, items, self.dim, self.block, groups,
                              k_slots, v_slots, self.mixed)  # fmt: skip
        for c in range(groups):
            yield lambda c=c: consumer(c)

    def __call__(self, programs):
        run_threads(self.memory, [work for p in range(programs) for work in self.program(p, programs)])
        assert sorted(self.made) == sorted(list(range(len(self.lists))) * self.warpgroups)
        assert self.counter == 0


@pytest.mark.parametrize(
    ("warpgroups", "block", "slots"), [(1, 64, (1, 2)), (1, 64, (3, 3)), (2, 128, (3, 3)), (2, 64, (2, 1))]
)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("mixed", [0, 1])
def test_protocol(warpgroups, block, slots, programs, mixed):
    draw = random.Random(7)
    lists = [draw.sample(range(40), draw.choice((0, 1, 2, 3, 5, 9))) for _ in range(14)]
    Run(3, warpgroups, block, slots, lists, heads=2, mixed=mixed)(programs)


@pytest.mark.parametrize("barrier", ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty"])
def test_a_missing_wait_is_found(monkeypatch, barrier):
    """The check itself: who does not wait for one kind of barrier is caught."""
    waits = Barrier.wait
    monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if barrier in self.name else waits(self, parity))
    lists = [[1, 2, 3, 4, 5, 6, 7], [3], [4], [], [6], [7], [8], [9], [1, 9, 8, 7, 5, 4, 3] * 3]
    slots = {"q": (3, 3), "k": (1, 3), "v": (3, 1)}[barrier[0]]  # the other ring must not hold the culprit back

    def several() -> None:
        for seed in range(100):  # threads race as they like: the first fault ends it
            Run(seed, 2, 64, slots, lists, heads=1, mixed=seed % 2)(1)

    with pytest.raises(AssertionError):
        several()
