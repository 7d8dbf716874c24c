"""The Gluon kernels for matrix products on sm_90, of 16 bits and of 8: their partitions over stand-ins of buffers and products.

A product reads its buffers from when it is issued until it is waited for; what they hold then, and where the sum goes, is
compared with what the work item should be, worked out in another way than the kernel's."""

import types

from simulated import Launch, Number, Panels, Tile, barriers, own_classes, own_functions, run_threads, tiles_of
from tilefold.kernels.hopper import matmul, matmul_eight, matmul_eight_rows, matmul_scheduler, ring, split_k


class Products(Launch):
    """What runs of all kernels share."""

    functions: tuple = ()
    classes: tuple = ()

    def product(self, a, b, acc, use_acc=True, is_async=True):
        self.local.sums.append((a.held(), b.held()))
        self.read(a, b)
        return acc

    def finished(self, wanted, what):
        """Every product was made, of the right factors, and has been waited for."""
        if self.local.sums != wanted or self.local.open:
            self.memory.fail(f"{what}: {self.local.sums}, not {wanted}")
        self.made.append(what)

    def namespace(self, program, programs):
        gl = self.language(("zeros",), int8="int8", program_id=lambda axis: program, num_programs=lambda axis: programs)
        names = self.names(gl) | {
            "range": lambda *ends: map(Number, range(*ends)), "swizzled": gl.zeros, "reinterpret": tiles_of,
            "let_next_start": lambda early: None, "field": lambda x: x,
        }  # fmt: skip
        return own_functions(own_classes(names, ((ring, ("Ring",)), *self.classes)), self.functions)

    def finish(self, *args):
        raise NotImplementedError

    def epilogue(self):
        """What stands for a kernel's: `finish` compares instead of storing."""
        return types.SimpleNamespace(m=0, n=0, finish=self.finish, drain=lambda: None)

    def ring(self, names, slots, arrivals):
        return names["Ring"](*barriers(self.memory, full=(slots, 1), empty=(slots, arrivals)), slots)

    def consumer(self, work):
        self.local.sums, self.local.open = [], []
        work()


