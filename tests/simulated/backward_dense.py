"""One launch of the dense backward kernels for sm_90, the narrow one and the wide one, what it has to make, and in what.

Every sum is over the pairs of tiles that see each other, in order, also where it waits in memory between two stripes of keys;
every piece of work is done once; no tile's P, q or dout is taken for another's."""

from simulated import Number, barriers
from simulated.backward import (
    CAUSAL,
    DIM,
    FULL,
    GRADIENTS,
    PANELS,
    SLOTS,
    TILES,
    WINDOW,
    ZEROS,
    Backward,
    Panel,
    Value,
)
from tilefold.kernels.hopper import (
    attention_backward,
    attention_backward_wide,
    backward_items,
    backward_parts,
    backward_ranges,
    backward_spans,
    backward_work,
    parts,
)
from tilefold.plan import AttentionProblem
from tilefold.plan.backward import attention_backward_hopper as rules

SHARED = (
    (backward_work, ("work_of_item",)),
    (parts, ("load_panels",)),
    (backward_parts, ("next_slot", "load_keys", "load_queries", "load_kept")),
    (backward_ranges, ("keys_of_queries", "queries_of_keys", "stripe_of_queries", "lines_of_head", "line_of_keys",
                       "whole_tiles")),
    (backward_items, ("batch_of", "key_item", "query_item", "produce_keys", "_kept_row", "produce_sums")),
)  # fmt: skip
NARROW = (
    (backward_parts, ("wait_tile", "first_products", "key_tile", "finish_keys", "add_kept")),
    (backward_spans, ("finish_span",)),
    (attention_backward, ("_produce", "_consume_keys", "_consume_sums", "_consume")),
)
WIDE = (
    (
        attention_backward_wide,
        ("_produce", "_give", "_take", "_consume_dv", "_consume_dk", "_consume_sums", "_consume"),
    ),
)


class Sum:
    """The sum of a tile of queries between two stripes: in memory, by one program at a time."""

    def __init__(self, run, place):
        self.run, self.place = run, place

    def store(self, value):
        self.run.sums[self.place] = value

    def load(self):
        if self.place not in self.run.sums:
            self.run.memory.fail(f"the sum of {self.place} is read before it is written")
        found = self.run.sums.pop(self.place)
        return Value(found.tags, found.log)


