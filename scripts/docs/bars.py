"""Bars beside tables: drawn from the rows of benchmarks/results, or from the very table of the docs that they stand beside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svg import OTHERS, OURS, OURS_TOO, box, svg, text

__all__ = ["PICTURES", "Bar", "bars", "read_rows", "table"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
LEFT, ROOM, HIGH, STEP = 142, 162, 15, 19


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, how long it is, what stands at its end, its colour."""

    name: str
    value: float
    said: str
    fill: str = OTHERS


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results, an object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(page: str, begins: str) -> list[list[str]]:
    """The cells of the rows of a page's table whose header begins so, without emphasis.  ValueError: there is no such table."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    found = [n for n, line in enumerate(lines) if line.startswith(begins)]
    if len(found) != 1:
        raise ValueError(f"docs/{page} has {len(found)} tables that begin with {begins!r}, expected one")
    rows = []
    for line in lines[found[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
    return rows


def bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]], below: str, together: bool = True) -> str:
    """Groups of bars.  together: one scale for all groups, else each group's longest bar has all the room."""
    most = max(bar.value for _, group in groups for bar in group)
    parts, told = [text(12, 26, title, 16, weight="600")], []
    y = 36.0
    for name, group in groups:
        y += 20 if name else 6
        if name:
            parts.append(text(12, y, name, 14, weight="600"))
            y += 8
        longest = most if together else max(bar.value for bar in group)
        for bar in group:
            long = round(ROOM * bar.value / longest, 1)
            parts.append(text(LEFT - 8, y + 12, bar.name, 13, "end"))
            parts.append(box(LEFT, y, long, HIGH, bar.fill, ' rx="2"'))
            parts.append(text(LEFT + long + 6, y + 12, bar.said, 13, weight="600" if bar.fill == OURS else ""))
            y += STEP
        told.append((f"{name}: " if name else "") + ", ".join(f"{bar.name} {bar.said}" for bar in group))
    for line in below.split("\n"):
        y += 18
        parts.append(text(12, y, line, 12))
    return svg(396, int(y) + 12, title, parts, "; ".join(told))


def video_whole() -> str:
    """One forward pass of whole video transformers."""
    rows = [row for row in read_rows(RESULTS / "video_transformer.jsonl") if "H200" in row["device"]]
    models = {"wan-1.3b": "Wan 2.1, 1.3B, 480p", "wan-14b": "Wan 2.1, 14B, 720p", "hunyuan": "HunyuanVideo, 720p"}
    names = {"SDPA": "SDPA", "FA4": "FA4", "ours": "tilefold, dense", "70% left out": "70 % left out",
             "80% left out": "80 % left out", "90% left out": "90 % left out"}  # fmt: skip
    groups = []
    for model, title in models.items():
        took = {row["attention"]: row["whole s"] for row in rows if row["model"] == model and "whole s" in row}
        fill = {"SDPA": OTHERS, "FA4": OTHERS, "ours": OURS}
        groups.append((title, [Bar(said, took[way], f"{took[way]:.2f} s", fill.get(way, OURS_TOO))
                               for way, said in names.items()]))  # fmt: skip
    (device,) = {row["device"] for row in rows}
    return bars("One forward pass: shorter is faster", groups, f"{device}, bfloat16.", together=False)


def mods() -> str:
    """tilefold's speed beside compiled FlexAttention, by mod."""
    rows = [row for row in read_rows(RESULTS / "mods.jsonl") if "H200" in row["device"]]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if (row["tokens"], row["dim"]) == (4096, 128) and {"flex", "ours"} <= row["ms"].keys():
            found.setdefault(row["mod"], {})[row["pass"]] = row
    groups, shown = [], [pair for pair in found.items() if pair[1].keys() == {"forward", "backward"}]
    for mod, passes in shown:
        times = {way: passes[way]["ms"]["flex"] / passes[way]["ms"]["ours"] for way in ("forward", "backward")}
        groups.append(Bar(mod, times["forward"], f"{times['forward']:.2f}", OURS))
        groups.append(Bar("its gradients", times["backward"], f"{times['backward']:.2f}", OURS_TOO))
    (device,) = {row["device"] for _, passes in shown for row in passes.values()}
    said = f"Above 1 tilefold is faster.\nD=128, 4096 tokens x 4, bfloat16, {device}."
    return bars("Times as fast as FlexAttention", [("", groups)], said)


def figures(cell: str) -> list[float]:
    """The numbers of a cell."""
    return [float(one) for one in re.findall(r"\d+(?:\.\d+)?", cell)]


def pipeline() -> str:
    """Sparse video attention beside dense attention, from its table."""
    rows = {row[0]: row[1] for row in table("explanation/video.md", "| stage | ms |")}
    groups = []
    for title, ours, dense in (
        ("Forward", "whole, forward", "dense cuDNN, FA4"),
        ("Forward and backward", "whole, forward and backward", "dense cuDNN, FA4, forward and backward"),
    ):
        cudnn, fa4 = figures(rows[dense])
        mine = figures(rows[ours])[-1]
        group = [Bar("sparse, tilefold", mine, f"{rows[ours]} ms", OURS)]
        groups.append((title, [*group, Bar("dense, FA4", fa4, f"{fa4} ms"), Bar("dense, cuDNN", cudnn, f"{cudnn} ms")]))
    return bars("Sparse and dense attention of a video", groups, "23296 tokens, 65.1 % left out, H200, bfloat16.")


