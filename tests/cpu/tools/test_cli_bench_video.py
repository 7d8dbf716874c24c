"""`tilefold bench video`: sweeps on tiny shapes with every output, the crossover, the budget, refusals."""

import json
import re

import pytest
import torch

from cases.cli import command, refused, reports
from tilefold import reference
from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.family import Calls, Peer
from tilefold.bench.judge import Judge
from tilefold.bench.setting import Options
from tilefold.bench.suites import ENGINES
from tilefold.bench.timers import Timing
from tilefold.bench.video import sweep as video_sweep
from tilefold.bench.video.module import PARTS
from tilefold.bench.video.report import findings, overtakes, table_of
from tilefold.bench.video.sweep import Point, SweepRow, points_of
from tilefold.errors import ShapeError, ValueRangeError
from tilefold.plan.sparse.video import VideoShape
from tilefold.reference import Comparison

TINY = ("--shape", "1,2,128,16", "--dtype", "fp32")
SHAPE = VideoShape(1, 12, 12, 23296, 128)


run = command("bench", "video")


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_a_sweep_over_sparsity_with_every_output(tmp_path):
    files, options = reports(tmp_path, "video", "json", "markdown", "png", "html")
    results = tmp_path / "results"
    result = run("--sweep sparsity --values 0,50 --peers math,fa4 --results", results, *TINY, *options)
    assert "sparsity: 128 tokens, batch 1, 2 heads on 2 KV heads, D=16, float32" in result.output
    # Which one is faster depends on what else runs on the machine.
    assert re.search(
        "128 tokens: the fine stage (does not overtake|overtakes|is faster than) dense math", result.output
    )
    assert "FA4: " in result.output
    assert "Times in the interpreter say nothing about a GPU" in result.output
    document = json.loads(files["json"].read_text())
    rows = document["rows"]
    assert [row["value"] for row in rows] == [0, 50]
    for row in rows:
        assert set(row["ms"]) == {"coarse", "select", "fine", "fuse", "pipeline", "dense math"}
        assert row["stages_ms"] == pytest.approx(sum(row["ms"][name] for name in ("coarse", "select", "fine", "fuse")))
        assert {name: one["ok"] for name, one in row["errors"].items()} == {
            "fine": True,
            "pipeline": True,
            "dense math": True,
        }
        assert row["fine_flops"] == 4 * 16 * 2 * 128 * 128 * row["density"]
        assert row["speedup"]["dense math"]["fine"] == row["ms"]["dense math"] / row["ms"]["fine"]
        assert row["versions"]["math"] == row["torch"]
    assert {each["what"] for each in document["overtakes"]} == {"fine", "pipeline"}
    assert [json.loads(line)["case"] for line in (results / "video.jsonl").read_text().splitlines()] == [
        "sparsity_d16_h2_n128x1_b64_s0",
        "sparsity_d16_h2_n128x1_b64_s50",
    ]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["html"].read_text()
    assert "| % sparsity | kept | fine ms | stages ms | total ms |" in files["markdown"].read_text()


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_lengths_and_caches_are_checked_like_everything_else(tmp_path):
    figures = tmp_path / "video.json"
    options = ("--values", "192", "--sparsity", "50", "--peers", "math", "--json", figures, *TINY, "--kv-heads", 1)
    result = run("--sweep", "cached", "--page-size", 32, *options)
    rows = json.loads(figures.read_text())["rows"]
    assert [row["page_size"] for row in rows] == [None, 32]
    assert all("append" in row["ms"] and row["queries"] == 64 and row["seq"] == 192 for row in rows)
    assert all(one["ok"] for row in rows for one in row["errors"].values())
    assert "pages of 32, 50 % sparsity" in result.output
    # Neither whole blocks nor a power of two.
    result = run("--sweep", "length", *options, "--values", "100")
    (row,) = json.loads(figures.read_text())["rows"]
    assert row["queries"] == row["seq"] == 100
    assert all(one["ok"] for one in row["errors"].values())


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_a_wrong_result_is_named_not_timed_and_exit_code_1(monkeypatch):
    monkeypatch.setattr(Judge, "verdict", lambda self, result: Comparison(1.0, 0.1, 1.0, 0.1, False))
    result = run("--sweep", "sparsity", "--values", "50", "--peers", "none", *TINY, code=1)
    assert "fine at sparsity_d16_h2_n128x1_b64_s50: WRONG: max error 1.00e+00 (limit 1.00e-01)" in result.output


