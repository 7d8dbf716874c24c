"""Timers, with clocks and calls that are made up; clocks, power and temperature from recorded lines of nvidia-smi."""

import gc
import stat
import time
from dataclasses import asdict

import pytest
import torch

from tilefold.bench import timers
from tilefold.bench.power import Reading, Sampler, gpu_id, parse_smi, summarise


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


# ---------------------------------------------------------------- clocks, power, temperature


STEADY = "1980, 2619, 652.31, 61, 100, 0x0000000000000000"
CAPPED = "1755, 2619, 699.80, 64, 100, 0x0000000000000004"
IDLE = "345, 2619, 118.20, 38, 0, 0x0000000000000001"
UNSAID = "1410, [N/A], [Not Supported], 44, [N/A], [N/A]"


def test_lines_of_nvidia_smi_are_read():
    assert parse_smi(STEADY) == Reading(1980.0, 2619.0, 652.31, 61.0, 100.0, 0)
    assert parse_smi(CAPPED).throttled == ("power cap",)
    assert parse_smi(IDLE).throttled == ()
    assert parse_smi(UNSAID) == Reading(1410.0, None, None, 44.0, None, 0)
    for line in ("", 'Field "clocks_event_reasons.active" is not a valid field to query.', "a, b, c, d, e, f", "1, 2"):
        assert parse_smi(line) is None


def test_a_summary_is_of_what_was_read_under_load():
    steady = summarise([parse_smi(line) for line in (STEADY, IDLE, STEADY)])
    assert steady.samples == 2 and (steady.sm_mhz.least, steady.sm_mhz.most) == (1980, 1980)
    assert steady.warnings == []
    assert (
        str(steady) == "SM clock 1980 MHz, memory clock 2619 MHz, power 652 W, temperature 61 C (2 samples under load)"
    )
    moved = summarise([parse_smi(line) for line in (STEADY, CAPPED, CAPPED, IDLE)])
    assert moved.sm_mhz.median == 1755 and moved.power_w.most == 699.8
    assert moved.warnings == [
        "the SM clock moved between 1755 and 1980 MHz (11 %)",
        "the GPU was throttled in 67 % of the samples: power cap",
    ]
    assert asdict(moved)["throttled"] == {"power cap": pytest.approx(2 / 3)}
    assert summarise([]) is None
    assert summarise([parse_smi(UNSAID)]).memory_mhz is None


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def read(sampler, samples):
    """The summary, once it is of so many samples."""
    deadline, found = time.perf_counter() + 20, sampler.since()
    while time.perf_counter() < deadline and (found is None or found.samples < samples):
        time.sleep(0.005)
        found = sampler.since()
    return found


def test_a_sampler_collects_while_it_is_open_and_by_windows(tmp_path):
    later = tmp_path / "later"
    loop = f'case "$*" in *loop-ms*) ;; *) exit 0;; esac\necho "{IDLE}"\necho "{STEADY}"\n'
    wait = f'while [ ! -e {later} ]; do sleep 0.01; done\necho "{CAPPED}"\nprintf "1755, 26"\nexec sleep 60'
    with Sampler("GPU-1", program(tmp_path / "smi", loop + wait)) as sampler:
        assert read(sampler, 1).sm_mhz.most == 1980
        mark = sampler.mark()
        assert sampler.since(mark) is None
        later.touch()
        assert read(sampler, 2).sm_mhz.least == 1755
        assert sampler.since(mark).power_w.most == 699.8
    with Sampler(None) as nothing:
        assert nothing.since() is None


def test_nothing_is_read_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_id() is None


def test_nvidia_smi_is_one_process_that_ends_with_the_sampler(tmp_path):
    """A driver that does not know the newer column's name is asked by the older one's."""
    made = program(
        tmp_path / "smi",
        f'echo "$@" >> {tmp_path}/calls\n'
        'case "$*" in *clocks_event_reasons*) echo "Field is not a valid field to query."; exit 2;; esac\n'
        f'echo "{STEADY}"\necho "{CAPPED}"\nexec sleep 60',
    )
    begin = time.perf_counter()
    with Sampler("GPU-1", made) as sampler:
        assert read(sampler, 2).sm_mhz.median == (1980 + 1755) / 2
    assert time.perf_counter() - begin < 20 and sampler._process.returncode is not None
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert (
        "--id=GPU-1" in first and "clocks_event_reasons.active" in first and "clocks_throttle_reasons.active" in second
    )
    assert "--loop-ms=500" in second
    with Sampler("GPU-1", str(tmp_path / "nowhere")) as absent:
        assert absent.since() is None
