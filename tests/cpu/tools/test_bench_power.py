"""Clocks, power and temperature: recorded lines of nvidia-smi, and what is said of their spread."""

import stat
import time

import pytest
import torch

from tilefold.bench.power import Reading, Sampler, gpu_id, parse_smi, summarise

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
    assert moved.record()["throttled"] == {"power cap": pytest.approx(2 / 3)}
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
