"""benchmarks/video_transformer.py, with small models on the CPU: its checks hold, its tables add up."""

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parents[3] / "benchmarks")
sys.path.insert(0, FOLDER)
try:
    SCRIPT = runpy.run_path(f"{FOLDER}/video_transformer.py")
finally:
    sys.path.remove(FOLDER)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The rows that it writes, by model and by the first words of a table's title."""
    path = tmp_path_factory.mktemp("video") / "rows.jsonl"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["OMP_NUM_THREADS"] = "1"  # others share the cores
    command = [sys.executable, f"{FOLDER}/video_transformer.py", "--tiny", "--rounds", "1", "--jsonl", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert " failed: " not in done.stdout
    rows: dict = {}
    for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        rows.setdefault((record["model"], record["part"].split(",")[0]), []).append(record)
    return rows


@pytest.mark.parametrize("model", ["tiny", "tiny-joint"])
def test_every_part_is_measured(report, model):
    parts = {part for name, part in report if name == model}
    assert {
        "once a forward pass",
        "one dense block by stages",
        "the transformer",
        "a training step of one block",
    } < parts
    for part, ways in (("the transformer", 5), ("a training step of one block", 3), ("self-attention of a layer", 5)):
        assert len(report[model, part]) == ways
    stages = {record["stage"] for record in report[model, "one dense block by stages"]}
    assert ("cross-attention" in stages) == (model == "tiny")
    assert {"projections", "norms, gates, rotary", "feed-forward", "self-attention, ours"} < stages


def test_what_is_left_follows_amdahls_law(report):
    rows = {record["attention"]: record for record in report["tiny", "the transformer"]}
    dense = next(
        row["ms"] for row in report["tiny", "one dense block by stages"] if row["stage"] == "self-attention, ours"
    )
    block = rows["ours"]["a block ms"]
    assert rows["SDPA"]["Amdahl"] is None
    assert math.isclose(rows["90% left out"]["Amdahl"], block / (block - 0.9 * dense), rel_tol=1e-6)


def test_a_spent_budget_leaves_the_rest_out(capsys):
    SCRIPT["main"](["--tiny", "--budget", "0", "--only", "checks,whole"])
    told = capsys.readouterr().out
    assert "the budget of 0 s is spent: tiny checks is left out" in told and "| attention |" not in told


def test_a_wrong_result_is_told(monkeypatch):
    names = SCRIPT["main"].__globals__
    right = names["attend_lists"]

    def wrong(*given):
        out, text = right(*given)
        return out * 1.001, text

    monkeypatch.setitem(names, "attend_lists", wrong)
    with pytest.raises(AssertionError, match="wrong results"):
        SCRIPT["main"](["--tiny", "--only", "checks"])
