"""The barriers of a bias and a mask in the dense Gluon kernel, on CPU threads: every tile of scores meets its own, which stays
until every thread has read it.  Each folding warpgroup has rings of its own, so that one may run ahead of the other."""

import random
import time
import types

import pytest

import gluon_threads
from gluon_threads import Anything, Barrier

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from forward_threads import CAUSAL, FULL, REAL, WINDOW, Buffers, Product, Run, Tile
from tilefold.kernels.hopper import forward_mods

MODS = ("load_tiles", "wait_tile", "release_tile", "add_bias", "drop_masked", "change_scores")


class Descriptor:
    """What boxes are cut from; 1, or 0 where one serves all batch entries or heads, leads to them."""

    def __init__(self, name, bits, steps):
        self.name, self.dtype, self.steps = name, types.SimpleNamespace(primitive_bitwidth=bits), steps


class Changed(Run):
    """A launch with a bias of rows of 16 bits and a mask of bytes; rows: of a tile of each, 64, 1 or 0 for none."""

    def __init__(self, *args, rows=(64, 64), slots=(2, 2), steps=((1, 1), (0, 1)), **options):
        super().__init__(*args[:6], **options)
        self.bias, self.mask = rows
        self.tile_slots = slots
        self.real = {**REAL, forward_mods: MODS}
        self.sources = [Descriptor("bias", 16, steps[0]), Descriptor("mask", 8, steps[1])]

    def more(self):
        return {
            "panel_of_tile": lambda dtype, rows, keys: 64,
            "places_of_tile": lambda dtype, rows, keys: 1,
            "tile_layout": lambda *shape: None,
            "reinterpret": lambda panels, *view: types.SimpleNamespace(index=lambda i: Held(self, panels, i)),
            "read_sequence": lambda note, i_b, varlen: i_b,
        }

    def namespace(self, program, programs):
        names = super().namespace(program, programs)
        names["fence_async_shared"] = self.fence
        return names

    def fence(self):
        """What threads began to read before has arrived: without it the copy engine may write there first."""
        with self.memory.changed:
            for tile in self.local.held.values():
                tile.reading(-1)
        self.local.held = {}

    def bytes_of(self, desc):
        if not isinstance(desc, Descriptor):
            return super().bytes_of(desc)
        rows = self.bias if desc.name == "bias" else self.mask
        return rows * 64 * desc.dtype.primitive_bitwidth // 8

    def tile_rings(self):
        sources, rings = [], []
        for desc, rows, slots in zip(self.sources, (self.bias, self.mask), self.tile_slots, strict=True):
            number = self.consumers * slots
            panels = Buffers(self.memory, desc.name, number, 0, range(0, self.keys, 64))
            panels.dtype, panels.shape = desc.dtype, (number * self.keys // 64, rows, 64)
            bars = [
                types.SimpleNamespace(
                    index=[Barrier(self.memory, f"{desc.name}_{what}[{i}]", 1) for i in range(number)].__getitem__
                )
                for what in ("full", "empty")
            ]
            sources.append((desc, *desc.steps) if rows else ())
            rings.append((panels, *bars) if rows else ())
        return tuple(sources), tuple(rings)

    def product(self, a, tile, acc, use_acc=True, is_async=True):
        made = super().product(a, tile, acc, use_acc, is_async)
        return Scores(made) if isinstance(made, Product) else made

    def begin(self, item):
        self.local.held, self.local.met = {}, []
        return super().begin(item)

    def check(self, tile):
        """The tile in hand is the one of the scores that are made last, of this warpgroup's rows."""
        sequence, head, block = self.place(self.local.item)
        first, _ = self.range_of_block(
            block, *self.lengths[sequence], self.left, self.right, self.kind, self.rows, self.keys, self.pack
        )
        name = tile.buffers.name
        rows, desc = (self.bias, self.sources[0]) if name == "bias" else (self.mask, self.sources[1])
        row = block * self.rows + self.local.consumer * 64 if rows > 1 else 0
        key = (first + self.local.tiles["k", 0] - 1) * self.keys
        wanted = [
            (desc, sequence * desc.steps[0], head * desc.steps[1], row, key + column) for column in tile.buffers.columns
        ]
        if tile.held() != wanted:
            self.memory.fail(
                f"item {self.local.item}: {name} holds {[(held or [0])[1:] for held in tile.held()]}, not {wanted}"
            )


class Scores(Product):
    """S, to which a tile is added."""

    shape, type = (64, 128), Anything()

    def __mul__(self, scale):
        return self

    def __add__(self, tile):
        return self


class Held(Tile):
    """A tile of the bias or the mask: read from the load on until the next fence."""

    def __init__(self, run, buffers, slot):
        super().__init__(buffers, slot)
        self.run = run

    def load(self, layout):
        with self.run.memory.changed:
            self.run.check(self)
            self.reading(1)
        self.run.local.held[self.buffers.name] = self
        self.run.memory.linger()
        return Kept()


class Kept(Anything):
    """What a tile of the mask holds: every key is seen."""

    def __ne__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("version", [
    {},
    {"rows": (64, 0), "slots": (1, 0)},
    {"rows": (0, 1), "turns": True},
    {"rows": (1, 64), "slots": (1, 2), "late": True},
    {"steps": ((0, 0), (1, 0)), "consumers": 1},
], ids=str)  # fmt: skip
def test_every_tile_meets_its_scores(kind, version):
    Changed(11, kind, [(400, 700)], 2, 1, 2, **version)(2)
    Changed(12, kind, [(300, 100)], 4, 2, 2, **version)(1)


def test_packed_sequences_have_their_own():
    Changed(13, CAUSAL, [(100, 300), (0, 50), (257, 257), (1, 400), (64, 0)], 2, 1, 2, turns=True)(2)


@pytest.mark.parametrize("barrier", ["bias_full", "bias_empty", "mask_full", "mask_empty"])
def test_a_missing_wait_is_found(monkeypatch, barrier):
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    waits = Barrier.wait
    monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if barrier in self.name else waits(self, parity))
    if barrier.endswith("empty"):  # readers that are slower than the copy engine, and alone are
        monkeypatch.setattr(gluon_threads.Memory, "linger", lambda self: time.sleep(2e-2))

    def several() -> None:
        pick = random.Random(5)
        for seed in range(100):  # threads race as they like: the first fault ends it
            Changed(seed, CAUSAL, [(pick.choice((300, 700)), pick.choice((150, 900)))], 4, 1, 2)(1)

    with pytest.raises(AssertionError):
        several()


def test_a_missing_fence_is_found(monkeypatch):
    """A thread's read of shared memory may still be under way when it arrives at a barrier; an H200 showed it."""
    monkeypatch.setattr(Changed, "fence", lambda self: None)
    with pytest.raises(AssertionError):
        Changed(11, FULL, [(400, 700)], 2, 1, 2)(1)
