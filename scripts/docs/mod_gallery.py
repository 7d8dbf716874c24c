"""The gallery of mods, docs/reference/gallery.md: pictures of benchmarks/gallery.py, its code, and speeds of benchmarks/results.

`python scripts/docs/pictures.py` writes the page with the pictures."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from svg import EDGE, FULL, box, svg, text

from tilefold.bench.page import table_lines

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gallery import LIMITS, MODS, Mod  # noqa: E402

__all__ = ["PAGE", "PICTURES", "page"]

PAGE = ROOT / "docs" / "reference" / "gallery.md"
RESULTS = ROOT / "benchmarks" / "results" / "mods.jsonl"
TOKENS, HEADS, BLOCK, CELL = 64, 4, 8, 3
LEFT, TOP = 26, 10
SIDE = TOKENS * CELL


# --- pictures ---------------------------------------------------------------------------------------------------------------


def values(mod: Mod, score: torch.Tensor) -> torch.Tensor:
    """What a mod makes of scores that broadcast to [TOKENS, TOKENS], in head 0."""
    zero, index = torch.zeros((), dtype=torch.int64), torch.arange(TOKENS)
    args = (*mod.args(TOKENS, HEADS), TOKENS, TOKENS)
    made: torch.Tensor = mod.twin(score, zero, zero, index[:, None], index[None, :], args)
    return made


def rectangles(mask: torch.Tensor) -> str:
    """A path that covers where a mask [TOKENS, TOKENS] is true: equal runs of rows below each other are one rectangle."""
    parts: list[str] = []
    begun: dict[tuple[int, int], int] = {}  # (column, width): first row
    for i, row in enumerate([*mask.int().tolist(), [0] * TOKENS]):
        edges = [j for j in range(TOKENS + 1) if (row[j] if j < TOKENS else 0) != (row[j - 1] if j else 0)]
        runs = {(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)}
        for run in sorted(begun.keys() - runs):
            j, wide, first = *run, begun.pop(run)
            x, y, w = LEFT + j * CELL, TOP + first * CELL, wide * CELL
            parts.append(f"M{x} {y}h{w}v{(i - first) * CELL}h-{w}z")
        begun |= dict.fromkeys(runs - begun.keys(), i)
    return "".join(parts)


def frame(below: str) -> list[str]:
    """Blocks, what lies along the axes, and a line of text."""
    steps = range(0, SIDE + 1, BLOCK * CELL)
    lines = "".join(f"M{LEFT} {TOP + y}h{SIDE}" for y in steps) + "".join(f"M{LEFT + x} {TOP}v{SIDE}" for x in steps)
    middle = TOP + SIDE / 2
    return [
        f'<path d="{lines}" stroke="currentColor" stroke-opacity="0.25" stroke-width="0.7" fill="none"/>',
        text(LEFT + SIDE / 2, TOP + SIDE + 15, "keys", 12, "middle"),
        f'<g transform="rotate(-90 16 {middle:g})">{text(16, middle, "queries", 12, "middle")}</g>',
        text(LEFT, TOP + SIDE + 33, below, 12),
    ]


def picture(told: str, parts: list[str]) -> str:
    return svg(LEFT + SIDE + 10, TOP + SIDE + 42, told, parts)


def map_of(mod: Mod) -> str:
    """Who sees whom: tokens of whole blocks in one colour, of cut ones in the other."""
    seen = values(mod, torch.zeros(()))
    shares = seen.float().unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).mean((2, 3))
    kinds = {"whole": shares == 1, "cut": (shares > 0) & (shares < 1), "empty": shares == 0}
    said = ", ".join(f"{int(kind.sum())} {name}" for name, kind in kinds.items())
    parts = []
    for name, fill in (("whole", FULL), ("cut", EDGE)):
        inside = kinds[name].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        if path := rectangles(seen & inside):
            parts.append(f'<path d="{path}" fill="{fill}"/>')
    return picture(f"{mod.title}: of 64 blocks of 8 x 8 tokens {said}", [*parts, *frame(said)])


def heat(mod: Mod, levels: int = 5) -> str:
    """What is added to each score."""
    added = values(mod, torch.zeros(())).expand(TOKENS, TOKENS)
    least, most = float(added.min()), float(added.max())
    steps = (added / max(-least, most) * levels).round()
    parts = []
    for level in range(1, levels + 1):
        for sign, fill in ((1, FULL), (-1, EDGE)):
            if path := rectangles(steps == sign * level):
                parts.append(f'<path d="{path}" fill="{fill}" fill-opacity="{level / levels:g}"/>')
    said = f"added in head 0: {least:.1f} to {most:.1f}"
    return picture(f"{mod.title}: {said}", [*parts, *frame(said)])


def curve(mod: Mod) -> str:
    """A new score over the old one, where a mod does not look at places."""
    (cap,) = mod.args(TOKENS, HEADS)
    scores = torch.linspace(-3 * cap, 3 * cap, 61)
    made = values(mod, scores[:, None]).flatten()
    x, y = LEFT + SIDE * (scores / (6 * cap) + 0.5), TOP + SIDE * (0.5 - made / (2.4 * cap))
    line = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    middle_x, middle_y = LEFT + SIDE / 2, TOP + SIDE / 2
    same = f"M{middle_x - SIDE / 5:.1f} {TOP + SIDE}L{middle_x + SIDE / 5:.1f} {TOP}"  # 6 caps wide, 2.4 caps high
    axes = f"M{LEFT} {middle_y:g}h{SIDE}M{middle_x:g} {TOP}v{SIDE}"
    parts = [
        box(LEFT, TOP, SIDE, SIDE, "none", ' stroke="currentColor" stroke-opacity="0.25"'),
        f'<path d="{axes}" stroke="currentColor" stroke-opacity="0.25" fill="none"/>',
        f'<path d="{same}" stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="3 3" fill="none"/>',
        f'<path d="M{line}" stroke="{FULL}" stroke-width="2.4" fill="none"/>',
        text(LEFT + SIDE / 2, TOP + SIDE + 15, f"score: {-3 * cap:g} to {3 * cap:g}", 12, "middle"),
        text(LEFT, TOP + SIDE + 33, f"new score: at most {float(made.max()):.1f}", 12),
    ]
    return picture(f"{mod.title}: the new score over the old one", parts)


def draw(mod: Mod) -> str:
    if not mod.is_score:
        return map_of(mod)
    return curve(mod) if mod.name.startswith("softcap") else heat(mod)


PICTURES: dict[str, Callable[[], str]] = {f"gallery/{mod.name}": partial(draw, mod) for mod in MODS}


# --- speeds -----------------------------------------------------------------------------------------------------------------

SIZES = tuple((tokens, dim) for dim in (128, 64) for tokens in (1024, 4096, 16384))
Records = dict[tuple[str, int, int, str], dict[str, Any]]  # by mod, tokens, head dim and pass


def records(path: Path, device: str) -> Records:
    """The newest record of each row on such a device; none if nothing was measured."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = sorted((row for row in map(json.loads, lines) if device in row["device"]), key=lambda row: str(row["date"]))
    return {(row["mod"], row["tokens"], row["dim"], row["pass"]): row for row in rows}


