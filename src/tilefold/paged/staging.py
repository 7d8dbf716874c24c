"""Small integer tables from the host to the device without waiting: pinned buffers, each reused when its last copy is done.

A copy that does not block reads its source later.  So a buffer is written again only after the event behind its copy has
happened; where none has, there is a new buffer: the host never waits, and the ring is as long as the host is ahead.
"""

import ctypes
from collections import deque
from typing import Any

import torch

__all__ = ["Buffer", "Staging"]

LEAST = 4096  # bytes: of a page, and more than most steps need


class Buffer:
    """Host memory that is filled by offset and then copied; pinned where the device is a GPU."""

    __slots__ = ("_address", "_event", "bytes")

    def __init__(self, size: int, pinned: bool) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._address = self.bytes.data_ptr()
        self._event = torch.cuda.Event() if pinned else None

    def is_done(self) -> bool:
        """Whether the device has read what was copied last."""
        return self._event is None or self._event.query()

    def int32(self, offset: int, values: list[int]) -> None:
        """Write from byte `offset` on."""
        place: Any = (ctypes.c_int32 * len(values)).from_address(self._address + offset)
        place[:] = values

    def int64(self, offset: int, values: list[int]) -> None:
        """Write from byte `offset` on."""
        place: Any = (ctypes.c_int64 * len(values)).from_address(self._address + offset)
        place[:] = values

    def send(self, into: torch.Tensor) -> None:
        """Copy the first bytes into a contiguous uint8 tensor, in the order of the current stream."""
        into.copy_(self.bytes[: into.numel()], non_blocking=True)
        if self._event is not None:
            self._event.record()


class Staging:
    """A ring of buffers for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._ring: deque[Buffer] = deque()

    def __len__(self) -> int:
        return len(self._ring)

    def lend(self, size: int) -> Buffer:
        """A buffer of at least `size` bytes that nothing reads any more; to be sent before the next is lent."""
        if self._ring and self._ring[0].is_done():
            found = self._ring.popleft()
            if found.bytes.numel() < size:
                found = self._make(size)
        else:
            found = self._make(size)
        self._ring.append(found)
        return found

    def _make(self, size: int) -> Buffer:
        return Buffer(max(LEAST, 1 << (size - 1).bit_length()), self._pinned)

    def int64s(self, *lists: list[int]) -> list[torch.Tensor]:
        """Lists of one length as int64 tensors on the device."""
        n = len(lists[0])
        buffer = self.lend(8 * n * len(lists))
        for i, values in enumerate(lists):
            buffer.int64(8 * n * i, values)
        fresh = torch.empty(8 * n * len(lists), dtype=torch.uint8, device=self.device)
        buffer.send(fresh)
        return list(fresh.view(torch.int64).view(len(lists), n).unbind())
