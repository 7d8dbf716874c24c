"""The dense backward kernels for sm_90 as threads on a CPU: one launch of the narrow one, what it has to make, and in what."""

from backward_threads import DIM, PANELS, SLOTS, TILES, ZEROS, Launch, Output, Value
from gluon_threads import Number
from tilefold.kernels.hopper import attention_backward as kernel
from tilefold.kernels.hopper import (
    backward_items,
    backward_parts,
    backward_ranges,
    backward_spans,
    backward_work,
    parts,
)
from tilefold.plan import AttentionProblem
from tilefold.plan import attention_backward_hopper as rules

FULL, CAUSAL, WINDOW = 0, 1, 2


class Sum:
    """The sum of a tile of queries between two stripes: in memory, by one program at a time."""

    def __init__(self, run, place):
        self.run, self.place = run, place

    def store(self, value):
        with self.run.memory.changed:
            self.run.sums[self.place] = value

    def load(self):
        with self.run.memory.changed:
            if self.place not in self.run.sums:
                self.run.memory.fail(f"the sum of {self.place} is read before it is written")
            found = self.run.sums.pop(self.place)
        return Value(found.tags, found.log)


class Run(Launch):
    """One launch; keys in stripes of stripe_units tiles, batches of batch_heads KV heads.  span: None, or tiles of a head of the
    call some of whose queries it makes."""

    def __init__(
        self,
        seed,
        kind,
        seq_q,
        seq_k,
        heads,
        group,
        stripe_units,
        batch_heads,
        rooms,
        sum_tiles=2,
        hold=False,
        span=None,
    ):
        super().__init__(seed)
        self.span = span
        left, right = 90, 30
        self.hold = hold  # K and V in registers
        self.sum_tiles, self.sum_slots = sum_tiles, TILES * PANELS // (PANELS + sum_tiles)
        self.kind, self.heads, self.group, self.batch_heads, self.rooms = kind, heads, group, batch_heads, rooms
        self.seq_q, self.seq_k, self.band = seq_q, seq_k, (left, right)
        self.q_units, self.kv_units = -(-seq_q // 64), -(-seq_k // 64)
        self.stripe_units, self.stripes = stripe_units, -(-self.kv_units // stripe_units)
        self.batches = heads // group // batch_heads * self.stripes
        window = (left, right) if kind == WINDOW else (-1, -1)
        problem = AttentionProblem(1, seq_q, seq_k, heads, heads // group, 64, 64, causal=kind == CAUSAL, window=window)
        self.width = rules.line_width(problem, stripe_units * 64)
        self.room_rows = batch_heads * group * rules.lines(problem, stripe_units * 64) * self.width * 64
        batch = batch_heads * stripe_units
        self.delay = min(batch + 5, max(1, rooms - 1) * batch)
        self.query_items = batch_heads * group * -(-self.q_units // sum_tiles)
        self.items = self.batches * (batch + self.query_items)
        self.sums = {}

    functions = (
        (backward_work, ("work_of_item",)),
        (parts, ("load_panels",)),
        (backward_parts, ("next_slot", "load_keys", "load_queries", "wait_tile", "first_products", "key_tile",
                          "finish_keys", "load_kept", "add_kept")),
        (backward_ranges, ("keys_of_queries", "queries_of_keys", "stripe_of_queries", "lines_of_head", "line_of_keys",
                           "whole_tiles")),
        (backward_items, ("batch_of", "key_item", "query_item", "produce_keys", "_kept_row", "produce_sums")),
        (backward_spans, ("finish_span",)),
        (kernel, ("_produce", "_consume_keys", "_consume_sums", "_consume")),
    )  # fmt: skip

    def names(self):
        return {
            "FULL": FULL, "CAUSAL": CAUSAL, "WINDOW": WINDOW, "cut_if_needed": lambda s, *args: s,
            "add_rows": lambda out, acc, strides, i_b, i_h, i_n, seq, written, columns: self.store(
                out, acc, seq - i_n * 64, strides, None
            ),
            "sum_so_far": lambda sums, i_m, row, *args: Sum(self, (int(row), int(i_m))),
        }  # fmt: skip

    def finished(self, names):
        for name in ("key_item", "query_item"):  # scalars, which can be cast
            names[name] = lambda *args, inner=names[name]: tuple(map(Number, inner(*args)))
        return names

    def units_of_statistics(self):
        return self.span or self.q_units

    def split(self):
        return self.stripe_units, self.stripes, self.batch_heads

    # ------------------------------------------------------------ what is wanted

    def paired(self, q, k):
        """Whether some query of tile q sees some key of tile k: by looking at each."""
        left, right = self.band
        for i in range(q * 64, min(q * 64 + 64, self.seq_q)):
            own = i + self.seq_k - self.seq_q
            for j in (
                k * 64,
                min(k * 64 + 64, self.seq_k) - 1,
                min(max(own, k * 64), min(k * 64 + 64, self.seq_k) - 1),
            ):
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
                for h in range(hk * self.group, (hk + 1) * self.group):
                    units = [q for q in range(self.q_units) if self.paired(q, k)]
                    for q in units or [self.q_units]:  # the tile past the end, with the last row of the statistics
                        p, ds = self.made_of(h, q, k)
                        if not units:
                            own, last = (
                                frozenset([("stat", n * 128)])
                                for n in (h * self.units_of_statistics() + q, self.heads * self.units_of_statistics())
                            )
                            p, ds = p - own | last, ds - own | last
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
        with self.memory.changed:
            key = out.name, int(key[2]), int(key[0]) + (0 if keys else self.local.stored)
            self.local.stored += 1
            if key in self.made:
                self.memory.fail(f"{key} was made before")
            self.made[key] = tuple(pair for pair in acc.log if pair[0] != ZEROS)

    # ------------------------------------------------------------ threads

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        pool, statistics, ds, bars = self.buffers(self.sum_slots)
        lengths = self.seq_q, self.seq_k, self.q_units, self.kv_units
        work = self.heads, self.group, self.heads * self.units_of_statistics()
        order = self.batches, self.delay, self.rooms
        zeros = (Number(0),) * 6

        def produce():
            names["_produce"](
                "q", "do", "k", "v", "stat", "kept", None, pool, statistics, *bars, lengths, self.band, work, self.split(),
                self.width, order, self.room_rows, item, self.rooms * self.room_rows, self.kind, DIM, SLOTS, self.sum_slots,
                self.sum_tiles, self.span)  # fmt: skip

        def consume():
            self.begin(item)
            self.local.names, self.local.stored = names, 0
            key_items, query_items = self.batch_heads * self.stripe_units, self.query_items
            self.local.place = names["work_of_item"](item, key_items, query_items, self.batches, self.delay)
            names["_consume"](
                *(Output(name) for name in ("dq", "dk", "dv")), None, None, "keep", pool, statistics, ds, *bars, lengths,
                self.band, work, self.split(), self.width, order, self.room_rows, item, zeros[:3], zeros,
                self.rooms * self.room_rows, 1.0, self.kind, DIM, None, None, TILES, SLOTS, self.sum_slots, self.sum_tiles,
                self.stripes > 1,
                False, self.hold, None if self.span is None else 0)  # fmt: skip

        return produce, consume

    def __call__(self, places):
        self.run(places)
        assert self.made == self.expected()
        assert not self.sums
        key_items, query_items = self.batch_heads * self.stripe_units, self.query_items
        assert self.progress[1:] == [key_items] * self.batches + [query_items] * self.batches
