"""One launch of the backward kernel that adds dq in memory: who reads what when, and what is added where.

A tile's value is the set of what went into it, an accumulator's the list of its products; dq in memory is a list of summands.
The functions are the kernel's own, but for masks, views of buffers and addresses."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

from simulated import Anything, Number, Offsets, Ring, Turn, barriers, run_threads
from simulated.backward import FULL, GRADIENTS, WINDOW, Backward, Panel, Value, View
from tilefold.kernels.hopper import (
    attention_backward_reduce,
    backward_epilogue,
    backward_mask,
    backward_mods,
    backward_pipeline,
    config,
    dq_sums,
    group_sums,
    parts,
    pipeline,
    recompute,
    reduce_pipeline,
    reduce_scheduler,
    stored_ds,
    tails,
)

KEYS = 128
BAND = (90, 30)  # of WINDOW


class Statistics(Panel):
    def load(self, layout):
        return Value(self.content)


class Loaded(Panel):
    """A panel of q, dout, K or V, which comes as one box, or 64 rows at a time."""

    def slice(self, begin, size, dim):
        return Rows(self, int(begin) // size)


class Rows:
    """64 rows of a panel."""

    def __init__(self, panel, number):
        self.panel, self.number = panel, number

    def fill(self, content):
        parts = self.panel.__dict__.setdefault("parts", {})
        parts[self.number] = content
        self.panel.fill(frozenset().union(*parts.values()))


class Sums(Panel):
    """A part of a tile of dq, on its way to memory.  Each box of it stands for the whole."""

    def slice(self, begin, size, dim):
        return self

    def store(self, value):
        self.fill(value)


class Operand(View):
    """Some panels, of which a product takes some, or the rows or columns that `part` names."""

    dtype = Anything()

    def __init__(self, panels, part=""):
        super().__init__(panels)
        self.part = part

    def slice(self, begin, size, dim):
        if dim == 0:
            return Operand(self.panels, f"{self.part}r{int(begin) // size}")
        return Operand(self.panels[int(begin) // 64 : -(-int(begin + size) // 64)], self.part)

    def load(self, layout):
        return Product(self.tags())

    def tags(self):
        content = super().tags()
        return frozenset((self.part, one) for one in content) if self.part else content


class Half(Operand):
    """dS of a warpgroup's 64 keys, which it writes and may read."""

    def store(self, value):
        (panel,) = self.panels
        panel.fill(value.tags)


