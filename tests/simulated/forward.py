"""The dense Gluon kernel for sm_90: its partitions over stand-ins of buffers, barriers and products.

Q is read from shared memory by every product with K, so its buffer has to stay until the last of them has been waited for."""

import types

import simulated
from simulated import Anything, Launch, Note, Number, Offsets, Panels, Tile, Turn, barriers, own_classes, tiles_of
from tilefold.kernels.hopper import (
    config,
    consumer,
    epilogue,
    mask,
    ping_pong,
    pipeline,
    producer,
    products,
    scheduler,
    score_mods,
)

FULL, CAUSAL, WINDOW = 0, 1, 2
STRIDES = (10**12, 1009, 7)  # of the output's batch entries, queries and heads
FUNCTIONS = (
    (consumer, ("pass_over", "consume")),
    (producer, ("acquire_all", "signal_all", "load_work", "produce")),
    (products, ("issue_scores", "issue_output", "_rows_of_keys", "wait_output")),
    (scheduler, ("block_of_item", "fields_of", "sequence_of_place")),
)
CLASSES = (
    (config, ("Problem",)),
    (pipeline, ("Stage", "Pipeline")),
    (scheduler, ("WorkCounter", "WorkTile", "TileScheduler")),
    (mask, ("TileWalk", "Mask")),
    (score_mods, ("ModPipeline", "ScoreMods")),
    (epilogue, ("Epilogue",)),
    (ping_pong, ("PingPong",)),
)


def parts_of(dim):
    """Widths of the tiles of a head dim."""
    wide = 1 << (dim.bit_length() - 1)
    return (wide,) if wide == dim else (wide, dim - wide)


class Buffers(Panels):
    """Panels of 64 columns of one part of a tensor; columns: where the panels of a tile begin."""

    def __init__(self, memory, name, number, part, columns):
        super().__init__(memory, name, number * len(columns), len(columns))
        self.part, self.columns = part, columns


class Product(int):
    """S, and P made of it: the number of its key tile."""

    def __eq__(self, other):
        return int(self) == int(other)

    __hash__ = int.__hash__


class Accumulator(Anything):
    """A part of O: how wide it is."""

    def __init__(self, columns):
        self.shape = 64, columns


class Softmax:
    """What follows each tile of scores, which are their tile's number."""

    def __init__(self, run):
        self.run, self.LAZY, self.VOTE = run, run.lazy, False

    def begin(self, like, head):
        return Anything(), Anything()

    def step(self, s, m, l, scale):
        return s, m, l, Anything()

    def operand(self, p, zero):
        return p

    def step_lazily(self, s, m, m_next, l, scale):
        return s, m, l, Anything(), Anything()

    def check(self, s, m, scale):
        return m

    def update(self, part, m, worst):
        return Anything(), Anything()

    def overflowed(self, worst, item):
        return self.run.judge(item)


class Flags:
    """The overflow flags."""

    def __init__(self, run):
        self.run, self.LAZY, self.TILES, self.flags = run, run.lazy, 3 if run.prefetch else 2, {}
        self.checked = [0] * (self.TILES - 1)

    def write(self, i, consumer, item):
        self.flags[i % self.TILES, consumer] = item

    def read(self, i):
        return max(self.flags.get((i % self.TILES, c), 0) for c in range(self.run.consumers))

    def set_checked(self, again, i):
        self.checked[i % len(self.checked)] = again

    def is_checked(self, i):
        self.run.local.checked = self.checked[i % len(self.checked)] > 0
        return self.run.local.checked


