"""Tiles of a matrix product: which there are, what each needs, which one a shape gets."""

from dataclasses import dataclass, replace

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
SMALL_TILE = 1.1  # how much longer 128 x 128 takes for the same work: it draws a third more from L2
# By elements of a tile: the share of the device's rate that the portable kernel reaches with it.
REACHED = {32768: 0.8, 16384: 0.75, 8192: 0.6, 4096: 0.45, 2048: 0.28, 1024: 0.15}
EPILOGUE, LAUNCH = 1.0e-6, 2.5e-6  # seconds: a tile's end, which nothing hides in the last wave, and a launch


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


def _candidates(problem: MatmulProblem, device: Device) -> tuple[MatmulTile, ...]:
    if device.backend == "interpreter":  # its cost is that of its steps
        return (MatmulTile(64, 64, 64, 4, 1),)
    if problem.dtype == "float32":
        found: tuple[tuple[int, ...], ...] = _TF32 if problem.tf32 else _SINGLE
    elif problem.dtype == "float8_e4m3fn":
        found = _EIGHT
    else:
        found = _HALF if device.has("shared operands") else _HALF_AMPERE
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


def choose_portable(problem: MatmulProblem, device: Device, order: str) -> MatmulTile:
    """Of the tiles that are not half empty, and their shares of the sum, the one with the least estimated time."""
    every = _candidates(problem, device)
    fitting = [t for t in every if not _waste(problem.m, t.block_m) and not _waste(problem.n, t.block_n)]
    made = []
    for tile in fitting or [every[-1]]:
        most = splits_of(problem, device, tile)
        made += [replace(tile, splits=splits) for splits in sorted({1, max(1, most // 2), most})]
    tile = min(made, key=lambda t: portable_seconds(problem, device, t))
    return replace(tile, group=1) if order == "plain" else tile


def invariant_tiles(problem: MatmulProblem, device: Device) -> tuple[MatmulTile, ...]:
    """For few rows and for many: tiles of the portable kernel whose elements are sums in one order, whatever m, n and the batch.

    It is one chain of tensor instructions over k, by wgmma the same for each row with 64 rows and 4 warps or 128 and 8; of
    float32 a sum of the products of tiles, so that these have one length of k."""
    if device.backend == "interpreter":
        return (MatmulTile(64, 64, 64, 4, 1),)
    if problem.dtype == "float32":
        return (MatmulTile(64, 64, 32, 4, 3),)
    if problem.dtype == "float8_e4m3fn":
        return (MatmulTile(64, 64, 128, 4, 3),)
    if device.has("tcgen05") or not device.has("shared operands"):
        return (MatmulTile(64, 64, 64, 4, 2),)
    return (MatmulTile(64, 128, 64, 4, 4), MatmulTile(128, 128, 64, 8, 4))


def portable_seconds(problem: MatmulProblem, device: Device, tile: MatmulTile) -> float:
    """Estimated time: waves of tiles at the part of the device's rate that their size reaches, and a launch more for shares."""
    rate = device.matmul_rate("bfloat16" if problem.dtype == "float8_e4m3fn" else problem.rate)
    waves = -(-tile.tiles(problem) * tile.splits // device.sms)
    area = 2.0 * tile.block_m * tile.block_n * tile.block_k * device.sms / (rate * REACHED[tile.block_m * tile.block_n])
    return waves * -(-tile.steps(problem) // tile.splits) * area + LAUNCH + _second_launch(problem, device, tile)


def _second_launch(problem: MatmulProblem, device: Device, tile: MatmulTile) -> float:
    """Seconds for adding the shares up."""
    if tile.splits == 1:
        return 0.0
    sums = 4 * problem.results * problem.m * problem.n * (tile.splits + 1)
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


def hopper_slower(problem: MatmulProblem, device: Device) -> str | None:
    """Why the portable kernel is the better one, as a sentence, or None if it is not."""
    tiles = MatmulTile(128, 128, 64, 4, 6).tiles(problem)
    if 4 * tiles < 3 * device.sms:
        return (
            f"{tiles} tile{'s' * (tiles != 1)} of 128 x 128 for {device.sms} SMs: the portable kernel has smaller ones"
        )
    if problem.m <= 32 or problem.n <= 32:
        return f"a side of {min(problem.m, problem.n)} leaves most of its 128 x 128 tiles empty"
    return None


def choose_hopper(problem: MatmulProblem, device: Device, order: str) -> MatmulTile:
    """The tile, and the number of shares of the sum, with the least estimated time."""
    made = []
    for rows, columns, stages in HOPPER_TILES:
        step = HOPPER_BYTES // ITEMSIZE[problem.dtype]
        tile = MatmulTile(rows, columns, step, 4, stages, GROUP * columns // 128)
        for splits in sorted({1, 2, splits_of(problem, device, tile)}):
            if splits <= splits_of(problem, device, tile):
                made.append(replace(tile, splits=splits))
    tile = min(made, key=lambda t: hopper_seconds(problem, device, t))
    return replace(tile, group=1) if order == "plain" else tile


def hopper_seconds(problem: MatmulProblem, device: Device, tile: MatmulTile) -> float:
    """Estimated time: waves of tiles at the rate at which their loads come, start and end, and a second launch for shares."""
    waves = -(-tile.tiles(problem) * tile.splits // device.sms)
    eight = ITEMSIZE[problem.dtype] == 1  # no device lists a rate of bytes: twice that of 16 bits
    rate = 2 * device.matmul_rate("bfloat16") if eight else device.matmul_rate(problem.dtype)
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
    """Bytes that tiles draw from the L2 cache."""
    return tile.tiles(problem) * (tile.block_m + tile.block_n) * problem.summed * ITEMSIZE[problem.dtype]


def tile_violation(problem: MatmulProblem, device: Device, kernel: str, tile: MatmulTile) -> tuple[str, str] | None:
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


def _hopper_fault(problem: MatmulProblem, tile: MatmulTile) -> tuple[str, str] | None:
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