class Run(Backward):
    """One launch; keys in stripes of stripe_units tiles, batches of batch_heads KV heads.  span: None, or tiles of a head of the
    call some of whose queries it makes.  hold: K and V in registers."""

    functions = SHARED + NARROW

    def __init__(self, seed, kind, seq_q, seq_k, heads, group, stripe_units, batch_heads, rooms, sum_tiles=2, hold=False,
                 span=None):  # fmt: skip
        super().__init__(seed)
        self.span, self.hold, self.band = span, hold, (90, 30)
        self.sum_tiles, self.sum_slots = sum_tiles, TILES * PANELS // (PANELS + sum_tiles)
        self.kind, self.heads, self.group, self.batch_heads, self.rooms = kind, heads, group, batch_heads, rooms
        self.seq_q, self.seq_k = seq_q, seq_k
        self.q_units, self.kv_units = -(-seq_q // 64), -(-seq_k // 64)
        self.stripe_units, self.stripes = stripe_units, -(-self.kv_units // stripe_units)
        self.batches = heads // group // batch_heads * self.stripes
        window = self.band if kind == WINDOW else (-1, -1)
        problem = AttentionProblem(1, seq_q, seq_k, heads, heads // group, 64, 64, causal=kind == CAUSAL, window=window)
        self.width = rules.line_width(problem, stripe_units * 64)
        self.room_rows = batch_heads * group * rules.lines(problem, stripe_units * 64) * self.width * 64
        self.key_items = batch_heads * stripe_units
        self.delay = min(self.key_items + 5, max(1, rooms - 1) * self.key_items)
        self.query_items = batch_heads * group * -(-self.q_units // sum_tiles)
        self.items = self.batches * (self.key_items + self.query_items)
        self.sums = {}

    def more(self):
        return {
            "add_rows": lambda out, acc, strides, i_b, i_h, i_n, seq, *rest: self.store(out, acc, seq - i_n * 64, 1, None),
            "sum_so_far": lambda sums, i_m, row, *args: Sum(self, (int(row), int(i_m))),
        }  # fmt: skip

    def namespace(self):
        return self.cast(super().namespace(), "key_item", "query_item")

    def units_of_statistics(self):
        return self.span or self.q_units

    def split(self):
        return self.stripe_units, self.stripes, self.batch_heads

    # ------------------------------------------------------------ what is wanted

    def paired(self, q, k):
        """Whether some query of tile q sees some key of tile k: by looking at each."""
        left, right = self.band
        for i in range(q * 64, min(q * 64 + 64, self.seq_q)):
            own, end = i + self.seq_k - self.seq_q, min(k * 64 + 64, self.seq_k)
            for j in (k * 64, end - 1, min(max(own, k * 64), end - 1)):
                if self.kind == FULL or (j <= own if self.kind == CAUSAL else own - left <= j <= own + right):
                    return True
        return False

    def expected(self):
        """{(output, head, tile): its products}"""
        wanted = {}
        for h in range(self.heads):
            for q in range(self.q_units):
                seen = [k for k in range(self.kv_units) if self.paired(q, k)]
                wanted["dq", h, q] = tuple(
                    (self.made_of(h, q, k)[1], self.boxes("k", h // self.group, k)) for k in seen
                )
        for hk in range(self.heads // self.group):
            for k in range(self.kv_units):
                dv, dk = [], []
                units = [q for q in range(self.q_units) if self.paired(q, k)]
                for h in range(hk * self.group, (hk + 1) * self.group):
                    for q in units or [self.q_units]:  # the tile past the end, with the last row of the statistics
                        p, ds = self.made_of(h, q, k, None if units else self.heads * self.units_of_statistics())
                        dv.append((p, self.boxes("do", h, q)))
                        dk.append((ds, self.boxes("q", h, q)))
                wanted["dv", hk, k], wanted["dk", hk, k] = tuple(dv), tuple(dk)
        return wanted

    def store(self, out, acc, rows, stride, dtype, columns=None):
        if int(rows) <= 0:
            return  # tiles past the end: of keys in the last stripe, of queries in the last pair
        keys, batch, program = self.local.place
        names, split = self.local.names, self.split()
        if keys:
            key = names["key_item"](batch, program, self.heads // self.group, split)
        else:
            key = names["query_item"](batch, program, self.heads, self.group, self.q_units, split, self.sum_tiles)
        later = 0 if keys else self.local.stored
        self.local.stored += 1
        log = tuple(pair for pair in acc.log if pair[0] != ZEROS)
        self.record((out.name, int(key[2]), int(key[0]) + later), log)

    # ------------------------------------------------------------ threads

    def sizes(self):
        """What both partitions are told: lengths, work, order, and a row past the end."""
        lengths = self.seq_q, self.seq_k, self.q_units, self.kv_units
        work = self.heads, self.group, self.heads * self.units_of_statistics()
        return lengths, work, (self.batches, self.delay, self.rooms), self.rooms * self.room_rows

    def begin_at(self, item, names, first=0):
        self.begin(item)
        self.local.names, self.local.stored = names, first
        self.local.place = names["work_of_item"](item, self.key_items, self.query_items, self.batches, self.delay)

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        pool, statistics, ds, bars = self.buffers(self.sum_slots)
        lengths, work, order, nowhere = self.sizes()
        zeros = (Number(0),) * 6

        def produce():
            names["_produce"](
                "q", "do", "k", "v", "stat", "kept", None, pool, statistics, *bars, lengths, self.band, work, self.split(),
                self.width, order, self.room_rows, item, nowhere, self.kind, DIM, SLOTS, self.sum_slots, self.sum_tiles,
                self.span)  # fmt: skip

        def consume():
            self.begin_at(item, names)
            names["_consume"](
                *GRADIENTS, None, None, "keep", pool, statistics, ds, *bars, lengths, self.band, work, self.split(), self.width,
                order, self.room_rows, item, zeros[:3], zeros, nowhere, 1.0, self.kind, DIM, None, None, TILES, SLOTS,
                self.sum_slots, self.sum_tiles, self.stripes > 1, False, self.hold,
                None if self.span is None else 0)  # fmt: skip

        return produce, consume

    def __call__(self, places):
        self.run(places)
        assert self.made == self.expected()
        assert not self.sums
        assert self.progress[1:] == [self.key_items] * self.batches + [self.query_items] * self.batches


class Exchange(Panel):
    """Where P is: all of it, of one tile."""

    def load(self, layout):
        return Value(self.content or frozenset(["nothing"]))


class Wide(Run):
    """Two warpgroups an item, P handed from one to the other."""

    functions = SHARED + WIDE

    def more(self):
        return super().more() | {"TOGETHER": 2, "schedule_fence_16": lambda p: None}

    def program(self, item):
        """The three partitions of the program that has drawn an item."""
        names, memory, ring = self.namespace(), self.memory, max(SLOTS, self.sum_slots)
        pool, statistics, ds, _ = self.buffers()
        exchange = Exchange(memory, "P")
        kv_full, given, taken, done = barriers(memory, kv_full=(1, 1), given=(1, 1), taken=(1, 1), done=(1, 2))
        rings = tuple(barriers(memory, q_full=(ring, 1), q_empty=(ring, 2), do_full=(SLOTS, 1), do_empty=(SLOTS, 2)))
        lengths, work, order, nowhere = self.sizes()

        def produce():
            names["_produce"](
                ("q", "do", "k", "v", "stat", "kept"), None, pool, statistics, kv_full, rings, done, lengths, self.band,
                work, self.split(), self.width, order, self.room_rows, item, nowhere, self.kind, DIM, SLOTS,
                self.sum_slots, self.span)  # fmt: skip

        def consume(number):
            self.begin_at(item, names, number)  # of a query item each makes one tile
            names["_consume"](
                GRADIENTS, None, None, "keep", pool, statistics, exchange, ds, kv_full, rings, given, taken, done, lengths,
                self.band, work, self.split(), self.width, order, self.room_rows, item, ((Number(0),) * 3,) * 3, nowhere, 1.0,
                number, self.kind, DIM, None, None, TILES, SLOTS, self.sum_slots, self.stripes > 1, True,
                None if self.span is None else 0)  # fmt: skip

        return produce, lambda: consume(0), lambda: consume(1)
