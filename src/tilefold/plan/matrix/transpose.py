"""The plan of a 2-D transpose: which of its three kernels, which tile, and why the others were not taken."""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan.base import Shown
from tilefold.plan.device import Device

REGISTERS, STRIDES, DESCRIPTORS = METHODS = ("registers", "strides", "descriptors")
ALIGNMENT = 16  # bytes, of a descriptor's base and strides
# Tile and warps by element size, measured on an H200: 8192 x 8192 (of 8 bytes 4096 x 4096) in 36.9, 69.1, 135.4 and 68.5 us.
TILES = {1: (64, 128, 8), 2: (128, 128, 8), 4: (64, 64, 8), 8: (32, 32, 4)}
BOXES = {
    1: (128, 32, 4),
    2: (128, 32, 4),
    4: (64, 32, 4),
    8: (32, 32, 4),
}  # of the descriptors: 40.9, 73.4, 141.1, 70.4 us


@dataclass(frozen=True, slots=True)
class TransposeProblem:
    """[rows, columns] of `size` bytes an element, strides in elements; aligned: the first element is 16-byte aligned."""

    rows: int
    columns: int
    size: int
    strides: tuple[int, int]
    aligned: bool = True

    @property
    def wide(self) -> bool:
        """Whether the offsets within a tile may exceed 31 bits."""
        far = max(*map(abs, self.strides), self.rows) * 128 * 2  # of a tile of at most 128 x 128
        return far >= 2**31


@dataclass(frozen=True, slots=True)
class TransposePlan(Shown):
    """The decision: kernel, tile (rows x columns of the input), warps; reason; rejected: (kernel, why not)."""

    problem: TransposeProblem
    device: Device
    method: str
    tile: tuple[int, int]
    num_warps: int
    reason: str
    rejected: tuple[tuple[str, str], ...]

    @property
    def programs(self) -> int:
        return -(-self.problem.rows // self.tile[0]) * -(-self.problem.columns // self.tile[1])

    @property
    def bytes(self) -> int:
        """One read and one write of everything."""
        return 2 * self.problem.rows * self.problem.columns * self.problem.size

    @property
    def bound_s(self) -> float:
        return self.bytes / self.device.dram_rate

    def __str__(self) -> str:
        n = self.problem
        others = "".join(f"\n  not {name}: {why}" for name, why in self.rejected)
        return (
            f"Transpose of [{n.rows}, {n.columns}] of {n.size} bytes on {self.device.title}: {self.method}, tile "
            f"{self.tile[0]} x {self.tile[1]}, {self.num_warps} warps ({self.reason}); {self.bytes} bytes, at least "
            f"{self.bound_s * 1e6:.1f} us{others}"
        )


def check_method(method: object) -> None:
    """ValueRangeError unless it is one that `plan_transpose` knows, whatever its type."""
    if method not in ("auto", *METHODS):
        raise ValueRangeError(f"method must be one of 'auto', {', '.join(map(repr, METHODS))}, got {method!r}")


def descriptors_refusal(n: TransposeProblem, device: Device) -> str | None:
    """Why tensor descriptors cannot be used, as a sentence, or None if they can."""
    if not device.has("descriptors"):
        return f"{device.name} has no tensor memory accelerator (sm_90 and newer have)"
    if n.strides[1] != 1:
        return f"x has strides {n.strides}: descriptors need a contiguous last dimension"
    if not n.aligned:
        return f"x does not begin at a multiple of {ALIGNMENT} bytes"
    if n.strides[0] <= 0:
        return f"x has strides {n.strides}: descriptors need rows that follow one another"
    if n.strides[0] * n.size % ALIGNMENT:
        return f"a row of x is {n.strides[0] * n.size} bytes apart from the next: not a multiple of {ALIGNMENT}"
    if n.rows * n.size % ALIGNMENT:
        return f"a row of the result has {n.rows * n.size} bytes: not a multiple of {ALIGNMENT}"
    if max(n.rows, n.columns) >= 2**31:
        return f"x has shape {(n.rows, n.columns)}: coordinates of descriptors have 32 bits"
    return None


@lru_cache(maxsize=4096)
def plan_transpose(problem: TransposeProblem, device: Device, method: str = "auto") -> TransposePlan:
    """The plan: pure.  ValueRangeError for an unknown method, Unsupported for descriptors that cannot be."""
    check_method(method)
    refusal = descriptors_refusal(problem, device)
    if method == DESCRIPTORS and refusal is not None:
        raise Unsupported(f"method 'descriptors' is not possible here: {refusal}; use 'registers' or 'auto'")
    *tile, warps = (
        (16, 16, 4) if device.backend == "interpreter" else (BOXES if method == DESCRIPTORS else TILES)[problem.size]
    )
    if method != "auto":
        return TransposePlan(problem, device, method, (tile[0], tile[1]), warps, "asked for", ())
    rejected = (
        (STRIDES, "the compiler turns the tile to store it in rows, which is the kernel through registers"),
        (DESCRIPTORS, refusal or "measured: 3 to 10 % slower than the kernel through registers"),
    )
    return TransposePlan(problem, device, REGISTERS, (tile[0], tile[1]), warps, "takes any strides and sizes", rejected)