def ladder() -> str:
    """How far the rungs of the ladder get, from their table."""
    rows = table("tutorials/ladder/README.md", "| | 512 | 1024 |")
    groups = []
    for title, column in (("1024 tokens", 2), ("8192 tokens", 5)):
        group = [
            Bar(row[0], float(row[column]), row[column],
                OURS if row[0] == "tilefold" else OTHERS if row[0].startswith("torch") else OURS_TOO)
            for row in rows
        ]  # fmt: skip
        groups.append((title, group))
    return bars("Rungs of the ladder, TFLOP/s", groups, "bfloat16, 16 heads of 128, H200.")


def roofline() -> str:
    """The least time of each rung, what its model predicts and what was measured, from their table."""
    groups = []
    for rung, *_, least, by, predicted, measured in table("tutorials/ladder/README.md", "| N=4096 | GFLOP |"):
        times = (("at least", least, OTHERS), ("predicted", predicted, OURS_TOO), ("measured", measured, OURS))
        groups.append((f"{rung}: {by}", [Bar(name, float(one), f"{one} ms", fill) for name, one, fill in times]))
    below = "4096 tokens, 16 heads of 128, bfloat16, H200.\nEach group has its own scale."
    return bars("Rungs of the ladder, ms", groups, below, together=False)


def errors() -> str:
    """Errors of a model's weights by bits and schemes, from their table."""
    groups, schemes = [], (("symmetric", OTHERS), ("asymmetric", OURS_TOO), ("refined", OURS))
    for weights, bits, *values in table("explanation/quantisation.md", "| weights | bits | symmetric"):
        if weights == "MiniLM":
            drawn = zip(schemes, values, strict=True)
            groups.append((f"{bits} bits", [Bar(name, float(one), f"{one} %", fill) for (name, fill), one in drawn]))
    return bars("Errors of MiniLM's first layer", groups, "Relative, groups of 128, scales in bfloat16.")


def one_side() -> str:
    """Errors of weights on one side of 0 with whole and with floating zero points, from their table."""
    groups = []
    for weights, bits, whole, auto, _ in table("explanation/quantisation.md", "| weights | bits | integer"):
        pair = [Bar("integer", float(whole), f"{whole} %"), Bar("auto", float(auto), f"{auto} %", OURS)]
        groups.append((f"{weights}, {bits} bits", pair))
    below = "Relative, groups of 128, scales in bfloat16.\nEach pair of bars has its own scale."
    return bars("Errors by zero points", groups, below, together=False)


def interpreted() -> str:
    """Calls in Triton's interpreter without and with `patch_interpreter`, from their table."""
    groups = []
    for what, without, patched in table("guides/debugging.md", "| 200 tokens, 2 heads"):
        name = what.replace("`", "").split(", all")[0].replace("the same", "attention, causal,")
        pair = [Bar("without", float(without), f"{without} ms"), Bar("with", float(patched), f"{patched} ms", OURS)]
        groups.append((name, pair))
    return bars("patch_interpreter, ms: shorter is faster", groups, "200 tokens, 2 heads, D=32, fp32, two cores.")


def cookbook() -> str:
    """What the steps of the cookbook take at least, from its table."""
    rows = table("guides/cookbook_wan.md", "| step | forward passes |")
    names = ("a dense sample", "a sparse one", "calibration")
    group = [Bar(name, float(row[2]), f"{row[2]} s", OTHERS if name == names[0] else OURS)
             for name, row in zip(names, rows, strict=True) if row[0].startswith(name)]  # fmt: skip
    return bars("Steps of the cookbook, seconds at least", [("", group)], "Computed for one H100.")


def served() -> str:
    """Pipelines, decoding steps and a model in few bits beside their peers, from the overview's table."""
    groups, above = [], ""
    for what, ours, peers in table("performance/overview.md", "| | tilefold | peers |"):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", what)
        title = title.replace("the same, with the backward pass", f"{above}, with gradients")
        title = re.sub(r", (?:23296 tokens|65 % left out|batch 1|32 heads on 8|D=128)", "", title)
        above, unit = title, ours.split()[-1]
        title, *formats = (part.strip().removeprefix("in ") for part in title.split(";"))
        names = ["tilefold", *(f"tilefold, {one}" for one in formats)]
        group = [
            (name, value, OURS_TOO if n else OURS)
            for n, (name, value) in enumerate(zip(names, figures(ours), strict=True))
        ]
        named = re.findall(r"([A-Za-z]\w*) (\d[\d.]*)", peers) or zip(("cuDNN", "FA4"), peers.split(", "), strict=True)
        group += [(name, figures(value)[0], OTHERS) for name, value in named]
        times = [
            Bar(name, 1 / value if "/s" in unit else value, f"{value:g} {unit}", fill) for name, value, fill in group
        ]
        groups.append((title[0].upper() + title[1:], times))
    return bars("Pipelines, decoding: shorter is faster", groups, "One H200.", together=False)


PICTURES: dict[str, Callable[[], str]] = {
    "video_whole": video_whole,
    "mods": mods,
    "pipeline": pipeline,
    "ladder": ladder,
    "roofline": roofline,
    "errors": errors,
    "one_side": one_side,
    "served": served,
    "interpreted": interpreted,
    "cookbook": cookbook,
}