class Run(Products):
    """One launch: `shape` in tiles (rows, columns, k), batch entries, shares of the sum."""

    functions = ((matmul, ("_produce", "_consume")),)
    classes = ((matmul, ("Operands",)), (matmul_scheduler, ("WorkTile", "TileScheduler")))

    def __init__(self, seed, shape, batch=1, splits=1, slots=3, columns=256, turned=(False, False), fold=False, group=2,
                 steps=(1, 1)):  # fmt: skip
        super().__init__(seed)
        self.shape, self.batch, self.splits, self.slots = shape, batch, splits, slots
        self.columns, self.turned, self.fold, self.group, self.own = columns, turned, fold, group, steps
        self.panels = 1 if turned[1] else columns // 64
        self.steps = shape[2] * (batch if fold else 1)
        self.results = 1 if fold else batch
        self.work = shape[0] * shape[1] * self.results * splits

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

    def finish(self, acc, tile, row, column, consumer):
        i_m, i_n, i_b, i_s = (row - consumer * 64) // 128, column // self.columns, tile.batch, tile.split
        share = range(self.steps * i_s // self.splits, self.steps * (i_s + 1) // self.splits)
        wanted = [self.loads(i_b, i_m, i_n, step, consumer) for step in share]
        self.finished(wanted, (int(i_s), int(i_b), int(i_m), int(i_n), consumer))
        self.local.sums = []

    def program(self, program, programs):
        names = self.namespace(program, programs)
        a = Panels(self.memory, "a", self.slots * 2)
        b = Panels(self.memory, "b", self.slots * self.panels, self.panels)
        ring_of = self.ring(names, self.slots, 2)
        operands = names["Operands"]("a", "b", a, b, ring_of, *self.turned, self.columns)
        tiles_m, tiles_n, tiles_k = self.shape
        scheduler = names["TileScheduler"](
            tiles_m, tiles_n, self.steps, self.splits, self.work, self.group, self.columns
        )
        yield lambda: names["_produce"](operands, scheduler, tiles_k, *self.own, self.fold)
        yield from (
            lambda c=c: self.consumer(lambda: names["_consume"](operands, scheduler, self.epilogue(), c))
            for c in range(2)
        )

    def __call__(self, programs):
        self.launch(min(programs, self.work))
        ranges = (range(n) for n in (self.splits, self.results, self.shape[0], self.shape[1], 2))
        assert sorted(self.made) == every(*ranges)


def every(*ranges):
    """All combinations, in order."""
    found = [()]
    for one in ranges:
        found = [(*begun, i) for begun in found for i in one]
    return found


class Part(Tile):
    """Some rows of a tile: which, beside what it holds."""

    def __init__(self, tile, first):
        super().__init__(tile.buffers, panels=tile.panels)
        self.first = first

    def held(self):
        return [box and (box[0], box[1] + self.first, box[2]) for box in super().held()]


class Whole(Tile):
    """One buffer, as TMA and as products see it."""

    def fill(self, content):
        self.buffers.fill(self.panels[0], content)

    def slice(self, first, size, dim):
        return Part(self, first)


def wholes(memory, name, number, dtype="int8"):
    panels = Panels(memory, name, number)
    return types.SimpleNamespace(dtype=dtype, index=lambda i: Whole(panels, i))


class Large(Products):
    """One launch of matmul_eight_hopper: `shape` in tiles (rows, columns, steps of the sum)."""

    functions = ((matmul_eight, ("_produce", "_consume", "_sum_inside", "_sum_outside", "_outside_product")),)
    classes = ((matmul_eight, ("Operands",)), (matmul_scheduler, ("WorkTile", "TileScheduler")))

    def __init__(self, seed, shape, splits=1, slots=3, halves=2, outside=True, group=2):
        super().__init__(seed)
        self.shape, self.splits, self.halves, self.outside, self.group = shape, splits, halves, outside, group
        self.slots, self.work = slots, shape[0] * shape[1] * splits

    def bytes_of(self, desc):
        return (self.halves * 128 if desc == "b" else 64) * 128

    def finish(self, acc, tile, row, column, consumer):
        i_s = tile.split
        steps = range(self.shape[2] * i_s // self.splits, self.shape[2] * (i_s + 1) // self.splits)
        first = column // (self.halves * 128) * self.halves * 128
        wanted = [([("a", row, j * 128)], [("b", first + h * 128, j * 128)]) for j in steps for h in range(self.halves)]
        self.finished(wanted, (int(i_s), row // 64, column // 128))
        if column + 128 == first + self.halves * 128:
            self.local.sums = []

    def program(self, program, programs):
        names = self.namespace(program, programs)
        names["reinterpret"] = lambda ring, *shape: types.SimpleNamespace(
            index=lambda i: ring.index(i // self.halves).slice(i % self.halves * 128, 128, 0)
        )
        tiles_m, tiles_n, steps = self.shape
        columns = self.halves * 128
        a, b = wholes(self.memory, "a", self.slots * 2), wholes(self.memory, "b", self.slots)
        operands = names["Operands"]("a", "b", a, b, self.ring(names, self.slots, 2), columns)
        scheduler = names["TileScheduler"](tiles_m, tiles_n, steps, self.splits, self.work, self.group, columns)
        scales = types.SimpleNamespace(apply=lambda acc, *where: acc)
        yield lambda: names["_produce"](operands, scheduler, True)
        yield from (
            lambda c=c: self.consumer(
                lambda: names["_consume"](operands, scheduler, scales, self.epilogue(), self.outside, c)
            )
            for c in range(2)
        )

    def __call__(self, programs):
        self.launch(min(programs, self.work))
        assert sorted(self.made) == every(
            range(self.splits), range(self.shape[0] * 2), range(self.shape[1] * self.halves)
        )


class Few(Products):
    """One program of matmul_eight_rows that makes the steps `first` to `end`, each of `panels`, beside the kernel before it."""

    functions = ((matmul_eight_rows, ("_produce", "_consume")),)
    classes = ((matmul_eight_rows, ("Operands",)), (split_k, ("SplitTile",)))
    waits = True  # for the kernel before

    def __init__(self, seed, first, end, slots=3, panels=2, consumers=2, kind="int8"):
        super().__init__(seed)
        self.steps, self.slots, self.panels, self.consumers, self.kind = (first, end), slots, panels, consumers, kind
        self.before = False  # whether the kernel before is through

    def bytes_of(self, desc):
        return (self.consumers * 64 if desc == "w" else 16) * 128

    def copy(self, desc, place, barrier, panel):
        if desc == "x" and not self.before:
            self.memory.fail("x is read before the kernel that makes it is through")
        super().copy(desc, place, barrier, panel)

    def wait_for_previous(self, early):
        if self.waits:
            self.memory.until(lambda: self.before, "the kernel before")

    def __call__(self):
        names, (first, end), row, token = self.namespace(0, 1), self.steps, 7 * self.consumers * 64, 32
        names |= {"wait_for_previous": self.wait_for_previous}
        number = self.slots * self.panels
        w, x = wholes(self.memory, "w", number, self.kind), wholes(self.memory, "x", number)
        ring_of = self.ring(names, self.slots, self.consumers)
        operands = names["Operands"]("w", "x", w, x, ring_of, self.consumers * 64, 16, self.panels)
        tile = names["SplitTile"](0, row, token, 0, first, end)
        steps = range(first * self.panels, end * self.panels)

        def finish(acc, row_of, *rest):
            wanted = [([("w", int(row_of), p * 128)], [("x", token, p * 128)]) for p in steps]
            self.finished(wanted, (row_of - row) // 64)

        output = types.SimpleNamespace(finish=finish)

        def before():
            self.memory.nap()
            self.before = self.waits

        run_threads(self.memory, [
            lambda: names["_produce"](operands, tile, True), before,
            *(lambda c=c: self.consumer(lambda: names["_consume"](operands, output, None, tile, c, self.consumers, True))
              for c in range(self.consumers)),
        ])  # fmt: skip
        assert sorted(self.made) == list(range(self.consumers))
