"""One launch of the block-sparse Gluon kernel of the backward pass: every sum is over the pairs that the lists name, in their
order, of tiles that belong together; every piece of work is done once."""

import itertools
import random

from simulated import Number
from simulated.backward import CLASSES, DIM, FUNCTIONS, GARBAGE, SLOTS, Backward, Pointer
from tilefold.kernels.hopper import backward_lists, sparse_backward


def random_lists(seed, heads, q_blocks, kv_blocks):
    draw = random.Random(seed)
    counts = [0, 1, kv_blocks, *(draw.randrange(kv_blocks + 1) for _ in range(q_blocks))]
    return [[draw.sample(range(kv_blocks), draw.choice(counts)) for _ in range(q_blocks)] for _ in range(heads)]


class Run(Backward):
    """One launch over random lists of `heads` query heads in groups; capacity is that of the longest list.  span: query blocks of
    a span, or None."""

    functions = (
        *FUNCTIONS,
        (sparse_backward, ("produce_keys", "produce_queries", "produce", "consume_keys", "consume_queries", "consume")),
    )
    classes = (*CLASSES, (backward_lists, ("ListScheduler", "Lists", "Spans", "BlockSizes", "ListDsRing")))

    def __init__(self, seed, lists, group, kv_blocks, per_q, per_k, heads_at_once, slots, span=None):
        super().__init__(seed)
        self.lists, self.group = lists, group
        self.per_q, self.per_k, self.heads_at_once, self.slots = per_q, per_k, heads_at_once, slots
        self.heads, self.q_blocks, self.kv_blocks = len(lists), len(lists[0]), kv_blocks
        self.q_units, self.kv_units = self.q_blocks * per_q, kv_blocks * per_k
        self.capacity = max(1, *(len(x) for rows in lists for x in rows))
        self.transposed = [[[i for i, x in enumerate(rows) if n in x] for n in range(kv_blocks)] for rows in lists]
        self.span, self.sums = span or self.q_blocks, {}
        self.spans, self.span_units = -(-self.q_blocks // self.span), self.span * per_q
        self.segments = self.heads // group // heads_at_once * self.spans
        self.slot_rows = heads_at_once * group * self.span_units * self.capacity * per_k * 64
        self.key_items, self.query_items = heads_at_once * self.kv_units, heads_at_once * group * self.span_units
        self.sum_counters = self.key_items if self.spans > 1 else 0
        self.delay = min(self.key_items + 5, max(1, slots - 1) * self.key_items)
        self.items = self.segments * (self.key_items + self.query_items)

    def places(self, n, h):
        rows = self.lists[h]
        return [i % self.span * self.per_q * self.capacity + rows[i].index(n) for i in self.transposed[h][n]]

    def edges(self):
        """How many entries of each transposed list come before each span, all in a row."""
        ends = (s * self.span for s in range(self.spans + 1))
        return [sum(i < end for i in one) for end in ends for rows in self.transposed for one in rows]

    def pass_on(self, which, acc, work):
        """Spans.add: a sum is left once and taken once."""
        place = which, int(work.local)
        if work.split > 0:
            if place not in self.sums:
                self.memory.fail(f"the sum of {place} is read before it is written")
            acc = acc + self.sums.pop(place)
        if work.split < self.spans - 1:
            if place in self.sums:
                self.memory.fail(f"the sum of {place} is written before it was read")
            self.sums[place] = acc
        return acc

    def store(self, out, acc, rows, *others):
        if int(rows) > 0:  # not of a span before the last, nor behind the last query
            super().store(out, acc, rows, *others)

    def more(self):
        return {
            "place_of_item": lambda item, units, heads: (
                Number(item % units), Number(item // units // heads), Number(item // units % heads)),
        }  # fmt: skip

    def namespace(self):
        names = super().namespace()

        def of(lists, tile, batch, head):
            found = lists.Index[head][tile // lists.TILES]
            return Pointer(found or [GARBAGE]), len(found)

        names["Lists"].of = of
        names["Lists"].begin = lambda lists, place, block, batch, head: Pointer(self.places(block, head))
        names["Spans"].add = self.pass_on
        return names

    def expected(self, place):
        """{output: its products} of a piece of work; of keys in the last span those of all."""
        keys, segment, place = place
        batch, span = divmod(segment, self.spans)
        if not keys:
            h, q = divmod(batch * self.query_items + place, self.span_units)
            q += span * self.span_units
            if q >= self.q_units:
                return {}
            listed = [n * self.per_k + e for n in self.lists[h][q // self.per_q] for e in range(self.per_k)]
            return {"dq": [(self.made_of(h, q, k)[1], self.boxes("k", h // self.group, k)) for k in listed]}
        if span < self.spans - 1:
            return {}
        hk, k = divmod(batch * self.key_items + place, self.kv_units)
        dv, dk = [], []
        for s, h in itertools.product(range(self.spans), range(hk * self.group, (hk + 1) * self.group)):
            blocks = [i for i in self.transposed[h][k // self.per_k] if i // self.span == s]
            listed = [i * self.per_q + e for i in blocks for e in range(self.per_q)]
            row = None if listed else self.heads * self.q_units
            for q in listed or [self.q_units] * self.per_q:  # units past the end, with the last row of the statistics
                p, ds = self.made_of(h, q, k, row)
                dv.append((p, self.boxes("do", h, q)))
                dk.append((ds, self.boxes("q", h, q)))
        return {"dv": dv, "dk": dk}

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        config = names["BackwardConfig"](None, DIM, SLOTS, 1)
        pipe, tiles = self.pipeline(names, config)
        lengths = names["Lengths"](self.q_units * 64, 1 << 20, self.q_units, self.kv_units)
        several = self.spans > 1
        scheduler = names["ListScheduler"](
            names["Counters"](0, self.segments), lengths, self.heads, self.group, self.heads_at_once, self.delay, self.slots,
            self.heads * self.q_units, *((self.spans, self.span_units) if several else (None, None)))  # fmt: skip
        ds = names["ListDsRing"](tiles, None, self.slots, self.slot_rows, scheduler.head_tiles(), self.capacity, self.per_q,
                                 self.per_k)  # fmt: skip
        strides = self.heads * self.kv_blocks, 0, self.kv_blocks
        spans = names["Spans"](self.spans if several else None, Pointer(self.edges()), *strides, None, config)
        lists = names["Lists"](self.lists, None, (0,) * 5, self.per_q, self.per_k)
        transposed = names["Lists"](self.transposed, None, (0,) * 5, self.per_k, self.per_q)
        sizes = names["BlockSizes"](0, 0, (0,) * 4, False, False, False)

        def consume():
            self.begin(item)
            gradients = self.gradients(names)
            names["consume"](item, scheduler, pipe, lists, transposed, spans, sizes, ds, *gradients, 1.0)

        return lambda: names["produce"](item, scheduler, pipe, lists, transposed, spans, ds), consume

    def __call__(self, places):
        self.run(places)
        work_of_number = self.namespace()["work_of_number"]
        wanted = {}
        for item in range(self.items):
            place = work_of_number(item, self.key_items, self.query_items, self.segments, self.delay)
            wanted |= {(name, item): tuple(log) for name, log in self.expected(place).items()}
        assert self.made == wanted
        done = [self.key_items] * self.segments + [self.query_items] * self.segments
        assert self.progress[1:] == done + [self.segments] * self.sum_counters
        assert not self.sums
