"""What fits: shared memory, registers, tile sizes and grids, estimated before anything is compiled."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tilefold.errors import DtypeError, Unsupported
from tilefold.plan.base import Fault, unusable
from tilefold.plan.device import Device
from tilefold.plan.problem import MAX_HEAD_DIM, AttentionProblem

POINTER, BOX, VARLEN = KERNELS = ("attention_forward", "attention_forward_box", "attention_forward_varlen")

MAX_GRID = 2**31 - 1  # programs along the first axis of a grid
MAX_LENGTH = 2**30  # the sum of two positions must fit int32
MAX_BOX_ROWS = 256  # rows of one descriptor box
RESERVED_SHARED = 1024  # bytes per resident program that the driver keeps for itself
MOD_BYTES = {
    "bias": 4,
    "mask": 1,
    "user": 4,
}  # bytes per score that a modification may load; the others load per row or nothing


@dataclass(frozen=True, slots=True)
class Tile:
    """One program: block_m queries against block_n keys a step, with num_warps warps and num_stages pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def __str__(self) -> str:
        stages = "1 stage" if self.num_stages == 1 else f"{self.num_stages} stages"
        warps = "1 warp" if self.num_warps == 1 else f"{self.num_warps} warps"
        cap = f", at most {self.maxnreg} registers" if self.maxnreg else ""
        return f"{self.block_m} x {self.block_n}, {warps}, {stages}{cap}"


def uses_wgmma(problem: AttentionProblem, device: Device, tile: Tile) -> bool:
    """Whether products read both operands from shared memory (wgmma, tcgen05): sm_90 and newer, 64 rows, 4 warps."""
    takes = device.has("shared operands") and problem.dtype != "float32"
    return takes and tile.block_m >= 64 and tile.num_warps >= 4


def kv_buffers(problem: AttentionProblem, device: Device, tile: Tile) -> int:
    """How many tiles of K and of V are in flight: one per stage if products read shared memory, else one fewer."""
    return tile.num_stages if uses_wgmma(problem, device, tile) else max(1, tile.num_stages - 1)


def shared_bytes(problem: AttentionProblem, device: Device, tile: Tile) -> int:
    """Estimated shared memory of one program (bytes), checked against compilations of the fold with triton 3.6.0.

    K and V buffers, Q (held in registers on CDNA), loads of modifications, barriers; or the output tile if larger.
    """
    if device.backend == "interpreter":
        return 0
    size, buffers, wgmma = problem.itemsize, kv_buffers(problem, device, tile), uses_wgmma(problem, device, tile)
    total = buffers * tile.block_n * (problem.block_qk + problem.block_v) * size
    loads = sum(MOD_BYTES.get(mod, 0) for mod in problem.score_mods + problem.mask_mods)
    total += buffers * tile.block_m * tile.block_n * loads
    if wgmma:
        total += 1024
    elif size == 4:
        total += tile.block_m * tile.block_n * size + 256
    elif tile.block_m < problem.block_v:
        total += tile.block_m * tile.block_n * size  # the probabilities change layout before the second product
    if device.backend != "hip":
        total += tile.block_m * problem.block_qk * size
    return max(total, tile.block_m * problem.block_v * size)


