"""The barrier protocol of the Gluon kernels for 8-bit products on CPU threads: every product reads what it should, every tile is
made once, nobody waits for ever; and the check finds a wait that is missing."""

import pytest

import gluon_threads
from gluon_threads import Barrier

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from eight_threads import Few, Large


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("halves", [1, 2])
def test_many_rows(outside, halves):
    Large(1, (3, 2, 4), halves=halves, outside=outside)(1)
    Large(2, (2, 3, 5), slots=2, halves=halves, outside=outside)(3)
    Large(3, (2, 1, 7), splits=3, halves=halves, outside=outside, group=8)(2)
    Large(4, (2, 2, 1), slots=4, halves=halves, outside=outside, group=1)(2)


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
@pytest.mark.parametrize("consumers", [1, 2])
def test_few_rows(kind, consumers):
    for seed, (first, end, slots, panels) in enumerate(((0, 11, 3, 2), (5, 7, 4, 1), (3, 4, 2, 2), (2, 10, 4, 1))):
        Few(seed, first, end, slots, panels, consumers, kind)()


@pytest.mark.parametrize("barrier", ["full", "empty"])
def test_a_missing_wait_is_found(monkeypatch, barrier):
    """The check itself: who does not wait for one kind of barrier is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    waits = Barrier.wait
    monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if barrier in self.name else waits(self, parity))

    def several(run) -> None:
        for seed in range(50):  # threads race as they like: the first fault ends it
            run(seed)

    with pytest.raises(AssertionError):
        several(lambda seed: Large(seed, (3, 2, 6), slots=2)(1))
    with pytest.raises(AssertionError):
        several(lambda seed: Few(seed, 0, 12, 2)())


def test_a_kernel_that_does_not_wait_for_the_one_before_is_found(monkeypatch):
    run = Few(1, 0, 5)
    monkeypatch.setattr(run.before, "wait", lambda: None)
    monkeypatch.setattr(run.before, "set", lambda: None)
    with pytest.raises(AssertionError, match="before the kernel"):
        run()
