"""Timers, with clocks and calls that are made up."""

import gc

import pytest

from tilefold.bench import timers


class Clock:
    """A perf_counter that moves only when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(timers.time, "perf_counter", fake)
    return fake


def test_summary_is_the_median_with_percentiles():
    timing = timers.summarise([5.0, 1.0, 3.0, 2.0, 4.0], "events")
    assert (timing.ms, timing.low, timing.high) == pytest.approx((3.0, 1.8, 4.2))
    assert (timing.samples, timing.method, timing.us) == (5, "events", 3000.0)
    assert timers.summarise([7.0], "x") == timers.Timing(7.0, 7.0, 7.0, 1, "x", (7.0,))


def test_alternating_changes_the_order_and_takes_medians_of_rounds():
    order = []

    def sampler(name, times):
        turns = iter(times)

        def sample():
            order.append(name)
            return next(turns)

        return sample

    found = timers.time_alternating(
        {"a": sampler("a", [[1, 2, 30], [4], [6, 6]]), "b": sampler("b", [[10], [10], [100, 100, 100]])}, rounds=3
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found["a"].ms == 4  # medians of the rounds: 2, 4, 6
    assert found["b"].ms == 10  # the disturbed round counts once
    assert found["a"].samples == 3


def test_a_steady_drift_meets_alternating_calls_alike():
    drift = iter(range(100))

    def sample():
        return [100.0 + next(drift)]

    found = timers.time_alternating({"a": sample, "b": sample}, rounds=4)
    assert found["a"].ms == found["b"].ms


def test_host_time_is_per_call_and_leaves_out_the_wait(clock):
    waits = []

    def call():
        clock.now += 20e-6

    def synchronize():
        waits.append(clock.now)
        clock.now += 1.0

    timing = timers.time_host(call, synchronize, calls=50, repetitions=4)
    assert timing.us == pytest.approx(20.0)
    assert timing.samples == 4
    assert len(waits) == 6  # before each of five repetitions, the first thrown away, and once at the end


def test_host_time_stays_below_the_depth_of_the_queue():
    calls = []
    timers.time_host(lambda: calls.append(1), lambda: None, calls=10**6, repetitions=1)
    assert len(calls) == 2 * timers.QUEUE_DEPTH


def test_host_time_restores_garbage_collection_even_after_an_error():
    def fail():
        assert not gc.isenabled()
        raise RuntimeError("x")

    with pytest.raises(RuntimeError):
        timers.time_host(fail, lambda: None)
    assert gc.isenabled()


def test_wall_samples_stop_at_the_budget_but_not_before_the_least(clock):
    def call():
        clock.now += 0.25

    assert timers.wall_samples(call, budget_s=1.0, least=2) == pytest.approx([250.0] * 4)
    assert len(timers.wall_samples(call, budget_s=0.0, least=3)) == 3


@pytest.mark.parametrize(
    ("size", "l2", "sets"), [(100, 60, 2), (120, 60, 1), (10**9, 60, 1), (1, 60, 120), (0, 60, 120)]
)
def test_rotations_overflow_the_cache_twice(size, l2, sets):
    assert timers.rotations(size, l2) == sets
