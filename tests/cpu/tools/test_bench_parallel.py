"""`tilefold bench parallel`: what is hidden in a trace, what the table says; on ranks it runs in tests/distributed."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cases.cli import command, refused
from tilefold.bench.parallel.loads import Work
from tilefold.bench.parallel.table import HEAD, Line, cells_of, markdown, to_json
from tilefold.bench.parallel.trace import MARK, Trace, device_events, hidden_of, overlaps_of, written
from tilefold.bench.timers import exported


def test_hidden_is_the_time_of_both():
    found = hidden_of([(0, 2), (1, 3), (8, 9), (10, 12)], [(2, 4), (2.5, 3.5), (8.25, 8.5), (11, 20)])
    assert found == (6, 2 + 0.25 + 9, 1 + 0.25 + 1)
    assert found.share == pytest.approx(2.25 / 6)
    assert found.exposed == pytest.approx(3.75)
    assert hidden_of([], [(0, 1)]).share == 1.0
    assert hidden_of([(0, 1)], []).share == 0.0


def test_waiting_for_others_is_no_transfer():
    """Of three ranks the second comes 30 us late to the first transfer, and the third's own fold ends 10 us after the second."""

    def trace(began, *events):
        return Trace(
            began, "h", [{"cat": "kernel", "name": n, "ts": a, "dur": b - a} for n, a, b in sorted(events, key=str)]
        )

    transfers = [("nccl 1", 0, 50), ("nccl 2", 100, 140)]
    ranks = [
        trace(0, *transfers, ("fold", 45, 95)),
        trace(30_000, ("nccl 1", 0, 20), ("nccl 2", 70, 110), ("fold", 0, 65)),
        trace(0, ("nccl 1", 0, 50), ("nccl 2", 110, 140), ("fold", 50, 120), ("spin_kernel", 0, 50)),
    ]
    for ring in (True, False):  # three ranks are all neighbours
        first, second, third = overlaps_of(ranks, ring)
        assert first[0] == pytest.approx((20e-6 + 30e-6, 50e-6, 5e-6))  # from 30 to 50, and from 110 to 140
        assert first[1] == pytest.approx(30e-6 + 10e-6)
        assert second[0] == pytest.approx((20e-6 + 30e-6, 65e-6, 20e-6))
        assert second[1] == pytest.approx(10e-6)
        assert third[0] == pytest.approx((50e-6, 70e-6, 10e-6)), "a delay hides nothing"
        assert third[1] == pytest.approx(30e-6)
    apart = [one._replace(host=str(i)) for i, one in enumerate(ranks)]
    assert [waited for _, waited in overlaps_of(apart, True)] == pytest.approx([0, 0, 0])


def test_a_trace_that_torch_wrote_is_read():
    """It writes beside the path and renames: who has opened the path before reads nothing."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(MARK):
        torch.ones(3) + 1
    assert MARK in [event.get("name") for event in exported(profiler)["traceEvents"]]


def test_a_trace_holds_the_measured_call_alone(tmp_path):
    mark = {"name": MARK, "cat": "user_annotation", "ts": 100.0}
    events = [
        {"ph": "X", "cat": "kernel", "name": n, "ts": t, "dur": 1}
        for n, t in (("late", 107.0), ("before", 50.0), ("a", 101.0))
    ]
    every = [*events, mark, {"cat": "cpu_op", "name": "x", "ts": 102.0}]
    began, found = device_events({"traceEvents": every, "baseTimeNanoseconds": 5000})
    assert began == 105_000
    assert [(e["name"], e["ts"]) for e in found] == [("a", 1.0), ("late", 7.0)]
    ranks = [Trace(began, "h", found), Trace(began + 2000, "h", found), Trace(0, "g", found)]
    (path,) = written(f"{tmp_path}/t", {"ring": {"8 tokens, forward": ranks, "8 tokens, backward": ranks[:1]}})
    every = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    assert [e["pid"] for e in every] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [e["ts"] for e in every if e["ph"] == "X"] == [1, 7, 3, 9, 1, 7, 1, 7], "ranks of one host are on one clock"
    assert [e["args"]["name"] for e in every if e["ph"] == "M"][1] == "ring, 8 tokens, forward, rank 1"
    assert path.endswith("t-ring.json.gz")


def test_the_table_and_the_files():
    lines = [
        Line("ring", 4, 1024, "forward", "ok", "", 2.0, 400.0, 0.95, 10**9, 1.9, 1.1e9, 0.97, 0.061, 0.25, 0.985),
        Line("torch", 4, 1024, "forward", "ok", "", 3.0, 300.0, 0.6),
        Line("heads", 4, 1024, "forward", "WRONG", "rank 0: out"),
    ]
    cells = [dict(zip(range(len(HEAD)), cells_of(line), strict=True)) for line in lines]
    figures = ["2.000", "1.900", "400", "95.0%", "98.5%", "1.000", "1.100", "97%", "0.061", "0.250"]
    assert list(cells[0].values())[3:] == figures
    assert list(cells[1].values())[3:] == ["3.000", "", "300", "60.0%", "", "", "", "", "", ""]
    assert cells[2][3] == "WRONG"
    assert markdown(lines).count("\n") == 5
    written = json.loads(to_json(lines, {"torch": "2"}, Work((1024,))))
    assert written["lines"][2]["note"] == "rank 0: out"
    assert written["work"]["heads"] == [32, 8]


@pytest.mark.interpreter
def test_wrong_usage():
    refused(
        command("bench", "parallel"),
        ("--direction up", "--direction must be"),
        ("--ways rings", "--ways must be from ring"),
        ("--heads 3,2", "Q a multiple of KV"),
        ("--tokens 0", "--tokens"),
    )
