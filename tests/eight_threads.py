"""The Gluon kernels for products of 8-bit numbers on CPU threads, as matmul_threads has that for 16 bits."""

import threading
import types

from gluon_threads import Anything, Barrier, Memory, Number, Panels, Streams, Tile, run_threads
from tilefold.kernels.hopper import matmul_eight, matmul_eight_rows, matmul_parts


class Part:
    """Some rows of a tile: which, beside what it holds."""

    def __init__(self, tile, first):
        self.tile, self.first = tile, first

    def permute(self, order):
        return self

    def held(self):
        return [(desc, row + self.first, k) for desc, row, k in self.tile.held()]

    def reading(self, number):
        self.tile.reading(number)


class Both(Streams):
    """What runs of both kernels share."""

    def __init__(self, seed, slots):
        self.memory, self.slots = Memory(seed), slots
        self.made, self.local = [], threading.local()

    def product(self, a, b, acc, use_acc=True, is_async=True):
        with self.memory.changed:
            self.local.sums.append((a.held(), b.held()))
            for tile in (a, b):
                tile.reading(1)
        self.local.open.append((a, b))
        return acc

    def finished(self, wanted, what):
        """Every product was made, of the right factors, and has been waited for."""
        with self.memory.changed:
            if self.local.sums != wanted or self.local.open:
                self.memory.fail(f"{what}: {self.local.sums}, not {wanted}")
            self.made.append(what)

    def names(self, program, programs, modules):
        names = {
            "gl": types.SimpleNamespace(
                **dict.fromkeys(("float32", "int32", "NVMMADistributedLayout", "zeros"), Anything()), constexpr=None,
                static_range=range, program_id=lambda axis: program, num_programs=lambda axis: programs, minimum=min, int8="int8",
            ),
            "range": lambda *ends: map(Number, range(*ends)), "bytes_swizzled": Anything(),
            "let_next_start": lambda early: None, "tma_load": self.copy,
            "wgmma": self.product, "mbarrier": self.mbarrier, "wgmma_wait": self.wait_products,
        }  # fmt: skip
        for module, own in modules:
            for name in own:
                fn = getattr(module, name).fn
                names[name] = types.FunctionType(fn.__code__, names, name, fn.__defaults__)
        return names

    def ring(self, name, number, tiles):
        """Buffers in shared memory; tiles(i): what number i is to a product."""
        made = Panels(self.memory, name, number)
        return types.SimpleNamespace(dtype="int8", index=lambda i: _Slot(made, i, tiles(made, i)))

    def barriers(self, **counts):
        made = {n: [Barrier(self.memory, f"{n}[{i}]", c) for i in range(self.slots)] for n, c in counts.items()}
        return [types.SimpleNamespace(index=each.__getitem__) for each in made.values()]


class _Slot:
    """One buffer, as the copy engine and as products see it."""

    def __init__(self, panels, i, tile):
        self.fill, self.tile = panels.index(i).fill, tile

    def __getattr__(self, name):
        return getattr(self.tile, name)


