"""The pictures in docs/assets: what the command makes is what is there, and the chart shows what the results say."""

import json
import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import bars
import charts
import mod_gallery
import pictures
import pytest

SVG = "{http://www.w3.org/2000/svg}"


@cache
def drawn() -> dict[str, str]:
    return pictures.pictures()


@pytest.mark.parametrize("name", [f"{name}.svg" for name in pictures.PICTURES | mod_gallery.PICTURES])
def test_what_is_kept_is_what_the_command_makes(name: str) -> None:
    made = drawn()[name]
    assert (pictures.ASSETS / name).read_text(encoding="utf-8") == made, "run: python scripts/docs/pictures.py"
    root = ElementTree.fromstring(made)
    named = {one.get("id") for tag in ("title", "desc") for one in root.iter(f"{SVG}{tag}") if one.text}
    assert named == set(root.get("aria-labelledby", "").split())
    assert any(str(one).endswith("-title") for one in named)
    width, height = (float(root.get(side, "0")) for side in ("width", "height"))
    for one in root.iter(f"{SVG}text"):
        assert one.get("fill") == "currentColor"
        assert 0 <= float(one.get("x", "-1")) <= width
        assert 0 <= float(one.get("y", "-1")) <= height


def results(folder: Path, *rows: tuple[str, str, str, float | None]) -> Path:
    """A results file of rows (date, case, implementation, TFLOP/s)."""
    lines = [
        {"date": date, "commit": date, "device": "GPU", "case": case, "implementation": name, "tflops": rate,
         "status": "ok" if rate else "refused"}
        for date, case, name, rate in rows
    ]  # fmt: skip
    (folder / "dense.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


GROUP = charts.Bars("made up", "dense", "case", (("tilefold", "tilefold"), ("fa4", "FA4")))


def test_a_group_is_of_the_newest_run_that_has_all_of_it(tmp_path: Path) -> None:
    old = [("1", "case", "tilefold", 10.0), ("1", "case", "fa4", 20.0)]
    new = [("2", "case", "tilefold", 11.0), ("2", "case", "fa4", 21.0)]
    lacks = [("3", "case", "tilefold", 12.0), ("3", "case", "fa4", None)]
    rates, row = charts.newest(GROUP, results(tmp_path, *new, *lacks, *old))
    assert rates == {"tilefold": 11.0, "fa4": 21.0}
    assert row["date"] == "2"
    with pytest.raises(ValueError, match="no run of case with tilefold, fa4"):
        charts.newest(GROUP, results(tmp_path, *lacks))


def test_bars_are_as_long_as_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "CHART", (GROUP,))
    made = charts.speed(results(tmp_path, ("1", "case", "tilefold", 300.0), ("1", "case", "fa4", 400.0)))
    long = [float(one) for one in re.findall(rf'width="([\d.]+)" height="{bars.HIGH}"', made)]
    assert long[0] / long[1] == pytest.approx(0.75, abs=1e-3)
    assert "tilefold 300, FA4 400" in made


def test_every_picture_stands_on_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (pictures.ROOT / "docs").rglob("*.md"))
    for name in pictures.PICTURES | mod_gallery.PICTURES:
        assert f"assets/{name}.svg)" in pages, name


def test_bars_beside_a_table_are_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("| | ms |\n|---|---:|\n| one | **2.5** |\n| two | 5 |\n\n| other | x |\n")
    rows = bars.table("page.md", "| | ms |")
    assert rows == [["one", "2.5"], ["two", "5"]]
    shown = [bars.Bar(name, float(value), f"{value} ms") for name, value in rows]
    made = bars.bars("A title", [("group", shown)], "below")
    long = [float(one) for one in re.findall(rf'width="([\d.]+)" height="{bars.HIGH}"', made)]
    assert long[0] / long[1] == pytest.approx(0.5, abs=1e-2)
    assert "group: one 2.5 ms, two 5 ms" in made
    with pytest.raises(ValueError, match="0 tables that begin with '| none |'"):
        bars.table("page.md", "| none |")


def test_a_mask_cuts_tiles_at_its_edge() -> None:
    kind = pictures.tiles(lambda i, j: i - 4 <= j <= i, 4)
    assert [[kind(i, j) for j in range(3)] for i in range(3)] == [
        ["edge", "", ""],
        ["edge", "edge", ""],
        ["", "edge", "edge"],
    ]
    assert pictures.tiles(lambda i, j: j <= i, 4)(2, 1) == "full"
