"""The matrix product's Gluon kernel for sm_90 on CPU threads: its partitions over stand-ins of buffers, barriers and products.

A product reads its buffers from when it is issued until it is waited for; what they hold then, and where the sum goes, is
compared with what the work item should be, worked out in another way than the kernel's.
"""

import threading
import types

from gluon_threads import Anything, Barrier, Memory, Number, Panels, Streams, Tile, run_threads
from tilefold.kernels.hopper import matmul, matmul_parts


class Run(Streams):
    """One launch: `shape` in tiles (rows, columns, k), batch entries, shares of the sum."""

    def __init__(
        self,
        seed,
        shape,
        batch=1,
        splits=1,
        slots=3,
        columns=256,
        turned=(False, False),
        fold=False,
        group=2,
        steps=(1, 1),
    ):
        self.memory, self.shape, self.batch, self.splits, self.slots = Memory(seed), shape, batch, splits, slots
        self.columns, self.turned, self.fold, self.group, self.own = columns, turned, fold, group, steps
        self.panels = 1 if turned[1] else columns // 64
        self.steps = shape[2] * (batch if fold else 1)
        self.results = 1 if fold else batch
        self.work = shape[0] * shape[1] * self.results * splits
        self.made, self.local = [], threading.local()

    def loads(self, i_b, i_m, i_n, step, consumer):
        """What A's panel and B's panels have to hold at a step of the sum."""
        entry, k = divmod(step, self.shape[2]) if self.fold else (i_b, step)
        row, column, k = i_m * 128 + consumer * 64, i_n * self.columns, k * 64
        a = ("a", entry * self.own[0], *((k, row) if self.turned[0] else (row, k)))
        if self.turned[1]:
            return [a], [("b", entry * self.own[1], column, k)]
        return [a], [("b", entry * self.own[1], k, column + 64 * p) for p in range(self.panels)]

    def bytes_of(self, desc):
        return (self.columns if desc == "b" and self.turned[1] else 64) * 64 * 2

    def product(self, a, b, acc, is_async=True):
        with self.memory.changed:
            self.local.sums.append((a.held(), b.held()))
            for tile in (a, b):
                tile.reading(1)
        self.local.open.append((a, b))
        return acc

    def finish(self, acc, o_desc, p_desc, out, pre, bias, staging, consumer, i_s, i_b, row, column, *rest):
        """Every product of the share was made, with the right factors, and has been waited for."""
        i_m, i_n = (row - consumer * 64) // 128, column // self.columns
        share = range(self.steps * i_s // self.splits, self.steps * (i_s + 1) // self.splits)
        wanted = [self.loads(i_b, i_m, i_n, step, consumer) for step in share]
        with self.memory.changed:
            if self.local.sums != wanted or self.local.open:
                self.memory.fail(f"tile {i_m, i_n} of {i_b}, share {i_s}: {self.local.sums}, not {wanted}")
            self.made.append((int(i_s), int(i_b), int(i_m), int(i_n), consumer))
        self.local.sums = []

    def namespace(self, program, programs):
        gl = types.SimpleNamespace(
            **dict.fromkeys(("float32", "NVMMADistributedLayout", "zeros"), Anything()), constexpr=None, static_range=range,
            program_id=lambda axis: program, num_programs=lambda axis: programs, minimum=min,
        )  # fmt: skip
        names = {
            "gl": gl, "range": lambda *ends: map(Number, range(*ends)), "swizzled": Anything(),
            "panels_of": lambda columns, turned: self.panels, "tma_load": self.copy, "wgmma": self.product,
            "mbarrier": self.mbarrier,
            "wgmma_wait": self.wait_products, "wait_for_stores": lambda: None, "finish_part": self.finish,
            "reinterpret": lambda ring, *shape: types.SimpleNamespace(index=lambda i: Tile(ring, i)),
        }  # fmt: skip
        for module, own in ((matmul, ("_produce", "_consume")), (matmul_parts, ("place_of_work",))):
            for name in own:
                fn = getattr(module, name).fn
                names[name] = types.FunctionType(fn.__code__, names, name, fn.__defaults__)
        return names

    def program(self, program, programs):
        names = self.namespace(program, programs)
        rings = [
            Panels(self.memory, "a", self.slots * 2),
            Panels(self.memory, "b", self.slots * self.panels, self.panels),
        ]
        for name, count in (("full", 1), ("empty", 2)):
            made = [Barrier(self.memory, f"{name}[{i}]", count) for i in range(self.slots)]
            rings.append(types.SimpleNamespace(index=made.__getitem__))
        tiles_m, tiles_n, tiles_k = self.shape
        sizes = (tiles_m * 128, tiles_n * self.columns, tiles_m, tiles_n, tiles_k, self.steps, self.splits, self.work)

        def consumer(c):
            self.local.sums, self.local.open = [], []
            names["_consume"]("o", None, None, None, None, rings, (), sizes, (0,) * 6, c, None, *self.turned, True, 0, 0,
                              self.group, self.columns, self.slots)  # fmt: skip

        yield lambda: names["_produce"](
            "a", "b", rings, sizes, *self.own, *self.turned, self.fold, self.group, self.columns, self.slots
        )
        yield from (lambda c=c: consumer(c) for c in range(2))

    def __call__(self, programs):
        programs = min(programs, self.work)
        run_threads(self.memory, [work for p in range(programs) for work in self.program(p, programs)])
        wanted = [
            (s, b, m, n, c)
            for s in range(self.splits)
            for b in range(self.results)
            for m in range(self.shape[0])
            for n in range(self.shape[1])
            for c in range(2)
        ]
        assert sorted(self.made) == wanted
