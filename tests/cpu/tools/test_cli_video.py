"""`tilefold video`: the demo's table, page and picture; what it refuses; a wrong result ends in exit code 1."""

import pytest

from cases.cli import command, refused
from tilefold.cli import video_demo
from torch_cpu import torch_cpu  # noqa: F401

pytest.importorskip("matplotlib", reason="the pictures need matplotlib")

pytestmark = pytest.mark.usefixtures("torch_cpu")
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
    demo = video_demo.Demo("cpu", True, video_demo.policies_at(0.0), 1, "7,0,11", 3)
    assert demo.tiling.grid == (8, 8, 12) and demo.block == 1 * 6 + 2
    names = [title.split("(")[0] for title, _ in demo.shown[1:]]
    window = demo.shown[1 + names.index("SlidingTile")][1]
    assert window[demo.block] == 1
    assert demo.rows[0][1:4] == ("0.0%", "100.0%", "0.000")
    assert demo.shown[0][1].max() == 1


def test_refusals():
    refused(
        run,
        ("video demo --quick --head 4", "head must be 0 to 3, got 4"),
        ("video demo --quick --query 1,2", "query must be T,H,W, three whole numbers, got '1,2'"),
        ("video demo --quick --query 1,2,12", "query must lie in the grid (8, 8, 12) of tokens, got (1, 2, 12)"),
        ("video demo --quick --out /dev/null/x", "out must be a folder that can be written"),
    )


def test_a_wrong_result_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.setattr(video_demo.Demo, "_judged", lambda self, index, site: "WRONG")
    assert "WRONG" in run("video", "demo", "--quick", "--out", str(tmp_path), code=1).output


# ---------------------------------------------------------------- calibrate, show


def test_calibrate_and_show(tmp_path):
    """The files, the table, what was planted beside what was found; the policy file is read again and drawn."""
    out = tmp_path / "made"
    result = run("video", "calibrate", "--quick", "--error", "0.2", "--out", str(out))
    assert "fitted" in result.output and "all heads Pooled(sparsity=" in result.output
    assert "meets a relative L2 error of 0.2" in result.said
    assert max(map(len, result.output.split("The fitted policy")[0].splitlines())) <= 110
    page = (out / "calibration.html").read_text()
    assert "<th>planted</th>" in page and page.count("<td>scattered</td>") == 3 and "<svg" in page
    assert (out / "calibration.png").read_bytes().startswith(b"\x89PNG")
    policy = str(out / "policy.json")
    result = run("video", "show", policy, "--quick", "--layer", "1", "--head", "3", "--out", str(tmp_path / "shown"))
    assert "WRONG" not in result.output and "head 3: " in result.output
    assert (tmp_path / "shown" / "demo-video.png").exists()
    (tmp_path / "policy.json").write_text('{"type": "ByLayer", "policies": {}}')
    refused(
        run,
        (("video show", policy, "--head 4"), "head must be 0 to 3, got 4"),
        (("video show", tmp_path / "none.json"), "policy must be a file that calibrate wrote"),
        (("video show", tmp_path / "policy.json", "--layer 2"), "layer 2 is dense"),
    )


MINE = """
from tilefold.video.planted import Planted, PlantedAdapter
import torch

def setup():
    return Planted((2, 4, 8), [["local", "global"]], 8), [{"hidden_states": torch.randn(1, 64, 8)}], PlantedAdapter()

def wrong():
    return 3
"""


def test_calibrate_a_model_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "calibrated_model.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    run("video", "calibrate", "calibrated_model:setup", "--cube", "1,4,4", "--error", "0.3")
    assert (tmp_path / "out" / "calibrate" / "policy.json").exists()
    calibrate = "video calibrate calibrated_model:"
    refused(
        run,
        (
            f"{calibrate}wrong",
            "calibrated_model:wrong must return (model, inputs) or (model, inputs, adapter), got int",
        ),
        (f"{calibrate}absent", "model must be module:function that can be imported"),
        (f"{calibrate}setup --cube 1,4", "cube must be T,H,W, three whole numbers, got '1,4'"),
        (f"{calibrate}setup --error 0", "error must be greater than 0, got 0.0"),
    )
