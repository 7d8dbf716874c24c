"""Tiles of a matrix product: which there are, what each needs, which one a shape gets."""

from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.plan.base import Fault
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID, shared_fault
from tilefold.plan.matrix.problem import ITEMSIZE, MatmulProblem

PORTABLE, HOPPER = "matmul", "matmul_hopper"
GROUP = 8  # rows of tiles that are made together
MAX_SPLITS = 64
SHORTEST_SHARE = 512  # of k, in elements: a shorter one costs more to add up than it saves
BARRIER_BYTES = 1024  # barriers, and what the compiler keeps to start the partitions
STAGING = 2  # pieces of 64 columns that a warpgroup of matmul_hopper has on their way out
HOPPER_TILES = ((128, 256, 4), (128, 128, 6))  # rows, columns, buffers
HOPPER_BYTES = 128  # of a row of A and of B at a time: 64 numbers of 16 bits, 128 of 8
SMALL_TILE = 1.1  # how much longer 128 x 128 takes for the same work in 8 bits: it draws a third more from L2
# By elements of a tile: the share of the device's rate that the portable kernel reaches with it.
REACHED = {32768: 0.8, 16384: 0.75, 8192: 0.6, 4096: 0.45, 2048: 0.28, 1024: 0.15}
EPILOGUE, LAUNCH = 1.0e-6, 2.5e-6  # seconds: a tile's end, which nothing hides in the last wave, and a launch
# Products of 16 bits by wgmma, where a program has an SM for itself: seconds of a step of a tile of (rows, columns, k), of a
# launch with its first loads, and the part of DRAM's rate that loads reach.  Fitted on an H200: benchmarks/products.py.
STEP_SECONDS = {(64, 32, 128): 0.27e-6, (64, 64, 128): 0.34e-6, (64, 128, 64): 0.28e-6, (128, 128, 64): 0.35e-6,
                (128, 256, 64): 0.74e-6}  # fmt: skip
HOPPER_STEP_SECONDS = {128: 0.34e-6, 256: 0.63e-6}  # by columns
FIRST_LOADS, LOADED = 4.5e-6, 0.8
BESIDE = 0.15  # of the shorter of steps and loads, what the longer does not hide
ADD_UP, ADD_SHARE, ADD_BYTES = (
    4.5e-6,
    0.5e-6,
    2e12,
)  # seconds of the second launch, and of each share in it; bytes/s of sums


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """The part of a plan that describes one program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = GROUP
    splits: int = 1

    def tiles(self, problem: MatmulProblem) -> int:
        """Tiles of all results."""
        return -(-problem.m // self.block_m) * -(-problem.n // self.block_n) * problem.results

    def steps(self, problem: MatmulProblem) -> int:
        """Tiles of k that an element's sum has."""
        return -(-problem.k // self.block_k) * (problem.batch if problem.fold else 1)


# From large to small: rows, columns, k, warps, stages.
# Of as many elements the first: with 64 rows wgmma serves, with 32 mma.sync, and takes a third longer.
_HALF = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4),
         (64, 32, 64, 4, 4), (32, 64, 64, 4, 4), (16, 64, 128, 4, 4), (64, 16, 128, 4, 4))  # fmt: skip
# As many bytes on their way as shared memory holds, so that a program has an SM for itself: where copies are asynchronous.
DEEP = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 6), (64, 128, 64, 4, 8), (64, 64, 128, 4, 6), (64, 32, 128, 4, 8))
_HALF_AMPERE = ((128, 128, 32, 8, 4), (128, 64, 32, 4, 4), (64, 128, 32, 4, 4), (64, 64, 64, 4, 3), (32, 64, 64, 4, 3),
                (16, 64, 64, 4, 4), (64, 16, 64, 4, 4))  # fmt: skip
