"""`tilefold roofline`: results read, roofs placed, a page that needs nothing else, refusals."""

import json
import re
from dataclasses import replace

import pytest

from cases.cli import command, refused
from cases.refusals import refuses
from tilefold.errors import ValueRangeError
from tilefold.plan import device_named
from tilefold.profiling import roofline, roofs

H200 = device_named("h200")
BENCH = {"case": "d128_n4096", "implementation": "tilefold", "dtype": "bfloat16"}
BENCH |= {"ms": 2.0, "flops": 10**12, "bytes": 10**9}


run = command("roofline", columns=200)


@pytest.fixture
def files(tmp_path):
    """Results of each kind: a line per case, a benchmark's document, a profile."""
    old = {**BENCH, "ms": 4.0}
    refused = {**BENCH, "case": "other", "ms": None}
    (tmp_path / "old.jsonl").write_text("\n".join(json.dumps(row) for row in (old, refused, BENCH)) + "\n")
    (tmp_path / "bench.json").write_text(json.dumps({"setting": {}, "rows": [old]}))
    point = {"name": "fold</script><b>", "flops": 1e12, "bytes": 1e8, "seconds": 3e-3}
    point |= {"verdict": "L2-to-SM path", "detail": "83.5 %"}
    profile = {"kind": "profile", "rows": [{"evidence": {}}], "points": [point]}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    return tmp_path


def test_results_of_every_kind(files):
    (point,) = roofline.read_run(files / "old.jsonl").points
    assert point.name == "d128_n4096 tilefold" and point.dtype == "bfloat16"
    assert point.intensity == 1000 and point.rate == pytest.approx(5e14), "the last line of a case is its newest"
    (point,) = roofline.read_run(files / "bench.json").points
    assert point.rate == pytest.approx(2.5e14)
    (point,) = roofline.read_run(files / "profile.json").points
    assert point.intensity == 1e4 and point.detail == "L2-to-SM path: 83.5 %"


def test_files_without_points(files, tmp_path):
    refuses(ValueRangeError, "no kernel whose name has 'absent'", roofline.read_run, files / "old.jsonl", "absent")
    (tmp_path / "not.json").write_text("{")
    refuses(ValueRangeError, "cannot be read as JSON", roofline.read_run, tmp_path / "not.json")
    (tmp_path / "empty.json").write_text("{}")
    refuses(ValueRangeError, "no kernel with FLOPs, bytes and a time", roofline.read_run, tmp_path / "empty.json")


def test_roofs_and_axes_hold_everything(files):
    picture = roofline.Picture(
        H200, False, (roofline.read_run(files / "profile.json"), roofline.read_run(files / "old.jsonl"))
    )
    assert picture.slopes == (("L2 to SM", 9.6e12), ("DRAM", 4.27e12))
    assert [name for name, _ in picture.ceilings] == ["bf16, fp16", "tf32", "fp32"]
    left, right, low, high = (10.0**each for each in picture.bounds)
    for run_ in picture.runs:
        for point in run_.points:
            assert left < point.intensity < right and low < point.rate < high
    assert high > picture.ceilings[0][1]
    alone = roofline.Picture(device_named("l4"), False, ())
    assert [name for name, _ in alone.slopes] == ["DRAM"] and alone.ceilings[0][0] == "bf16, fp16"
    assert alone.bounds[0] < alone.bounds[1] and alone.bounds[2] < alone.bounds[3]


def test_roofs_of_one_kind_come_from_one_source():
    """Of a device whose record has measured and stated rates: the stated ones, or those that were measured here, never both."""
    assert dict(H200.measured_flops) and dict(H200.measured_flops) != dict(H200.tensor_flops)
    assert roofline.Picture(H200, False, ()).rates == dict(H200.tensor_flops)
    here = replace(H200, measured_flops=(("float16", 7e14), ("int8", 13e14)))
    assert roofline.Picture(here, True, ()).ceilings == (("int8", 13e14), ("fp16", 7e14))


def test_rates_have_a_unit_that_shows_them():
    texts = [roofs.scaled(value, "B/s", 3) for value in (4.27e12, 1.2e11, 3.125e7, 2.5e4, 12.0)]
    assert texts == ["4.270 TB/s", "0.120 TB/s", "31.250 MB/s", "25.000 kB/s", "12.000 B/s"]


def test_labels_never_touch():
    assert roofline.spread([5.0, 4.9, 4.0], 0.2) == pytest.approx([5.0, 4.8, 4.0])


def test_the_page_needs_nothing_else_and_is_not_broken_by_names(files):
    page = roofline.to_html(roofline.Picture(H200, True, (roofline.read_run(files / "profile.json"),)))
    assert not re.search(r"""(src|href)\s*=|@import|url\((?!#inside)|https?://(?!www\.w3\.org/2000/svg")""", page)
    assert page.count("</script>") == 1 and "@DATA@" not in page and "@TITLE@" not in page
    data = json.loads(re.search(r"const data = (.*);\n", page).group(1))
    assert data["runs"][0]["points"][0]["name"] == "fold</script><b>"
    assert data["measured"] is True and data["rates"]["bfloat16"] == 760e12


def test_the_command(files, tmp_path):
    out = {kind: tmp_path / f"out.{kind}" for kind in ("html", "png")}
    result = run(files / "old.jsonl", files / "bench.json", "--device h200 --html", out["html"], "--png", out["png"])
    assert "old: 1 kernels" in result.output and "bench: 1 kernels" in result.output
    assert "roofs as recorded" in result.output
    assert out["png"].read_bytes().startswith(b"\x89PNG")
    assert '"name": "bench"' in out["html"].read_text()


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_measuring(tmp_path, monkeypatch):
    monkeypatch.setenv(roofs.FOLDER_VARIABLE, str(tmp_path / "kept"))
    result = run("--measure", "--json", tmp_path / "roofs.json")
    assert "L2 to SM" in result.output and result.output.count("launch") == 1 and "CUDA graph" not in result.output
    found = roofs.Roofs.from_json((tmp_path / "roofs.json").read_text())
    assert found.dram > 0 and roofs.scaled(found.dram_read, "B/s", 3) in result.output and " 0.000" not in result.output
    assert not (tmp_path / "kept").exists(), "what the interpreter does is no roof of a machine"


@pytest.mark.interpreter
def test_refusals(files):
    refused(
        run,
        ("--device h200 --measure", "--measure measures this machine"),
        ("--device h2000", "device must be one of h200"),
        ((), "no GPU here whose roofs could be drawn"),
        ((files / "absent.json", "--device h200"), "cannot be read as JSON"),
        (("--device h200 --json", files / "x.json"), "none were measured"),
        (("--device h200 --html", files / "no" / "x.html"), "--html must be a file that can be written"),
    )
