"""The pictures of the README and of the docs, as SVG in docs/assets: the charts of speed, the fold, maps, schedules, layouts.

    python scripts/docs/pictures.py            # writes them and the gallery of mods; speeds from benchmarks/results

Equal input gives equal bytes.  A picture stands in the colours of its reader, light or dark; inside a page of the site it takes
those of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import bars
import charts
from svg import EDGE, FULL, OTHERS, OURS_TOO, arrow, box, svg, text

__all__ = ["PICTURES", "pictures"]

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs" / "assets"


# --- the fold ---------------------------------------------------------------------------------------------------------------


def fold() -> str:
    """Tiles of keys enter the state one after the other."""
    parts = []

    def stage(x: float, name: str, below: str, fill: str) -> None:
        parts.append(box(x, 92, 76, 40, fill, ' fill-opacity="0.22" stroke="currentColor" rx="6"'))
        parts.append(text(x + 38, 117, name, 15, "middle", "600"))
        parts.append(text(x + 38, 151, below, 12, "middle", mono=True))

    stage(12, "empty", "(0, -inf, 0)", OTHERS)
    for x, name in ((116, "tile 0"), (254, "tile n-1")):
        parts.append(box(x, 12, 76, 44, EDGE, ' fill-opacity="0.3" stroke="currentColor" rx="4"'))
        parts.append(text(x + 38, 31, name, 13, "middle"))
        parts.append(text(x + 38, 48, "K, V", 13, "middle", mono=True))
        parts.append(arrow(x + 38, 56, x + 38, 90))
        stage(x, "step", "(acc, m, l)", FULL)
    parts.append(text(216, 117, "…", 17, "middle"))
    stage(358, "finish", "out, lse", OTHERS)
    for x, to in ((88, 114), (192, 205), (227, 252), (330, 356)):
        parts.append(arrow(x, 112, to, 112))
    told = "The fold: an empty state takes in one tile of keys and values after the other, then is finished"
    return svg(446, 166, told, parts)


def split() -> str:
    """Parts of the keys are folded apart, and their states merged."""
    parts = []
    for turn, state in enumerate(("(out, lse)", "(out, lse)", "(out, lse)", "(0, -inf)")):
        x = 14 + 106 * turn
        parts.append(box(x, 12, 98, 30, EDGE, ' fill-opacity="0.3" stroke="currentColor" rx="4"'))
        parts.append(text(x + 49, 32, f"keys, part {turn}", 13, "middle"))
        parts.append(arrow(x + 49, 42, x + 49, 72))
        parts.append(box(x + 9, 74, 80, 34, FULL, ' fill-opacity="0.22" stroke="currentColor" rx="6"'))
        parts.append(text(x + 49, 96, "fold", 15, "middle", "600"))
        parts.append(text(x + 49, 126, state, 12, "middle", mono=True))
        parts.append(arrow(x + 49, 134, x + 49, 156))
    parts.append(box(14, 158, 416, 34, OTHERS, ' fill-opacity="0.22" stroke="currentColor" rx="6"'))
    parts.append(text(222, 180, "merge", 15, "middle", "600"))
    parts.append(text(222, 210, "out, lse of all keys; the last part is empty and changes nothing", 12, "middle"))
    return svg(444, 224, "Parts of the keys are folded apart at the same time, then their results are merged", parts)


# --- maps of blocks ---------------------------------------------------------------------------------------------------------

Map = Callable[[int, int], str]  # (query tile, key tile) -> "full", "edge" or ""


def tiles(sees: Callable[[int, int], bool], size: int) -> Map:
    """What of a mask over single tokens falls into a tile: all of it, some, nothing."""

    def kind(i: int, j: int) -> str:
        seen = [sees(i * size + a, j * size + b) for a, b in product(range(size), range(size))]
        return "full" if all(seen) else "edge" if any(seen) else ""

    return kind


def grid(x: float, y: float, count: int, cell: int, kind: Map) -> Iterator[str]:
    """A map of count x count tiles: one path a kind."""
    places: dict[str, list[str]] = {"full": [], "edge": [], "": []}
    for i, j in product(range(count), range(count)):
        places[kind(i, j)].append(f"M{x + j * cell:g} {y + i * cell:g}h{cell}v{cell}h-{cell}z")
    for which, fill in (("", "none"), ("full", FULL), ("edge", EDGE)):
        if places[which]:
            line = 'stroke="currentColor" stroke-opacity="0.3" stroke-width="0.6"'
            yield f'<path d="{"".join(places[which])}" fill="{fill}" {line}/>'


def maps(named: Sequence[tuple[str, Map]], count: int, legend: list[tuple[str, str]], told: str) -> str:
    """Maps beside one another, queries down and keys to the right, and what their colours mean."""
    cell, gap = 10, 16
    side = cell * count
    width = 24 + len(named) * (side + gap)
    parts = []
    for turn, (name, kind) in enumerate(named):
        x = 34 + turn * (side + gap)
        parts.append(text(x + side / 2, 22, name, 14, "middle", "600"))
        parts += grid(x, 34, count, cell, kind)
        parts.append(text(x + side / 2, 34 + side + 17, "keys", 12, "middle"))
    parts.append(
        f'<g transform="rotate(-90 22 {34 + side / 2:g})">{text(22, 34 + side / 2, "queries", 12, "middle")}</g>'
    )
    left = 34.0
    for fill, said in legend:
        parts.append(box(left, 34 + side + 30, 13, 13, fill, ' stroke="currentColor" stroke-opacity="0.4"'))
        parts.append(text(left + 19, 34 + side + 41, said, 13))
        left += 38 + 6.2 * len(said)
    return svg(width, 34 + side + 58, told, parts)


def masks() -> str:
    """Which tiles a mask leaves whole, cuts, or drops."""
    size = 4
    named = [
        ("full", tiles(lambda i, j: True, size)),
        ("causal", tiles(lambda i, j: j <= i, size)),
        ("window", tiles(lambda i, j: i - 12 <= j <= i, size)),
    ]
    legend = [(FULL, "interior: no mask"), (EDGE, "edge: masked"), ("none", "not visited")]
    return maps(named, 12, legend, "Tiles that a full, a causal and a window mask leave whole, cut, or never visit")


def listed(count: int = 12) -> str:
    """Lists of blocks of keys, one list a block of queries."""

    def kept(i: int, many: int) -> list[int]:
        """That many keys, in an order that looks like none."""
        return sorted(range(count), key=lambda j: (1103515245 * ((i * 37 + j * 101 + 11) ** 3 % 65521)) % 2**31)[:many]

    def drawn(i: int, j: int) -> str:
        return "full" if j in kept(i, 3) else ""

    def near(i: int, j: int) -> str:
        """Cubes of a grid of 3 x 2 x 2 that touch with a face."""
        apart = [abs(a - b) for a, b in zip((i // 4, i // 2 % 2, i % 2), (j // 4, j // 2 % 2, j % 2), strict=True)]
        return "full" if sum(apart) <= 1 else ""

    def uneven(i: int, j: int) -> str:
        return "full" if j in kept(i + 50, (1, 5, 2, 9, 1, 3, 12, 2, 1, 6, 2, 4)[i]) else ""

    named = [("equal counts", drawn), ("video", near), ("uneven counts", uneven)]
    legend = [(FULL, "listed: computed"), ("none", "not listed: not read, not computed")]
    return maps(named, count, legend, "Lists of blocks: which blocks of keys each block of queries attends")


def combined() -> str:
    """Masks as values, by their own definition."""
    torch, masks = _library()
    size, count = 4, 12
    tokens = size * count
    ends = torch.tensor([0, 20, tokens], dtype=torch.int32)
    values = [
        ("prefix", masks.prefix(12)),
        ("causal & docs", masks.causal() & masks.documents(ends)),
        ("window & docs", masks.window(11, 0) & masks.documents(ends)),
    ]

    def kind(mask: Any) -> Map:
        seen = mask.dense(1, 1, tokens, tokens)[0, 0].tolist()
        return tiles(lambda i, j: seen[i][j], size)

    named = [(name, kind(mask)) for name, mask in values]
    legend = [(FULL, "interior: no mask"), (EDGE, "edge: masked"), ("none", "hidden")]
    return maps(named, count, legend, "Tiles of a prefix, of causal documents, and of a window inside documents")


def _library() -> tuple[Any, Any]:
    """torch and tilefold's masks, for pictures that show what the library says."""
    import torch

    from tilefold import masks

    return torch, masks


