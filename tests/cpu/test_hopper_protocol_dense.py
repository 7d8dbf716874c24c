"""The barrier protocol of the dense Gluon kernel on CPU threads; what `test_hopper_protocol` says of the block-sparse one holds.

Q is read from shared memory by every product with K, so its buffer has to stay until the last of them has been waited for.
"""

import contextlib
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
from tilefold.kernels.hopper import attention_forward as kernel
from tilefold.kernels.hopper import parts

DIM, PANELS = 128, 2
FULL, CAUSAL, WINDOW = 0, 1, 2


class Buffers:
    """Panels in shared memory: what was copied there, and how many products read each."""

    def __init__(self, memory, name, number):
        self.memory, self.name, self.dtype = memory, name, Anything()
        self.content, self.readers = [None] * number, [0] * number

    def index(self, i):
        return Panel(self, i)


class Panel:
    def __init__(self, buffers, i):
        self.buffers, self.i = buffers, i

    def fill(self, content):
        with self.buffers.memory.changed:
            if self.buffers.readers[self.i]:
                self.buffers.memory.fail(f"{self.buffers.name}[{self.i}] is written while it is read")
            self.buffers.content[self.i] = content


class Tile:
    """The panels of one tile of a reinterpreted ring."""

    def __init__(self, buffers, slot):
        self.buffers, self.panels = buffers, range(slot * PANELS, (slot + 1) * PANELS)

    def permute(self, order):
        return self

    def held(self):
        return [self.buffers.content[i] for i in self.panels]

    def reading(self, number):
        for i in self.panels:
            self.buffers.readers[i] += number


class Note:
    def __init__(self):
        self.item = None

    def store(self, value):
        self.item = value

    def load(self, layout):
        return self.item


