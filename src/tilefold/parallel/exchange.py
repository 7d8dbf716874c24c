"""The transfers between ranks: one message of several tensors to the next rank of a ring, from all to all, or to everyone.

Over NCCL every operation runs on a stream of the group's own, which waits for what was launched before the call; the caller's
stream goes on, and waits for the transfer only in `wait`: what is launched between `start` and `wait` overlaps the transfer."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommunicationError

__all__ = ["Ring", "all_gather", "all_to_all", "gather_flat", "guarded", "pack", "unpack"]

# Newer torch has another name for it, and warns of the old one.
gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Shapes = Sequence[tuple[int, ...]]


@contextmanager
def guarded(group: Any, what: str) -> Iterator[None]:
    """Errors of a backend become a CommunicationError that says who was doing what."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:  # torch.distributed's own derive from it
        if isinstance(error, torch.OutOfMemoryError):
            raise
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        raise CommunicationError(
            f"rank {rank} of {size} failed while {what}: a rank has died, or has not come to the same call within the group's "
            f"timeout. Look at the other ranks' first errors; destroy the process group before going on. The backend: {error}"
        ) from error


def pack(tensors: Iterable[torch.Tensor], count: int | None = None) -> torch.Tensor:
    """All elements of tensors of one dtype, one after the other: one message, one copy of each, whatever its strides.

    count: of elements in all; with it the tensors are asked for one by one, so that they need not all be there at once."""
    if count is None:
        tensors = list(tensors)
        if len(tensors) == 1:
            return tensors[0].contiguous().view(-1)
        count = sum(t.numel() for t in tensors)
    flat: torch.Tensor | None = None
    at = 0
    for t in tensors:
        if flat is None:
            flat = torch.empty(count, dtype=t.dtype, device=t.device)
        flat[at : at + t.numel()].view(t.shape).copy_(t)
        at += t.numel()
    assert flat is not None
    return flat


def unpack(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Views of what `pack` made, by their shapes."""
    found, at = [], 0
    for shape in shapes:
        count = prod(shape)
        found.append(flat[at : at + count].view(shape))
        at += count
    return found


class Ring:
    """Messages to the next rank of a group and from the previous one; sizes differ from rank to rank and are known to all."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def start(
        self, message: torch.Tensor | None, expected: torch.Tensor | None, what: str, distance: int = 1
    ) -> list[Any]:
        """Begin to send a message so many ranks on and to receive one into `expected`; neither may be touched before `wait`."""
        target, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        operations = []
        if message is not None and message.numel():
            operations.append(dist.P2POp(dist.isend, message, group=self.group, group_peer=target))
        if expected is not None and expected.numel():
            operations.append(dist.P2POp(dist.irecv, expected, group=self.group, group_peer=source))
        if not operations:
            return []
        with guarded(self.group, f"{what} (to rank {target}, from rank {source})"):
            works: list[Any] = dist.batch_isend_irecv(operations)
        return works

    def wait(self, works: list[Any], what: str) -> None:
        """What is launched from now on sees the message."""
        with guarded(self.group, what):
            for work in works:
                work.wait()


def all_gather(mine: torch.Tensor, sizes: Sequence[int], group: Any, what: str) -> list[torch.Tensor]:
    """Every rank's flat tensor; sizes: of all ranks.  Shorter ones travel padded to the longest: one collective anywhere."""
    most = max(sizes)
    if most == 0:
        return [mine for _ in sizes]
    padded = mine
    if mine.numel() < most:
        padded = mine.new_zeros(most)
        padded[: mine.numel()] = mine
    every = torch.empty(most * len(sizes), dtype=mine.dtype, device=mine.device)
    with guarded(group, what):
        gather_flat(every, padded, group=group)
    return [every[r * most : r * most + size] for r, size in enumerate(sizes)]


def all_to_all(
    parts: Iterable[torch.Tensor], counts: Sequence[int], sizes: Sequence[int], group: Any, what: str
) -> list[torch.Tensor]:
    """Every rank's flat tensor for this one.  parts: tensors in the order of the ranks that they go to, several for each or one,
    asked for one by one; counts: elements for each rank; sizes: elements that come from each."""
    message = pack(parts, sum(counts))
    got = torch.empty(sum(sizes), dtype=message.dtype, device=message.device)
    with guarded(group, what):
        dist.all_to_all_single(got, message, list(sizes), list(counts), group=group)
    return list(got.split(list(sizes)))
