"""`tilefold video`: the demo's table, page and picture; what it refuses; a wrong result ends in exit code 1."""

import pytest

from cases.cli import command
from tilefold.cli import video_demo

pytest.importorskip("matplotlib", reason="the pictures need matplotlib")

run = command(columns=110, TERM="dumb")


def test_demo(tmp_path):
    result = run("video", "demo", "--quick", "--out", str(tmp_path / "made"))
    for policy in ("Pooled(sparsity=0.8)", "Antidiagonal(", "Gini(", "SlidingTile(", "Radial("):
        assert policy in result.output
    assert "WRONG" not in result.output
    assert max(map(len, result.output.split("A rendered video")[0].splitlines())) <= 110
    page = (tmp_path / "made" / "demo-video.html").read_text()
    assert page.count("<tr>") == 6 and "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")
    assert (tmp_path / "made" / "demo-video.png").read_bytes().startswith(b"\x89PNG")


def test_the_query_that_is_asked_for():
    """Its block is lit by a window, and in the table a sparsity of 0 leaves nothing out."""
    demo = video_demo.Demo("cpu", True, 0.0, 1, "7,0,11", 3)
    assert demo.tiling.grid == (8, 8, 12) and demo.block == 1 * 6 + 2
    names = [title.split("(")[0] for title, _ in demo.shown[1:]]
    window = demo.shown[1 + names.index("SlidingTile")][1]
    assert window[demo.block] == 1
    assert demo.rows[0][1:4] == ("0.0%", "100.0%", "0.000")
    assert demo.shown[0][1].max() == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--head", "4"], "head must be 0 to 3, got 4"),
        (["--query", "1,2"], "query must be T,H,W, three whole numbers, got '1,2'"),
        (["--query", "1,2,12"], "query must lie in the grid (8, 8, 12) of tokens, got (1, 2, 12)"),
        (["--out", "/dev/null/x"], "out must be a folder that can be written"),
    ],
)
def test_refusals(options, text):
    result = run("video", "demo", "--quick", *options, code=2)
    assert text in " ".join(result.output.split())


def test_a_wrong_result_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(video_demo.Demo, "_judged", lambda self, index, site: "WRONG")
    assert "WRONG" in run("video", "demo", "--quick", "--out", str(tmp_path), code=1).output