class Run:
    """One launch over `heads` query heads in groups; P of a tile is its key tile's number."""

    def __init__(self, seed, kind, seq_q, seq_k, heads, group, slots, left=100, right=30):
        self.memory, self.kind, self.seq_q, self.seq_k = Memory(seed), kind, seq_q, seq_k
        self.heads, self.group, self.slots, self.left, self.right = heads, group, slots, left, right
        self.q_blocks = -(-seq_q // 128)
        self.items, self.counter, self.made, self.local = self.q_blocks * heads, 0, [], threading.local()

    def namespace(self, program, programs):
        run = self
        gl = types.SimpleNamespace(
            **dict.fromkeys(("float32", "int32", "int64", "NVMMADistributedLayout", "DotOperandLayout"), Anything()),
            **dict.fromkeys(("NVMMASharedLayout", "BlockedLayout", "SliceLayout", "zeros", "zeros_like"), Anything()),
            **dict.fromkeys(("expand_dims",), Anything()), constexpr=None, static_range=range, num_warps=lambda: 4,
            program_id=lambda axis: Number(program), num_programs=lambda axis: programs, minimum=min, maximum=max,
            where=lambda c, a, b: a if c else b, sum=lambda x, axis: run.begin(x),
            full=lambda shape, value, *rest: value if shape == [1] else Anything(),
            store=lambda pointer, value: setattr(run, "counter", value),
        )  # fmt: skip
        names = {
            "gl": gl, "ROWS": 128, "KEYS": 128, "PANEL": 64, "FULL": FULL, "CAUSAL": CAUSAL, "WINDOW": WINDOW, "LOG2E": 1.0,
            "LOWEST": 0.0, "range": range,
            "mbarrier": types.SimpleNamespace(
                wait=lambda bar, parity: bar.wait(parity), expect=lambda bar, size: bar.arrive(expected=size),
                arrive=lambda bar, count: bar.arrive(),
            ),
            "tma_load": run.copy, "wgmma": run.product, "wgmma_wait": run.wait_products,
            "reinterpret": lambda buffers, dtype, shape, layout: types.SimpleNamespace(index=lambda i: Tile(buffers, i)),
            "draw_ticket": lambda tickets: run.draw(), "read_ticket": lambda drawn: drawn,
            "place_of_item": lambda item, blocks, heads: (
                Number(item % blocks), Number(item // blocks // heads), Number(item // blocks % heads)),
            "_cut_if_needed": lambda s, *args: s, "quad_sums": Anything(), "schedule_fence": lambda x: x,
            "softmax_step": lambda s, m, l, scale, layout, dtype: (s, m, l, Anything()),
            "rescale": lambda acc, alpha, row: acc, "reciprocal": Anything(), "store_lse": lambda *args: None,
            "store_accumulator": lambda *args: run.made.append((run.local.item, run.local.consumer)),
        }  # fmt: skip
        for module, functions in (
            (kernel, ("_block_of_item", "_range_of_block", "_produce", "_consume")),
            (parts, ("load_panels", "load_rows")),
        ):
            for name in functions:
                names[name] = types.FunctionType(getattr(module, name).fn.__code__, names)
        places = names["_block_of_item"]
        names["_block_of_item"] = lambda *args: tuple(map(Number, places(*args)))  # scalars, which can be cast
        self.block_of_item, self.range_of_block = names["_block_of_item"], names["_range_of_block"]
        return names

    def draw(self):
        with self.memory.changed:
            self.counter += 1
            return self.counter - 1

    def begin(self, item):
        self.local.item, self.local.open, self.local.tiles = item, [], {"k": 0, "v": 0}
        return item

    def copy(self, desc, place, barrier, panel):
        panel.fill(None)

        def arrive():
            time.sleep(self.memory.random.random() * 1e-3)
            with contextlib.suppress(AssertionError):  # noted in memory.failure
                panel.fill((desc, *(int(p) for p in place)))
                barrier.arrive(copied=(64 if desc == "q" else 128) * 64 * 2)

        threading.Thread(target=arrive, daemon=True).start()

    def boxes(self, desc, head, row):
        return [(desc, 0, head, row, p * 64) for p in range(PANELS)]

    def product(self, a, tile, acc, use_acc=True, is_async=True):
        """Reads its buffers from now until it is waited for; they hold what the item names."""
        side = tile.buffers.name
        block, _, head = self.block_of_item(self.local.item, self.q_blocks, self.heads)
        first, _ = self.range_of_block(block, self.seq_q, self.seq_k, self.left, self.right, self.kind)
        j = self.local.tiles[side]
        self.local.tiles[side] += 1
        reads = [tile]
        with self.memory.changed:
            wanted = self.boxes(side, head // self.group, (first + j) * 128)
            if tile.held() != wanted:
                self.memory.fail(f"item {self.local.item}: {side} holds {tile.held()}, not {wanted}")
            if side == "k":
                reads.append(a)
                if a.held() != self.boxes("q", head, block * 128 + self.local.consumer * 64):
                    self.memory.fail(f"item {self.local.item}: Q holds {a.held()}")
            elif a != j:
                self.memory.fail(f"item {self.local.item}: P of tile {a} meets V of tile {j}")
            for t in reads:
                t.reading(1)
        self.local.open.append(reads)
        return Product(j) if side == "k" else acc

    def wait_products(self, pending, deps):
        self.memory.nap()
        while len(self.local.open) > pending:
            with self.memory.changed:
                for t in self.local.open.pop(0):
                    t.reading(-1)
        return deps[0]

    def program(self, program, programs):
        memory, names, note = self.memory, self.namespace(program, programs), Note()
        q, k, v = (Buffers(memory, name, n * PANELS) for name, n in (("q", 2), ("k", self.slots), ("v", self.slots)))
        shapes = {"q_full": (2, 1), "q_empty": (2, 1), "k_full": (self.slots, 1), "k_empty": (self.slots, 2),
                  "v_full": (self.slots, 1), "v_empty": (self.slots, 2)}  # fmt: skip
        bars = []
        for name, (number, count) in shapes.items():
            made = [Barrier(memory, f"{name}[{i}]", count) for i in range(number)]
            bars.append(types.SimpleNamespace(index=made.__getitem__))

        rings, sizes = (q, k, v, *bars), (self.seq_q, self.seq_k, self.heads, self.q_blocks, self.left, self.right)

        def consumer(c):
            self.local.consumer = c
            names["_consume"](note, rings, (Number(0),) * 5, sizes, 1.0, c, self.kind, DIM, self.slots, True)

        yield lambda: names["_produce"](
            "q", "k", "v", None, note, rings, sizes, self.group, self.items, self.kind, DIM, self.slots
        )
        yield from (lambda c=c: consumer(c) for c in range(2))

    def __call__(self, programs):
        run_threads(self.memory, [work for p in range(programs) for work in self.program(p, programs)])
        assert sorted(self.made) == [(item, c) for item in range(self.items) for c in range(2)]
        assert self.counter == 0


class Product(int):
    """S, and P made of it: the number of its key tile."""

    def __eq__(self, other):
        return int(self) == int(other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("programs", [1, 3])
def test_protocol(kind, slots, programs):
    for seq_q, seq_k, heads, group in ((400, 700, 2, 1), (300, 100, 4, 2)):
        programs = min(programs, -(-seq_q // 128) * heads)
        Run(3, kind, seq_q, seq_k, heads, group, slots)(programs)


@pytest.mark.parametrize("barrier", ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty"])
def test_a_missing_wait_is_found(monkeypatch, barrier):
    """The check itself: who does not wait for one kind of barrier is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    waits = Barrier.wait
    monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if barrier in self.name else waits(self, parity))

    def several() -> None:
        pick = random.Random(5)
        for seed in range(10):
            Run(seed, CAUSAL, pick.choice((300, 700)), pick.choice((150, 900)), 4, 1, 2)(1)

    with pytest.raises(AssertionError):
        several()
