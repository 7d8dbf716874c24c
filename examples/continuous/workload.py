"""Requests that arrive over time, from a seed or from lines of text."""

import random
from collections.abc import Sequence

from continuous.engine import Request

__all__ = ["arrivals", "random_requests", "text_requests"]


def arrivals(count: int, rate: float, draw: random.Random) -> list[int]:
    """Steps at which `count` requests arrive, on average `rate` a step: a Poisson process, the first at step 0.

    Raises ValueError unless rate is positive."""
    if not rate > 0:
        raise ValueError(f"rate must be positive, got {rate}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return [int(time) for time in times[:count]]


def random_requests(
    count: int,
    vocabulary: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    rate: float,
    seed: int,
    ends: tuple[int, ...] = (),
) -> list[Request]:
    """Requests of random tokens, prompts and answers of lengths between the two bounds, ends included; the same for a seed."""
    for name, (least, most) in (("prompt", prompt), ("new", new)):
        if not 1 <= least <= most:
            raise ValueError(f"{name} must be two lengths, at least 1 and in order, got {least}, {most}")
    draw = random.Random(seed)
    times = arrivals(count, rate, draw)
    return [
        Request(
            i, tuple(draw.randrange(vocabulary) for _ in range(draw.randint(*prompt))), draw.randint(*new), times[i], ends
        )
        for i in range(count)
    ]  # fmt: skip


def text_requests(
    prompts: Sequence[Sequence[int]], new: int, rate: float, seed: int, ends: tuple[int, ...] = ()
) -> list[Request]:
    """A request for each prompt, in order of arrival."""
    times = arrivals(len(prompts), rate, random.Random(seed))
    return [Request(i, tuple(prompt), new, times[i], ends) for i, prompt in enumerate(prompts)]