_SINGLE = ((128, 64, 32, 8, 3), (64, 64, 32, 4, 3), (32, 64, 32, 4, 3), (16, 64, 64, 4, 3), (64, 16, 64, 4, 3))
_TF32 = (
    (128, 128, 32, 8, 4),
    (128, 64, 32, 4, 4),
    (64, 64, 32, 4, 4),
    (32, 64, 32, 4, 4),
    (16, 64, 64, 4, 3),
    (64, 16, 64, 4, 3),
)
_EIGHT = ((128, 128, 128, 8, 3), (64, 128, 128, 4, 3), (64, 64, 128, 4, 3), (16, 64, 128, 4, 4), (64, 16, 128, 4, 4))


def by_wgmma(problem: MatmulProblem, device: Device) -> bool:
    """Whether factors of 16 bits are multiplied by wgmma, from shared memory."""
    half = problem.dtype in ("bfloat16", "float16")
    return half and device.has("shared operands") and not device.has("tcgen05")


def is_deep(problem: MatmulProblem, device: Device) -> bool:
    """Whether loads come by asynchronous copies of 16 bytes to wgmma: deep tiles, whose steps were measured."""
    return by_wgmma(problem, device) and problem.descriptors


def _candidates(problem: MatmulProblem, device: Device) -> tuple[MatmulTile, ...]:
    if device.backend == "interpreter":  # its cost is that of its steps
        return (MatmulTile(64, 64, 64, 4, 1),)
    if problem.dtype == "float32":
        found: tuple[tuple[int, ...], ...] = _TF32 if problem.tf32 else _SINGLE
    elif problem.dtype == "float8_e4m3fn":
        found = _EIGHT
    else:
        found = DEEP if is_deep(problem, device) else _HALF if device.has("shared operands") else _HALF_AMPERE
    if device.backend == "hip":  # 64 KiB of shared memory
        found = tuple((m, n, min(k, 64), warps, 2) for m, n, k, warps, _ in found)
    if (
        problem.activation != "none" or problem.saved or not problem.descriptors
    ):  # 128 sums a thread leave no room for more
        found = tuple(numbers for numbers in found if numbers[1] < 256)
    tiles = (MatmulTile(*numbers) for numbers in found)
    return tuple(t for t in tiles if shared_bytes(problem, PORTABLE, t) <= device.smem_per_block)


def _waste(size: int, block: int) -> bool:
    """Whether half of the block would do."""
    return block > 16 and 2 * size <= block


