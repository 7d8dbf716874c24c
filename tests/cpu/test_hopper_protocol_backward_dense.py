"""The protocol of the dense Gluon kernel of the backward pass on CPU threads: its own functions, with values that say what made
them (backward_threads, dense_backward_threads).

Held here: every sum is over the pairs of tiles that see each other, in order, also where it waits in memory between two stripes
of keys; every piece of work is done once.
"""

import pytest

import gluon_threads
from backward_threads import TILES
from gluon_threads import Barrier

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from dense_backward_threads import CAUSAL, FULL, WINDOW, Run

CASES = {  # seq_q, seq_k, heads, group, stripe_units, batch_heads, rooms
    "heads": (200, 250, 4, 1, 4, 1, 2),
    "groups": (130, 250, 6, 3, 4, 1, 2),
    "stripes": (250, 330, 2, 1, 2, 1, 2),
    "stripes of heads": (330, 250, 4, 2, 3, 2, 2),
    "few keys": (500, 60, 2, 1, 1, 2, 1),
    "few queries": (60, 500, 2, 1, 3, 1, 2),
}


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("places", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_protocol(kind, places, case):
    for sum_tiles in (1, 2):
        Run(places, kind, *CASES[case], sum_tiles, hold=places == 1)(places)


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
def test_protocol_of_a_span(kind):
    """Some of a call's queries: their statistics lie among those of all, and dk and dv are added to."""
    for case in ("groups", "few keys"):
        Run(3, kind, *CASES[case], 2, span=11)(5)


@pytest.mark.parametrize(
    "missing", ["kv_full", "q_full", "do_full", "empty", "done", "await_room", "await_keys", "await_queries"]
)
def test_a_missing_wait_is_found(monkeypatch, missing):
    """The check itself: who does not wait for one kind of barrier or counter is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    if missing == "kv_full":  # else they have come, as a rule, when what was asked for after them has
        monkeypatch.setattr(Run, "late", ("k", "v"))
    if missing.startswith("await"):
        monkeypatch.setattr(Run, missing, lambda self, *args: None)
    else:
        waits = Barrier.wait
        skipped = [f"{missing}[{i}]" for i in range(TILES)]
        monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if self.name in skipped else waits(self, parity))

    def several() -> None:
        for seed in range(100):  # stripes wait for each other, and so for rooms; whole heads for rooms alone
            Run(seed, FULL, 500, 500, 2, 1, 3, 1, 2)(14)
            Run(seed, FULL, 250, 130, 12, 1, 3, 1, 2)(30)

    with pytest.raises(AssertionError):
        several()
