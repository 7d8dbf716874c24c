"""Which layout a convolution's kernels read: channels-first tensors as they lie, or a channels-last copy of them.  The estimate
that decides, and the copy's tile.

A plain GEMM (one tap, every pixel) reads rows of pixels as wide as rows of channels, so nothing is copied.  Other
filters shift those rows by a tap, off every alignment: elements come one by one.  So do the channels of an input with three of
them, in either layout, unless the copy has a fourth.  The copy costs one read and one write."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilefold.plan.device import Device
    from tilefold.plan.matrix.conv import ConvProblem

FEW = 16  # channels of a group below which taps and channels are one axis of the reduction
ELEMENT_S = 3e-12  # of an element that is read by itself; on an H200 2.5 to 14 ps (137 us for 28.9 million of them, 794 for 57.8)
LAUNCH_S = 2e-6  # of one more kernel in a row
USE = 0.8  # of the DRAM's rate that a copy reaches
WIDEST = 8  # bytes at least that reading rows of pixels as they lie must load at once
ALIGNED = 4  # channels that the copy of an input with few of them is padded to a multiple of


def copied(n: "ConvProblem") -> tuple[str, ...]:
    """Which of "x" and "dy" are channels-first, so that a copy would change them."""
    names = () if n.x_last or n.channels == 1 else ("x",)
    return names if n.y_last or n.out_channels == 1 else (*names, "dy")


def padded(n: "ConvProblem") -> int:
    """Channels that a copy of x has: with few of them, zeros up to a width that is loaded at once."""
    if n.groups > 1 or n.taps == (1, 1) or not 1 < n.channels < FEW:
        return n.channels
    width = -(-n.channels // ALIGNED) * ALIGNED
    return width if width < FEW else n.channels


def copied_bytes(n: "ConvProblem", name: str) -> int:
    """Of memory for the copy of "x" or "dy"."""
    if name == "x":
        return n.batch * n.high * n.wide * padded(n) * n.itemsize
    return n.pixels * n.out_channels * n.itemsize


def copy_s(n: "ConvProblem", device: "Device", name: str) -> float:
    """Estimated seconds of the copy: a read, a write, a launch."""
    return LAUNCH_S + 2 * copied_bytes(n, name) / (USE * device.dram_rate)


def gathered_s(n: "ConvProblem") -> float:
    """Estimated seconds of the forward pass that reads channels-first input element by element."""
    tiles = -(-n.columns // 128)
    return ELEMENT_S * n.pixels * n.channels * n.taps[0] * n.taps[1] * tiles


def copy_pays(n: "ConvProblem", device: "Device") -> tuple[bool, str]:
    """-> whether, and why (not), in words of figures."""
    names = copied(n)
    wider = padded(n) != n.channels
    if not names and not wider:
        return False, "nothing lies channels-first"
    if n.pointwise and n.high * n.wide * n.itemsize % WIDEST == 0:
        return False, "rows of pixels are read as wide as they lie"
    name = "x" if wider else names[0]
    copies, elements = copy_s(n, device, name), gathered_s(n)
    kind = f"copy of {padded(n)} channels" if wider else "copy"
    what = f"a channels-last {kind} takes about {copies * 1e6:.1f} us, reading element by element {elements * 1e6:.1f}"
    return copies < elements, what


def copy_tile(pixels: int, width: int, itemsize: int, device: "Device") -> tuple[int, int, int]:
    """-> pixels, channels and warps of a program of the copy."""
    if device.backend == "interpreter":
        return 64, min(32, 1 << (width - 1).bit_length()), 4
    if width <= 64:
        columns = 1 << (width - 1).bit_length()
        return min(1024, 4096 // columns), columns, 4
    side = 128 if itemsize <= 2 else 64
    if -(-pixels // side) * -(-width // side) >= 2 * device.sms:
        return side, side, 8
    return 64, 64 if itemsize <= 2 else 32, 4
