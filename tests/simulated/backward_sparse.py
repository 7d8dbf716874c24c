"""One launch of the block-sparse Gluon kernel of the backward pass: every sum is over the pairs that the lists name, in their
order, of tiles that belong together; every piece of work is done once."""

import random

from simulated import Number
from simulated.backward import DIM, GARBAGE, GRADIENTS, SLOTS, SUM_SLOTS, TILES, Backward, Pointer
from tilefold.kernels.hopper import backward_parts, backward_work, parts, sparse_backward


class Turned(list):
    """The transposed lists, which the kernel also takes apart as seven arguments to look its places up."""

    def __iter__(self):
        return iter((None,) * 7)


def random_lists(seed, heads, q_blocks, kv_blocks):
    draw = random.Random(seed)
    counts = [0, 1, kv_blocks, *(draw.randrange(kv_blocks + 1) for _ in range(q_blocks))]
    return [[draw.sample(range(kv_blocks), draw.choice(counts)) for _ in range(q_blocks)] for _ in range(heads)]


class Run(Backward):
    """One launch over random lists of `heads` query heads in groups; capacity is that of the longest list."""

    functions = (
        (backward_work, ("work_of_item",)),
        (parts, ("load_panels",)),
        (backward_parts, ("next_slot", "load_keys", "load_queries", "wait_tile", "first_products", "key_tile",
                          "finish_keys", "load_kept", "add_kept", "produce_sums", "consume_sums")),
        (sparse_backward, ("_produce_keys", "_consume_keys", "_keep_row", "_valid_queries", "_produce", "_consume")),
    )  # fmt: skip

    def __init__(self, seed, lists, group, kv_blocks, per_q, per_k, batch_heads, rooms):
        super().__init__(seed)
        self.lists, self.group = lists, group
        self.per_q, self.per_k, self.batch_heads, self.rooms = per_q, per_k, batch_heads, rooms
        self.heads, self.q_blocks, self.kv_blocks = len(lists), len(lists[0]), kv_blocks
        self.q_units, self.kv_units = self.q_blocks * per_q, kv_blocks * per_k
        self.capacity = max(1, *(len(x) for rows in lists for x in rows))
        self.turned = [[[i for i, x in enumerate(rows) if n in x] for n in range(kv_blocks)] for rows in lists]
        self.batches = self.heads // group // batch_heads
        self.room_rows = batch_heads * group * self.q_units * self.capacity * per_k * 64
        self.key_items, self.query_items = batch_heads * self.kv_units, batch_heads * group * self.q_units
        self.delay = min(self.key_items + 5, max(1, rooms - 1) * self.key_items)
        self.items = self.batches * (self.key_items + self.query_items)

    def places(self, n, h):
        rows = self.lists[h]
        return [i * self.per_q * self.capacity + rows[i].index(n) for i in self.turned[h][n]]

    def more(self):
        return {
            "place_of_item": lambda item, units, heads: (
                Number(item % units), Number(item // units // heads), Number(item // units % heads)),
            "list_of_block": lambda lists, block, b, h: (
                Pointer(lists[h][block] if lists[h][block] else [GARBAGE]), len(lists[h][block])),
            "list_of_item": lambda lists, block, b, h: Pointer(self.places(block, h)),
        }  # fmt: skip

    def expected(self, place):
        """{output: its products} of a piece of work."""
        keys, batch, place = place
        if not keys:
            h, q = divmod(batch * self.query_items + place, self.q_units)
            listed = [n * self.per_k + e for n in self.lists[h][q // self.per_q] for e in range(self.per_k)]
            return {"dq": [(self.made_of(h, q, k)[1], self.boxes("k", h // self.group, k)) for k in listed]}
        hk, k = divmod(batch * self.key_items + place, self.kv_units)
        dv, dk = [], []
        for h in range(hk * self.group, (hk + 1) * self.group):
            listed = [i * self.per_q + e for i in self.turned[h][k // self.per_k] for e in range(self.per_q)]
            row = None if listed else self.heads * self.q_units
            for q in listed or [self.q_units] * self.per_q:  # units past the end, with the last row of the statistics
                p, ds = self.made_of(h, q, k, row)
                dv.append((p, self.boxes("do", h, q)))
                dk.append((ds, self.boxes("q", h, q)))
        return {"dv": dv, "dk": dk}

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        pool, statistics, ds, bars = self.buffers()
        work = self.heads, self.group, self.q_units, self.kv_units, self.heads * self.q_units
        order = self.batch_heads, self.batches, self.delay, self.rooms
        zeros = (Number(0),) * 6

        def produce():
            names["_produce"]("q", "do", "k", "v", "stat", "kept", None, pool, statistics, *bars, self.lists, self.turned, work,
                              self.capacity, order, self.room_rows, item,
                              DIM, SLOTS, SUM_SLOTS, self.per_q, self.per_k)  # fmt: skip

        def consume():
            self.begin(item)
            names["_consume"](
                *GRADIENTS, *(Number(0),) * 3, "keep", pool, statistics, ds, *bars, self.lists, Turned(self.turned), work,
                self.capacity, order, self.room_rows, item, zeros[:3], zeros, zeros[:4], self.rooms * self.room_rows, 1.0,
                1 << 20, 1 << 20, DIM, TILES, SLOTS, SUM_SLOTS, self.per_q, self.per_k, False, False, False)  # fmt: skip

        return produce, consume

    def __call__(self, places):
        self.run(places)
        work_of_item = self.namespace()["work_of_item"]
        wanted = {}
        for item in range(self.items):
            place = work_of_item(item, self.key_items, self.query_items, self.batches, self.delay)
            wanted |= {(name, item): tuple(log) for name, log in self.expected(place).items()}
        assert self.made == wanted
        assert self.progress[1:] == [self.key_items] * self.batches + [self.query_items] * self.batches
