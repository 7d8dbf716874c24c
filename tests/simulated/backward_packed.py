"""One launch of the Gluon kernel of the backward pass for packed sequences, in the order that the kernel before it makes.

Every sum is over the pairs of tiles of its own sequence that see each other, in order; what lies past the end of a sequence was
zeroed wherever a product reads it; a line is not written before all who read it have done so."""

import functools

from packed_batch import Batch
from simulated.backward import (
    CAUSAL,
    DIM,
    FULL,
    PANELS,
    SLOTS,
    WIDE_CLASSES,
    WIDE_FUNCTIONS,
    WINDOW,
    ZEROS,
    Backward,
    Pointer,
)

LEFT, RIGHT = 90, 30
MASKS = {FULL: {}, CAUSAL: {"causal": True}, WINDOW: {"window": (LEFT, RIGHT)}}


@functools.cache
def batch_of(kind, lengths_q, lengths_k, kv_heads, group, slots, rows):
    """The batch and its order of work, which the interpreter makes."""
    return Batch(lengths_q, lengths_k, kv_heads, group, slots, rows, (7, 20), **MASKS[kind])


class Run(Backward):
    """One launch over a batch."""

    def __init__(self, seed, kind, lengths_q, lengths_k, kv_heads, group, slots, query_tiles=1, hold=False):
        super().__init__(seed)
        self.batch = batch_of(kind, tuple(lengths_q), tuple(lengths_k), kv_heads, group, slots, 64 * query_tiles)
        order = self.batch.order
        self.kind, self.hold, self.order, self.group = kind, hold, order, group
        self.query_tiles = query_tiles
        self.items, self.segments, self.slots = order.keys + order.queries, order.blocks, order.slots
        self.slot_rows = group * order.width * 64
        self.entries = self.batch.entries.flatten().tolist()

    def namespace(self):
        names = super().namespace()
        names["BackwardPipeline"].clear = lambda pipe, tile, live: self.clear(pipe.pool, tile, live)
        return names

    def clear(self, pool, tile, live):
        """Zero the rows from `live` on; of what is behind all sequences, which is zero, nothing changes."""
        for panel in pool.items[tile * PANELS : (tile + 1) * PANELS]:
            if panel.content is None:
                self.memory.fail(f"{panel.name} is cleared before it is there")
            if panel.content[3] < (self.batch.total_q if panel.content[0] in ("q", "do") else 1 << 30):
                panel.fill(("cleared", panel.content, int(live)))

    # ------------------------------------------------------------ what is wanted

    def tile(self, side, i, h, t):
        """The boxes of a tile of sequence i, as a product may read them."""
        b = self.batch
        cu, length = (b.cu_q, b.lengths_q[i]) if side in ("q", "do") else (b.cu_k, b.lengths_k[i])
        boxes = ((side, 0, h, cu[i] + t * 64, p * 64) for p in range(PANELS))
        live = length - t * 64
        return frozenset(("cleared", box, live) if live < 64 else box for box in boxes)

    def sees(self, i, q, k):
        """Whether some query of tile q of a sequence sees some key of tile k: by looking at each."""
        n_q, n_k = self.batch.lengths_q[i], self.batch.lengths_k[i]
        last = min(k * 64 + 64, n_k) - 1
        for query in range(q * 64, min(q * 64 + 64, n_q)):
            own = query + n_k - n_q
            for key in (k * 64, last, min(max(own, k * 64), last), min(max(own - LEFT, k * 64), last)):
                if self.kind == FULL or (key <= own if self.kind == CAUSAL else own - LEFT <= key <= own + RIGHT):
                    return True
        return False

    def pair(self, i, h, q, k):
        """-> scores of a pair, dS of it, q and dout; q None: of keys that nobody sees, zeros from behind all sequences."""
        sides, places = ("q", "do"), self.order.q_places
        if q is None:
            own = [frozenset((s, 0, h, self.batch.total_q, p * 64) for p in range(PANELS)) for s in sides]
            at = self.batch.heads * places
        else:
            own = [self.tile(side, i, h, q) for side in sides]
            at = h * places + self.batch.cu_q[i] // 64 + i + q
        p = self.tile("k", i, h // self.group, k) | own[0] | {("stat", at * 128)}
        return p, p | self.tile("v", i, h // self.group, k) | own[1], *own

    def expected(self):
        """{(output, sequence, head, tile): its products}"""
        b, wanted = self.batch, {}
        for i, (n_q, n_k) in enumerate(zip(b.lengths_q, b.lengths_k, strict=True)):
            rows, columns = range(-(-n_q // 64)), range(-(-n_k // 64))
            for h in range(b.heads):
                for q in rows:
                    seen = [k for k in columns if self.sees(i, q, k)]
                    own = h // self.group
                    wanted["dq", i, h, q] = tuple((self.pair(i, h, q, k)[1], self.tile("k", i, own, k)) for k in seen)
            for own in range(b.kv_heads):
                for k in columns:
                    seen = [q for q in rows if self.sees(i, q, k)] or [None]
                    heads = range(own * self.group, (own + 1) * self.group)
                    pairs = [self.pair(i, h, q, k) for h in heads for q in seen]
                    wanted["dv", i, own, k] = tuple((p, dout) for p, _, _, dout in pairs)
                    wanted["dk", i, own, k] = tuple((ds, query) for _, ds, query, _ in pairs)
        return wanted

    def store(self, out, acc, rows, stride, dtype, columns=None):
        if int(rows) <= 0:
            return  # the second of two tiles of queries, past the end
        entry = self.batch.work[self.local.item]
        later = self.local.stored if out.name == "dq" else 0
        self.local.stored += 1
        key = out.name, entry["block"] // self.batch.kv_heads, entry["head"], entry["tile"] + later
        self.record(key, tuple(pair for pair in acc.log if pair[0] != ZEROS))

    # ------------------------------------------------------------ threads

    def nouns(self, names, consumers=1):
        """What both partitions share, and sums between splits, which there are none of."""
        config = names["BackwardConfig"](None, DIM, SLOTS, self.query_tiles, self.hold, True)
        pipe, tiles = self.pipeline(names, config, consumers)
        scheduler = names["PackedScheduler"](
            names["Counters"](0, self.segments), Pointer(self.entries), self.group, self.batch.total_q, self.order.q_places,
            self.batch.heads * self.order.q_places, self.query_tiles)  # fmt: skip
        ds = names["PackedDsRing"](tiles, self.group, self.slots, self.order.width)
        mask = names["BackwardMask"](LEFT, RIGHT, self.kind)
        return (scheduler, pipe, mask, ds), names["SplitSums"](None, self.group, config, False)

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        nouns, sums = self.nouns(names)

        def consume():
            self.begin(item)
            names["consume"](item, *nouns, sums, *self.gradients(names, batch=False), 1.0)

        return lambda: names["produce"](item, *nouns), consume

    def __call__(self, places):
        self.run(places)
        assert self.made == self.expected()
        b = self.batch
        keys = [-(-n // 64) for n in b.lengths_k for _ in range(b.kv_heads)]
        queries = [self.group * -(-n // b.rows) for n in b.lengths_q for _ in range(b.kv_heads)]
        assert self.progress[1:] == keys + queries


class Wide(Run):
    """Two consumers a work tile, one of which zeroes what both read."""

    functions, classes = WIDE_FUNCTIONS, WIDE_CLASSES

    def program(self, item):
        """The three partitions of the program that has drawn an item."""
        names = self.namespace()
        nouns, sums = self.nouns(names, 2)
        scheduler, pipe, mask, ds = nouns
        exchange = self.exchange(names)

        def consume(number):
            self.begin(item)
            self.local.stored = number
            own = self.gradients(names, batch=False)
            names["consume"](number, item, scheduler, pipe, mask, self.softcap(), exchange, ds, sums, *own)

        return lambda: names["produce"](item, *nouns), lambda: consume(0), lambda: consume(1)
