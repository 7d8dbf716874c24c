"""How much the measurements of a device's roofs do."""

from dataclasses import dataclass

from tilefold.plan.device import Device


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each measurement does. elements: int32 of the DRAM buffers; l2_elements: of the one in L2, read l2_turns times;
    block: of a program at a time. turns: of the loops in registers and on tensor cores. programs: of those, an SM.
    tile: M, N of the products; k_bytes: bytes of a row of their tiles. warps. Defaults are for a data-centre GPU."""

    elements: int = 1 << 29
    l2_elements: int = 1 << 21
    l2_turns: int = 4
    block: int = 8192
    turns: int = 4096
    programs: int = 8
    tile: tuple[int, int] = (128, 256)
    k_bytes: int = 128
    warps: int = 8


def sizes_of(device: Device) -> Sizes:
    """Sizes for a device: buffers far beyond its L2 cache and within a quarter of it; next to nothing for the interpreter."""
    if device.backend == "interpreter":
        return Sizes(
            elements=1 << 12, l2_elements=1 << 10, l2_turns=3, block=256, turns=2, programs=2, tile=(16, 16), k_bytes=64, warps=4
        )  # fmt: skip
    quarter = 1 << (device.l2_bytes // 16).bit_length() - 1  # elements of 4 bytes
    return Sizes(elements=max(1 << 28, 128 * quarter), l2_elements=quarter)
