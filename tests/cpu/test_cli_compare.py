"""`tilefold compare`: implementations, files, reports, refusals."""

import json
import re

import numpy
import pytest
import torch
from typer.testing import CliRunner

from tilefold.bench.accuracy import difference_of
from tilefold.cli import compare
from tilefold.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "100", "NO_COLOR": "1"})


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_two_implementations_with_every_report(tmp_path):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "png", "html")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", path)]
    result = run(
        "tilefold", "fp64", "--family", "sparse", "--quick", "--direction", "backward", "--dtype", "fp32", *options
    )
    assert result.exit_code == 0, result.output
    document = json.loads(files["json"].read_text())
    assert [each["name"] for each in document["tensors"]] == ["dq", "dk", "dv"]
    for each in document["tensors"]:
        assert each["first"]["dtype"] == "float32"
        assert each["second"]["dtype"] == "float64"
        assert 0 < each["relative_l2"] < 1e-5
        assert len(each["first"]["sha256"]) == 64
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert "<svg" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)  # needs nothing else
    assert document["tensors"][0]["first"]["sha256"] in page


def test_labels_of_the_drawing_do_not_touch():
    """Of long names and differences in all decades: whatever is written stands apart."""
    pytest.importorskip("matplotlib")
    name = "model.language_model.layers.31.self_attn.attention_interface.query_projection.weight"
    a = torch.zeros(4, 512)
    b = 10.0 ** torch.linspace(-12, 3, 2048).view(4, 512)
    figure = compare._picture([difference_of(f"{i}.{name}", a, b, 1e-5, 1e-5) for i in range(3)]).figure
    figure.canvas.draw()
    texts = [axes.title for axes in figure.axes]
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            texts += [t for t, at in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True) if low <= at <= high]
    boxes = [t.get_window_extent() for t in texts]
    assert len(boxes) > 40
    touching = [(i, j) for i, one in enumerate(boxes) for j, other in enumerate(boxes[:i]) if one.overlaps(other)]
    assert not touching, [[texts[i].get_text() for i in pair] for pair in touching]


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_the_same_twice_has_the_same_bits():
    result = run("tilefold", "tilefold", "--quick", "--strict")
    assert result.exit_code == 0, result.output
    assert "same bits" in result.output


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_who_ignores_lists_is_said():
    result = run("tilefold", "math", "--family", "sparse", "--quick", "--strict")
    assert result.exit_code == 1
    assert "math computes every pair, whatever the lists say" in result.output


def test_files(tmp_path):
    a = torch.randn(4, 5)
    torch.save(a, tmp_path / "a.pt")
    numpy.save(tmp_path / "a.npy", a.numpy())
    torch.save({"x": a, "y": a}, tmp_path / "two.pt")
    result = run(tmp_path / "a.pt", tmp_path / "a.npy")
    assert result.exit_code == 0, result.output
    assert "same bits" in result.output
    assert run(tmp_path / "two.pt", tmp_path / "two.pt", "--strict").exit_code == 0
    result = run(tmp_path / "a.pt", tmp_path / "two.pt")
    assert result.exit_code == 2
    assert "holds tensor, but" in result.output


def test_refusals(tmp_path):
    (tmp_path / "text.pt").write_text("no tensor")
    torch.save({"x": 1}, tmp_path / "number.pt")
    torch.save(torch.zeros(2), tmp_path / "a.pt")
    for arguments, message in (
        (("tilefold", "nothing"), "an implementation must be a file or one of fp64, tilefold, cudnn"),
        (("tilefold", tmp_path / "a.pt"), "is a file, so the other one must be, too"),
        ((tmp_path / "text.pt", tmp_path / "text.pt"), "is no file of torch.save or .npy"),
        ((tmp_path / "number.pt", tmp_path / "number.pt"), "'x' is int"),
        (("tilefold", "math", "--direction", "both"), "direction must be forward or backward, got 'both'"),
        (("tilefold", "math", "--html", tmp_path / "no" / "where.html"), "--html must be a file that can be written"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())


@pytest.mark.interpreter
def test_what_cannot_take_the_case_says_why():
    result = run("tilefold", "cudnn", "--quick")
    assert result.exit_code == 2
    assert "cudnn cannot take" in result.output
    assert "needs a GPU" in result.output
