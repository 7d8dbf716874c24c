"""The transfers between ranks: one message of several tensors to the next rank of a ring, from all to all, or to everyone.

Over NCCL every operation runs on a stream of the group's own, which waits for what was launched before the call; the caller's
stream goes on, and waits for the transfer only in `wait`: what is launched between `start` and `wait` overlaps the transfer."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import CommunicationError

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
            f"timeout. Look at the other ranks' first errors; destroy the process group before going on. If all ranks are alive, "
            f"TILEFOLD_PARALLEL_CHECK=always on all of them finds the call that differs. The backend: {error}"
        ) from error


def arrived(device: torch.device, group: Any, timeout: float | None) -> None:
    """The host waits for what was launched on the device, at most for the group's timeout: to read a number from a GPU would wait
    for a dead rank as long as NCCL's watchdog lets it, and keep other threads from saying so.  Raises RuntimeError."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    end = time.monotonic() + (timeout or math.inf)
    while not event.query():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing came for {timeout:.0f} s, the timeout of the group")
        time.sleep(20e-6)


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
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Transfer(NamedTuple):
    """What is under way; nothing of it may be touched before `wait`.  kept: what has to live until then."""

    works: list[Any]
    group: Any
    what: str
    kept: list[Any]

    def wait(self) -> None:
        """What is launched from now on sees what has come."""
        with guarded(self.group, self.what):
            for work in self.works:
                work.wait()
        self.works.clear()
        self.kept.clear()


def begin(
    sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]], group: Any, what: str
) -> Transfer:
    """Begin to send each rank the tensors that are listed for it, and to receive what it lists for this one into those of
    `receives`: contiguous ones, of the same sizes on both sides, from and to where they belong.  Nothing goes to itself."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    operations = []
    for step in range(1, size):
        target, source = (rank + step) % size, (rank - step) % size
        operations += [dist.P2POp(dist.isend, t, group=group, group_peer=target) for t in sends[target] if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, group=group, group_peer=source) for t in receives[source] if t.numel()]
    with guarded(group, what):
        works = dist.batch_isend_irecv(operations) if operations else []
    if operations:
        give_way(operations[0].tensor, sum(one.tensor.nbytes for one in operations) // 2)
    return Transfer(works, group, what, [sends, receives])


def pass_on(message: torch.Tensor, expected: torch.Tensor, group: Any, what: str, distance: int = 1) -> Transfer:
    """Begin to send a message so many ranks on around the ring of a group, and to receive one into `expected`; sizes differ from
    rank to rank and are known to all."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    target, source = (rank + distance) % size, (rank - distance) % size
    sends = [[message] if other == target else [] for other in range(size)]
    receives = [[expected] if other == source else [] for other in range(size)]
    return begin(sends, receives, group, f"{what} (to rank {target}, from rank {source})")


WAIT_S, WAIT_CLOCKS = 25e-6, 45_000  # longer than a kernel of NCCL's takes to begin; at 1.8 GHz
FASTEST = 400e9  # bytes/s: no transfer takes less


def give_way(t: torch.Tensor, size: int) -> None:
    """Let what is launched next on t's GPU begin after the transfer that was launched last.

    Both wait for the same kernels.  A fold that begins first takes every SM until its end, and NCCL's kernel, which needs some,
    waits for that: nothing is hidden, and the rank at its other end waits, too.  So the fold waits a little, unless `size` bytes
    take less than that."""
    if t.device.type == "cuda" and size / FASTEST > WAIT_S:
        with torch.cuda.device(t.device):
            torch.cuda._sleep(WAIT_CLOCKS)


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