@pytest.mark.interpreter
def test_a_budget_says_how_much_it_leaves_out():
    result = run("--sweep", "sparsity", "--values", "50,90", "--budget", "0", *TINY)
    assert "0 of 2 cases were reached" in result.output


@pytest.mark.interpreter
@pytest.mark.no_poison
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_peers_that_follow_lists_are_held_to_the_lists_and_timed(tmp_path, monkeypatch, wrong):
    """By a stand-in, for the libraries need a GPU: it gets the fine stage's lists, its result is judged over them."""

    def prepare(inputs):
        assert inputs.case.pattern.blocks == "64" and inputs.index.geometry[:2] == (64, 64)
        whole = reference.attention(inputs.q, inputs.k, inputs.v, dtype=torch.float32)[0]
        listed = reference.sparse_attention(inputs.q, inputs.k, inputs.v, inputs.index, dtype=torch.float32)[0]
        return Calls([lambda: whole if wrong else listed])

    def refuses(case, device):
        return None if case.pattern is not None else "takes lists of blocks only"

    monkeypatch.setitem(IMPLEMENTATIONS, "tk", Peer("tk", "TK", "a stand-in", "torch", prepare, refuses, lists=True))
    file = tmp_path / "video.json"
    options = ("--sweep", "sparsity", "--values", "50", "--peers", "math,tk,bsa,fa4-lists", "--json", file)
    result = run(*options, *TINY)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["errors"]["lists TK"]["ok"] is not wrong and row["errors"]["dense math"]["ok"]
    assert ("lists TK" in row["ms"]) is not wrong
    if wrong:
        assert "lists TK at sparsity_d16_h2_n128x1_b64_s50: WRONG" in result.output
    else:
        assert row["speedup"]["lists TK"] == {"fine": row["ms"]["lists TK"] / row["ms"]["fine"]}
        assert "lists TK ms" in result.output and row["versions"]["TK"] == row["torch"]
    assert "BSA: nvidia-cudnn-frontend is not installed" in result.output
    assert "FA4: flash-attn-4 is not installed" in result.output


def test_refusals(tmp_path):
    refused(
        run,
        ("--sweep heads", "--sweep must be from sparsity, length, cached (or none), got 'heads'"),
        ("--sweep none", "--sweep must name at least one of sparsity, length, cached, got 'none'"),
        ("--values 50", "--values needs one --sweep that they belong to, got 'sparsity,cached'"),
        (
            "--sweep sparsity --values a",
            "--values must be comma-separated numbers, or two numbers that rise, ... and a last one, got 'a'",
        ),
        ("--sweep sparsity --values 100", "sparsity must be from 0 to below 100 per cent, got 100.0"),
        ("--sweep sparsity --sparsity 80", "--sparsity is for length and cached"),
        ("--sweep length --values 99.5", "tokens must be integers, got 99.5"),
        ("--sweep length --values 0", "seq must be an integer of at least 1, got 0"),
        ("--sweep cached --values 64", "cached tokens must be at least two whole blocks of 64"),
        ("--shape 1,2,3", "--shape must be 4 integers of at least 1, comma-separated, got '1,2,3'"),
        (
            "--peers portable",
            "--peers must be from cudnn, flash, efficient, math, fa4, bsa, tk, fastvideo, flex, fa4-lists (or none), got",
        ),
        (("--json", tmp_path / "no" / "file.json"), "--json must be a file that can be written"),
    )


# ---------------------------------------------------------------- what is made of the figures


def row_of(point, listed, **ms):
    timings = {name.replace("_", " "): Timing(value, value, value, 1, "made up") for name, value in ms.items()}
    return SweepRow(point, listed, timings)


def sweep_of_sparsity(fine, pipeline, dense):
    points = points_of("sparsity", SHAPE, (0, 50, 75))
    pairs = 12 * 364 * 364
    return [
        row_of(point, int(pairs * (1 - point.sparsity / 100)), fine=f, pipeline=p, dense_cuDNN=dense)
        for point, f, p in zip(points, fine, pipeline, strict=True)
    ]


def test_the_crossover_is_a_straight_line_s():
    rows = sweep_of_sparsity((5.0, 3.0, 1.5), (6.0, 4.5, 3.5), 4.0)
    fine, total = overtakes(rows)
    assert (fine.what, fine.dense, fine.crossing.sparsity) == ("fine", "dense cuDNN", pytest.approx(25))
    assert total.crossing.sparsity == pytest.approx(62.5)
    assert "overtakes dense cuDNN at 25.0 % sparsity (between 0.0 and 50.0)" in str(fine)
    always, never = overtakes(sweep_of_sparsity((1, 1, 1), (9, 9, 9), 4.0))
    assert "is faster than dense cuDNN at every point, from 0.0 % sparsity on" in str(always)
    assert "does not overtake dense cuDNN up to 75.0 % sparsity" in str(never)