# --- who waits for whom -----------------------------------------------------------------------------------------------------


def roles() -> str:
    """Producer, tensor cores and two consumers over time: a model of the main loop, S and O two steps each, a softmax four."""
    unit, left, row, rounds = 25, 128, 46, 3
    names = ("producer: TMA", "tensor cores", "consumer 0", "consumer 1")
    parts = [text(left - 10, 40 + row * n, name, 13, "end", "600") for n, name in enumerate(names)]

    def bar(line: int, begin: float, long: float, said: str, fill: str) -> None:
        x, y = left + begin * unit, 22 + row * line
        parts.append(box(x + 1, y, long * unit - 2, 28, fill, ' fill-opacity="0.45" stroke="currentColor" rx="3"'))
        parts.append(text(x + long * unit / 2, y + 18, said, 11, "middle"))

    fills = (FULL, EDGE)
    for j in range(rounds + 1):
        bar(0, 2.0 * j, 2, f"K{j + 1} V{j}", OTHERS)
    free, ready = 2.0, [2.0, 2.0]  # when the tensor cores, and each consumer, can begin
    for j in range(rounds):
        for who in (0, 1):
            begin = max(free, ready[who])
            bar(1, begin, 2, f"S{j + 1}", fills[who])
            bar(1, begin + 2, 2, f"O{j}", fills[who])
            bar(2 + who, begin + 2, 4, f"softmax {j + 1}", fills[who])
            x = left + (begin + 2) * unit
            parts.append(arrow(x, 50 + row, x, 22 + row * (2 + who)))
            free, ready[who] = begin + 4, begin + 6
    bottom = 22 + row * 4 + 6
    parts.append(arrow(left, bottom, left + (free + 2) * unit, bottom))
    parts.append(text(left + (free + 2) * unit, bottom + 18, "time", 12, "end"))
    parts.append(text(16, bottom + 20, "An arrow: the softmax waits for its scores.", 12))
    parts.append(text(16, bottom + 38, "The tensor cores go on with the other consumer's products.", 12))
    told = "Who waits for whom: the producer loads ahead; two consumers issue products in turns, each one's softmax beside them"
    return svg(int(left + (free + 2) * unit + 16), bottom + 50, told, parts)


