"""The gallery of mods: the page is what the command makes, its code runs, and its speeds are those of the results."""

import json
import re
from pathlib import Path

import mod_gallery
import pytest
import torch
from gallery import MODS, Mod
from mods import plain

import tilefold
from sources import run_source

TEXT = mod_gallery.PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_command_makes() -> None:
    assert mod_gallery.page() == TEXT, "run: python scripts/docs/pictures.py"
    pictures = mod_gallery.ROOT / "docs" / "assets" / "gallery"
    assert {path.stem for path in pictures.iterdir()} == {mod.name for mod in MODS}
    assert sum(path.stat().st_size for path in pictures.iterdir()) < 300_000


@pytest.mark.interpreter
def test_its_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example attends as the mod does in torch, with the arguments that it shows."""
    calls: list[dict] = []
    attend = tilefold.attention

    def recorded(*args, **options):
        calls.append(options)
        return attend(*args, **options)

    monkeypatch.setattr(tilefold, "attention", recorded)
    begin, *examples = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(examples) == len(MODS)
    names: dict = {}
    run_source(re.sub(r"^torch.set_default_device.*$", "", begin, flags=re.MULTILINE), names)
    q, k, v = (names[name].float() for name in "qkv")
    for mod, example in zip(MODS, examples, strict=True):
        run_source(example, names)
        kind = "score" if mod.is_score else "mask"
        args = calls.pop().get(f"{kind}_args", ())
        exact = plain(q, k, v, {f"{kind}_mod": mod.in_torch(args, 256)})
        error = (names["out"].float() - exact).norm() / exact.norm()
        assert error < 1e-2, (mod.name, error)  # bfloat16
        seen = 1.0 if mod.is_score else shown(mod, args)
        assert 0.03 < seen < 0.7 or mod.is_score, (mod.name, seen)
    assert not calls


def shown(mod: Mod, args: tuple) -> float:
    zero, index = torch.zeros((), dtype=torch.int64), torch.arange(256)
    return float(mod.in_torch(args, 256)(zero, zero, index[:, None], index).float().mean())


def row(mod: str, way: str, ours: float, date: str = "2026-11-27", error: float = 1e-3, **ms: float) -> str:
    made = {"mod": mod, "tokens": 4096, "dim": 128, "pass": way, "ms": {"ours": ours, **ms}, "gflop": 1000.0,
            "error": {"ours": error}, "device": "H200", "date": date, "commit": "abc", "torch": "2"}  # fmt: skip
    return json.dumps(made) + "\n"


def test_speeds_are_those_of_the_results(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        row("causal", "forward", 2.0, flex=3.0, own=1.9),
        row("causal", "forward", 4.0, "2026-11-26", flex=4.0),  # older: not shown
        row("causal", "backward", 5.0, error=0.5, flex=9.0, own=9.0),  # wrong: no ratio
        row("tree", "forward", 1.0),
        row("boolean mask", "backward", 1.0, sdpa=1.25),
    ]
    path.write_text("".join(rows))
    made = mod_gallery.page(path)
    assert "| 500 TFLOP/s<br>1.50 times FlexAttention<br>0.95 times our own kernel | no figure" in made
    assert "| causal | - / - | 1.50 / - | - / -" in made
    assert "1000 TFLOP/s<br>- times FlexAttention | no figure" in made
    assert "| causal | - / - | 0.95 / - | - / -" in made
    assert "| boolean mask | - / - | - / 1.25 |" in made
    assert "| H200, 2026-11-27, abc, torch 2 |" in made
    path.write_text("")
    assert "| not measured yet |" in mod_gallery.page(path)


def test_a_picture_covers_what_is_seen() -> None:
    """Rectangles of a random mask have its area, and each token is in one."""
    mask = torch.rand(64, 64) < 0.3
    covered = torch.zeros(64, 64, dtype=torch.int)
    for x, y, wide, high in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", mod_gallery.rectangles(mask)):
        i, j = (int(y) - mod_gallery.TOP) // 3, (int(x) - mod_gallery.LEFT) // 3
        covered[i : i + int(high) // 3, j : j + int(wide) // 3] += 1
    assert torch.equal(covered, mask.int())
    causal = mod_gallery.map_of(MODS[0])
    assert "28 whole, 8 cut, 28 empty" in causal
    assert "<title" in causal
