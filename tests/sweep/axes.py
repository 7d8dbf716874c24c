"""What a family of problems may draw: axes of options, which of their values exclude one another, and pairs of them to cover."""

import base64
import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Options = dict[str, Any]
Pair = tuple[str, str]  # "axis=value" twice, sorted
LIGHT: dict[str, tuple[Any, ...]] = {
    "dim": ("64", "1", "tiny", "16", "odd"),
    "dim_v": ("same", "less", "1", "odd", "64"),
    "group": (1, 4),
    "page": ("16", "1", "odd", "64"),
}
Clash = tuple[str, frozenset[Any], str, frozenset[Any]]


def never(axis: str, values: Iterable[Any], other: str, others: Iterable[Any]) -> Clash:
    """None of `values` of one axis goes with any of `others` of another one: the documents refuse it, or it means nothing."""
    return axis, frozenset(values), other, frozenset(others)


@dataclass(frozen=True)
class Family:
    """Problems of one operation.

    axes: values of each option, the plainest first.  run(ctx, options, dims, sizes): makes the inputs, calls the operation and
    compares.  sizes(rng, options, dims, most): all numbers that do not decide compilation, lengths up to about `most`.
    dims(rng, options): those that do.  clashes: pairs of values that exclude one another.  light: the values of some axes that
    the interpreter is asked for."""

    name: str
    axes: dict[str, tuple[Any, ...]]
    run: Callable[..., None]
    sizes: Callable[..., dict[str, Any]]
    dims: Callable[..., dict[str, Any]] = lambda rng, o: {}
    clashes: tuple[Clash, ...] = ()
    light: dict[str, tuple[Any, ...]] = field(default_factory=dict, compare=False)
    memo: dict[str, Any] = field(default_factory=dict, compare=False)

    def excluded(self) -> dict[str, set[str]]:
        """For every "axis=value" what does not go with it."""
        if "excluded" not in self.memo:
            found: dict[str, set[str]] = {}
            for axis, values, other, others in self.clashes:
                for x, y in itertools.product(sorted(values, key=str), sorted(others, key=str)):
                    assert x in self.axes[axis] and y in self.axes[other], (self.name, axis, x, other, y)
                    found.setdefault(f"{axis}={x}", set()).add(f"{other}={y}")
                    found.setdefault(f"{other}={y}", set()).add(f"{axis}={x}")
            self.memo["excluded"] = found
        return self.memo["excluded"]  # type: ignore[no-any-return]

    def lighter(self) -> "Family":
        """The family without what takes the interpreter long."""
        few = {**LIGHT, **self.light}
        axes = {axis: tuple(x for x in values if x in few.get(axis, values)) for axis, values in self.axes.items()}
        kept = lambda axis, some: some & set(axes[axis])  # noqa: E731
        clashes = tuple((a, kept(a, x), b, kept(b, y)) for a, x, b, y in self.clashes)
        return replace(self, axes=axes, clashes=clashes, memo={})

    def fits(self, options: Options) -> bool:
        """Whether no two of the options exclude one another."""
        given, excluded = [f"{axis}={value}" for axis, value in options.items()], self.excluded()
        return not any(excluded.get(x, set()) & set(given) for x in given)


def pairs_of(options: Options) -> set[Pair]:
    """All pairs of an assignment."""
    return set(itertools.combinations(sorted(f"{axis}={value}" for axis, value in options.items()), 2))


def fill(family: Family, rng: random.Random, options: Options) -> Options | None:
    """Random values for the axes that are missing; None where the given ones leave an axis without any."""
    excluded, options = family.excluded(), dict(options)
    if not family.fits(options):
        return None
    gone = set().union(*(excluded.get(f"{axis}={value}", ()) for axis, value in options.items()))
    missing = [axis for axis in family.axes if axis not in options]
    rng.shuffle(missing)
    for axis in missing:
        fit = [value for value in family.axes[axis] if f"{axis}={value}" not in gone]
        if not fit:
            return None
        options[axis] = rng.choice(fit)
        gone |= excluded.get(f"{axis}={options[axis]}", set())
    return {axis: options[axis] for axis in family.axes}


def valid_pairs(family: Family) -> dict[Pair, Options]:
    """Every pair that some assignment holds, with its two options."""
    if "pairs" not in family.memo:
        rng, found = random.Random(0), {}
        values = [(axis, value) for axis, some in family.axes.items() for value in some]
        for (a, x), (b, y) in itertools.combinations(values, 2):
            if a != b and any(fill(family, rng, {a: x, b: y}) for _ in range(20)):
                found[tuple(sorted((f"{a}={x}", f"{b}={y}")))] = {a: x, b: y}
        family.memo["pairs"] = found
    return family.memo["pairs"]  # type: ignore[no-any-return]


def draw_options(family: Family, rng: random.Random, left: dict[Pair, Options], tries: int = 30) -> Options:
    """The assignment among a few random ones that covers most of the pairs in `left`; each holds one of them for certain."""
    starts, best, most = list(left.values()), None, -1
    for _ in range(tries):
        options = (fill(family, rng, rng.choice(starts)) if starts else None) or fill(family, rng, {})
        if options is None:
            continue
        covers = len(pairs_of(options) & left.keys()) if left else 0
        if covers > most:
            best, most = options, covers
    assert best is not None, family.name
    return best


def packed_options(drawn: list[tuple[str, Options]]) -> str:
    """Operations and options of a run as a short text, for its row in a record."""
    plain = json.dumps([[op, options] for op, options in drawn if options]).encode()
    return base64.b85encode(zlib.compress(plain, 9)).decode()


def covered_by(record: Path) -> dict[str, set[Pair]]:
    """Pairs that the runs of a record drew, by operation; rows that do not say which count for nothing."""
    done: dict[str, set[Pair]] = {}
    for line in record.read_text().splitlines() if record.is_file() else ():
        text = json.loads(line).get("drawn", "")
        for op, options in json.loads(zlib.decompress(base64.b85decode(text))) if text else ():
            done.setdefault(op, set()).update(pairs_of(options))
    return done
