"""The block-sparse Gluon kernel for sm_90: one launch over random lists, whose products find the blocks that they name."""

import types

from simulated import Anything, Launch, Number, Panels, Tile, barriers, own_classes, own_functions
from tilefold.kernels.hopper import block_list, config, parts, pipeline, producer, products, scheduler, sparse_forward

FUNCTIONS = (
    (sparse_forward, ("produce", "consume")),
    (producer, ("acquire_all", "signal_all")),
    (products, ("issue_scores", "issue_output", "_rows_of_keys", "wait_output")),
    (parts, ("entry",)),
)
CLASSES = (
    (config, ("Problem",)),
    (pipeline, ("Stage", "Pipeline")),
    (scheduler, ("WorkCounter", "WorkTile")),
    (block_list, ("TileList", "BlockLists", "ListScheduler")),
    (sparse_forward, ("Mix",)),
)


class Unit(Tile):
    """A unit of keys, or a warpgroup's queries."""

    def __init__(self, run, buffers, slot=0, panels=None):
        super().__init__(buffers, slot, panels)
        self.run = run

    def slice(self, begin, rows):
        block = self.run.block
        return Rows(self.run, self.buffers, panels=self.panels[begin // block :: 128 // block])

    def load(self, layout):
        """As on the device, the load may be under way until a product has needed it."""
        self.run.read(self)
        return self.held()


class Rows(Unit):
    """64 rows of a unit that are loaded into registers: read until they are used."""

    def load(self, layout):
        self.reading(1)
        return self

    def to(self, dtype):
        return self


class Units:
    def __init__(self, run, buffers, number):
        self.run, self.buffers, buffers.width = run, buffers, len(buffers.content) // number

    def index(self, i):
        return Unit(self.run, self.buffers, i)


class Entries:
    """A pointer into a list."""

    def __init__(self, blocks, i=0):
        self.blocks, self.i = blocks, i

    def __add__(self, offset):
        return Entries(self.blocks, self.i + offset)

    def __call__(self):
        return self.blocks[self.i] if self.i < len(self.blocks) else 0


class Run(Launch):
    """One launch: `programs` of `warpgroups` consumers."""

    def __init__(self, seed, warpgroups, block, slots, lists, heads, dim=128, mixed=0):
        super().__init__(seed)
        self.mixed, self.lists, self.heads = mixed, lists, heads
        self.warpgroups, self.block, self.slots, self.dim = warpgroups, block, slots, dim
        self.q_blocks, self.seq_k = len(lists) // heads, 64 * 128

    def namespace(self, program, programs):
        """The names that the kernel's functions see, with the language replaced."""
        run = self
        gl = self.language(
            ("zeros", "zeros_like", "full", "arange", "expand_dims"), program_id=lambda axis: Number(program),
            num_programs=lambda axis: programs, store=lambda pointer, value: setattr(run, "counter", value),
            load=lambda place, **options: place(),
        )  # fmt: skip
        names = self.names(gl) | {
            "UNIT": 128, "BRANCH": 1, "BRANCH_GATE": 2, "GATE": 4, "field": lambda x: x, "wide_of": lambda dim: dim,
            "panel_of": lambda dim, dtype: 64, "swizzled": lambda dim, dtype: None,
            "reinterpret": lambda ring, dtype, shape, layout: Units(run, ring, shape[0]), "list_of_item": run.list_of,
            "place_of_item": lambda item, q_blocks, heads: (Number(item % q_blocks), Number(0), Number(item // q_blocks)),
            "draw_work": lambda counter: run.draw(), "read_work": lambda drawn: drawn, "cut_columns": lambda s, *args: s,
            "zero_output": lambda config: (Anything(),), "rescale_output": lambda acc, *args: acc,
        }  # fmt: skip
        own_functions(own_classes(names, CLASSES), FUNCTIONS)
        names["BlockLists"].count = lambda lists, work: len(run.list_of(None, work.block, work.batch, work.head).blocks)
        names["ListScheduler"].post = lambda scheduler, item, count: scheduler.mailbox.update(item=item, count=count)
        names["ListScheduler"].read = lambda scheduler: run.take(scheduler.mailbox)
        names["Mix"].apply = lambda mix, acc, l, branch, gates: run.finish(branch)
        return names

    def list_of(self, lists, block, batch, head):
        return Entries(self.lists[head * self.q_blocks + block])

    def take(self, mailbox):
        self.local.item, self.local.open, self.local.j = mailbox["item"], [], {"k": 0, "v": 0}
        return mailbox["item"], mailbox["count"]

    def bytes_of(self, desc):
        return (64 if desc == "q" else self.block) * 64 * 2

    def boxes(self, side, rows):
        """In the order panel, block, of the current item's head."""
        head = self.local.item // self.q_blocks
        return [(side, 0, head, row, p * 64) for p in range(self.dim // 64) for row in rows]

    def expected(self, side, j):
        """What the slots of unit j of the current item hold."""
        per, entries = 128 // self.block, self.lists[self.local.item]
        missing = max(-(-len(entries) // per), 1) * per - len(entries)
        rows = [self.seq_k if i < missing else entries[i - missing] * self.block for i in range(j * per, (j + 1) * per)]
        return self.boxes(side, rows)

    def first_row(self):
        """Of the rows that this warpgroup makes."""
        return (self.local.item % self.q_blocks * self.warpgroups + self.local.consumer) * 64

    def product(self, a, tile, acc, **options):
        """Reads its buffer from now until it is waited for."""
        side = tile.buffers.name
        wanted = self.expected(side, self.local.j[side])
        self.local.j[side] += 1
        if tile.held() != wanted or (side == "k" and a != self.boxes("q", [self.first_row()])):  # a is Q there
            self.memory.fail(f"item {self.local.item}: {side} unit holds {tile.held()}, {wanted} was listed")
        self.read(tile)
        return Anything()

    def finish(self, branch):
        """The rows of the other branch are read until the result is made."""
        if self.mixed:
            boxes = self.boxes("branch", [self.first_row() // self.block * self.block])
            self.memory.nap()
            if branch.held() != boxes:
                self.memory.fail(f"item {self.local.item}: {branch.held()} is mixed in, not {boxes}")
            branch.reading(-1)
        self.made.append(self.local.item)

    def program(self, program, programs):
        """The threads of one program."""
        memory, groups, note = self.memory, self.warpgroups, {}
        panels, per = self.dim // 64, 128 // self.block
        names, items, zeros = self.namespace(program, programs), len(self.lists), (Number(0),) * 6

        def pipe(side, number, rows, readers, *rest):
            bars = barriers(memory, **{f"{side}_full": (number, 1), f"{side}_empty": (number, readers)})
            made = Panels(memory, side, number * panels * (1 if side == "q" else per))
            made.dtype = types.SimpleNamespace(primitive_bitwidth=16)
            return names["Pipeline"](side, (made,), *bars, number, rows, self.dim, *rest)

        q = pipe("q", groups, 64, 1)
        k, v = (
            pipe(side, slots, 128, groups, 1, False, self.block) for side, slots in zip("kv", self.slots, strict=True)
        )
        problem = names["Problem"](1 << 20, self.seq_k, self.heads, 1, None, None, None, None)
        order = names["ListScheduler"](problem, names["WorkCounter"](None, items), note, self.q_blocks)
        lists = names["BlockLists"](None, None, zeros, Number(0), None, zeros, self.block, False, False, False)
        mix = names["Mix"]("branch", None, None, zeros, self.mixed, groups)
        layouts = types.SimpleNamespace(CONSUMERS=groups, SCORES=None, OUT=None, PROBS_REST=None)
        softmax = types.SimpleNamespace(
            begin=lambda like, head: (Anything(), Anything()), step=lambda s, m, l, scale: (s, m, l, Anything())
        )
        end = types.SimpleNamespace(store_live=lambda *args: None)

        def consumer(c):
            self.local.consumer, self.local.open = c, []
            names["consume"](c, layouts, order, lists, q, k, v, mix, softmax, end, 1.0)

        yield lambda: names["produce"](order, lists, q, k, v, mix)
        yield from (lambda c=c: consumer(c) for c in range(groups))

    def __call__(self, programs):
        self.launch(programs)
        assert sorted(self.made) == sorted(list(range(len(self.lists))) * self.warpgroups)
        assert self.counter == 0
