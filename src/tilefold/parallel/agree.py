"""Before the first exchange of a kind of call, every rank learns what every other one was given; all raise the same error."""

import os
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ShapeError, TilefoldError
from ..plan.parallel.sharding import Sharding
from .exchange import arrived, gather_flat, guarded
from .group import Ranks, carried_by

_AGREED: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()  # by the group
KNOWN: dict[Any, Any] = {}  # what calls of a kind that was compared came to, by all that decides it
MOST = 4096
WIDTH = 24  # of what travels, whichever function was called: ranks in different functions must not differ in size


def _compared(value: object) -> tuple[int, str]:
    """The number by which ranks compare a fact, itself or a checksum that is the same in every process, and how they write it."""
    if type(value) is int:
        return value, str(value)
    return zlib.crc32(repr(value).encode()), f"[{value}]" if isinstance(value, Sharding) else str(value)


@contextmanager
def agree(ranks: Ranks, function: str, like: object, always: bool = False) -> Iterator[dict[str, object]]:
    """Compare a call, which is checked inside, with those of the other ranks: a collective at the end, the first time that this
    rank sees these facts.

    Into the mapping goes what has to be the same on all ranks, by name; the same names for every call of the function, at most
    22.  What is raised inside goes on only after the others have learnt that there is an error, so that nobody waits for this
    rank; its facts do not count.  like: a tensor of the call, on whose device ranks compare.  always: compare this call whether
    or not its facts were seen, where the host waits for the ranks anyway.

    TILEFOLD_PARALLEL_CHECK=always in the environment of all ranks compares every call, which costs each a small exchange and a
    wait of the host: to find out who goes astray where a transfer has failed.

    Raises ShapeError on every rank, naming what differs and on which ranks."""
    facts: dict[str, object] = {}
    error: Exception | None = None
    try:
        yield facts
    except (TilefoldError, TypeError, ValueError) as raised:
        error = raised
    seen = _AGREED.setdefault(ranks.flat, set())
    fields = {name: _compared(value) for name, value in {"function": function, **facts}.items()}
    key = tuple(number for number, _ in fields.values())
    always = always or os.environ.get("TILEFOLD_PARALLEL_CHECK") == "always"
    if error is None and key in seen and not always:
        return
    where = _carrier(ranks.flat, like.device if isinstance(like, torch.Tensor) else torch.device("cpu"))
    row = [int(error is not None), *key]
    mine = torch.tensor(row + [0] * (WIDTH - len(row)), dtype=torch.int64, device=where)
    every = torch.zeros(ranks.size * mine.numel(), dtype=torch.int64, device=where)
    with guarded(ranks.flat, "comparing the call with those of the other ranks"):
        gather_flat(every, mine, group=ranks.flat)
        arrived(where, ranks.flat, ranks.timeout)
    table = every.view(ranks.size, -1).tolist()
    if error is not None:
        raise error
    refused = [rank for rank, row in enumerate(table) if row[0]]
    if refused:
        raise ShapeError(
            f"rank {ranks.rank} does not start: the arguments of rank{'s' * (len(refused) > 1)} "
            f"{', '.join(map(str, refused))} were refused there; its error says why"
        )
    differing = [(name, i + 1) for i, name in enumerate(fields) if len({row[i + 1] for row in table}) > 1]
    if differing and differing[0][0] == "function":
        differing = differing[:1]  # another function's fields have other meanings
    if differing:
        raise ShapeError(_difference(ranks, fields, table, differing))
    if len(seen) >= MOST:  # here on all ranks at once: whoever still knew a call would not come to its next comparison
        seen.clear()
        KNOWN.clear()
    seen.add(key)


def _carrier(group: Any, device: torch.device) -> torch.device:
    """Where what is compared lies: on the call's device, unless the group does not carry tensors from there."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    carried = carried_by(group)
    return device if carried is None or device.type in carried else torch.device(carried[0])


def _difference(
    ranks: Ranks, fields: dict[str, tuple[int, str]], table: list[list[int]], differing: list[tuple[str, int]]
) -> str:
    """Which arguments differ, and who has what."""
    lines = []
    for name, column in differing:
        mine, text = fields[name]
        odd = [rank for rank, row in enumerate(table) if row[column] != mine]
        values = sorted({row[column] for row in table} - {mine})
        plain = text == str(mine)
        other = f" ({', '.join(map(str, values))})" if plain else ""
        lines.append(f"{name} is {text} on rank {ranks.rank} but not on {', '.join(f'rank {r}' for r in odd)}{other}")
    return f"the ranks were called with different arguments, all have to give the same: {'; '.join(lines)}"


def forget() -> None:
    """Compare everything again, for tests and after a process group was destroyed."""
    _AGREED.clear()
    KNOWN.clear()


def known(key: Any) -> Any:
    """What was kept under it; None if nothing was, or if every call is to be compared."""
    return None if os.environ.get("TILEFOLD_PARALLEL_CHECK") == "always" else KNOWN.get(key)


def keep(key: Any, value: Any) -> None:
    """Of a call that all ranks have agreed on."""
    if len(KNOWN) >= MOST:
        KNOWN.clear()
    KNOWN[key] = value