def accumulator_registers(problem: AttentionProblem, device: Device, tile: Tile) -> int:
    """Registers per thread that hold the fp32 accumulators: the output tile and one tile of scores."""
    threads = device.warp_size * tile.num_warps
    return -(-tile.block_m * (problem.block_v + tile.block_n) // threads)


def registers_estimate(problem: AttentionProblem, device: Device, kernel: str, tile: Tile) -> int:
    """Registers per thread: accumulators, rounded probabilities, addresses, row statistics.

    Checked against compilations of the fold with triton 3.6.0, to within a third.
    """
    threads = device.warp_size * tile.num_warps
    held = accumulator_registers(problem, device, tile) + tile.block_m * tile.block_n // (2 * threads) + 40
    if not uses_wgmma(problem, device, tile):
        held += tile.block_m * problem.block_qk * problem.itemsize // (4 * threads)
    if kernel != BOX:  # a 64-bit address for each 16 bytes of a tile of K and V
        held += tile.block_n * (problem.block_qk + problem.block_v) * problem.itemsize // (8 * threads)
    if device.backend == "hip":
        held *= 2  # tiles on their way to shared memory wait in registers
    return -(-held // 8) * 8


def programs_per_sm(problem: AttentionProblem, device: Device, kernel: str, tile: Tile) -> int:
    """Estimated programs resident on one SM at a time, at least 1 for a tile within the limits."""
    if device.backend == "interpreter":
        return 1
    threads = device.warp_size * tile.num_warps
    wanted = registers_estimate(problem, device, kernel, tile)
    registers = min(wanted, tile.maxnreg or device.registers_per_thread + 1)
    return min(
        device.smem_per_sm // (shared_bytes(problem, device, tile) + _reserved(device)),
        device.registers_per_sm // (registers * threads),
        device.threads_per_sm // threads,
        device.blocks_per_sm,
    )


def _reserved(device: Device) -> int:
    return RESERVED_SHARED if device.backend == "cuda" else 0


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def tile_violation(problem: AttentionProblem, device: Device, kernel: str, tile: Tile) -> Fault:
    """The first limit that a tile breaks, as (field, sentence), or None if it fits."""
    for field in ("block_m", "block_n"):
        value = getattr(tile, field)
        if type(value) is not int or value < 16 or not _is_power_of_two(value):
            return field, f"{field} must be a power of two of at least 16, got {value!r}"
    if type(tile.num_warps) is not int or not _is_power_of_two(tile.num_warps) or tile.num_warps > 32:
        return "num_warps", f"num_warps must be a power of two from 1 to 32, got {tile.num_warps!r}"
    if type(tile.num_stages) is not int or not 1 <= tile.num_stages <= 8:
        return "num_stages", f"num_stages must be from 1 to 8, got {tile.num_stages!r}"
    if tile.maxnreg is not None and (
        type(tile.maxnreg) is not int or not 24 <= tile.maxnreg <= device.registers_per_thread
    ):
        return "maxnreg", f"maxnreg must be None or from 24 to {device.registers_per_thread}, got {tile.maxnreg!r}"
    kernel_fault = _kernel_violation(problem, device, kernel, tile)
    return kernel_fault or _resource_violation(problem, device, kernel, tile)


def _kernel_violation(problem: AttentionProblem, device: Device, kernel: str, tile: Tile) -> Fault:
    if kernel not in KERNELS:
        return "kernel", f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}"
    if (kernel == VARLEN) != problem.varlen:
        return "kernel", f"kernel {kernel} does not serve a problem with varlen={problem.varlen}"
    if kernel == BOX:
        if fault := unusable(f"kernel {kernel}", box_refusal(problem, device)):
            return fault
        if tile.block_n > MAX_BOX_ROWS:
            return "block_n", f"block_n must be at most {MAX_BOX_ROWS} with box loads, got {tile.block_n}"
    grid = grid_of(problem, tile.block_m)
    if grid[0] > MAX_GRID:
        return "grid", f"grid needs {grid[0]} programs, a launch takes at most {MAX_GRID}"
    return None


def _resource_violation(problem: AttentionProblem, device: Device, kernel: str, tile: Tile) -> Fault:
    if fault := shared_fault("shared_bytes", shared_bytes(problem, device, tile), device):
        return fault
    held, limit = accumulator_registers(problem, device, tile), tile.maxnreg or device.registers_per_thread
    if held > limit:
        return "num_warps", f"accumulators need {held} registers per thread, a thread has {limit}"
    if programs_per_sm(problem, device, kernel, tile) < 1:
        threads = device.warp_size * tile.num_warps
        return "num_warps", f"{threads} threads need more registers than an SM of {device.name} has"
    return None


def shared_fault(field: str, shared: int, device: Device) -> Fault:
    """(field, sentence) where a program needs more bytes of shared memory than it can have, else None."""
    need, have = shared / 1024, device.smem_per_block / 1024
    if need <= have:
        return None
    return field, f"needs {need:.0f} KiB of shared memory, a program on {device.name} has {have:.0f} KiB"


def first_fit(tiles: Iterable[Tile], device: Device, violation: Callable[[Tile], Fault], what: str) -> Tile:
    """The first tile that breaks no limit; Unsupported with what each one breaks.  what: they are for."""
    faults = []
    for tile in tiles:
        fault = violation(tile)
        if fault is None:
            return tile
        faults.append(f"{tile}: {fault[1]}")
    raise Unsupported(f"no tile fits {device.name} for {what} ({'; '.join(faults)})")


def box_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why K and V cannot be loaded as descriptor boxes, as a sentence, or None if they can."""
    if not device.has("descriptors"):
        return f"{device.target} has no tensor-descriptor loads (sm_90 and newer have)"
    if problem.varlen:
        return (
            "sequences of a packed batch start at rows that only the device knows, a box would read across their ends"
        )
    return strides_refusal(keys=problem.descriptors)


def strides_refusal(queries: bool = True, keys: bool = True) -> str | None:
    """Why descriptors cannot read tensors, as a sentence, or None.  queries, keys: whether they can read Q, and K and V."""
    if queries and keys:
        return None
    return f"the base or the strides of {'K or V' if queries else 'Q'} are not multiples of 16 bytes"


def grid_of(problem: AttentionProblem, block_m: int) -> tuple[int, int, int]:
    """One program per query tile, batch entry and head."""
    return (-(-problem.seq_q // block_m) * problem.batch * problem.heads, 1, 1)


def require_supported(problem: AttentionProblem, device: Device, most: int = MAX_HEAD_DIM) -> None:
    """Raise Unsupported, naming the argument, where no tile could help.  most: of a head dim."""
    for name in ("dim_qk", "dim_v"):
        if getattr(problem, name) > most:
            raise Unsupported(f"{name} must be at most {most}, got {getattr(problem, name)}")
    for name in ("seq_q", "seq_k"):
        if getattr(problem, name) > MAX_LENGTH:
            raise Unsupported(f"{name} must be at most 2**30 = {MAX_LENGTH}, got {getattr(problem, name)}")
    require_kernels(device)


def require_kernels(device: Device) -> None:
    """Raise Unsupported where no kernel runs; DtypeError for what is no Device."""
    if not isinstance(device, Device):
        raise DtypeError(f"device must be a tilefold.plan.Device, as device_named({device!r}) may give it")
    if device.backend == "cuda" and device.generation < 80:
        raise Unsupported(f"device must be sm_80 or newer, got {device.name} ({device.target})")
    if device.backend not in ("cuda", "hip", "interpreter"):
        raise Unsupported(
            f"device must have backend cuda, hip or interpreter, got {device.backend!r}; on a CPU kernels take TRITON_INTERPRET=1"
        )
