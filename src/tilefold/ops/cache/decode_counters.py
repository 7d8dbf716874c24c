"""Counters for programs that arrive one after the other: zero before and after each launch, so nobody clears them in between.

Launches of one stream follow one another and share a stretch of counters.  A launch that is captured into a graph gets a stretch
of its own for good: graphs may replay at the same time, on any stream.
"""

from typing import Any

import torch

from ..device import interpreting, stream_of

SLAB = 1 << 20  # counters of a device, 4 MB: graphs may hold 4096 launches of 256 items

_SLABS: dict[int, "_Slab"] = {}


class _Slab:
    """The zeroed counters of one device, and who has which."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(SLAB, dtype=torch.int32, device=device)
        self.ready = torch.cuda.Event()
        self.ready.record(torch.cuda.current_stream(device))
        self.used = 0
        self.streams: dict[Any, torch.Tensor] = {}

    def take(self, number: int) -> torch.Tensor | None:
        """A stretch that nobody has, None if there is none so long."""
        first, self.used = self.used, self.used + -(-number // 32) * 32
        if self.used > SLAB:
            self.used = first
            return None
        return self.memory[first : first + number]


def counters(number: int, device: torch.device) -> torch.Tensor:
    """[number or more] int32 zeros for the next launch on the current stream, which leaves them zero."""
    index = device.index or 0
    slab = _SLABS.get(index)
    if slab is None and (device.type == "cpu" or interpreting()):
        return torch.zeros(number, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    if slab is None and not capturing:
        slab = _SLABS[index] = _Slab(device)
    if slab is None or capturing:
        found = None if slab is None else slab.take(number)
        # Without a stretch the graph clears counters of its own in each replay.
        return torch.zeros(number, dtype=torch.int32, device=device) if found is None else found
    stream = stream_of()(index)  # torch makes an object of it, in every call
    held = slab.streams.get(stream)
    if held is None or held.numel() < number:
        torch.cuda.current_stream(device).wait_event(slab.ready)  # other streams are to find zeros
        held = slab.take(max(number, 1024))
        if held is None:
            held = torch.zeros(number, dtype=torch.int32, device=device)
        slab.streams[stream] = held
    return held