def test_lines_of_a_sweep_are_kept_apart():
    points = points_of("cached", SHAPE, (8192, 16384), (90,), (None, 64))
    assert [point.series for point in points] == ["contiguous, 90 % sparsity"] * 2 + ["pages of 64, 90 % sparsity"] * 2
    times = ((0.02, 0.01), (0.02, 0.03), (0.03, 0.01), (0.03, 0.03))
    rows = [row_of(point, 10, fine=fine, dense_cuDNN=dense) for point, (fine, dense) in zip(points, times, strict=True)]
    first, second = overtakes(rows)
    assert first.crossing.sparsity == pytest.approx(12288)
    assert second.crossing.sparsity is None
    assert table_of(rows).head[:2] == ("cached tokens", "line")


def test_missing_figures_leave_gaps_not_errors():
    points = points_of("length", SHAPE, (8192, 131072), (80,))
    rows = [row_of(points[0], 10, fine=1.0), SweepRow(points[1], notes=("no memory",))]
    table = table_of(rows)
    assert all(len(cells) == len(table.head) for cells in table.rows)
    assert overtakes(rows) == []
    assert findings(rows) == {"lines": ["no memory"], "overtakes": []}


def test_points_say_what_they_do_not_take():
    with pytest.raises(ShapeError, match="at least two whole blocks of 64, the newest one included, got 100"):
        Point("cached", VideoShape(1, 1, 1, 100, 16), 50)
    with pytest.raises(ValueRangeError, match="sweep must be one of sparsity, length, cached, got 'heads'"):
        Point("heads", SHAPE, 50)


@pytest.mark.interpreter
def test_too_little_memory_is_a_note(monkeypatch):
    def none_left(*arguments, queries):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(video_sweep, "video_inputs", none_left)
    (row,) = ENGINES["video"].run([Point("sparsity", SHAPE, 50)], [], "cpu", Options(), lambda *_: None, lambda _: None)
    assert row.notes == ("sparsity_d128_h12_n23296x1_b64_s50: no memory: out of memory",)
    assert not row.timings and row.status == "no memory"


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_a_layer_is_checked_and_timed_by_parts(tmp_path, monkeypatch):
    """With norms and without, both ways, beside a dense layer; what fails its check has no time."""
    file, results = tmp_path / "module.json", tmp_path / "results"
    options = ("--module", "--grid", "4,4,8", "--sparsity", "50", "--peers", "math", "--rounds", 1, "--json", file)
    output = run(*options, "--results", results, *TINY).output
    assert (
        "module: 4 x 4 x 8 tokens, batch 1, 2 heads on 2, D=16, float32, 50 % left out, norms of q and k"
        in " ".join(output.split())
    )
    assert "of what products and pipeline take" in output
    plain, normed = json.loads(file.read_text())["rows"]
    for row in (plain, normed):
        assert row["status"] == "ok" and row["relative_l2"] is not None
        assert {"module", "dense math", "module, forward + backward", "dense math, forward + backward", *PARTS} == set(
            row["ms"]
        )
        assert row["least_ms"] == row["ms"]["products of qkv and out"] + row["ms"]["pipeline"]
    assert (plain["qk_norm"], normed["qk_norm"]) == (False, True)
    assert len((results / "video_module.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(Judge, "verdict", lambda self, result: Comparison(1.0, 0.1, 1.0, 0.1, False))
    output = run(*options, "--quick", *TINY, code=1).output
    assert "module at module_d16_h2_4x4x8_s50: WRONG" in " ".join(output.split())
    (row,) = json.loads(file.read_text())["rows"]
    assert row["status"] == "WRONG" and set(row["ms"]) == {*PARTS}


def test_a_layer_refuses():
    refused(
        run,
        ("--module --grid 4,4,6", "--grid must be three multiples of 4 (cubes of 4 x 4 x 4 tokens), got (4, 4, 6)"),
        ("--grid 4,4,8", "--grid is for --module, got '4,4,8'"),
        ("--module --png a.png --graph --block 128", "--png, --graph, --block cannot be given with --module"),
        ("--module --sparsity 100", "--sparsity must be from 0 to below 100 per cent, got 100"),
    )
