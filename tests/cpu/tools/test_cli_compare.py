"""`tilefold compare`: implementations, files, reports, refusals."""

import json
import re

import numpy
import pytest
import torch

from cases.cli import command, refused, reports
from tilefold import reference
from tilefold.bench.accuracy import difference_of
from tilefold.bench.compared import video_results
from tilefold.cli import compare
from tilefold.plan.sparse.video import VideoShape
from tilefold.sparse import SelectOptions

run = command("compare")


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_two_implementations_with_every_report(tmp_path):
    files, options = reports(tmp_path, "report", "json", "png", "html")
    run("tilefold", "fp64", "--family", "sparse", "--quick", "--direction", "backward", "--dtype", "fp32", *options)
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


def columns(output, corner):
    """Rows of the tables under a corner, by name, the columns of all its parts together."""
    found = {}
    lines = output.splitlines()
    for at, line in enumerate(lines):
        if line.split()[:1] == [corner] and lines[at + 1].startswith(("max abs", "shape")):
            for row in lines[at + 1 : at + 10]:
                name, *cells = re.split(r"\s{2,}", row.strip())
                found.setdefault(name, []).extend(cells)
    return found


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_several_seeds_and_the_rows_of_lse(tmp_path):
    file = tmp_path / "report.json"
    result = run("tilefold fp64 --quick --dtype fp32 --case d32,n40 --seed 3 --seeds 4 --json", file)
    document = json.loads(file.read_text())
    assert document["seeds"] == [3, 4, 5, 6]
    assert [each["name"] for each in document["tensors"]] == [
        f"{name}, seed {seed}" for seed in (3, 4, 5, 6) for name in ("out", "lse")
    ]
    for name in ("out", "lse"):
        each = [one for one in document["tensors"] if one["name"].startswith(name)]
        assert len({one["first"]["sha256"] for one in each}) == 4  # other inputs
        assert len({one["mean"] for one in each}) == 4
        shown = columns(result.output, name)
        assert len(shown["max abs"]) == 5
        assert float(shown["max abs"][-1]) == pytest.approx(max(one["max_abs"] for one in each), rel=1e-3)
        assert float(shown["mean"][-1]) == pytest.approx(sum(one["mean"] for one in each) / 4, rel=1e-2)
        assert int(shown["of"][-1]) == sum(one["elements"] for one in each)
        assert max(one["max_abs"] for one in each) < 1e-5
    assert document["tensors"][1]["first"]["shape"] == [1, 4, 40]
    assert max(map(len, result.output.splitlines())) <= 100


@pytest.mark.interpreter
@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("tilefold math --quick --case d64", 0, "no rows of lse: math tell none"),
        ("tilefold tilefold --quick --strict", 0, "same bits"),
        ("tilefold math --family sparse --quick --strict", 1, "math computes every pair, whatever the lists say"),
    ],
)
def test_what_has_to_be_known_is_said(arguments, code, said):
    assert said in run(arguments, code=code).output


@pytest.mark.interpreter
@pytest.mark.no_poison
@pytest.mark.parametrize("size", [(), ("--shape", "2,2,200,16", "--sparsity", 50)], ids=["usual", "odd"])
def test_the_whole_video_pipeline(tmp_path, size):
    file = tmp_path / "video.json"
    options = ("--family", "video", "--dtype", "fp32", "--json", file, *size)
    run("tilefold", "fp64", "--same-lists", *options)
    found = {each["name"]: each for each in json.loads(file.read_text())["tensors"]}
    gini = () if size else ("tau",)  # a sparsity asks for no mass
    assert list(found) == ["coarse", "scores", "gini", *gini, "mass", "kept", "fine", "lse", "out"]
    for name, each in found.items():
        assert each["max_abs"] < 2e-6 * (1 + each["second"]["norm"]), name
    run("tilefold", "fused", *options)
    (out,) = json.loads(file.read_text())["tensors"]
    assert out["name"] == "out" and out["relative_l2"] < 1e-6
    run("plain", "tilefold", "--strict", "--direction", "backward", "--atol", "1e-4", *options)
    found = {each["name"]: each for each in json.loads(file.read_text())["tensors"]}
    assert list(found) == ["dq", "dk", "dv", "dgate_coarse", "dgate_fine"]
    assert all(each["relative_l2"] < 1e-5 for each in found.values())


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_same_lists_are_the_first_ones(monkeypatch):
    """An oracle that would select other blocks attends the first one's when it is told to."""
    true = reference.sparse_video_attention

    def other(*tensors, select, **options):  # selects more blocks than it is asked to
        return true(*tensors, select=SelectOptions(method="top_k", top_k=3), **options)

    monkeypatch.setattr(reference, "sparse_video_attention", other)
    shape, select = VideoShape(1, 2, 2, 256, 16, "float32"), SelectOptions(method="top_k", top_k=1)
    for same in (True, False):
        first, second = video_results(("tilefold", "fp64"), shape, select, "cpu", 0, False, same)
        assert torch.equal(first["kept"], second["kept"]) == same
        assert torch.allclose(first["out"].double(), second["out"], atol=1e-5) == same


def test_files(tmp_path):
    a = torch.randn(4, 5)
    torch.save(a, tmp_path / "a.pt")
    numpy.save(tmp_path / "a.npy", a.numpy())
    torch.save({"x": a, "y": a}, tmp_path / "two.pt")
    result = run(tmp_path / "a.pt", tmp_path / "a.npy")
    assert "same bits" in result.output
    run(tmp_path / "two.pt", tmp_path / "two.pt", "--strict")
    result = run(tmp_path / "a.pt", tmp_path / "two.pt", code=2)
    assert "holds tensor, but" in result.output


def test_refusals(tmp_path):
    (tmp_path / "text.pt").write_text("no tensor")
    torch.save({"x": 1}, tmp_path / "number.pt")
    torch.save(torch.zeros(2), tmp_path / "a.pt")
    refused(
        run,
        ("tilefold nothing", "an implementation must be a file or one of fp64, tilefold, cudnn"),
        (("tilefold", tmp_path / "a.pt"), "is a file, so the other one must be, too"),
        ((tmp_path / "text.pt", tmp_path / "text.pt"), "is no file of torch.save or .npy"),
        ((tmp_path / "number.pt", tmp_path / "number.pt"), "'x' is int"),
        ("tilefold math --direction both", "direction must be forward or backward, got 'both'"),
        ("tilefold math --family none", "--family must be one of dense, sparse, video, got 'none'"),
        ("tilefold math --family video", "must be one of tilefold, fused, fp64, plain, got 'math'"),
        ("tilefold fp64 --sparsity 50", "--sparsity is for --family video, got 50.0 with --family dense"),
        ("tilefold fp64 --same-lists", "--same-lists is for --family video"),
        ("tilefold fp64 --family video --case d128", "--case is of attention; video has --shape"),
        ("fp64 tilefold --family video --same-lists", "--same-lists has fp64 or plain attend the lists"),
        ("fused fp64 --family video --direction backward", "direction must be forward for 'fused'"),
        ("fp64 plain --family video --shape 1,12,23296,128", "fp64 cannot take 1 x 12 x 23296 x 23296"),
        ((tmp_path / "a.pt", tmp_path / "a.pt", "--seeds 2"), "--seeds is for implementations"),
        (("tilefold math --html", tmp_path / "no" / "where.html"), "--html must be a file that can be written"),
    )


@pytest.mark.interpreter
def test_what_cannot_take_the_case_says_why():
    result = run("tilefold", "cudnn", "--quick", code=2)
    assert "cudnn cannot take" in result.output
    assert "needs a GPU" in result.output
