"""benchmarks/mods.py on the CPU: each mod is the same in Triton, in torch and in FlexAttention, forward and backward."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gallery
import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.interpreter


def run(*options):
    command = [sys.executable, str(FOLDER / "mods.py"), "--tiny", *options]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # others share the cores
    return subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A record of each mod and pass, in the order of the run."""
    path = tmp_path_factory.mktemp("mods") / "rows.jsonl"
    told = run("--jsonl", str(path))
    assert "not reached" not in told
    assert "WRONG" not in told
    again = run("--jsonl", str(path), "--only", "causal,tree")  # what is there is shown, not measured
    assert again.startswith("\n| mod |")
    assert again.count("| tree |") == 2
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_mod_is_what_it_is_in_torch(records):
    by_pass = {one: [record for record in records if record["pass"] == one] for one in ("forward", "backward")}
    assert [one["mod"] for one in by_pass["forward"]] == [one["mod"] for one in by_pass["backward"]]
    assert len({one["mod"] for one in records}) == 23
    for record in records:
        theirs = "sdpa" if record["mod"].startswith("boolean") else "flex"
        assert record["failed"] == {}
        assert record["ms"].keys() >= {"ours", "plain", *([theirs] if record["pass"] == "forward" else [])}
        softcap = record["mod"] == "softcap"  # of sigmoid, whose 1 cancels
        assert record["error"]["ours"] < (5e-6 if softcap else 1e-6), record
        assert 0.05 < record["seen"] <= 1


def test_rows_come_in_parts_and_by_name(tmp_path):
    told = run("--only", "sink,softcap", "--pass", "forward", "--shard", "2/2")
    assert [line.split(" | ")[0] for line in told.splitlines() if line.startswith("| s")] == ["| softcap"]
    more = run("--only", "none,slopes,distance,built in,bias", "--variants", "--pass", "forward")
    assert more.count("| flex |") == more.count("'portable'") == more.count("tilefold's flex_attention") == 7
    learned = run("--only", "learned", "--variants", "--pass", "backward")  # of the bias and the table, too
    assert learned.count("| backward |") == 2
    assert "WRONG" not in more + learned
    assert "not reached: causal, (64, 16)" in run("--budget", "-1", "--only", "causal", "--pass", "forward")


def test_biases_are_told_as_they_were_measured():
    rows = [json.loads(line) for line in (FOLDER / "results" / "bias.jsonl").read_text().splitlines()]
    page = (FOLDER.parent / "docs" / "performance" / "attention_backward_hopper.md").read_text(encoding="utf-8")
    measured = [row for row in rows if row["pass"] == "backward"]
    assert len(measured) == 10
    for row in measured:
        assert row["failed"] == {}
        assert row["error"]["ours"] < gallery.LIMITS["backward"]
        start = "| {tokens} x {batch}, {heads}, {dim} | ".format(**row)
        told = page.split(start)[1].splitlines()[0].split(" | ")
        times = [row["ms"][name] for name in ("ours", "portable", "flex", "sdpa")]
        at = row["mod"] == "bias, learned"
        assert [float(cell.split("; ")[at].split()[0]) for cell in told] == pytest.approx(times, abs=0.006)
        if at:
            assert f"({times[2] / times[0]:.2f}x)" in told[2]


def test_the_mods_are_their_sources():
    """Buckets as T5's code counts them."""
    apart = torch.arange(-300, 301)
    zero = torch.zeros((), dtype=torch.int64)
    found = gallery.t5_buckets_twin(0, zero, zero, zero, apart, (torch.arange(32.0)[None],))
    far = 8 + ((apart.abs().clamp(min=1).double() / 8).log() / math.log(128 / 8) * 8 + 1e-9).long()
    wanted = (apart > 0) * 16 + torch.where(apart.abs() < 8, apart.abs(), far.clamp(max=15))
    assert torch.equal(found.long(), wanted)
    ends = gallery.ends_of(64)
    assert all(
        ends[j] <= ends[i] for i in range(64) for j in range(i, int(ends[i]))
    )  # subtrees lie inside their parents
    assert len({mod.name for mod in gallery.MODS}) == len(gallery.MODS) >= 20
