"""`tilefold profile video`: the table, its files, refusals."""

import json

import pytest
import torch

from cases.cli import command, refused, reports
from tilefold.bench.timers import Timing
from tilefold.bench.video.stages import ALONE, StageRow, VideoRun, prepare_stages
from tilefold.cli import profile
from tilefold.plan.sparse.video import VideoShape
from tilefold.sparse import CoarseOptions, SelectOptions

run = command("profile", "video")


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_every_stage_and_every_report(tmp_path):
    files, options = reports(tmp_path, "report", "json", "png", "html")
    result = run("--shape 1,2,128,16 --dtype fp32 --sparsity 0.5 --peers math,fa4 --backward", *options)
    document = json.loads(files["json"].read_text())
    rows = {row["name"]: row for row in document["rows"]}
    stages = ("coarse", "select", "fine", "fuse")
    assert list(rows)[:4] == list(stages)
    assert {"pipeline", "pipeline, forward + backward", "dense math", "dense math, forward + backward"} <= set(rows)
    assert sum(rows[name]["share"] for name in stages) == pytest.approx(1)
    assert rows["pipeline"]["cost"]["flops"] == sum(rows[name]["cost"]["flops"] for name in stages)
    assert rows["pipeline, forward + backward"]["cost"] is None
    assert document["density"] == 0.5 and "1 of 2 blocks kept" in document["title"]
    alone = rows["index alone"]
    assert alone["share"] is None and alone["timing"]["ms"] > 0
    assert alone["cost"]["bytes"] == 2 * 2 * (2 + 4 * 1 + 4)  # rows: two pairs of blocks, an entry, a length
    assert "index alone: from a map of blocks" in result.output
    assert document["reported_ms"] == {} and "reported" not in result.output
    assert any("FA4" in note for note in document["notes"])
    check_explained(document["explained"])
    assert "pipeline takes" in result.output
    assert "Times in the interpreter say nothing about a GPU" in result.output
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert "<svg" in page and "gather_blocks (k)" in page and "adds up" in page and "Not explained" in page


@pytest.mark.interpreter
def test_the_index_alone_makes_the_lists_of_the_stages():
    ready = prepare_stages(
        VideoShape(2, 2, 1, 200, 16, "float32"), "cpu", CoarseOptions(), SelectOptions("top_p", top_p=0.6)
    )
    made, index = ready.calls[ALONE](), ready.index
    assert made.capacity == index.capacity and made.geometry == index.geometry
    assert torch.equal(made.counts, index.counts) and torch.equal(made.to_map(), index.to_map())
    assert int(made.counts.sum()) == ready.listed


def test_the_published_shape_has_what_its_authors_report():
    """In a column of its own that names their device, and with a sentence; no other shape has it."""
    names = ("coarse", "select", "fine", "fuse", "index alone", "pipeline", "dense cuDNN")
    rows = tuple(StageRow(name, Timing(2.0, 2.0, 2.0, 1, "events"), None, None, None) for name in names)
    table = profile._table(VideoRun(VideoShape(1, 12, 12, 23296, 128), 0.35, 1, rows, ()))
    assert table.head[:4] == ("", "ms", "reported (H800)", "%")
    assert [row[2] for row in table.rows] == ["1.007", "0.400", "3.125", "0.231", "0.097", "4.860", ""]
    notes = profile._notes(VideoRun(VideoShape(1, 12, 12, 23296, 128), 0.35, 1, rows, ()))
    assert any("by the pipeline's authors, on an H800; not measured here; 3.666 ms in all" in note for note in notes)
    for other in (VideoShape(1, 12, 12, 23296, 128, "float16"), VideoShape(1, 12, 4, 23296, 128)):
        assert profile._table(VideoRun(other, 0.35, 1, rows, ())).head == profile.HEAD
        assert not any("reported" in note for note in profile._notes(VideoRun(other, 0.35, 1, rows, ())))


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
    refused(
        run,
        ("--shape 1,2,3", "--shape must be 4 integers of at least 1, comma-separated, got '1,2,3'"),
        ("--method best", "--method must be one of top_k, top_p, gini, got 'best'"),
        ("--tau 0.5", "--tau must be two numbers MIN,MAX from 0 to 1, got '0.5'"),
        ("--peers tk", "--peers must be from cudnn, flash, efficient, math, fa4 (or none), got 'tk'"),
        ("--coarse mean", "kind must be one of block, dense, pooled, got 'mean'"),
        (("--json", tmp_path / "no" / "file.json"), "--json must be a file that can be written"),
    )
