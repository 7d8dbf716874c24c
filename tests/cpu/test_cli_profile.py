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
    assert "pipeline takes" in result.output
    assert "Times in the interpreter say nothing about a GPU" in result.output
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["html"].read_text()


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
