"""The block-sparse Gluon kernel for sm_90: one launch over random lists, whose products find the blocks that they name.

K and V lie in one tensor, in that of a packed batch, or in pages."""

import itertools
import types

import numpy as np

from simulated import Anything, Launch, Note, Number, Panels, Tile, barriers, own_classes, own_functions
from tilefold.kernels.hopper import block_list, config, parts, pipeline, producer, products, scheduler, sparse_forward

FUNCTIONS = (
    (sparse_forward, ("produce", "consume")),
    (producer, ("acquire_all", "signal_all")),
    (products, ("issue_scores", "issue_output", "_rows_of_keys", "wait_output")),
    (block_list, ("cut_unit", "clear_unit", "whole_of")),
    (parts, ("entry", "list_of_item", "place_of_item")),
    (scheduler, ("sequence_of_place",)),
)
CLASSES = (
    (config, ("Problem",)),
    (pipeline, ("Stage", "Pipeline")),
    (scheduler, ("WorkCounter", "WorkTile")),
    (block_list, ("Pages", "TileList", "BlockLists", "ListScheduler")),
    (sparse_forward, ("Mix",)),
)
NOTHING = 10**6  # what lies behind the last entry of a list, and in a table behind the last page
ZEROS = "zeros"  # a box outside of its tensor


