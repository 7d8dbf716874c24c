"""The barrier protocol of the matrix product's Gluon kernel on CPU threads: every product reads what it should, every tile is
made once, nobody waits for ever; and the check finds a wait that is missing."""

import pytest

import gluon_threads
from gluon_threads import Barrier

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from matmul_threads import Run


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("programs", [1, 3])
def test_layouts(turned, programs):
    Run(1, (3, 2, 4), turned=turned)(programs)
    Run(2, (2, 3, 5), columns=128, slots=2, turned=turned)(programs)


@pytest.mark.parametrize("programs", [1, 4])
def test_batches_and_shares(programs):
    Run(3, (2, 2, 3), batch=3)(programs)
    Run(4, (2, 2, 3), batch=3, steps=(0, 1))(programs)
    Run(5, (2, 1, 7), splits=3)(programs)
    Run(6, (1, 2, 3), batch=3, fold=True, splits=2)(programs)
    Run(7, (2, 2, 1), batch=2, slots=4)(programs)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_orders(group):
    Run(8, (5, 3, 1), group=group)(2)


@pytest.mark.parametrize("barrier", ["full", "empty"])
def test_a_missing_wait_is_found(monkeypatch, barrier):
    """The check itself: who does not wait for one kind of barrier is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    waits = Barrier.wait
    monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if barrier in self.name else waits(self, parity))

    def several() -> None:
        for seed in range(50):  # threads race as they like: the first fault ends it
            Run(seed, (3, 2, 6), slots=2)(1)

    with pytest.raises(AssertionError):
        several()