class Both(Operand):
    """dS of both warpgroups: rows are keys."""

    def slice(self, begin, size, dim):
        return Half([self.panels[int(begin) // size]]) if dim == 0 else Operand(self.panels, f"c{int(begin) // size}")


class Stored:
    """A panel of both warpgroups' dS, on its way to memory."""

    def __init__(self, halves):
        self.halves = halves


class Product(Value):
    """An accumulator, in whatever order."""

    def __init__(self, tags=frozenset(), log=(), shape=None):
        super().__init__(tags, log)
        self.shape = shape

    def reshape(self, shape):
        return self

    permute = reshape


class Boxes(str):
    """The descriptor of a mask."""

    dtype = None


class Sequence(NamedTuple):
    """A sequence, or a head's tokens: its number, first rows of queries and keys, how many, the number of its first tile of
    queries among those of a head, and the numbers of its blocks of keys."""

    number: int
    first_q: int
    first_k: int
    seq_q: int
    seq_k: int
    place: int
    blocks: list[int] | range


class Run(Backward):
    """sizes: queries, keys, heads of queries, how many share a KV head; dim 64, 80, 96 or 128.  late: dP behind P.  mask: rows of
    a tile of the mask that all heads share, 0 for none.  lists: a third of the tiles is hidden, at random, from some block.
    apart: each head of a group has programs of its own.  stored: dS goes to memory.  packed: queries and keys of each sequence,
    of which sizes has the sums; the order of their blocks is drawn, but that of a sequence's."""

    functions = (
        (parts, ("load_panels",)),
        (backward_pipeline, ("first_stage", "next_stage")),
        (reduce_scheduler, ("own_keys",)),
        (config, ("wide_of",)),
        (reduce_pipeline, ("zero_sums", "wait_sums")),
        (attention_backward_reduce, ("produce", "add", "store_ds", "step", "consume")),
    )
    classes = (
        (pipeline, ("Stage",)),
        (backward_mask, ("Lengths", "BackwardMask")),
        (reduce_scheduler, ("KeyBlock", "Visit", "OwnKeys", "BlockScheduler")),
        (reduce_pipeline, ("ReduceConfig", "ReducePipeline")),
        (dq_sums, ("DqSums",)),
        (group_sums, ("GroupSums",)),
        (stored_ds, ("StoredDs",)),
        (recompute, ("Recompute",)),
        (backward_mods, ("ModTiles",)),
        (tails, ("Tails",)),
        (backward_epilogue, ("Gradient",)),
    )
    pairs = 2  # of barriers at which the warpgroups meet, in turns

    def __init__(
        self, seed, kind, sizes, dim=128, ordered=False, heads_at_once=1, slots=2, late=False, mask=0, lists=False,
        apart=False, packed=None, stored=False,
    ):  # fmt: skip
        super().__init__(seed)
        self.kind, self.dim, self.ordered, self.late_dp, self.mask = kind, dim, ordered, late, mask
        self.seq_q, self.seq_k, self.heads, self.group = sizes
        self.queries, self.slots, self.heads_at_once = 128 if dim == 64 else 64, slots, heads_at_once
        self.box = 2 * (dim % 64) or 128
        self.q_tiles, self.blocks = -(-self.seq_q // self.queries), -(-self.seq_k // KEYS)
        self.sequences, self.entries = [Sequence(0, 0, 0, self.seq_q, self.seq_k, 0, range(self.blocks))], None
        if packed is not None:
            self.pack(packed)
        self.no_tile = self.heads * self.q_tiles
        self.sums, self.adding, self.adders = {}, 0, {}
        self.stored = stored
        self.members, self.group_sums = 1 if apart else self.group, {}
        self.programs = self.blocks * self.heads // self.members
        self.progress = [0] * (self.no_tile + 1 + 2 * self.programs)
        lists = lists and packed is None
        pairs = ((t, b) for t in range(self.q_tiles) for b in range(self.blocks)) if lists else ()
        self.hidden = {pair for pair in pairs if self.memory.random.random() < 1 / 3}
        self.lists = (self.offsets_of_lists(), 0, 0) if lists else (None, None, None)

    def pack(self, lengths):
        """Sequences and their blocks, as kernels.backward.backward_packed_blocks tells of them."""
        ends_q, ends_k = ([sum(pair[side] for pair in lengths[:i]) for i in range(len(lengths) + 1)] for side in (0, 1))
        self.q_tiles = ends_q[-1] // self.queries + len(lengths)
        self.blocks = ends_k[-1] // KEYS + len(lengths)
        owners = [i for i in range(len(lengths)) for _ in range(ends_k[i + 1] // KEYS - ends_k[i] // KEYS + 1)]
        self.memory.random.shuffle(owners)
        places, entries = [[] for _ in lengths], []
        for number, i in enumerate(owners):
            first = ends_q[i] // self.queries + i
            entries += [ends_q[i], lengths[i][0], ends_k[i], lengths[i][1], len(places[i]), first, i, 0]
            places[i].append(number)
        self.sequences = [
            Sequence(i, ends_q[i], ends_k[i], *pair, ends_q[i] // self.queries + i, places[i])
            for i, pair in enumerate(lengths)
        ]
        self.entries = Offsets(entries)

    def offsets_of_lists(self):
        """For each block: how many tiles see it, which, up or down, and for each how many blocks see that before."""
        made = []
        for block in range(self.blocks):
            tiles = [t for t in range(self.q_tiles) if self.sees(t, block)][:: self.memory.random.choice((1, -1))]
            before = [sum(self.sees(t, b) for b in range(block)) for t in tiles] or [0]
            entries = [2 * t + t % 2 for t in tiles] or [2 * self.q_tiles + 1]
            blank = [-1] * self.q_tiles
            made += [len(tiles), *(entries + blank)[: self.q_tiles], *(before + blank)[: self.q_tiles]]
        return Offsets(made)

    # ------------------------------------------------------------ the language

    def more(self):
        return {
            "KEYS": KEYS, "ROWS": 128, "STAGGER": 2, "narrowed": lambda x, dtype: x,
            "pair_barrier": self.pair_barrier,
            "tma_reduce_add": self.add_copy, "tma_store_wait": self.wait_reads, "await_counter": self.await_counter,
            "tma_store": self.store_copy, "PANEL": 64,
            "count": self.count, "places_of_tile": lambda *shape: 1,
        }  # fmt: skip

    def namespace(self):
        names = super().namespace()
        names["gl"].program_id = lambda axis: Number(self.local.program)
        names["gl"].load = lambda pointer: Number(pointer.values[pointer.i])
        names["gl"].num_programs = lambda axis: Number(self.programs)
        names["gl"].zeros = lambda shape, *rest: Product(shape=shape)
        names["GroupSums"].add = lambda sums, *args: self.add_in_group(sums, *args)
        names["ReducePipeline"].tile = lambda pipe, panels, slot, slots, rows: self.tiles(panels, slots).index(slot)
        return names

    def bytes_of(self, desc):
        return {"stat": 8 * self.queries, "mask": 64 * self.mask, "k": KEYS * 128, "v": KEYS * 128, "tail": 8192}.get(
            desc, self.queries * 128
        )

    def tiles(self, buffers, slots):
        each = -(-self.dim // 64)
        return Ring((Operand(buffers.items[i * each : (i + 1) * each]) for i in range(slots)), Anything())

    def copy(self, desc, place, barrier, panel):
        panel.fill(frozenset())

        def arrive():
            panel.fill(frozenset([(desc, *(int(p) for p in place))]))
            barrier.arrive(copied=self.bytes_of(desc))

        self.later(arrive, desc in self.late)

    def product(self, a, b, acc, use_acc=True, is_async=True):
        made = super().product(a, b, acc, use_acc)
        own = Product(made.tags | acc.tags if use_acc else made.tags, made.log, acc.shape)
        self.local.__dict__.setdefault("flying", []).append(own)
        return own

    def wait_products(self, pending, deps):
        """What is waited for has been made."""
        found, flying = super().wait_products(pending, deps), self.local.flying
        del flying[: max(0, len(flying) - pending)]
        if any(one is dep for one in flying for dep in deps):
            self.memory.fail("an accumulator is read while it is made")
        return found

    def pair_barrier(self, own, i):
        first = 2 * (i % self.pairs)
        self.local.turns[first + 1 - own].arrive()
        self.local.turns[first + own].sync()

    # ------------------------------------------------------------ dq in memory

    def added(self, row, box, log):
        self.sums.setdefault((row, box), []).extend(log)

    def add_copy(self, desc, place, panel):
        """A copy that reads its buffer some time, and adds it some time later."""
        rows = self.queries * self.dim // 32
        row, box = int(place[0]) // rows, int(place[0]) % rows // self.box
        state = {"read": False, "written": False}
        self.copies().append(state)
        program = self.local.program
        panel.readers += 1
        self.adding += 1

        def read():
            value, panel.readers, state["read"] = panel.content, panel.readers - 1, True
            self.memory.later(self.memory.random.random(), lambda: add(value))

        def add(value):
            self.added(row, box, value.log)
            self.adders.setdefault((row, box), []).append(program)
            self.adding, state["written"] = self.adding - 1, True

        self.later(read)

    def store_copy(self, desc, place, panel):
        """A copy that reads both halves of a tile of dS some time."""
        state, row, column = {"read": False, "written": False}, int(place[0]), int(place[1])
        self.copies().append(state)
        self.adding += 1
        for half in panel.halves:
            half.readers += 1

        def read():
            if column < self.q_tiles * self.queries:
                self.record(("stored", row, column), tuple(half.content for half in panel.halves))
            for half in panel.halves:
                half.readers -= 1
            self.adding, state["read"], state["written"] = self.adding - 1, True, True

        self.later(read, desc in self.late)

    def add_in_group(self, sums, which, acc, block, own, first):
        """As GroupSums.add: what a program reads has to be what all before it have left."""
        if sums.place is None:
            return acc
        key, part = (which, first, int(sums.number(block, own))), int(block.part)
        before, log = self.group_sums.get(key, (0, ()))
        if before != part:
            self.memory.fail(f"sum {key} has {before} parts, and part {part} is added")
        made = Value(acc.tags, (*log, *acc.log))
        self.group_sums[key] = part + 1, made.log
        return made

    def await_counter(self, at, wanted):
        self._await(at, wanted)

    def wait_reads(self, pending):
        """All but the last `pending` copies have read."""
        copies = self.copies()
        self.memory.until(lambda: all(c["read"] for c in copies[: len(copies) - pending]), "copies read")

    # ------------------------------------------------------------ what is wanted

    def sees(self, tile, block, sequence=None):
        """Whether some query of a tile sees some key of a block: by looking at each."""
        if (tile, block) in self.hidden:
            return False
        seq_q, seq_k = (sequence or self.sequences[0])[3:5]
        keys = range(block * KEYS, min(block * KEYS + KEYS, seq_k))
        for i in range(tile * self.queries, min((tile + 1) * self.queries, seq_q)):
            own = i + seq_k - seq_q
            low = 0 if self.kind != WINDOW else own - BAND[0]
            high = seq_k if self.kind == FULL else own + (BAND[1] if self.kind == WINDOW else 0)
            if max(low, keys.start) <= min(high, keys.stop - 1):
                return True
        return False

    def boxes(self, side, h, row, part="", columns=None):
        found = frozenset((side, 0, h, row, column) for column in columns or range(0, self.dim, 64))
        return frozenset((part, one) for one in found) if part else found

    def tile(self, side, h, t, sequence, part="", columns=None):
        """What a tile of a sequence is loaded from: the tensor, or, of packed sequences where an end is in it, its copy."""
        i, first_q, first_k, seq_q, seq_k, _, _ = sequence
        of_queries = side in ("q", "do")
        rows, first, seq = (self.queries, first_q, seq_q) if of_queries else (KEYS, first_k, seq_k)
        if self.entries is None or (t + 1) * rows <= seq:
            return self.boxes(side, h, first + t * rows, part, columns)
        panels, number = -(-self.dim // 64), len(self.sequences)
        heads = self.heads if of_queries else self.heads // self.group
        unit = ((side in ("do", "v")) * heads + h) * number + i
        unit = unit * panels * rows // 64 + (0 if of_queries else 2 * self.heads * number * panels * self.queries // 64)
        chosen = [c // 64 for c in columns or range(0, self.dim, 64)]
        found = frozenset(("tail", (unit + p * rows // 64 + u) * 64, 0) for p in chosen for u in range(rows // 64))
        return frozenset((part, one) for one in found) if part else found

    def pair(self, h, tile, block, half, row, sequence):
        """P of 64 keys, and dS of them."""
        statistics = frozenset([("stat", row * 2 * self.queries)])
        p = self.tile("k", h // self.group, block, sequence, f"r{half}") | statistics
        p |= self.tile("q", h, tile, sequence)
        if self.mask:
            p |= {("mask", 0, 0, tile * self.queries if self.mask > 1 else 0, block * KEYS + half * 64)}
        ds = p | self.tile("v", h // self.group, block, sequence, f"r{half}") | self.tile("do", h, tile, sequence)
        return p, ds

    def expected(self):
        """({output, KV head, block, half, first column: products}, {row, box: summands}), each a Counter, without the row of no
        tile."""
        made, sums = {}, {}
        parts = {0: (0,), 64: (64,)} if self.dim in (80, 96) else {0: None}  # the columns of the boxes
        firsts = 128 // self.box
        every = (
            (hk, one, b)
            for hk in range(self.heads // self.group)
            for one in self.sequences
            for b in enumerate(one.blocks)
        )
        for hk, sequence, (block, number) in every:
            tiles = [t for t in range(-(-sequence.seq_q // self.queries)) if self.sees(t, block, sequence)]
            nobody = [self.q_tiles] if self.entries is None else []
            logs = {(out, half, first): Counter() for out in ("dk", "dv") for half in (0, 1) for first in parts}
            for h in range(hk * self.group, (hk + 1) * self.group):
                for tile in tiles or nobody:
                    row = h * self.q_tiles + sequence.place + tile if tiles else self.no_tile
                    both = [self.pair(h, tile, block, half, row, sequence) for half in (0, 1)]
                    if self.stored and tiles:
                        place = "stored", (h * self.blocks + block) * KEYS
                        columns = range(tile * self.queries, (tile + 1) * self.queries, 64)
                        made |= {(*place, column): (both[0][1], both[1][1]) for column in columns}
                    for half, (p, ds) in enumerate(both):
                        for first, columns in parts.items():
                            logs["dv", half, first][p, self.tile("do", h, tile, sequence, "", columns)] += 1
                            logs["dk", half, first][ds, self.tile("q", h, tile, sequence, "", columns)] += 1
                    for box in range(self.queries * self.dim // 32 // self.box) if tiles else ():
                        ds, part = both[0][1] | both[1][1], box // firsts
                        left = ds if self.dim > 64 else frozenset((f"c{part}", one) for one in ds)
                        right = self.tile("k", hk, block, sequence, "", (64 * part,) if self.dim > 64 else None)
                        sums.setdefault((row, box), Counter())[left, right] += 1
            made |= {(out, hk, number, half, first): log for (out, half, first), log in logs.items()}
        return made, sums

    def store(self, out, acc, rows, stride, dtype, columns=None):
        self.record((out.name, *self.local.place, out.first), Counter(acc.log))

    # ------------------------------------------------------------ threads

    def program(self, number):
        """The partitions of one program."""
        names, memory, each, slots = self.namespace(), self.memory, -(-self.dim // 64), self.slots

        def buffers(name, count, kind=Panel):
            return Ring((kind(memory, f"{name} {i}", frozenset()) for i in range(count)), Anything())

        q, do = (buffers(name, slots * each, Loaded) for name in ("q", "dout"))
        k, v, statistics = (
            buffers("K", each, Loaded),
            buffers("V", each, Loaded),
            buffers("statistics", slots, Statistics),
        )
        ds = Ring(Both(buffers(f"dS {i}", 2).items) for i in (0, 1))
        bars = barriers(memory, kv_full=(1, 1), q_full=(slots, 1), do_full=(slots, 1), empty=(slots, 2))
        buffers = Ring((Sums(memory, f"dq {i}", Value()) for i in (0, 1)), Anything())
        adders = 2 if self.ordered and self.dim > 64 else 1
        ends = barriers(memory, sum_full=(2 * adders, 1), sum_empty=(2, 1))
        sums = names["DqSums"]("sums", 0, buffers, *ends, self.queries * self.dim, self.box, self.ordered, adders)
        turns = [Turn(memory, f"meeting {i}") for i in range(4)]
        config = names["ReduceConfig"](None, self.dim, self.queries, slots, self.late_dp)
        tail = None if self.entries is None else "tail"
        kv_heads = self.heads // self.group
        tails = names["Tails"](tail, len(self.sequences), self.heads, kv_heads, self.queries, each * 64)
        stored = None
        if self.stored:
            wide = self.queries // 64
            panels = Ring((Stored(one.panels) for one in ds.items for _ in range(wide)), Anything())
            rooms = barriers(memory, stored_full=(2, 2), stored_empty=(2, 1))
            stored = names["StoredDs"]("stored", panels, *rooms, self.heads, self.blocks, self.queries)
        pipe = names["ReducePipeline"](
            "q", "do", "k", "v", "stat", tails, q, do, k, v, ds, statistics, *bars, stored, config
        )
        lengths = names["Lengths"](self.seq_q, self.seq_k, -(-self.seq_q // 64), -(-self.seq_k // 64))
        mask = names["BackwardMask"](*BAND, self.kind)
        scheduler = names["BlockScheduler"](
            lengths, self.heads, self.group, self.members, self.q_tiles, self.blocks, self.heads_at_once, self.no_tile, mask,
            *self.lists, self.entries, self.queries, self.ordered,
        )  # fmt: skip
        place, done = (None, None) if self.members == self.group else ("sums", barriers(memory, done=(2, 1))[0])
        groups = names["GroupSums"](
            self.no_tile + 1, place, self.blocks, self.heads, self.group, self.members, done, config
        )
        gradients = [names["Gradient"](out, 0, 0, 0, None, None, None) for out in GRADIENTS[1:]]

        mods = self.mods(names)

        def begin():
            self.local.program, self.local.open, self.local.turns = number, [], turns

        def produce():
            begin()
            names["produce"](scheduler, pipe, mods, groups)

        def add(own):
            begin()
            names["add"](own, scheduler, sums)

        def store_ds():
            begin()
            names["store_ds"](scheduler, pipe)

        def consume(half):
            begin()
            block = scheduler.block()
            self.local.place = int(block.head), int(block.number), half
            names["consume"](half, scheduler, pipe, mods, sums, groups, *gradients)

        storers = [] if stored is None else [store_ds]
        return [
            produce,
            *(partial(add, own) for own in range(adders)),
            *storers,
            *(partial(consume, half) for half in (0, 1)),
        ]

    def mods(self, names):
        """What stands for BackwardMods: changes leave scores what they are, but that a mask was read for them."""
        tiles = Ring((Panel(self.memory, f"mask {i}", frozenset()) for i in range(2 * self.slots)), Anything())
        mask = names["ModTiles"](Boxes("mask"), 1, 0, tiles, self.mask, 2 * 64 * self.mask)

        def apply(s, slope, batch, head, query, key, lengths, partial, slot, own):
            return s._with(Value(tiles.index(slot * 2 + own).content)), 1.0

        plain = {"scale": 1.0, "slope": lambda *head: 0.0, "to_base_2": lambda: 1.0, "STEEP": False, "SCORES": False}
        return SimpleNamespace(ON=self.mask > 0, mask=mask, apply=apply, **plain)

    def __call__(self, places=1):
        """places: programs that run side by side; whenever one ends the next begins, as on a GPU."""
        numbers = iter(range(self.programs))

        def place():
            for number in numbers:
                run_threads(self.memory, self.program(number))

        run_threads(self.memory, [place] * places)
        self.memory.until(lambda: self.adding == 0, "the last sums")
        made, sums = self.expected()
        assert self.made == made
        found = {place: Counter(log) for place, log in self.sums.items() if place[0] != self.no_tile}
        assert found == sums
        if self.ordered:
            for (row, _), programs in self.adders.items():
                assert row == self.no_tile or programs == sorted(programs)
