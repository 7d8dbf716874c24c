"""Lengths, dims and the like, drawn from classes that hold the edges."""

import random
from typing import Any

DIMS = ("64", "1", "tiny", "16", "odd", "80", "96", "128", "wide", "192", "256")
WINDOWS = ("none", "left", "right", "both", "zero")


def dim_of(rng: random.Random, kind: str) -> int:
    """A head dim of a class."""
    spans = {"tiny": (2, 15, 1), "odd": (17, 63, 2), "80": (66, 127, 2), "wide": (129, 255, 2)}
    if kind in spans:
        low, high, step = spans[kind]
        return rng.randrange(low, high + 1, step)
    return int(kind)


def dims_of_heads(rng: random.Random, o: dict[str, Any]) -> dict[str, int]:
    """{"d", "dv"} by the axes dim and dim_v."""
    d = dim_of(rng, o["dim"])
    kind = o.get("dim_v", "same")
    if kind == "less":
        return {"d": d, "dv": rng.randint(max(1, d // 2), max(1, d - 1))}
    return {"d": d, "dv": d if kind == "same" else dim_of(rng, kind)}


def length(rng: random.Random, most: int, least: int = 0) -> int:
    """0, 1, few, around a tile's edge, or anything up to `most`."""
    kind = rng.choices(("none", "one", "few", "edge", "any", "long"), (1, 2, 3, 5, 6, 2))[0]
    edge = rng.choice([t for t in (16, 32, 64, 128, 192, 256, 512) if t <= most] or [most]) + rng.choice((-1, 0, 1))
    any_ = rng.randint(1, max(1, most // 2))
    found = {
        "none": 0,
        "one": 1,
        "few": rng.randint(2, 17),
        "edge": edge,
        "any": any_,
        "long": rng.randint(any_, most),
    }[kind]
    return max(least, min(found, most))


def lengths(rng: random.Random, most: int, count: int, least: int = 0) -> list[int]:
    return [length(rng, most, least) for _ in range(count)]


def window_of(rng: random.Random, kind: str, most: int) -> list[int | None] | None:
    """(left, right) of a class."""
    side = rng.choice((1, 3, 15, 16, 63, 64, rng.randint(1, max(1, most))))
    other = rng.randint(0, max(1, most // 2))
    return {"none": None, "left": [side, -1], "right": [-1, other], "both": [side, other], "zero": [0, 0]}[kind]
