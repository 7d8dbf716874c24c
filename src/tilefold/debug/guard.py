"""Copies of a kernel's tensors with poison around them, and the way back from an address to the element that lies there.

    [ guard | first element ... gaps between rows ... last element | guard ]

Each tensor gets memory of its own with its strides and its alignment kept. Poison is NaN for floating-point numbers, for
integers a pattern of bytes that no one expects.
"""

from typing import Any

import numpy as np
import torch

from tilefold.debug.overlap import extent, offsets

GUARD = 1 << 16  # bytes on each side: an access past the end by less than that is known to be of this tensor
LINE = 128  # bytes; alignment is kept modulo this
# of the formats whose only NaN is the sign bit; all ones are NaN in every other one, and no integer that one expects is 0xA5
POISON = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def place_of(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element of a tensor, by its number in the flattened one."""
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()


class Guarded:
    """A poisoned copy of one tensor on the CPU and what is known of its memory.

    name: what reports call it. written: it is an output. keep: the copy starts with the tensor's values, else with poison.
    view: the copy, of the tensor's shape, strides and dtype. writer, skipped: int32 [extent], the linear id of the program that
    wrote an element last, or first addressed it in a store with the mask off; -1 for none."""

    def __init__(self, name: str, tensor: torch.Tensor, written: bool, keep: bool) -> None:
        self.name, self.written, self.itemsize, self.shape = name, written, tensor.element_size(), tuple(tensor.shape)
        self.extent = extent(tensor)
        size = self.extent * self.itemsize
        self.byte = POISON.get(tensor.dtype, 0xFF if tensor.is_floating_point() else 0xA5)
        self.memory = torch.full((2 * GUARD + size + 2 * LINE,), self.byte, dtype=torch.uint8)
        shift = (tensor.data_ptr() - self.memory.data_ptr() - GUARD) % LINE
        start = GUARD + shift
        self.low, self.high = self.memory.data_ptr(), self.memory.data_ptr() + self.memory.numel()
        self.begin, self.end = self.low + start, self.low + start + size
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = self.memory.numpy()
        self.around = np.ones(self.bytes.size, bool)
        self.view = torch.empty(0, dtype=tensor.dtype).set_(
            self.memory.untyped_storage(), start // self.itemsize, tensor.shape, tensor.stride()
        )
        self.element = np.full(self.extent, -1, np.int64)  # flat index by offset, -1 in gaps
        places = offsets(tensor) if tensor.numel() else np.empty(0, np.int64)
        self.element[places] = np.arange(places.size)
        for part in range(self.itemsize):
            self.around[start + places * self.itemsize + part] = False
        if keep:
            self.view.copy_(tensor.detach())
        self.bits = self.bytes[start : start + size].view(BITS[self.itemsize])
        self.writer = np.full(self.extent, -1, np.int32)
        self.skipped = np.full(self.extent, -1, np.int32)

    def index(self, offset: int) -> tuple[int, ...]:
        """Index in the tensor of the element at an offset from the first one."""
        return place_of(int(self.element[offset]), self.shape)

    def value(self, bits: Any) -> Any:
        """The number that these bits are in the tensor's dtype."""
        raw = torch.from_numpy(np.array([bits], BITS[self.itemsize]).view(np.uint8)).view(self.view.dtype)
        return raw.item()

    def touched(self) -> int | None:
        """Offset in bytes from the first element of the first guard or gap byte that is no longer poison; None if all are."""
        wrong = np.flatnonzero((self.bytes != self.byte) & self.around)
        return int(wrong[0]) + self.low - self.begin if wrong.size else None
