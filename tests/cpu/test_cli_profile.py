"""`tilefold profile video`: the table, its files, refusals."""

import json

import pytest
from typer.testing import CliRunner

from tilefold.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["profile", "video", *map(str, arguments)], env={"COLUMNS": "140", "NO_COLOR": "1"})


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_every_stage_and_every_report(tmp_path):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "png", "html")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", path)]
    result = run(
        "--shape", "1,2,128,16", "--dtype", "fp32", "--sparsity", "0.5", "--peers", "math,fa4", "--backward", *options
    )
    assert result.exit_code == 0, result.output
    document = json.loads(files["json"].read_text())
    rows = {row["name"]: row for row in document["rows"]}
    stages = ("coarse", "select", "fine", "fuse")
    assert list(rows)[:4] == list(stages)
    assert {"pipeline", "pipeline, forward + backward", "dense math", "dense math, forward + backward"} <= set(rows)
    assert sum(rows[name]["share"] for name in stages) == pytest.approx(1)
    assert rows["pipeline"]["cost"]["flops"] == sum(rows[name]["cost"]["flops"] for name in stages)
    assert rows["pipeline, forward + backward"]["cost"] is None
    assert document["density"] == 0.5
    assert any("FA4" in note for note in document["notes"])
    check_explained(document["explained"])
    assert "pipeline takes" in result.output
    assert "Times in the interpreter say nothing about a GPU" in result.output
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert "<svg" in page and "gather_blocks (k)" in page and "adds up" in page and "Not explained" in page


def check_explained(why):
    """Every launch by name and stage, with its work; times that add up; the pipeline's launches back with their stages."""
    launches = [(row["stage"], row["evidence"]["kernel"], row["what"]) for row in why["launches"]]
    coarse = [("coarse", "gather_blocks", "k"), ("coarse", "gather_blocks", "v"), ("coarse", "coarse_forward", "")]
    last = [("sparse_forward", ""), ("fuse_forward", "")]
    together = "fine + fuse at once"
    alone = [("select", "select", ""), ("fine", *last[0]), ("fuse", *last[1])]
    assert launches == [*coarse, *alone, *((together, *each) for each in last)]
    assert [(each["stage"], each["launches"]) for each in why["inside"]] == [
        ("coarse", 3),
        ("select", 1),
        (together, 2),
    ]
    for row in why["launches"]:
        assert row["predicted"]["seconds"] > 0 and row["evidence"]["seconds"] > 0 and row["verdict"]["sentence"]
        assert (row["inside"] is None) == (row["stage"] in ("fine", "fuse"))
    for row in why["sums"]:
        assert row["device"] == pytest.approx(row["kernels"] + row["gaps"] + row["left"])
        assert 0 <= row["share"] < 0.9 and row["waits"] == 0
    sums = {row["name"]: row for row in why["sums"]}
    assert sums["pipeline"]["launches"] == 6
    assert sum(each["seconds"] for each in why["inside"]) * 1e3 == pytest.approx(sums["pipeline"]["kernels"])


def test_refusals(tmp_path):
    for arguments, message in (
        (("--shape", "1,2,3"), "--shape must be 4 integers of at least 1, comma-separated, got '1,2,3'"),
        (("--method", "best"), "--method must be one of top_k, top_p, gini, got 'best'"),
        (("--tau", "0.5"), "--tau must be two numbers MIN,MAX from 0 to 1, got '0.5'"),
        (("--peers", "tk"), "--peers must be from cudnn, flash, efficient, math, fa4 (or none), got 'tk'"),
        (("--coarse", "mean"), "kind must be one of block, dense, pooled, got 'mean'"),
        (("--json", tmp_path / "no" / "file.json"), "--json must be a file that can be written"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