class Large(Both):
    """One launch of matmul_eight_hopper: `shape` in tiles (rows, columns, steps of the sum)."""

    def __init__(self, seed, shape, splits=1, slots=3, halves=2, outside=True, group=2):
        super().__init__(seed, slots)
        self.shape, self.splits, self.halves, self.outside, self.group = shape, splits, halves, outside, group
        self.work = shape[0] * shape[1] * splits

    def bytes_of(self, desc):
        return (self.halves * 128 if desc == "b" else 64) * 128

    def finish(self, acc, o_desc, p_desc, out, pre, bias, staging, consumer, i_s, i_b, row, column, *rest):
        steps = range(self.shape[2] * i_s // self.splits, self.shape[2] * (i_s + 1) // self.splits)
        first = column // (self.halves * 128) * self.halves * 128
        wanted = [([("a", row, j * 128)], [("b", first + h * 128, j * 128)]) for j in steps for h in range(self.halves)]
        self.finished(wanted, (int(i_s), row // 64, column // 128))
        if column + 128 == first + self.halves * 128:
            self.local.sums = []

    def program(self, program, programs):
        own = ("_produce", "_consume", "_sum_inside", "_sum_outside", "_outside_product")
        names = self.names(program, programs, ((matmul_eight, own), (matmul_parts, ("place_of_work",))))
        names |= {
            "reinterpret": lambda ring, *shape: types.SimpleNamespace(
                index=lambda i: Part(ring.index(i // self.halves).tile, i % self.halves * 128)
            ),
            "scaled_sums": Anything(), "finish_part": self.finish, "wait_for_stores": lambda: None,
        }  # fmt: skip
        rings = (
            self.ring("a", self.slots * 2, Tile),
            self.ring("b", self.slots, Tile),
            *self.barriers(full=1, empty=2),
        )
        tiles_m, tiles_n, steps = self.shape
        columns = self.halves * 128
        sizes = (tiles_m * 128, tiles_n * columns, tiles_m, tiles_n, steps, self.splits, self.work)

        def consumer(c):
            self.local.sums, self.local.open = [], []
            names["_consume"](
                "o", None, None, None, None, None, rings, (), sizes, (0,) * 6, c, None, self.outside, True, 0, 0,
                self.group, columns, self.slots,
            )  # fmt: skip

        yield lambda: names["_produce"]("a", "b", rings, sizes, True, self.group, columns, self.slots)
        yield from (lambda c=c: consumer(c) for c in range(2))

    def __call__(self, programs):
        programs = min(programs, self.work)
        run_threads(self.memory, [work for p in range(programs) for work in self.program(p, programs)])
        rows, columns = range(self.shape[0] * 2), range(self.shape[1] * self.halves)
        assert sorted(self.made) == [(s, m, n) for s in range(self.splits) for m in rows for n in columns]


class Few(Both):
    """One program of matmul_eight_rows that makes the steps `first` to `end`, each of `panels`, beside the kernel before it."""

    def __init__(self, seed, first, end, slots=3, panels=2, consumers=2, kind="int8"):
        super().__init__(seed, slots)
        self.steps, self.panels, self.consumers, self.kind = (first, end), panels, consumers, kind
        self.before = threading.Event()

    def bytes_of(self, desc):
        return (self.consumers * 64 if desc == "w" else 16) * 128

    def copy(self, desc, place, barrier, panel):
        if desc == "x" and not self.before.is_set():
            with self.memory.changed:
                self.memory.fail("x is read before the kernel that makes it is through")
        super().copy(desc, place, barrier, panel)

    def __call__(self):
        names = self.names(0, 1, ((matmul_eight_rows, ("_produce", "_consume", "_bring_w", "_bring_x")),))
        first, end = self.steps
        row, token = 7 * self.consumers * 64, 32

        def tile(panels, i):
            made = Tile(panels, i)
            made.slice = lambda first, size, dim: Part(made, first)
            return made

        rings = (
            *(self.ring(name, self.slots * self.panels, tile) for name in "wx"),
            *self.barriers(full=1, empty=self.consumers),
        )
        rings[0].dtype = self.kind
        wanted = {
            c: [
                ([("w", row + c * 64, p * 128)], [("x", token, p * 128)])
                for p in range(first * self.panels, end * self.panels)
            ]
            for c in range(self.consumers)
        }
        names["wait_for_previous"] = lambda early: self.before.wait()
        names["_finish"] = lambda acc, outs, m, n, row_of, *rest: self.finished(
            wanted[(row_of - row) // 64], (row_of - row) // 64
        )
        sizes = (self.panels, self.consumers, self.slots)

        def consumer(c):
            self.local.sums, self.local.open = [], []
            names["_consume"](rings, None, (48, 4096), row, token, 0, first, end, 0, c, 1, 16, *sizes, True)

        def before():
            self.memory.nap()
            self.before.set()

        works = [lambda: names["_produce"]("w", "x", rings, row, token, first, end, 16, *sizes, True), before]
        run_threads(self.memory, [*works, *(lambda c=c: consumer(c) for c in range(self.consumers))])
        assert sorted(self.made) == list(range(self.consumers))
