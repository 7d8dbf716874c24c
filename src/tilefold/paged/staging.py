"""Small integer tables from the host to the device without waiting: pinned buffers, each reused when its last copy is done.

A copy that does not block reads its source later.  So a buffer is written again only after the event behind its copy has
happened; where it has not, there is a new buffer: the host never waits, and the ring is as long as the host is ahead.
"""

from collections import defaultdict, deque
from ctypes import c_int64
from typing import Any

import torch

LEAST = 1 << 14  # bytes of a buffer: a step of some 500 sequences
SLAB = 128  # of the smallest buffers that are pinned at once: pinning may wait for the device, so it is not done step by step


class Buffer:
    """Host memory that is filled by offset and then copied; pinned where the device is a GPU."""

    __slots__ = ("_address", "_device", "_event", "bytes")

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.bytes = memory
        self._address = memory.data_ptr()
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def is_done(self) -> bool:
        """Whether the device has read what was copied last."""
        return self._event is None or self._event.query()

    def write(self, kind: Any, offset: int, values: list[int]) -> None:
        """Write integers of a kind, `c_int32` or `c_int64`, from byte `offset` on."""
        (kind * len(values)).from_address(self._address + offset)[:] = values

    def send(self, into: torch.Tensor) -> None:
        """Copy the first bytes into a contiguous uint8 tensor, in the order of the device's current stream."""
        into.copy_(self.bytes[: into.numel()], non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))


class Staging:
    """Rings of buffers for one device, one for each size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rings: dict[int, deque[Buffer]] = defaultdict(deque)
        self._fresh = self._make(LEAST)

    def __len__(self) -> int:
        return sum(map(len, self._rings.values()))

    def lend(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes that nothing reads any more; to be sent before the next is lent."""
        size = LEAST if size <= LEAST else 1 << (size - 1).bit_length()
        ring = self._rings[size]
        if ring and ring[0].is_done():
            found = ring.popleft()
        elif size > LEAST:
            (found,) = self._make(size)
        else:
            self._fresh = self._fresh or self._make(LEAST)
            found = self._fresh.pop()
        ring.append(found)
        return found

    def _make(self, size: int) -> list[Buffer]:
        """One buffer, or a slab of the smallest."""
        pinned = self.device.type == "cuda"
        count = SLAB if pinned and size == LEAST else 1
        memory = torch.zeros((count, size), dtype=torch.uint8, pin_memory=pinned)
        return [Buffer(row, self.device) for row in memory]

    def int64s(self, *lists: list[int]) -> list[torch.Tensor]:
        """Lists of one length as int64 tensors on the device."""
        n = len(lists[0])
        buffer = self.lend(8 * n * len(lists))
        for i, values in enumerate(lists):
            buffer.write(c_int64, 8 * n * i, values)
        fresh = torch.empty(8 * n * len(lists), dtype=torch.uint8, device=self.device)
        buffer.send(fresh)
        return list(fresh.view(torch.int64).view(len(lists), n).unbind())