class Run(Launch):
    """One launch over `heads` query heads in groups; P of a tile is its key tile's number.

    lengths: of each sequence, (queries, keys); several make a packed batch."""

    bits, bias, mask, tile_slots, outside, scales, chunk = 16, 0, 0, (0, 0), False, None, 0
    transposed: tuple[object, ...] = ()

    def __init__(self, seed, kind, lengths, heads, group, slots, dims=(128, 128), consumers=2, turns=False, late=False, keys=128,
                 pack=1, lazy=False, prefetch=False, split=1):  # fmt: skip
        super().__init__(seed)
        self.kind, self.lengths, self.left, self.right = kind, lengths, 100, 30
        self.heads, self.group, self.slots, self.dims, self.keys = heads, group, slots, dims, keys
        self.consumers, self.turns, self.fold_late, self.rows = consumers, turns, late, consumers // split * 64
        self.prefetch, self.split = prefetch, split  # consumers that share rows
        self.varlen, self.pack = len(lengths) > 1, pack  # heads that make one; `heads` and `group` are what is left
        self.first = [[sum(pair[side] for pair in lengths[:b]) for b in range(len(lengths) + 1)] for side in (0, 1)]
        (self.seq_q, self.seq_k), total = lengths[0], self.first[0][-1]
        self.q_blocks = total // self.rows + len(lengths) if self.varlen else -(-self.seq_q * pack // self.rows)
        self.items, self.order = self.q_blocks * heads, []
        self.lazy, self.overflowed = lazy, set()  # items that have to be folded again

    def namespace(self, program, programs):
        run = self
        gl = self.language(
            ("zeros", "zeros_like", "expand_dims"), program_id=lambda axis: Number(program), num_programs=lambda axis: programs,
            sum=lambda x, axis: x, full=lambda shape, value, *rest: value, load=lambda pointer: pointer.values[pointer.i],
            store=lambda pointer, value: setattr(run, "counter", value),
        )  # fmt: skip
        names = self.names(gl) | {
            "FULL": FULL, "CAUSAL": CAUSAL, "WINDOW": WINDOW, "IDLE": -2, "LEAVE": -1, "field": lambda x: x, "held": lambda x: x,
            "wide_of": lambda dim: parts_of(dim)[0], "panel_of": lambda dim, dtype: 64, "swizzled": lambda dim, dtype: None,
            "reinterpret": lambda panels, *view: run.view(panels), "draw_work": lambda counter: run.draw(),
            "read_work": lambda number: number, "place_of_item": lambda item, blocks, heads: (
                Number(item % blocks), Number(item // blocks // heads), Number(item // blocks % heads)),
            "named_wait": lambda c: run.local.turns[c].sync(), "named_arrive": lambda c: run.local.turns[c].arrive(),
            "schedule_fence": lambda x: x, "opaque": lambda x: x, "thread_barrier": lambda: None,
            "zero_output": lambda config: tuple(map(Accumulator, parts_of(config.DIM_V))), "store_lse": run.store_lse,
            "rescale_output": lambda acc, *args: acc, "add_output": lambda acc, more: acc,
        } | self.more()  # fmt: skip
        simulated.own_functions(own_classes(names, CLASSES), FUNCTIONS)
        self.numbered(names["WorkTile"])
        item = names["TileScheduler"].item
        names["TileScheduler"].item = lambda scheduler, i: run.begin(item(scheduler, i))
        names["Pipeline"].clear_tail = lambda pipe, stage, live: run.clear(pipe.panels, stage.slot, live, pipe.ROWS)
        names["Mask"].cuts, names["Mask"].cut = lambda *args: False, lambda mask, s, *args: s
        names["Epilogue"]._store_columns = lambda epilogue, *args: run.store(*args)
        self.mask_of = lambda: names["Mask"](
            self.left, self.right, self.kind, self.rows, self.keys, self.pack, *self.lists()
        )
        return names

    @staticmethod
    def numbered(work_tile):
        """Its fields are scalars, which can be cast."""
        plain = work_tile.__init__

        def __init__(self, *fields):
            plain(self, *(field if isinstance(field, bool) else Number(field) for field in fields))

        work_tile.__init__ = __init__

    def view(self, panels):
        """Panels as tiles."""
        return tiles_of(panels)

    def more(self):
        """Further names for the kernel's functions."""
        return {}

    def mod_pipelines(self, names):
        """The rings of a bias and a mask."""
        none = names["ModPipeline"](*[None] * 6, 0, self.keys, 0, self.consumers)
        return none, none

    def place(self, item):
        """-> sequence, head, query block of an item, or None: worked out in another way than the kernel's."""
        head, place = item // self.q_blocks, self.q_blocks - 1 - item % self.q_blocks
        if not self.varlen:
            return 0, head, place
        begins = [self.first[0][b] // self.rows + b for b in range(len(self.lengths))]
        b = max(i for i, begin in enumerate(begins) if begin <= place)
        block = place - begins[b]
        return (b, head, block) if block * self.rows < self.lengths[b][0] else None

    def begin(self, item):
        self.local.item, self.local.open, self.local.tiles, self.local.lse = item, [], {}, None
        return item

    def row_of(self, block):
        """The first of the rows of a block that the consumer folds."""
        return block * self.rows + self.local.consumer // self.split * 64

    def first_column(self):
        """The first of the columns of V that the consumer folds."""
        return self.local.consumer % self.split * (self.dims[1] // self.split)

    def lists(self):
        """The lists of KV tiles, and their strides: none."""
        return ()

    def kv_tile(self, sequence, head, block, j):
        """The j-th tile of keys that a consumer's rows of a block of queries see."""
        seq_q, seq_k = self.lengths[sequence]
        work = types.SimpleNamespace(block=block, seq_q=seq_q, seq_k=seq_k, shift=seq_k - seq_q)
        seen = self.mask_of()
        first, count = seen.tiles(work)
        if seen.OWN and not (self.bias or self.mask):
            row = self.row_of(block)
            first += seen.own(work, row, types.SimpleNamespace(first=first, count=count))[0]
        return first + j

    def judge(self, item):
        """Now and then a query tile that was not checked has to be folded again."""
        again = not self.local.checked and self.memory.random.random() < 0.3
        if again:
            self.overflowed.add(int(item))
        return item + 1 if again else 0

    def bytes_of(self, desc):
        return (64 if desc == "q" else self.keys) * 64 * self.bits // 8

    def wrong(self, what):
        self.memory.fail(f"item {self.local.item}: {what}")

    def clear(self, buffers, slot, live, keys):
        """Both consumers of a tile may, while the other reads: they write what is there."""
        if live >= keys or any(held is None for part in buffers for held in Tile(part, slot).held()):
            self.wrong(f"V is cleared from row {live} before it is there")

    def store_lse(self, lse, m, l, rows, live, layout, pack, stride):
        self.local.lse = lse, rows, live, stride

    def store(self, out, acc, l, factor, rows, columns):
        """Where the query tile's rows go, worked out in another way; once for each part of O."""
        sequence, head, block = self.place(self.local.item)
        row, n_q = self.row_of(block), self.lengths[sequence][0]
        query, total, rest = row // self.pack, self.first[0][-1], n_q * self.pack - row
        if self.varlen:
            wanted = (self.first[0][sequence] + query) * STRIDES[1], head * total + self.first[0][sequence] + query
        else:
            wanted = query * STRIDES[1], head * self.pack * n_q + query
        skipped, first = self.dims[1] - columns, self.first_column()
        lse = None if first else (wanted[1], rest, rest, n_q)
        wanted = head * self.pack * STRIDES[2] + wanted[0] + skipped, rest, lse
        if (out, rows, self.local.lse) != wanted:
            self.wrong(f"stored at {out, rows, self.local.lse}, not {wanted}")
        if skipped == first:
            self.made.append((self.local.item, self.local.consumer))

    def check(self, tile, desc, head, row):
        packed = (row // self.pack, 0) if desc == "q" and self.pack > 1 else (row,)
        first = self.first_column() if desc == "v" else 0
        wanted = [(desc, 0, head, *packed, first + column) for column in tile.buffers.columns]
        if tile.held() != wanted:
            self.wrong(f"{desc} holds {tile.held()}, not {wanted}")

    def product(self, a, tile, acc, use_acc=True, is_async=True):
        """Reads its buffers from now until it is waited for; they hold what the item names."""
        side, part = tile.buffers.name, tile.buffers.part
        sequence, head, block = self.place(self.local.item)
        j = self.local.tiles.get((side, part), 0)
        self.local.tiles[side, part] = j + 1
        at = self.kv_tile(sequence, head, block, j)
        self.check(tile, side, head // self.group, self.first[1][sequence] + at * self.keys)
        if side == "k":
            self.check(a, "q", head, self.first[0][sequence] + self.row_of(block))
            if part == 0:
                self.order.append(self.local.consumer)
        elif a != j:
            self.wrong(f"P of tile {a} meets V of tile {j}")
        self.read(*((tile, a) if side == "k" else (tile,)))
        return Product(j) if side == "k" else acc

    def buffers(self, name, number, dim):
        begin, made = 0, []
        for part, width in enumerate(parts_of(dim)):
            made.append(Buffers(self.memory, name, number, part, range(begin, begin + width, 64)))
            made[-1].dtype = types.SimpleNamespace(primitive_bitwidth=self.bits)
            begin += width
        return tuple(made)

    def program(self, program, programs):
        names, n, slots = self.namespace(program, programs), self.consumers, self.slots
        turns = [Turn(self.memory, f"turn {c}") for c in range(n)]

        def pipe(side, number, rows, dim, readers, *rest):
            bars = barriers(self.memory, **{f"{side}_full": (number, 1), f"{side}_empty": (number, readers)})
            return names["Pipeline"](side, self.buffers(side, number, dim), *bars, number, rows, dim, *rest)

        own = n // self.split  # that have rows of their own
        q = pipe("q", 2 * own if self.prefetch else own, 64, self.dims[0], self.split, self.pack)
        k = pipe("k", slots, self.keys, self.dims[0], n)
        v = pipe("v", slots * self.split, *self.tile_of_values(), own, *self.transposed)
        offsets = (Offsets(self.first[0]), Offsets(self.first[1]), len(self.lengths)) if self.varlen else (None,) * 3
        problem = names["Problem"](self.seq_q, self.seq_k, self.heads, self.group, *offsets, self.first[0][-1])
        config = types.SimpleNamespace(DTYPE=None, DIM_V=self.dims[1] // self.split, KEYS=self.keys, CONSUMERS=n, PACK=self.pack,
                                       VARLEN=self.varlen, FENCE=True, LATE=self.fold_late, SCORES=None,
                                       PROBS_REST=None, OUTSIDE=self.outside, CHUNK=self.chunk,
                                       RELOCATE=not self.varlen)  # fmt: skip
        counter = names["WorkCounter"](None, self.items)
        tiles = names["TileScheduler"](
            problem, counter, Note(), Flags(self), self.q_blocks, self.rows, self.varlen, False, self.prefetch
        )
        mods = names["ScoreMods"](1.0, None, None, None, None, *self.mod_pipelines(names), 0,
                                  types.SimpleNamespace(KIND=self.kind, PACK=self.pack), self.scales)  # fmt: skip
        end = names["Epilogue"](Number(0), Number(0), *map(Number, STRIDES), problem, config, self.dims[1])
        order = names["PingPong"](self.turns, n)

        def consumer(c):
            self.local.consumer, self.local.turns, self.local.checked = c, turns, False
            names["consume"](c, config, tiles, q, k, v, self.mask_of(), mods, Softmax(self), end, order)
            if self.turns and c == 0:
                assert not any(turn.arrived for turn in turns)

        yield lambda: names["produce"](tiles, q, k, v, self.mask_of(), mods)
        yield from (lambda c=c: consumer(c) for c in range(n))

    def tile_of_values(self):
        return self.keys, self.dims[1] // self.split

    def __call__(self, programs):
        programs = min(programs, self.items)
        self.launch(programs)
        items = [item for item in range(self.items) if self.place(item) is not None]
        made = {one: self.made.count(one) for one in self.made}
        assert made == {(item, c): 1 + (item in self.overflowed) for item in items for c in range(self.consumers)}
        blocks = sum(-(-seq_q * self.pack // self.rows) for seq_q, _ in self.lengths)
        assert len(items) == blocks * self.heads
        assert self.counter == 0
        if self.turns and programs == 1 and not self.mask_of().OWN:
            assert self.order == [i % self.consumers for i in range(len(self.order))]


class Listed(Run):
    """A launch over random lists of KV tiles, of which each query tile has one or, with `shared`, all heads' the same."""

    def __init__(self, seed, kind, *rest, shared=False, **version):
        super().__init__(seed, kind, *rest, **version)
        tiles = range(-(-self.seq_k // self.keys))
        rows = self.q_blocks * (1 if shared else self.heads)
        pick = self.memory.random
        self.listed = [sorted(pick.sample(tiles, pick.randint(1, len(tiles)))) for _ in range(rows)]
        self.width, self.shared = len(tiles) + 1, shared

    def lists(self):
        rows = [
            [len(row), *(2 * tile + tile % 2 for tile in row), *[-1] * self.width][: self.width] for row in self.listed
        ]
        step = 0 if self.shared else self.q_blocks * self.width
        return Offsets([n for row in rows for n in row]), 0, step, self.width

    def kv_tile(self, sequence, head, block, j):
        return self.listed[block if self.shared else head * self.q_blocks + block][j]


class Total(Accumulator):
    """The state of all chunks so far: the numbers of the tiles behind them."""

    def __init__(self, columns, ends):
        super().__init__(columns)
        self.ends = ends


class Chunked(Run):
    """A launch in chunks of `chunk` tiles from a sequence's first key, each merged once, before the next begins."""

    def __init__(self, *args, chunk, **options):
        super().__init__(*args, **options)
        self.chunk = chunk

    def more(self):
        return {
            "first_chunk": lambda softmax: (Anything(), Anything()),
            "first_total": lambda *args: (Total(self.dims[1], []),),
            "step_of_chunk": lambda softmax, s, m, l, scale: (s, m, l, Anything()),
            "merge_chunk": self.merge,
            "keep_chunk": lambda *args: self.merge(*args)[0],
            "state_finish": lambda acc, m, l: (acc, Anything()),
            "store_each": lambda lse, value, rows, live, *rest: self.store_lse(lse, None, None, rows, live, None, *rest),
            "store_accumulator": self.store_total,
        }  # fmt: skip

    def merge(self, softmax, consumer, total, acc, m, l):
        place = self.place(self.local.item)
        return (Total(self.dims[1], [*total[0].ends, self.kv_tile(*place, self.local.tiles["v", 0])]),), m, l

    def store_total(self, out, acc, rows, *rest):
        first, end = self.kv_tile(*self.place(self.local.item), 0), acc.ends[-1]
        if acc.ends != [*(j for j in range(first + 1, end) if j % self.chunk == 0), end]:
            self.wrong(f"tiles from {first} on are merged at {acc.ends}, in chunks of {self.chunk}")
        self.store(out, acc, None, None, rows, self.dims[1])


class Eight(Run):
    """A launch over e4m3: V comes transposed, a tile is [DIM_V, KEYS].  outside: sums over tiles are not left to wgmma."""

    bits, transposed = 8, (1, True)
    scales = types.SimpleNamespace(of_scores=lambda work: 1.0, of_values=lambda work: None)

    def __init__(self, *args, outside=True, **options):
        super().__init__(*args, **options)
        self.outside = outside

    def tile_of_values(self):
        return self.dims[1], self.keys

    def bytes_of(self, desc):
        return self.dims[1] * 64 if desc == "v" else super().bytes_of(desc)

    def check(self, tile, desc, head, row):
        if desc != "v":
            return super().check(tile, desc, head, row)
        wanted = [(desc, 0, head, 0, row + column) for column in tile.buffers.columns]
        if tile.held() != wanted:
            self.wrong(f"V^T holds {tile.held()}, not {wanted}")


# ---------------------------------------------------------------- with a bias and a mask


class Descriptor:
    """What boxes are cut from; 1, or 0 where one serves all batch entries or heads, leads to them."""

    def __init__(self, name, bits, steps):
        self.name, self.dtype, self.steps = name, types.SimpleNamespace(primitive_bitwidth=bits), steps


class Changed(Run):
    """A launch with a bias of rows of 16 bits and a mask of bytes; rows: of a tile of each, 64, 1 or 0 for none.  Every tile of
    scores meets its own, which stays until every thread has read it; each folding warpgroup has rings of its own."""

    def __init__(self, *args, rows=(64, 64), tile_slots=(2, 2), steps=((1, 1), (0, 1)), **options):
        super().__init__(*args, **options)
        (self.bias, self.mask), self.tile_slots = rows, tile_slots
        self.sources = [Descriptor("bias", 16, steps[0]), Descriptor("mask", 8, steps[1])]

    def more(self):
        return {
            "panel_of_tile": lambda dtype, rows, keys: 64,
            "places_of_tile": lambda dtype, rows, keys: 1,
            "tile_layout": lambda *shape: None,
            "fence_async_shared": self.fence,
        }

    def view(self, panels):
        if panels.name in ("bias", "mask"):
            return types.SimpleNamespace(index=lambda i: Held(self, panels, i))
        return super().view(panels)

    def fence(self):
        """What threads began to read before has arrived: without it TMA may write there first."""
        for tile in self.local.held.values():
            tile.reading(-1)
        self.local.held = {}

    def bytes_of(self, desc):
        if not isinstance(desc, Descriptor):
            return super().bytes_of(desc)
        rows = self.bias if desc.name == "bias" else self.mask
        return rows * 64 * desc.dtype.primitive_bitwidth // 8

    def mod_pipelines(self, names):
        made = []
        for desc, rows, slots in zip(self.sources, (self.bias, self.mask), self.tile_slots, strict=True):
            number = self.consumers * slots
            panels = Buffers(self.memory, desc.name, number, 0, range(0, self.keys, 64))
            panels.dtype, panels.shape = desc.dtype, (number * self.keys // 64, rows, 64)
            bars = barriers(self.memory, **{f"{desc.name}_{what}": (number, 1) for what in ("full", "empty")})
            made.append(names["ModPipeline"](desc, *desc.steps, panels, *bars, rows, self.keys, slots, self.consumers))
        return made

    def product(self, a, tile, acc, use_acc=True, is_async=True):
        made = super().product(a, tile, acc, use_acc, is_async)
        return Scores(made) if isinstance(made, Product) else made

    def begin(self, item):
        self.local.held = {}
        return super().begin(item)

    def check_mod(self, tile):
        """The tile in hand is the one of the scores that are made last, of this warpgroup's rows."""
        sequence, head, block = self.place(self.local.item)
        rows, desc = (self.bias, self.sources[0]) if tile.buffers.name == "bias" else (self.mask, self.sources[1])
        row = self.row_of(block) if rows > 1 else 0
        key = self.kv_tile(sequence, 0, block, self.local.tiles["k", 0] - 1) * self.keys
        place = desc, sequence * desc.steps[0], head * desc.steps[1], row
        wanted = [(*place, key + column) for column in tile.buffers.columns]
        if tile.held() != wanted:
            self.wrong(f"{desc.name} holds {[(held or [0])[1:] for held in tile.held()]}, not {wanted}")


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
        self.run.check_mod(self)
        self.reading(1)
        self.run.local.held[self.buffers.name] = self
        self.run.memory.linger()
        return Kept()


class Kept(Anything):
    """What a tile of the mask holds: every key is seen."""

    def __ne__(self, other):
        return True

    __hash__ = None
