"""`tilefold bench`: options, files, exit codes; the whole of it in the interpreter and in plain torch on tiny shapes."""

import json

import pytest
import torch

from cases.cli import command, refused, reports
from tilefold.bench.attention import peers
from tilefold.bench.family import Calls, Peer
from torch_cpu import torch_cpu  # noqa: F401

run = command("bench")


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_quick_dense_with_every_output(tmp_path):
    files, options = reports(tmp_path, "dense", "json", "markdown")
    result = run(
        "dense --quick --case d32,n40|packed4_causal|window --dtype fp16 --peers flash,math,cudnn",
        "--rounds 1",
        *options,
        "--results",
        str(tmp_path / "results"),
    )
    assert "Times in the interpreter say nothing about a GPU" in result.output
    assert "cuDNN: needs a GPU" in result.output
    document = json.loads(files["json"].read_text())
    rows = document["rows"]
    names = {"d32_h1_n60x1_window20_0", "d32_h4k1_n40x1", "d32_h4k1_n40x1_causal", "d32_h1_packed4_causal"}
    assert {row["case"] for row in rows} == names
    assert [row["implementation"] for row in rows] == ["tilefold", "flash", "math", "cudnn"] * 4
    for row in rows:
        special = "packed" in row["case"] or "window" in row["case"]
        refused = row["implementation"] == "cudnn" or (special and row["implementation"] != "tilefold")
        assert row["status"] == ("refused" if refused else "ok"), row
    assert document["setting"]["backend"] == "interpreter"
    assert set(document["geometric_means"]) == {"flash", "math"}
    assert files["markdown"].read_text().startswith("| D, H | N x B |")
    assert len((tmp_path / "results" / "dense.jsonl").read_text().splitlines()) == 16


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_sparse_at_the_sparsities_that_are_asked_for(tmp_path):
    figures = tmp_path / "sparse.json"
    result = run("sparse --quick --dtype fp32 --peers none --rounds 1 --sparsity 25,50,...,99 --json", str(figures))
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["case"].rsplit("_", 2)[1], row["kept"]) for row in rows] == [
        ("s25", "3/4"),
        ("s50", "2/4"),
        ("s75", "1/4"),
        ("s99", "1/4"),
    ]
    assert "kept" in result.output and "64 random 75 %" in result.output and "3/4" in result.output
    refused(
        run,
        ("dense", "error: the full cases of 'dense' need a GPU: on a CPU they would take days. Add --quick"),
        ("dense --sparsity 50", "No such option"),
        ("sparse --quick --sparsity 50,...", "--sparsity must be comma-separated numbers"),
        ("sparse --quick --sparsity 100", "sparsity must be from 0 to below 100 per cent, got 100.0"),
    )


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_quick_sparse_in_both_directions(tmp_path):
    figures, results = tmp_path / "sparse.json", tmp_path / "results"
    options = ("--direction", "both", "--case", "video", "--peers", "math,bsa,portable", "--dtype", "fp32", "--log")
    options += ("--rounds", "1")
    result = run("sparse", "--quick", *options, "--json", str(figures), "--results", str(results))
    assert "sparse attention, forward, float32" in result.output
    assert "sparse attention, backward, float32" in result.output
    assert "BSA: nvidia-cudnn-frontend is not installed" in result.output
    assert "d32_h2k1_n256x1_b64_video_s50_float32: timing" in result.output
    rows = json.loads(figures.read_text())["rows"]
    assert len(rows) == 2 * 4 == len((results / "sparse.jsonl").read_text().splitlines())
    forward = [row for row in rows if row["implementation"] == "tilefold" and row["direction"] == "forward"]
    assert {row["status"] for row in forward} == {"ok"}
    assert {row["status"] for row in rows if row["implementation"] == "math"} == {"ok"}


@pytest.mark.no_poison
@pytest.mark.usefixtures("torch_cpu")
@pytest.mark.parametrize(
    ("command", "statuses"),
    [
        ("sparse --quick --case video --peers portable --direction both", ["ok", "refused"] * 2),
        ("suite attention --case d32_h4k1_n40x1_causal|d16_float16 --peers none", ["ok"] * 2),
        ("suite matrix --case m20_n33_k17_sharedb|r3_pad2|w8a8_int8 --peers none", ["ok", *["refused"] * 2]),
    ],
)
def test_without_the_interpreter_plain_torch_is_timed(command, statuses, tmp_path, monkeypatch):
    """What it does not serve is refused, and told what runs it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(command, "--rounds 1 --json", tmp_path / "x.json")
    assert "No GPU here: plain torch on the CPU." in result.output and "Times of plain torch" in result.output
    document = json.loads((tmp_path / "x.json").read_text())
    assert document["setting"]["backend"] == "cpu" and document["setting"]["device"].startswith("plain torch on ")
    assert [row["status"] for row in document["rows"]] == statuses
    assert all("TRITON_INTERPRET=1" in row["note"] for row in document["rows"] if row["status"] == "refused")


def test_each_family_is_a_command_with_examples():
    for family in ("dense", "sparse", "video"):
        result = run(family, "--help")
        assert f"tilefold bench {family}" in result.output.split("Examples")[1]
        assert max(map(len, result.output.splitlines())) <= 100
    unknown = run("paged", "--quick", code=2)
    assert "No such command 'paged'" in unknown.output


def test_refusals():
    peers = "cudnn, flash, fa4, fa4-det, flex, efficient, math, portable, non-deterministic, bsa, tk, fastvideo"
    refused(
        run,
        ("sparse --quick --direction up", "error: direction must be one of forward, backward, both, got 'up'"),
        ("dense --quick --peers fa3", f"error: --peers must be from tilefold, {peers} (or"),
        ("dense --quick --case d96", "error: case filter 'd96' matches none of"),
        ("dense --quick --dtype int4", "error: dtype must be bf16, fp16 or fp32"),
        ("dense --quick --json /nowhere/at/all.json", "error: --json must be a file that can be written"),
    )


@pytest.mark.interpreter
def test_a_wrong_output_of_tilefold_is_exit_code_1(monkeypatch):
    zeros = Peer(
        "tilefold", "tilefold", "", "torch", lambda inputs: Calls([lambda: inputs.q * 0]), lambda case, device: None
    )
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "tilefold", zeros)
    result = run("dense", "--quick", "--case", "d32,n100x2,causal", "--peers", "none", code=1)
    assert "tilefold: WRONG: max error" in result.output
