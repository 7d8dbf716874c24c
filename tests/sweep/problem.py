"""A problem as plain data; the endless list of them that a seed gives; running one; making a failing one smaller."""

import random
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .axes import Family, Pair, draw_options, pairs_of, valid_pairs
from .bounds import Wrong
from .context import Context

NO_ROOM = "memory: the device has none left for this, beside the other processes"


@dataclass(frozen=True)
class Problem:
    """op: the family's name.  o, dims: options and numbers that decide compilation.  sizes: all others.  seed: of the values."""

    op: str
    o: dict[str, Any]
    dims: dict[str, Any]
    sizes: dict[str, Any]
    seed: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """Where and how problems run.  most: about the longest length.  guard: bands of NaN around inputs."""

    device: torch.device
    most: int
    guard: bool = True
    small: bool = False


ODD: dict[str, tuple[Any, ...]] = {"dim": ("odd", "80", "tiny", "wide", "1"), "page": ("1", "odd", "100")}


def specialisations(
    families: Sequence[Family],
    seed: int,
    odd: bool = False,
    done: dict[str, set[Pair]] | None = None,
    once: bool = False,
) -> Iterator[tuple[Family, dict[str, Any], dict[str, Any], random.Random]]:
    """(family, options, dims, generator of sizes), the same for a seed: whichever family lacks the largest share of its pairs is
    next, with options that cover many that it lacks.  odd: dims and pages that are no power of two first.  done: pairs that
    other runs drew, which come when all others are drawn.  once: end where every pair is drawn."""
    rng = random.Random(f"sweep {seed}")
    left = {
        f.name: {p: x for p, x in valid_pairs(f).items() if p not in (done or {}).get(f.name, ())} for f in families
    }
    if not any(left.values()):
        left = {f.name: dict(valid_pairs(f)) for f in families}
    number = 0
    while True:
        family = max(families, key=lambda f: (len(left[f.name]) / max(1, len(valid_pairs(f))), rng.random()))
        starts = left[family.name]
        if odd:
            starts = {
                p: x for p, x in starts.items() if all(x.get(axis, v[0]) in v for axis, v in ODD.items())
            } or starts
        options = draw_options(family, rng, starts)
        for pair in pairs_of(options):
            left[family.name].pop(pair, None)
        number += 1
        inner = random.Random(f"{seed} {number} {family.name}")
        yield family, options, family.dims(inner, options), inner
        if not any(left.values()):
            if once:
                return
            left = {f.name: dict(valid_pairs(f)) for f in families}


def run_problem(family: Family, problem: Problem, setting: Setting, plant: Any = None) -> None:
    """Raises what was wrong."""
    ctx = Context(problem.seed, setting.device, setting.guard, setting.small)
    ctx.plant = plant
    family.run(ctx, dict(problem.o), dict(problem.dims), dict(problem.sizes))
    ctx.finish()


def failure_of(family: Family, problem: Problem, setting: Setting, plant: Any = None) -> str | None:
    """What was wrong, in a line; None for nothing."""
    try:
        run_problem(family, problem, setting, plant)
    except Wrong as wrong:
        return f"wrong: {wrong}"
    except torch.OutOfMemoryError:
        return NO_ROOM
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())[:300]
        return f"raised {type(error).__name__}: {said} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
    return None


def kind_of(failure: str) -> str:
    """What two failures have in common if they are one fault: how it shows, without the numbers."""
    if failure.startswith("crash"):
        return "crash"
    head = failure.split("[")[0].split("(")[0]
    return "".join(c for c in head if not c.isdigit())[:80]


# ---------------------------------------------------------------- smaller


def _smaller_sizes(sizes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in sizes.items():
        if isinstance(value, list) and len(value) > 1 and name in ("q", "k"):
            for i in range(len(value)):
                yield {**sizes, **{n: v[:i] + v[i + 1 :] for n, v in sizes.items() if isinstance(v, list) and n in ("q", "k")
                                   and len(v) == len(value)}}  # fmt: skip
        if isinstance(value, list) and name not in ("window",):
            for i, x in enumerate(value):
                if isinstance(x, int) and x > 1:
                    for less in {x // 2, x - 1}:
                        yield {**sizes, name: [*value[:i], less, *value[i + 1 :]]}
        elif type(value) is int and value > 1:
            for less in sorted({1, value // 2, value - 1}):
                yield {**sizes, name: less}


def _plainer(family: Family, problem: Problem) -> Iterator[Problem]:
    for axis, values in family.axes.items():
        if problem.o[axis] != values[0] and axis not in ("dim", "dim_v", "page"):
            options = {**problem.o, axis: values[0]}
            if family.fits(options):
                yield replace(problem, o=options)


def shrink(family: Family, problem: Problem, setting: Setting, seconds: float, plant: Any = None) -> Problem:
    """The smallest problem found in that time that fails in the same way."""
    end, wanted = time.monotonic() + seconds, failure_of(family, problem, setting, plant)
    if wanted is None:
        return problem
    kind, found = kind_of(wanted), True
    while found:
        found = False
        tries = [*(replace(problem, sizes=s) for s in _smaller_sizes(problem.sizes)), *_plainer(family, problem)]
        for smaller in tries:
            if time.monotonic() > end:
                return problem
            failure = failure_of(family, smaller, setting, plant)
            if failure is not None and kind_of(failure) == kind:
                problem, found = smaller, True
                break
    return problem
