"""`tilefold bench parallel`: what is hidden in a trace, what the table says; on ranks it runs in tests/dist."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from typer.testing import CliRunner

from tilefold.bench.parallel.run import HEAD, Line, Work, cells_of, to_json, to_markdown
from tilefold.bench.parallel.trace import MARK, device_events, hidden_of, written
from tilefold.bench.torch_trace import exported
from tilefold.cli.app import app


def test_hidden_is_the_time_of_both():
    found = hidden_of([(0, 2), (1, 3), (8, 9), (10, 12)], [(2, 4), (2.5, 3.5), (8.25, 8.5), (11, 20)])
    assert found == (6, 2 + 0.25 + 9, 1 + 0.25 + 1)
    assert found.share == pytest.approx(2.25 / 6)
    assert found.exposed == pytest.approx(3.75)
    assert "38%" in str(found)
    assert hidden_of([], [(0, 1)]).share == 1.0
    assert hidden_of([(0, 1)], []).share == 0.0


def test_a_trace_that_torch_wrote_is_read():
    """It writes beside the path and renames: who has opened the path before reads nothing."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(MARK):
        torch.ones(3) + 1
    assert MARK in [event.get("name") for event in exported(profiler)["traceEvents"]]


def test_a_trace_holds_the_measured_call_alone(tmp_path):
    mark = {"name": MARK, "cat": "user_annotation", "ts": 100.0}
    events = [
        {"cat": "kernel", "name": n, "ts": t, "dur": 1} for n, t in (("late", 107.0), ("before", 50.0), ("a", 101.0))
    ]
    found = device_events([*events, mark, {"cat": "cpu_op", "name": "x", "ts": 102.0}])
    assert [(e["name"], e["ts"]) for e in found] == [("a", 1.0), ("late", 7.0)]
    (path,) = written(f"{tmp_path}/t", {"ring": {"8 tokens, forward": found, "8 tokens, backward": found}})
    every = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    assert [e["pid"] for e in every] == [0, 0, 0, 1, 1, 1]
    assert path.endswith("t-ring.json.gz")


def test_the_table_and_the_files():
    lines = [
        Line("ring", 4, 1024, "forward", "ok", "", 2.0, 400.0, 0.95, 10**9, 1.9, 1.1e9, 0.97, 0.061),
        Line("torch", 4, 1024, "forward", "ok", "", 3.0, 300.0, 0.6),
        Line("heads", 4, 1024, "forward", "WRONG", "rank 0: out"),
    ]
    cells = [dict(zip(range(len(HEAD)), cells_of(line), strict=True)) for line in lines]
    assert list(cells[0].values())[4:] == ["2.000", "1.900", "400", "95%", "1.000 GB", "1.100 GB", "97%", "0.061"]
    assert list(cells[1].values())[4:] == ["3.000", "", "300", "60%", "", "", "", ""]
    assert cells[2][4] == "WRONG"
    assert to_markdown(lines).count("\n") == 5
    written = json.loads(to_json(lines, {"torch": "2"}, Work((1024,))))
    assert written["lines"][2]["note"] == "rank 0: out"
    assert written["work"]["heads"] == [32, 8]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--direction", "up"), "--direction must be"),
        (("--ways", "rings"), "--ways must be from ring"),
        (("--heads", "3,2"), "Q a multiple of KV"),
        (("--tokens", "0"), "--tokens"),
    ],
)
@pytest.mark.interpreter
def test_wrong_usage(arguments, text):
    result = CliRunner().invoke(app, ["bench", "parallel", *arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert text in result.output
