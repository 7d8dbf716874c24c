"""Before the first exchange of a kind of call, every rank learns what every other one was given; all raise the same error."""

import os
import struct
import weakref
import zlib
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ShapeError
from .exchange import arrived, gather_flat, guarded
from .group import Ranks, carried_by

_AGREED: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()  # by the group
KNOWN: dict[Any, Any] = {}  # what calls of a kind that was compared came to, by all that decides it
MOST = 4096
WIDTH = 24  # of what travels, whichever function was called: ranks in different functions must not differ in size


def number_of(value: float) -> int:
    """The bits of a float as an int, so that it travels exactly."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def text_of(value: object) -> int:
    """A checksum of what can only be compared, the same in every process."""
    return zlib.crc32(repr(value).encode())


def agree(
    ranks: Ranks,
    fields: dict[str, tuple[int, str]],
    error: Exception | None,
    device: torch.device,
    always: bool = False,
) -> None:
    """Compare this call with those of the other ranks: a collective, the first time that this rank sees these fields.

    fields: by name, the number to be compared and how this rank writes it; the first is "function", the others are the same
    for every call of it, at most 22.  error: what this rank found wrong by itself, which it raises only after the others
    have learnt that there is one, so that nobody waits for it.  always: compare this call whether or not its fields were seen,
    where the host waits for the ranks anyway.

    TILEFOLD_PARALLEL_CHECK=always in the environment of all ranks compares every call, which costs each a small exchange and a
    wait of the host: to find out who goes astray where a transfer has failed.

    Raises ShapeError on every rank, naming what differs and on which ranks."""
    seen = _AGREED.setdefault(ranks.flat, set())
    key = tuple(number for number, _ in fields.values())
    always = always or os.environ.get("TILEFOLD_PARALLEL_CHECK") == "always"
    if error is None and key in seen and not always:
        return
    where = _carrier(ranks.flat, device)
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