# --- layouts ----------------------------------------------------------------------------------------------------------------

SHADES = (FULL, EDGE, OURS_TOO, OTHERS)


def pages() -> str:
    """Three sequences in a paged cache, two of which share a prefix: their tables and the pool, as the cache itself has them."""
    torch, _ = _library()
    from tilefold import PagedKVCache

    size = 4
    cache = PagedKVCache(
        1, 1, 16, num_pages=9, page_size=size, max_sequences=3, max_tokens=24, dtype=torch.float32, device="cpu"
    )
    first, second = cache.add(), cache.add()
    cache.batch([first, second], [6, 9])
    cache.batch([first], [5])
    third = cache.share_prefix(second, 8)
    cache.batch([third], [3])
    sequences = (first, second, third)
    parts = [text(16, 24, "block table", 13, weight="600"), text(16, 178, "pool: pages of 4 rows", 13, weight="600")]
    owners: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    for n, one in enumerate(sequences):
        y = 36 + 38 * n
        parts.append(text(16, y + 19, f"sequence {n}: {cache.length(one)} rows", 13))
        for place, page in enumerate(cache.pages(one)):
            x = 160 + 44 * place
            parts.append(box(x, y, 38, 28, SHADES[n], ' fill-opacity="0.45" stroke="currentColor" rx="3"'))
            parts.append(text(x + 19, y + 19, str(page), 13, "middle", mono=True))
            owners.setdefault(page, []).append(n)
            rows[page] = max(rows.get(page, 0), min(size, cache.length(one) - place * size))
    for page in range(cache.num_pages):
        x = 16 + 50 * page
        for row in range(size):
            mine = owners.get(page, []) if row < rows.get(page, 0) else []
            for n, who in enumerate(mine):
                wide = 42 / len(mine)
                parts.append(box(x + n * wide, 190 + 14 * row, wide, 14, SHADES[who], ' fill-opacity="0.45"'))
            parts.append(box(x, 190 + 14 * row, 42, 14, "none", ' stroke="currentColor" stroke-opacity="0.5"'))
        parts.append(text(x + 21, 264, str(page), 13, "middle", mono=True))
    parts.append(text(16, 288, "Two colours: a page that two sequences share. White: rows without a token.", 12))
    told = (
        "Three sequences in pages: the table of each, and where its rows lie; two of them share the pages of a prefix"
    )
    return svg(482, 302, told, parts)


