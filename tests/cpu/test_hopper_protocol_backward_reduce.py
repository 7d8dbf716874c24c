"""The protocol of the dense backward kernel that adds dq in memory, on CPU threads: every version of it."""

import time

import pytest

import gluon_threads
from gluon_threads import Barrier, Turn

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from reduce_threads import CAUSAL, FULL, WINDOW, Run

SIZES = {  # seq_q, seq_k, heads, how many share a KV head
    "heads": (300, 400, 2, 1),
    "groups": (200, 260, 4, 2),
    "few queries": (50, 500, 2, 2),
    "keys that nobody sees": (700, 130, 1, 1),
}
VERSIONS = [  # dim, sum_slots, order, stagger
    (128, 0, 0, 0), (128, 0, 1, 2), (128, 0, 2, 2), (128, 1, 0, 2), (128, 1, 1, 3), (128, 1, 2, 0), (128, 2, 0, 2),
    (128, 2, 1, 0), (128, 2, 2, 1), (64, 0, 0, 2), (64, 1, 0, 2), (64, 2, 0, 0), (64, 1, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_protocol(version, kind, sizes):
    dim, sum_slots, order, stagger = version
    Run(1, kind, sizes, dim, sum_slots, order, stagger, batch_heads=sizes[2] // sizes[3])()


def several():
    """Many times the same, until something shows."""
    for seed in range(100):
        Run(seed, FULL, (500, 256, 1, 1))()


def test_one_pair_of_barriers_is_not_enough(monkeypatch):
    """A warpgroup that goes on at once arrives at the next meeting where the other does not wait yet: two pairs, in turns."""
    meet = Run.meet
    monkeypatch.setattr(Run, "meet", lambda self, own, turn: meet(self, own, 0))
    with pytest.raises(AssertionError, match="two arrivals without a wait"):
        several()


@pytest.mark.parametrize("missing", ["kv_full", "q_full", "do_full", "empty", "sum_full", "sum_empty", "meeting"])
def test_a_missing_wait_is_found(monkeypatch, missing):
    """The check itself: who does not wait for one kind of barrier is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    if missing == "kv_full":  # else they have come, as a rule, when what was asked for after them has
        monkeypatch.setattr(Run, "late", ("k", "v"))
    if missing.endswith("empty"):  # readers that are slower than those who write
        monkeypatch.setattr(gluon_threads.Memory, "nap", lambda self: time.sleep(self.random.random() * 5e-3))
    for kind, wait in ((Barrier, "wait"), (Turn, "sync")):
        waits = getattr(kind, wait)
        monkeypatch.setattr(
            kind, wait, lambda self, *args, w=waits: None if self.name.startswith(missing) else w(self, *args)
        )
    if missing == "meeting":
        monkeypatch.setattr(Turn, "arrive", lambda self: None)
    with pytest.raises(AssertionError):
        several()