def times(row: dict[str, Any] | None) -> dict[str, float]:
    """Milliseconds by name; none if our result was not the peer's, or there was none."""
    right = row is not None and row["error"].get("ours", 1.0) <= LIMITS[row["pass"]]
    return row["ms"] if row is not None and right else {}


def ratio(row: dict[str, Any] | None, other: str) -> str:
    """How much longer another took than ours; "-": unknown."""
    ms = times(row)
    return f"{ms[other] / ms['ours']:.2f}" if {"ours", other} <= ms.keys() else "-"


def pair(found: Records, name: str, size: tuple[int, int], other: str) -> str:
    """Forward / backward."""
    return " / ".join(ratio(found.get((name, *size, way)), other) for way in ("forward", "backward"))


def speed(found: Records, mod: Mod, way: str) -> str:
    """Of a pass at 4096 tokens, D=128."""
    row = found.get((mod.name, 4096, 128, way))
    if row is None or "ours" not in times(row):
        return "no figure"
    lines = [f"{row['gflop'] / row['ms']['ours']:.0f} TFLOP/s", f"{ratio(row, 'flex')} times FlexAttention"]
    return "<br>".join([*lines, f"{ratio(row, 'own')} times our own kernel"] if mod.own else lines)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(table_lines(head, rows))


