"""The protocol of the Gluon kernel of the backward pass for packed sequences on CPU threads: its own functions, in the order that
the kernel before it makes, with values that say what made them (backward_threads).

Held here: every sum is over the pairs of tiles of its own sequence that see each other, in order; what lies past the end of a
sequence was zeroed wherever a product reads it; a line is not written before all who read it have done so."""

import pytest

import gluon_threads
from backward_threads import DIM, PANELS, SLOTS, TILES, ZEROS, Launch, Output, Pointer
from gluon_threads import Barrier, Number
from packed_batch import Batch

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import attention_backward_packed as kernel
from tilefold.kernels.hopper import backward_parts, backward_ranges, parts

pytestmark = pytest.mark.interpreter
FULL, CAUSAL, WINDOW = 0, 1, 2
LEFT, RIGHT = 90, 30


class Run(Launch):
    """One launch over a batch."""

    def __init__(self, seed, kind, lengths_q, lengths_k, kv_heads, group, lines, sum_tiles=1, hold=False):
        super().__init__(seed)
        mask = {FULL: {}, CAUSAL: {"causal": True}, WINDOW: {"window": (LEFT, RIGHT)}}[kind]
        self.batch = Batch(lengths_q, lengths_k, kv_heads, group, lines, 64 * sum_tiles, (7, 20), **mask)
        order = self.batch.order
        self.kind, self.hold, self.order, self.group = kind, hold, order, group
        self.sum_tiles, self.sum_slots = sum_tiles, TILES * PANELS // (PANELS + sum_tiles)
        self.items, self.batches, self.rooms = order.keys + order.queries, order.blocks, 1
        self.room_rows = order.lines * group * order.width * 64
        self.entries = self.batch.entries.flatten().tolist()

    functions = (
        (parts, ("load_panels",)),
        (backward_parts, ("next_slot", "load_keys", "load_queries", "wait_tile", "first_products", "key_tile",
                          "finish_keys", "load_kept", "add_kept")),
        (backward_ranges, ("keys_of_queries", "queries_of_keys", "whole_tiles")),
        (kernel, ("_read_entry", "_lengths_of", "_kept_row", "_keys_of_item", "_produce_keys", "_produce_sums", "_produce",
                  "_consume_keys", "_consume_sums", "_consume")),
    )  # fmt: skip

    def names(self):
        return {
            "FULL": FULL, "CAUSAL": CAUSAL, "WINDOW": WINDOW, "FIELDS": 12, "KEYS": 1, "QUERIES": 0,
            "cut_if_needed": lambda s, *args: s, "clear_tile": self.clear,
        }  # fmt: skip

    def finished(self, names):
        inner = names["_read_entry"]

        def numbers(found):
            return tuple(map(numbers, found)) if isinstance(found, tuple) else Number(found)

        names["_read_entry"] = lambda entries, item: numbers(inner(entries, item))
        return names

    def clear(self, pool, tile, live, dim):
        """Zero the rows from `live` on; of what is behind all sequences, which is zero, nothing changes."""
        for panel in pool.items[tile * PANELS : (tile + 1) * PANELS]:
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
        """-> scores of a pair, dS of it."""
        at = h * self.order.q_places + self.batch.cu_q[i] // 64 + i + q
        p = self.tile("k", i, h // self.group, k) | self.tile("q", i, h, q) | {("stat", at * 128)}
        return p, p | self.tile("v", i, h // self.group, k) | self.tile("do", i, h, q)

    def unseen(self, i, h, k):
        """-> scores, dS, q and dout of keys that nobody sees: zeros from behind all sequences."""
        q, do = (frozenset((s, 0, h, self.batch.total_q, p * 64) for p in range(PANELS)) for s in ("q", "do"))
        p = self.tile("k", i, h // self.group, k) | q | {("stat", self.batch.heads * self.order.q_places * 128)}
        return p, p | self.tile("v", i, h // self.group, k) | do, q, do

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
                    dv, dk = [], []
                    for h in range(own * self.group, (own + 1) * self.group):
                        seen = [q for q in rows if self.sees(i, q, k)]
                        for q in seen:
                            p, ds = self.pair(i, h, q, k)
                            dv.append((p, self.tile("do", i, h, q)))
                            dk.append((ds, self.tile("q", i, h, q)))
                        if not seen:
                            p, ds, q_tile, do_tile = self.unseen(i, h, k)
                            dv.append((p, do_tile))
                            dk.append((ds, q_tile))
                    wanted["dv", i, own, k], wanted["dk", i, own, k] = tuple(dv), tuple(dk)
        return wanted

    def store(self, out, acc, rows, stride, dtype, columns=None):
        if int(rows) <= 0:
            return  # the second of two tiles of queries, past the end
        entry = self.batch.work[self.local.item]
        later = self.local.stored if out.name == "dq" else 0
        with self.memory.changed:
            key = out.name, entry["block"] // self.batch.kv_heads, entry["head"], entry["tile"] + later
            self.local.stored += 1
            if key in self.made:
                self.memory.fail(f"{key} was made before")
            self.made[key] = tuple(pair for pair in acc.log if pair[0] != ZEROS)

    # ------------------------------------------------------------ threads

    def program(self, item):
        """The two partitions of the program that has drawn an item."""
        names = self.namespace()
        pool, statistics, ds, bars = self.buffers(self.sum_slots)
        entries = Pointer(self.entries)
        room = self.group, self.order.lines, self.order.width
        packed = self.batch.total_q, self.order.q_places, self.batches, self.batch.heads * self.order.q_places
        band, nowhere = (LEFT, RIGHT), self.room_rows
        zero = Number(0)

        def produce():
            names["_produce"](
                "q", "do", "k", "v", "stat", "kept", None, entries, pool, statistics, *bars, band, room, packed, item, nowhere,
                self.kind, DIM, SLOTS, self.sum_slots, self.sum_tiles)  # fmt: skip

        def consume():
            self.begin(item)
            self.local.stored = 0
            names["_consume"](
                *(Output(name) for name in ("dq", "dk", "dv")), entries, "keep", pool, statistics, ds, *bars, band, room, item,
                (zero, zero), (zero,) * 4, nowhere, 1.0, self.kind, DIM, TILES, SLOTS, self.sum_slots, self.sum_tiles, False,
                self.hold)  # fmt: skip

        return produce, consume

    def __call__(self, places):
        self.run(places)
        assert self.made == self.expected()
        b = self.batch
        keys = [-(-n // 64) for n in b.lengths_k for _ in range(b.kv_heads)]
        queries = [self.group * -(-n // b.rows) for n in b.lengths_q for _ in range(b.kv_heads)]
        assert self.progress[1:] == keys + queries


CASES = {  # lengths of q and k, KV heads, group, lines
    "few lines": ([200, 64, 130, 0, 65], [130, 64, 190, 70, 0], 1, 1, 4),
    "groups": ([130, 90, 128], [100, 250, 64], 2, 3, 5),
    "heads": ([70, 300], [300, 70], 4, 1, 7),
    "room for all": ([1, 64, 63, 100], [65, 1, 64, 200], 2, 1, None),
    "short ones": ([5] * 12, [3] * 12, 1, 1, 2),
}


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("places", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_protocol(kind, places, case):
    for sum_tiles in (1, 2):
        Run(places, kind, *CASES[case], sum_tiles, hold=places == 1)(places)


@pytest.mark.parametrize(
    "missing", ["kv_full", "q_full", "do_full", "empty", "done", "await_room", "await_keys", "clear"]
)
def test_a_missing_wait_is_found(monkeypatch, missing):
    """The check itself: who does not wait for one kind of barrier or counter, or zeroes nothing, is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    if missing.startswith("await") or missing == "clear":
        monkeypatch.setattr(Run, missing, lambda self, *args: None)
    else:
        waits = Barrier.wait
        skipped = [f"{missing}[{i}]" for i in range(TILES)]
        monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if self.name in skipped else waits(self, parity))

    def several() -> None:
        for seed in range(100):
            Run(seed, FULL, [130] * 6, [200] * 6, 2, 1, 5)(14)

    with pytest.raises(AssertionError):
        several()