@lru_cache(maxsize=64)  # the estimate of which kernel is faster asks, and then its plan
def choose_portable(problem: MatmulProblem, device: Device, order: str) -> MatmulTile:
    """Of the tiles that are not half empty, and their shares of the sum, the one with the least estimated time."""
    every = fitting = _candidates(problem, device)
    if not is_deep(problem, device):
        fitting = tuple(t for t in every if not _waste(problem.m, t.block_m) and not _waste(problem.n, t.block_n))
    made = []
    for tile in fitting or every[-1:]:
        most = splits_of(problem, device, tile)
        made += [replace(tile, splits=splits) for splits in sorted({1, max(1, most // 2), most})]
    tile = min(made, key=lambda t: portable_seconds(problem, device, t))
    return replace(tile, group=1) if order == "plain" else tile


def invariant_tiles(problem: MatmulProblem, device: Device) -> tuple[MatmulTile, ...]:
    """Tiles of the portable kernel whose elements are sums in one order, whatever m, n and the batch: one chain of tensor
    instructions over k.  By wgmma it is the same with 64 rows and 4 warps as with 128 and 8, and whatever the columns and the
    length of k; of float32 it is a sum of the products of tiles, so that these have one length."""
    if device.backend == "interpreter":
        return (MatmulTile(64, 64, 64, 4, 1),)
    if problem.dtype == "float32":
        return (MatmulTile(64, 64, 32, 4, 3),)
    if problem.dtype == "float8_e4m3fn":
        return (MatmulTile(64, 64, 128, 4, 3),)
    if by_wgmma(problem, device):
        return tuple(t for t in _candidates(problem, device) if invariant_rows(t.block_m, t.num_warps))
    return (MatmulTile(64, 64, 64, 4, 2),)


def invariant_rows(block_m: int, num_warps: int) -> bool:
    """Whether each warp of a tile has the 16 rows of one wgmma."""
    return (block_m, num_warps) in ((64, 4), (128, 8))


def invariant_hopper_refusal(problem: MatmulProblem, device: Device) -> str | None:
    """Why the kernel for sm_90 has other bits than the portable one, or cannot serve, as a sentence; None if neither."""
    if refusal := hopper_refusal(problem, device):
        return refusal
    if problem.dtype not in ("bfloat16", "float16"):
        return f"its sums of {problem.dtype} were not compared with the portable kernel's"
    if problem.activation not in ("none", "relu"):
        return f"its {problem.activation} is made of other instructions"
    if problem.fold or problem.scaled:
        return "its sums over a batch, and its factors, were not compared with the portable kernel's"
    return None


def choose_invariant(problem: MatmulProblem, device: Device, order: str, portable: bool) -> tuple[str, MatmulTile]:
    """(kernel, tile) of numerics="invariant": of those with the same bits the one with the least estimated time."""
    _, _, kernel, tile = min(_invariant_choices(problem, device, portable), key=lambda one: one[:2])
    return kernel, replace(tile, group=1) if order == "plain" else tile


def estimated_invariant(problem: MatmulProblem, device: Device, portable: bool) -> float:
    """Estimated time of that (seconds)."""
    return min(_invariant_choices(problem, device, portable), key=lambda one: one[:2])[0]


def _invariant_choices(
    problem: MatmulProblem, device: Device, portable: bool
) -> list[tuple[float, int, str, MatmulTile]]:
    """(seconds, elements of a tile, kernel, tile)."""
    made = [(portable_seconds(problem, device, t), PORTABLE, t) for t in invariant_tiles(problem, device)]
    if by_wgmma(problem, device) and not portable and invariant_hopper_refusal(problem, device) is None:
        made += [(hopper_seconds(problem, device, t), HOPPER, t) for t in _hopper_tiles(problem)]
    return [(seconds, tile.block_m * tile.block_n, kernel, tile) for seconds, kernel, tile in made]


def portable_seconds(problem: MatmulProblem, device: Device, tile: MatmulTile) -> float:
    """Estimated time: waves of tiles at the part of the device's rate that their size reaches, and a launch more for shares; by
    wgmma in measured steps."""
    step = STEP_SECONDS.get((tile.block_m, tile.block_n, tile.block_k))
    if step and is_deep(problem, device):
        return _stepped(problem, device, tile, step)
    rate = device.matmul_rate("bfloat16" if problem.dtype == "float8_e4m3fn" else problem.rate)
    waves = -(-tile.tiles(problem) * tile.splits // device.sms)
    area = 2.0 * tile.block_m * tile.block_n * tile.block_k * device.sms / (rate * REACHED[tile.block_m * tile.block_n])
    return waves * -(-tile.steps(problem) // tile.splits) * area + LAUNCH + _second_launch(problem, device, tile)


def _stepped(problem: MatmulProblem, device: Device, tile: MatmulTile, step: float) -> float:
    """Estimated time: of waves of tiles, a tile an SM, in steps of so many seconds, beside DRAM, and what begins and ends."""
    waves = -(-tile.tiles(problem) * tile.splits // device.sms)
    less, more = sorted(
        (waves * -(-tile.steps(problem) // tile.splits) * step, problem.cost.bytes / (LOADED * device.dram_rate))
    )
    return FIRST_LOADS + more + BESIDE * less + _second_launch(problem, device, tile)


def _second_launch(problem: MatmulProblem, device: Device, tile: MatmulTile) -> float:
    """Seconds for adding the shares up."""
    if tile.splits == 1:
        return 0.0
    sums = 4 * problem.results * problem.m * problem.n * (tile.splits + 1)
    if is_deep(problem, device):
        return ADD_UP + ADD_SHARE * tile.splits + 2 * sums / ADD_BYTES
    return LAUNCH + 2 * sums / (device.measured_l2_bytes_per_s or 2 * device.dram_rate)


def splits_of(problem: MatmulProblem, device: Device, tile: MatmulTile) -> int:
    """Shares of the sum over k: as many as find a free SM, none shorter than SHORTEST_SHARE."""
    tiles = tile.tiles(problem)
    if not tiles or device.backend == "interpreter":
        return 1
    room, length = device.sms // tiles, tile.steps(problem) * tile.block_k // SHORTEST_SHARE
    return max(1, min(room, length, MAX_SPLITS))


def hopper_refusal(problem: MatmulProblem, device: Device) -> str | None:
    """Why the kernel for sm_90 cannot serve, as a sentence, or None if it can."""
    if refusal := architecture_refusal("matmul_hopper", device):
        return refusal
    eight = ITEMSIZE[problem.dtype] == 1
    if problem.dtype not in ("bfloat16", "float16") and not eight:
        return f"it multiplies bfloat16, float16 and float8_e4m3fn, not {problem.dtype}"
    if eight and (problem.a_major, problem.b_major) != ("k", "k"):
        return "tensor cores take bytes with k side by side in both factors: a contiguous, b the transpose of a contiguous [N, K]"
    if eight and (problem.batch != 1 or problem.fold or problem.saved):
        return "it has no batches of float8_e4m3fn, nor sums over one, nor saved results"
    if not problem.descriptors:
        return "TMA needs bases and strides of A and B that are multiples of 16 bytes, and some are not"
    if not problem.summed:
        return "there is nothing to multiply"
    return None


def hopper_slower(problem: MatmulProblem, device: Device, order: str) -> str | None:
    """Why the portable kernel is the better one, as a sentence, or None if it is not."""
    if by_wgmma(problem, device):
        own, other = choose_hopper(problem, device, order), choose_portable(problem, device, order)
        times = hopper_seconds(problem, device, own), portable_seconds(problem, device, other)
        if times[0] < times[1]:
            return None
        return f"{times[0] * 1e6:.1f} us are estimated for it, {times[1] * 1e6:.1f} for the portable kernel"
    tiles = MatmulTile(128, 128, 64, 4, 6).tiles(problem)
    if 4 * tiles < 3 * device.sms:
        return (
            f"{tiles} tile{'s' * (tiles != 1)} of 128 x 128 for {device.sms} SMs: the portable kernel has smaller ones"
        )
    if problem.m <= 32 or problem.n <= 32:
        return f"a side of {min(problem.m, problem.n)} leaves most of its 128 x 128 tiles empty"
    return None


def _hopper_tiles(problem: MatmulProblem) -> tuple[MatmulTile, ...]:
    step = HOPPER_BYTES // ITEMSIZE[problem.dtype]
    return tuple(MatmulTile(m, n, step, 4, stages, GROUP * n // 128) for m, n, stages in HOPPER_TILES)


@lru_cache(maxsize=64)
def choose_hopper(problem: MatmulProblem, device: Device, order: str) -> MatmulTile:
    """The tile, and the number of shares of the sum, with the least estimated time."""
    made = []
    for tile in _hopper_tiles(problem):
        for splits in sorted({1, 2, splits_of(problem, device, tile)}):
            if splits <= splits_of(problem, device, tile):
                made.append(replace(tile, splits=splits))
    tile = min(made, key=lambda t: hopper_seconds(problem, device, t))
    return replace(tile, group=1) if order == "plain" else tile


def hopper_seconds(problem: MatmulProblem, device: Device, tile: MatmulTile) -> float:
    """Estimated time: waves of tiles at the rate at which their loads come, start and end, and a second launch for shares; of 16
    bits in measured steps."""
    if by_wgmma(problem, device):
        return _stepped(problem, device, tile, HOPPER_STEP_SECONDS[tile.block_n])
    waves = -(-tile.tiles(problem) * tile.splits // device.sms)
    rate = 2 * device.matmul_rate("bfloat16")  # no device lists a rate of bytes
    area = 2.0 * tile.block_m * tile.block_n * device.sms / rate
    if tile.block_n < 256:
        area *= SMALL_TILE
    made = waves * (-(-tile.steps(problem) // tile.splits) * tile.block_k * area + EPILOGUE)
    return made + LAUNCH + _second_launch(problem, device, tile)


def shared_bytes(problem: MatmulProblem, kernel: str, tile: MatmulTile) -> int:
    """Shared memory of one program (bytes)."""
    ring = tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k * ITEMSIZE[problem.dtype]
    if kernel == HOPPER:
        return ring + tile.block_m * 64 * 2 * STAGING + BARRIER_BYTES
    return ring


def traffic(problem: MatmulProblem, tile: MatmulTile) -> int:
    """Bytes that tiles draw from the L2 cache; rows and columns that are not there are not loaded."""
    side = min(tile.block_m, problem.m) + min(tile.block_n, problem.n)
    return tile.tiles(problem) * side * problem.summed * ITEMSIZE[problem.dtype]


def tile_violation(problem: MatmulProblem, device: Device, kernel: str, tile: MatmulTile) -> Fault:
    """(field, sentence) of the first limit that a tile breaks, or None."""
    for field in ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group", "splits"):
        if type(getattr(tile, field)) is not int:
            return field, f"must be an int, got {getattr(tile, field)!r}"
    for field in ("block_m", "block_n", "block_k"):
        value = getattr(tile, field)
        if value < 16 or value > 256 or value & (value - 1):
            return field, f"must be a power of two from 16 to 256, got {value}"
    if tile.num_warps not in (1, 2, 4, 8, 16):
        return "num_warps", f"must be 1, 2, 4, 8 or 16, got {tile.num_warps}"
    for field, most in (("num_stages", 8), ("group", 1024), ("splits", 1024)):
        if not 1 <= getattr(tile, field) <= most:
            return field, f"must be from 1 to {most}, got {getattr(tile, field)}"
    if kernel == HOPPER and (fault := _hopper_fault(problem, tile)):
        return fault
    if tile.splits > max(1, tile.steps(problem)):
        return "splits", f"must be at most {tile.steps(problem)}, the tiles of the sum over k, got {tile.splits}"
    if tile.tiles(problem) * tile.splits > MAX_GRID:
        return "grid", f"{tile.tiles(problem) * tile.splits} tiles are more than the {MAX_GRID} that a launch takes"
    fault = shared_fault("num_stages", shared_bytes(problem, kernel, tile), device)
    if fault and device.backend != "interpreter":
        return fault
    held = tile.block_m * tile.block_n // (tile.num_warps * device.warp_size)
    if kernel == PORTABLE and held > device.registers_per_thread:
        return "num_warps", f"the accumulator needs {held} registers a thread, there are {device.registers_per_thread}"
    return None


def _hopper_fault(problem: MatmulProblem, tile: MatmulTile) -> Fault:
    if tile.block_m != 128:
        return "block_m", f"must be 128 with {HOPPER}, got {tile.block_m}"
    if tile.block_n not in (128, 256):
        return "block_n", f"must be 128 or 256 with {HOPPER}, got {tile.block_n}"
    if tile.block_k != HOPPER_BYTES // ITEMSIZE[problem.dtype]:
        wanted = HOPPER_BYTES // ITEMSIZE[problem.dtype]
        return "block_k", f"must be {wanted} with {HOPPER}, got {tile.block_k}"
    if tile.num_warps != 4:
        return "num_warps", f"must be 4, of each of the two warpgroups, with {HOPPER}, got {tile.num_warps}"
    return None