def settings(found: Records) -> str:
    """Where it was measured: devices, days, commits, torch."""
    said = {tuple(str(row[key]) for key in ("device", "date", "commit", "torch")) for row in found.values()}
    shown = sorted({f"{device}, {date[:10]}, {commit}, torch {version}" for device, date, commit, version in said})
    return "; ".join(shown) or "not measured yet"


# --- the page ---------------------------------------------------------------------------------------------------------------

BEGIN = """# Gallery of mods

Functions to copy, with pictures and speeds. [What a mod may contain](mods.md). [How to write one](../guides/mod.md).

| pictures of masks | 64 tokens in blocks of 8 |
|---|---|
| blue | tokens of whole blocks, which are computed without a mask |
| orange | tokens of cut blocks |

| pictures of scores | in head 0 |
|---|---|
| blue | what is added |
| orange | what is taken away |

| speeds | H200, 4096 tokens, D=128; [others](#speed) |
|---|---|
| TFLOP/s | of the pairs that are seen |
| our own kernel | the same mask by a keyword; scores without a change |

```python
import torch
import triton
import triton.language as tl

import tilefold
from tilefold.device import approximate

torch.set_default_device("cuda")  # without a GPU: TRITON_INTERPRET=1, and not this line
q, k, v = (torch.randn(1, 256, 4, 64, dtype=torch.bfloat16) for _ in range(3))
place = torch.arange(256, dtype=torch.int32)
```
"""


def code(function: Any) -> str:
    """The source of a function of Triton's."""
    return inspect.getsource(function.fn).strip()


def section(mod: Mod, found: Records, known: set[str]) -> str:
    """A mod: title, source, picture, speed, code; and the functions that it calls, if none before has them."""
    helpers = [code(one) for one in mod.calls if code(one) not in known]
    known |= set(helpers)
    kind = "score" if mod.is_score else "mask"
    args = f", {kind}_args={mod.shown}" if mod.shown else ""
    call = f"out = tilefold.attention(q, k, v, {kind}_mod={mod.name}{args})"
    body = "\n\n\n".join([*helpers, code(mod.fn), call])
    image = f"![{mod.title}](../assets/gallery/{mod.name}.svg)"
    ways = ("forward", "backward")
    shown = table((f"{mod.title}: {mod.source}", *ways), [(image, *(speed(found, mod, way) for way in ways))])
    return f"## {mod.name}\n\n{shown}\n\n```python\n{body}\n```\n"


def page(path: Path = RESULTS) -> str:
    """The whole page, with the speeds in a file."""
    found, known = records(path, DEVICES[0]), set[str]()
    where = table(
        ("measured", "by"),
        [
            *((settings(each), MEASURED) for each in (records(path, device) for device in DEVICES)),
            ("-", "not measured, or FlexAttention does not compile there"),
            (
                "of an older version on the H100",
                "all but forward at D=64, 1024 tokens, and alibi, whose distances were integers; faster since:"
                " [forward at D=64, and at D=128, 1024](../performance/attention_hopper.md#changes-of-scores);"
                " [gradients of global tokens and sinks](../performance/attention_backward_hopper.md#changes-of-scores)",
            ),
        ],
    )
    chart = "![Speed beside FlexAttention, by mod](../assets/mods.svg)"
    speeds = [f"## Speed\n\n{where}\n", f"{chart}\n", *tables(path)]
    return "\n".join([BEGIN, *(section(mod, found, known) for mod in MODS), *speeds])


def tables(path: Path) -> Iterator[str]:
    """Speeds beside others', by device."""
    for title, other, names in (
        ("Times as fast as FlexAttention compiled, forward / backward:", "flex", [mod.name for mod in MODS]),
        ("Times as fast as our own kernel:", "own", [mod.name for mod in MODS if mod.own]),
        ("Times as fast as SDPA:", "sdpa", TENSORS),
    ):
        yield f"{title}\n"
        for device in DEVICES:
            found = records(path, device)
            rows = [(name, *(pair(found, name, size, other) for size in SIZES)) for name in names]
            yield table((f"{device}: mod, by D and tokens", *(f"D={dim}, {n}" for n, dim in SIZES)), rows) + "\n"


DEVICES = ("H200", "H100")
MEASURED = "`benchmarks/mods.py`, bfloat16, 16384 tokens in all, 16 heads"
TENSORS = ("boolean mask", "boolean mask of documents")