class Unit(Tile):
    """A unit of keys, or a warpgroup's queries."""

    def __init__(self, run, buffers, panels):
        super().__init__(buffers, panels=panels)
        self.run = run

    def fill(self, content):
        (panel,) = self.panels
        self.buffers.fill(panel, content)

    def slice(self, begin, rows):
        block = self.run.block
        return Rows(self.run, self.buffers, self.panels[begin // block :: 128 // block])

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
        self.run, self.buffers, self.each = run, buffers, len(buffers.content) // number

    def index(self, i):
        return Unit(self.run, self.buffers, range(i * self.each, (i + 1) * self.each))


class Integers:
    """A pointer to int32, at one place or at one for each lane."""

    def __init__(self, values, places=0):
        self.values, self.places = np.asarray(values).reshape(-1), places

    def __add__(self, offset):
        return Integers(self.values, self.places + offset)

    def load(self, mask=True, other=0):
        """Of lanes that are masked the address does not matter; any other has to be inside."""
        if not isinstance(self.places, np.ndarray):
            return Number(self.at(self.places)) if mask else Number(other)
        return np.array([self.at(i) if m else other for i, m in zip(self.places, mask, strict=True)])

    def at(self, i):
        assert 0 <= i < len(self.values), f"{i} of {len(self.values)} is read"
        return int(self.values[i])


class Run(Launch):
    """One launch: `programs` of `warpgroups` consumers, over one sequence of whole blocks; or over more:

    lengths: (queries, keys) of each, the lists being those of one after the other; page: keys of a page of their caches, of which
    the queries' numbers are the same, 0 for a packed batch.  longest: rows that there are lists of, if there are more.  causal:
    query i sees keys up to i + keys - queries."""

    def __init__(
        self, seed, warpgroups, block, slots, lists, heads, dim=128, mixed=0, lengths=None, page=0, longest=None,
        causal=False,
    ):  # fmt: skip
        super().__init__(seed)
        self.mixed, self.lists, self.heads, self.page, self.causal = mixed, lists, heads, page, causal
        self.warpgroups, self.block, self.slots, self.dim = warpgroups, block, slots, dim
        self.rows, self.box = 64 * warpgroups, min(page or block, block)
        self.packed, self.lengths = lengths is not None and page == 0, lengths or [(1 << 20, 64 * 128)]
        self.q_blocks = len(lists) // (heads * len(self.lengths))  # of a sequence's lists
        self.room = max(keys for _, keys in self.lengths)
        self.longest = longest or max(n for n, _ in self.lengths)
        self.first = [[3, *(3 + n for n in itertools.accumulate(side))] for side in zip(*self.lengths, strict=True)]
        self.place()
        self.tiles = self.all_tiles()

    def place(self):
        """Lists, pages, and where each begins, as tensors of the device."""
        capacity = max(1, *map(len, self.lists))
        self.index = np.array([[*one, *[NOTHING] * (capacity - len(one))] for one in self.lists])
        self.count = np.array([len(one) for one in self.lists])
        each, of_head = capacity * self.q_blocks * self.heads, capacity * self.q_blocks
        self.strides = tuple(map(Number, (each, of_head, capacity, self.q_blocks * self.heads, self.q_blocks)))
        if self.page:
            self.width = -(-self.room // self.page)
            pages = self.memory.random.sample(range(1000), self.width * len(self.lengths))
            self.table = np.array(pages).reshape(len(self.lengths), self.width)
            for row, (_, keys) in zip(self.table, self.lengths, strict=True):
                row[-(-keys // self.page) :] = NOTHING

    def all_tiles(self):
        """(sequence, head, query tile, its list) of each item, None where a place holds no work."""
        if not self.packed:
            found = itertools.product(range(len(self.lengths)), range(self.heads), range(self.q_blocks))
        else:
            tiles = [-(-min(n, self.longest) // self.rows) for n, _ in self.lengths]
            begins = [first // self.rows + b for b, first in enumerate(self.first[0][:-1])]
            some = [None] * (self.first[0][-1] // self.rows + len(tiles))
            for b, (begin, n) in enumerate(zip(begins, tiles, strict=True)):
                some[begin : begin + n] = [(b, i) for i in range(n)]
            found = [one and (one[0], h, one[1]) for h in range(self.heads) for one in some]
        return [one and (*one, self.lists[(one[0] * self.heads + one[1]) * self.q_blocks + one[2]]) for one in found]

    def namespace(self, program, programs):
        """The names that the kernel's functions see, with the language replaced."""
        run = self
        gl = self.language(
            ("zeros", "zeros_like", "arange", "expand_dims", "SwizzledSharedLayout"), program_id=lambda axis: Number(program),
            num_programs=lambda axis: programs, store=lambda pointer, value: setattr(run, "counter", value),
            load=lambda place, **masked: place.load(**masked), full=lambda shape, value, *rest: value,
            sum=lambda x, axis: Number(x), max=lambda x, axis: Number(x.max()),
            where=lambda c, a, b: np.where(c, a, b) if isinstance(c, np.ndarray) else a if c else b,
        )  # fmt: skip
        names = self.names(gl) | {
            "UNIT": 128, "BRANCH": 1, "BRANCH_GATE": 2, "GATE": 4, "OUTSIDE": 1 << 30, "POSTED": 6, "field": lambda x: x,
            "wide_of": lambda dim: dim, "panel_of": lambda dim, dtype: 64, "swizzled": lambda dim, dtype: None,
            "reinterpret": lambda ring, dtype, shape, layout: Units(run, ring, shape[0]),
            "draw_work": lambda counter: run.draw(), "read_work": lambda drawn: Number(drawn),
            "zero_output": lambda config: (Anything(),), "rescale_output": lambda acc, *args: acc,
            "cut_columns": run.cut, "_cut_causal": run.cut_causal, "sum": sum, "lane_numbers": lambda: np.arange(32),
        }  # fmt: skip
        own_functions(own_classes(names, CLASSES), FUNCTIONS)
        names["ListScheduler"]._post = lambda scheduler, item, count: scheduler.mailbox.update(item=item, count=count)
        names["ListScheduler"].read = lambda scheduler: run.take(scheduler.mailbox)
        names["Mix"].apply = lambda mix, acc, l, branch, gates: run.finish(branch)
        names["Pipeline"].clear_blocks = lambda ring, stage, *lives: run.clear(ring.part(stage, 0), lives)
        return names

    def take(self, mailbox):
        own = self.local
        own.item, own.open, own.j = mailbox["item"], [], {"k": 0, "v": 0}
        own.cut = own.seen = own.cleared = None
        return mailbox["item"], mailbox["count"]

    def bytes_of(self, desc):
        return (64 if desc == "q" else self.block if desc == "branch" else self.box) * 64 * 2

    def content_of(self, desc, batch, head, row, column):
        """Outside of a tensor it is all the same where."""
        outside = desc in ("k", "v") and (batch < 0 or row >= (1 << 30 if self.ends() else self.room))
        return self.box_of(desc, head, None if outside else (batch, row), column)

    # ------------------------------------------------------------ what is expected of the present item

    def own_tile(self):
        """(sequence, head, query tile, its list)"""
        return self.tiles[self.local.item]

    def blocks(self, j):
        """Of unit j; None for what is missing."""
        per, entries = 128 // self.block, self.own_tile()[3]
        missing = max(-(-len(entries) // per), 1) * per - len(entries)
        return [None if i < missing else entries[i - missing] for i in range(j * per, (j + 1) * per)]

    def lives(self, j):
        """Keys of each block of unit j."""
        keys = self.lengths[self.own_tile()[0]][1]
        return [0 if b is None else max(0, min(self.block, keys - b * self.block)) for b in self.blocks(j)]

    def seen(self, j):
        """Keys of each block of unit j that this warpgroup's first query sees, at least 63 fewer than none."""
        sequence, _, tile, _ = self.own_tile()
        queries, keys = self.lengths[sequence]
        last = tile * self.rows + self.local.consumer * 64 + keys - min(queries, self.longest)
        return [min(max(last + 1 - (-1 if b is None else b) * self.block, -63), self.block) for b in self.blocks(j)]

    def boxes(self, block):
        """(batch entry or page, first row) of each box of a block, None for zeros."""
        sequence = self.own_tile()[0]
        keys, rows = self.lengths[sequence][1], range(0, self.block, self.box)
        if block is None:
            return [None for _ in rows]
        if not self.page:
            return [(0, block * self.block + self.packed * self.first[1][sequence])]
        begins = [block * self.block + row for row in rows]
        return [(int(self.table[sequence, i // self.page]), i % self.page) if i < keys else None for i in begins]

    def expected(self, side, j):
        """What the slots of unit j hold, in the order panel, box."""
        head, found = self.own_tile()[1], [box for block in self.blocks(j) for box in self.boxes(block)]
        return [self.box_of(side, head, box, p * 64) for p in range(self.dim // 64) for box in found]

    @staticmethod
    def box_of(side, head, box, column):
        return (side, ZEROS, column) if box is None else (side, box[0], head, box[1], column)

    def first_row(self):
        """(batch entry, row) of the first query that this warpgroup makes."""
        sequence, _, block, _ = self.own_tile()
        row = block * self.rows + self.local.consumer * 64
        return (0, self.first[0][sequence] + row) if self.packed else (sequence, row)

    # ------------------------------------------------------------ what consumers do

    def cut(self, s, live_0, live_1, block):
        self.local.cut = [live_0, live_1][: 128 // block]
        return s

    def cut_causal(self, s, lives, block):
        """As it takes them apart."""
        number = 128 // block
        self.local.cut = [lives >> 8 * i & 255 for i in range(number)]
        self.local.seen = [(lives >> 8 * i + 16 & 255) - 63 for i in range(number)]
        return s

    def clear(self, tile, lives):
        if None in tile.held():
            self.memory.fail(f"item {self.local.item}: cleared before it came")
        self.local.cleared = list(lives[: 128 // self.block])

    def softmax_step(self, s, m, l, scale):
        """Scores of keys that are none have been cut off."""
        own, j = self.local, self.local.j["k"] - 1
        whole = [self.block] * (128 // self.block)
        if (own.cut or whole) != self.lives(j) or (self.causal and (own.seen or whole) != self.seen(j)):
            self.memory.fail(f"item {own.item}: cut to {own.cut}, {own.seen}, not to {self.lives(j)}, {self.seen(j)}")
        own.cut = own.seen = None
        return s, m, l, Anything()

    def product(self, a, tile, acc, **options):
        """Reads its buffer from now until it is waited for."""
        side = tile.buffers.name
        j = self.local.j[side]
        wanted = self.expected(side, j)
        self.local.j[side] += 1
        (batch, row), head = self.first_row(), self.own_tile()[1]
        q = [("q", batch, head, row, p * 64) for p in range(self.dim // 64)]
        if tile.held() != wanted or (side == "k" and a != q):  # a is Q there
            self.memory.fail(f"item {self.local.item}: {side} unit holds {tile.held()}, {wanted} was listed")
        if side == "v":
            whole, left = [self.block] * (128 // self.block), self.local.cleared
            if self.ends() and (left or whole) != self.lives(j):
                self.memory.fail(f"item {self.local.item}: {left or whole} rows were left, not {self.lives(j)}")
            self.local.cleared = None
        self.read(tile)
        return Anything()

    def ends(self):
        """Whether sequences end where the device knows."""
        return self.packed or self.page > 0

    def finish(self, branch):
        """The rows of the other branch are read until the result is made."""
        if self.mixed:
            sequence, head, block, _ = self.own_tile()
            row = (block * self.rows + self.local.consumer * 64) // self.block * self.block
            boxes = [("branch", sequence, head, row, p * 64) for p in range(self.dim // 64)]
            self.memory.nap()
            if branch.held() != boxes:
                self.memory.fail(f"item {self.local.item}: {branch.held()} is mixed in, not {boxes}")
            branch.reading(-1)

    def store(self, made, m, l, work, row, live):
        """The rows that there are."""
        sequence, head, block, _ = self.own_tile()
        queries = min(self.lengths[sequence][0], self.longest)
        first = self.first[0][sequence] if self.packed else 0
        rows = block * self.rows + self.local.consumer * 64
        wanted = (sequence, head, rows, first, queries, queries - rows)
        found = (work.sequence, work.head, row, work.first_q, work.seq_q, live)
        if found != wanted:
            self.memory.fail(f"item {self.local.item}: stored at {found}, not {wanted}")
        self.made.append(self.local.item)

    def program(self, program, programs):
        """The threads of one program."""
        memory, groups, note = self.memory, self.warpgroups, {}
        panels, per = self.dim // 64, 128 // self.box
        names, zeros, ends = self.namespace(program, programs), (Number(0),) * 6, self.ends()

        def pipe(side, number, rows, readers, *rest):
            bars = barriers(memory, **{f"{side}_full": (number, 1), f"{side}_empty": (number, readers)})
            made = Panels(memory, side, number * panels * (1 if side == "q" else per))
            made.dtype = types.SimpleNamespace(primitive_bitwidth=16)
            return names["Pipeline"](side, (made,), *bars, number, rows, self.dim, *rest)

        q = pipe("q", groups, 64, 1)
        k, v = (
            pipe(side, slots, 128, groups, 1, False, self.block) for side, slots in zip("kv", self.slots, strict=True)
        )
        where = (
            (Integers(self.first[0]), Integers(self.first[1]), Number(len(self.lengths)), None)
            if self.packed
            else (None,) * 4
        )
        problem = names["Problem"](self.longest, self.room, self.heads, 1, *where)
        paged = (
            (Integers(self.table), Integers([n for _, n in self.lengths]), Number(self.width))
            if self.page
            else (None,) * 3
        )
        pages = names["Pages"](*paged, self.page)
        q_blocks = len(self.tiles) // self.heads if self.packed else self.q_blocks
        counter = names["WorkCounter"](None, Number(len(self.tiles)))
        order = names["ListScheduler"](problem, counter, note, Note() if ends else None, q_blocks, pages, self.rows)
        lists = names["BlockLists"](Integers(self.index), Integers(self.count), self.strides, Number(0), None, zeros, pages,
                                    self.block, ends or self.causal, False, False, self.causal, ends)  # fmt: skip
        mix = names["Mix"]("branch", None, None, zeros, self.mixed, groups)
        layouts = types.SimpleNamespace(CONSUMERS=groups, SCORES=None, OUT=None, PROBS_REST=None)
        softmax = types.SimpleNamespace(begin=lambda like, head: (Anything(), Anything()), step=self.softmax_step)
        end = types.SimpleNamespace(store_live=self.store)

        def consumer(c):
            self.local.consumer, self.local.open = c, []
            names["consume"](c, layouts, order, lists, q, k, v, mix, softmax, end, 1.0)

        yield lambda: names["produce"](order, lists, q, k, v, mix)
        yield from (lambda c=c: consumer(c) for c in range(groups))

    def __call__(self, programs):
        self.launch(min(programs, len(self.tiles)))
        live = [item for item, tile in enumerate(self.tiles) if tile is not None]
        assert sorted(self.made) == sorted(live * self.warpgroups)
        assert self.counter == 0
