"""The protocol of the wide dense backward kernel on CPU threads: two warpgroups an item, P handed from one to the other.

Held here, as of the narrow one: every sum is over the pairs of tiles that see each other, in order, every piece of work is done
once; and no tile's P, q or dout is taken for another's.
"""

import time

import pytest

import gluon_threads
from backward_threads import DIM, PANELS, SLOTS, TILES, Output, Panel, Ring, Value
from gluon_threads import Barrier, Number

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
import dense_backward_threads
from dense_backward_threads import CAUSAL, FULL, WINDOW
from tilefold.kernels.hopper import attention_backward_wide as kernel
from tilefold.kernels.hopper import backward_items, backward_parts, backward_ranges, backward_work, parts


class Exchange(Panel):
    """Where P is: all of it, of one tile."""

    def load(self, layout):
        return Value(self.content or frozenset(["nothing"]))


class Run(dense_backward_threads.Run):
    functions = (
        (backward_work, ("work_of_item",)),
        (parts, ("load_panels",)),
        (backward_parts, ("next_slot", "load_keys", "load_queries", "load_kept")),
        (backward_ranges, ("keys_of_queries", "queries_of_keys", "stripe_of_queries", "lines_of_head", "line_of_keys",
                           "whole_tiles")),
        (backward_items, ("batch_of", "key_item", "query_item", "produce_keys", "_kept_row", "produce_sums")),
        (kernel, ("_produce", "_give", "_take", "_consume_dv", "_consume_dk", "_consume_sums", "_consume")),
    )  # fmt: skip

    def names(self):
        return super().names() | {
            "TOGETHER": 2,
            "schedule_fence_16": lambda p: None,
            "add_rows": lambda out, acc, strides, i_b, i_h, i_n, seq, *others: self.store(
                out, acc, seq - i_n * 64, 1, None
            ),
        }

    def program(self, item):
        """The three partitions of the program that has drawn an item."""
        names, memory = self.namespace(), self.memory
        pool, statistics, ds, _ = self.buffers()
        exchange = Exchange(memory, "P")

        def bars(name, number, count):
            return Ring([Barrier(memory, f"{name}[{i}]", count) for i in range(number)])

        ring = max(SLOTS, self.sum_slots)
        rings = bars("q_full", ring, 1), bars("q_empty", ring, 2), bars("do_full", SLOTS, 1), bars("do_empty", SLOTS, 2)
        kv_full, given, taken, done = (
            bars(n, 1, 2 if n == "done" else 1) for n in ("kv_full", "given", "taken", "done")
        )
        lengths = self.seq_q, self.seq_k, self.q_units, self.kv_units
        work = self.heads, self.group, self.heads * self.units_of_statistics()
        order = self.batches, self.delay, self.rooms
        nowhere = self.rooms * self.room_rows

        def produce():
            names["_produce"](
                ("q", "do", "k", "v", "stat", "kept"), None, pool, statistics, kv_full, rings, done, lengths, self.band,
                work, self.split(), self.width, order, self.room_rows, item, nowhere, self.kind, DIM, SLOTS,
                self.sum_slots, self.span)  # fmt: skip

        def consume(number):
            self.begin(item)
            self.local.names, self.local.stored = names, number  # of a query item each makes one tile
            key_items = self.batch_heads * self.stripe_units
            self.local.place = names["work_of_item"](item, key_items, self.query_items, self.batches, self.delay)
            names["_consume"](
                tuple(Output(name) for name in ("dq", "dk", "dv")), None, None, "keep", pool, statistics, exchange, ds, kv_full,
                rings, given, taken, done, lengths, self.band, work, self.split(), self.width, order, self.room_rows, item,
                ((Number(0),) * 3,) * 3, nowhere, 1.0, number, self.kind, DIM, None, None, TILES, SLOTS, self.sum_slots,
                self.stripes > 1, True, None if self.span is None else 0)  # fmt: skip

        return produce, lambda: consume(0), lambda: consume(1)


CASES = {  # seq_q, seq_k, heads, group, stripe_units, batch_heads, rooms
    "heads": (200, 250, 4, 1, 4, 1, 2),
    "groups": (130, 250, 6, 3, 4, 1, 2),
    "stripes of heads": (330, 250, 4, 2, 3, 2, 2),
    "few keys": (500, 60, 2, 1, 1, 2, 1),
    "few queries": (60, 500, 2, 1, 3, 1, 2),
}


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("places", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_protocol(kind, places, case):
    assert PANELS * 64 == DIM
    Run(places, kind, *CASES[case])(places)
    if case == "groups":
        Run(places, kind, *CASES[case], span=11)(places)


@pytest.mark.parametrize("missing", ["kv_full", "q_full", "do_full", "q_empty", "do_empty", "given", "taken", "done"])
def test_a_missing_wait_is_found(monkeypatch, missing):
    """The check itself: who does not wait for one kind of barrier is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    if missing == "kv_full":  # else they have come, as a rule, when what was asked for after them has
        monkeypatch.setattr(Run, "late", ("k", "v"))
    if missing.endswith("empty"):  # readers that are slower than the copy engine
        monkeypatch.setattr(gluon_threads.Memory, "nap", lambda self: time.sleep(self.random.random() * 2e-2))
    waits = Barrier.wait
    skipped = [f"{missing}[{i}]" for i in range(TILES)]
    monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if self.name in skipped else waits(self, parity))

    def several() -> None:
        for seed in range(100):
            Run(seed, FULL, 500, 500, 2, 1, 3, 1, 2)(14)

    with pytest.raises(AssertionError):
        several()