def packed() -> str:
    """Which column each field of a lane holds, in 4 bits, found by packing one column at a time."""
    torch, _ = _library()
    from tilefold.quant.packing import pack

    words, _high = pack(torch.eye(128, dtype=torch.uint8) * 15, 4)  # row c has a code in column c alone
    lanes = words.view(torch.int16).reshape(128, 32).int() & 0xFFFF
    place = {}
    for column, row in enumerate(lanes.tolist()):
        ((lane, value),) = ((n, one) for n, one in enumerate(row) if one)
        place[next(f for f in range(4) if value >> 4 * f & 15), lane] = column
    parts = [text(16, 26, "a row of a block: 128 columns in 32 lanes of 16 bits", 13, weight="600")]
    shown = (0, 1, 2, 3, None, 30, 31)
    for n, number in enumerate(shown):
        x = 112 + 54 * n
        if number is None:
            parts += [text(x + 25, 98 + 28 * 1.5, "\N{HORIZONTAL ELLIPSIS}", 15, "middle")]
            continue
        parts.append(text(x + 25, 54, f"lane {number}", 12, "middle"))
        for field in range(4):
            y = 62 + 28 * field
            parts.append(box(x, y, 50, 26, SHADES[field], ' fill-opacity="0.45" stroke="currentColor"'))
            parts.append(text(x + 25, y + 18, str(place[field, number]), 13, "middle", mono=True))
    for field in range(4):
        parts.append(text(16, 80 + 28 * field, f"bits {4 * field} to {4 * field + 3}", 12))
    parts.append(text(16, 196, "One shift and one mask give 32 neighbouring columns, in order: a slab.", 12))
    return svg(500, 210, "How 4-bit codes lie in a 16-bit lane, and lanes in a row of a block", parts)


def shards() -> str:
    """Whose query meets which key under a causal mask, contiguous and zigzag over four ranks, by the library's own shards."""
    import tilefold.parallel as tp

    count, ranks, cell = 16, 4, 11
    parts = []
    for turn, kind in enumerate(("contiguous", "zigzag")):
        sharding = tp.shard(count, ranks, kind=kind)
        owner = {token: rank for rank in range(ranks) for token in tp.positions(sharding, rank).tolist()}
        x0 = 34 + turn * (count * cell + 30)
        parts.append(text(x0 + count * cell / 2, 22, kind, 14, "middle", "600"))
        for rank in range(ranks):
            path = "".join(f"M{x0 + j * cell} {34 + i * cell}h{cell}v{cell}h-{cell}z"
                           for i in range(count) if owner[i] == rank for j in range(i + 1))  # fmt: skip
            parts.append(
                f'<path d="{path}" fill="{SHADES[rank]}" fill-opacity="0.75" stroke="currentColor" stroke-width="0.4"/>'
            )
        work = [sum(i + 1 for i in range(count) if owner[i] == rank) for rank in range(ranks)]
        parts.append(text(x0 + count * cell / 2, 34 + count * cell + 18, f"work {work}", 12, "middle", mono=True))
        parts.append(text(x0 + count * cell / 2, 34 + count * cell + 35, "keys", 12, "middle"))
    side = count * cell
    parts.append(
        f'<g transform="rotate(-90 22 {34 + side / 2:g})">{text(22, 34 + side / 2, "queries", 12, "middle")}</g>'
    )
    for rank in range(ranks):
        parts.append(box(34 + 90 * rank, 34 + side + 48, 13, 13, SHADES[rank], ' stroke="currentColor"'))
        parts.append(text(53 + 90 * rank, 34 + side + 59, f"rank {rank}", 13))
    told = "Who computes which pairs of a causal mask: contiguous shards are unequal, zigzag shards are equal"
    return svg(34 + 2 * (side + 30), 34 + side + 76, told, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "speed": charts.speed,
    "forward": charts.forward,
    "backward": charts.backward,
    "block_sparse": charts.block_sparse,
    "fold": fold,
    "split": split,
    "masks": masks,
    "combined": combined,
    "lists": listed,
    "roles": roles,
    "pages": pages,
    "packed": packed,
    "shards": shards,
} | bars.PICTURES


def pictures() -> dict[str, str]:
    """Every picture by its name in docs/assets; those of the gallery need triton, which the site must not import so early."""
    import mod_gallery

    return {f"{name}.svg": draw() for name, draw in (PICTURES | mod_gallery.PICTURES).items()}


if __name__ == "__main__":
    import mod_gallery

    (ASSETS / "gallery").mkdir(exist_ok=True)
    for name, made in pictures().items():
        (ASSETS / name).write_text(made, encoding="utf-8")
        print(f"wrote docs/assets/{name}")
    mod_gallery.PAGE.write_text(mod_gallery.page(), encoding="utf-8")
    print(f"wrote {mod_gallery.PAGE.relative_to(ROOT)}")
