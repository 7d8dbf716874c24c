"""How a product of 8-bit numbers is cut.  Pure."""

from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.errors import PlanError, Unsupported
from tilefold.plan.architecture import SM_90
from tilefold.plan.base import Fault, Shown, require_fit, unusable
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.dense.attention import Rejected
from tilefold.plan.device import Device
from tilefold.plan.words import sentence

PORTABLE, ROWS, HOPPER = "matmul_eight", "matmul_eight_rows", "matmul_eight_hopper"
BYTES = 128  # of a row of either factor that lie together in shared memory
ROWS_UP_TO = 128  # rows of x that a program of ROWS has at most
ROOM = (
    200 * 1024
)  # bytes of shared memory that rings may take of an SM: the next call's quantise_rows has room beside them
SHORTEST = 1024  # of the sum, in numbers: what a split has at least
HOPPER_TILES = ((128, 256, 4), (128, 128, 6))  # rows, columns, buffers
# Seconds: start of a launch with the first loads, the end of a tile, splits' sums left and added. Estimates, not measured.
START, END, JOIN = 2.0e-6, 1.0e-6, 1.5e-6
# The share of twice the device's 16-bit rate that products reach: tiles of 256 columns, of 128, tiles of few rows.
WIDE, NARROW, FEW = 0.9, 0.8, 0.4


@dataclass(frozen=True, slots=True)
class EightProblem:
    """x [m, k] in 8 bits times the transpose of a weight [n, k]; kind: "int8" or "float8_e4m3fn".

    aligned: the weight's base and the stride of its rows are multiples of 16 bytes, as TMA needs them."""

    m: int
    n: int
    k: int
    kind: str
    aligned: bool = True


@dataclass(frozen=True, slots=True)
class EightPlan(Shown):
    """Kernel, tile, warps, stages and parts of K of a product; group: rows of tiles that programs make together.

    kernel: "matmul_eight" (portable), "matmul_eight_rows" (sm_90, few rows of x: block_n rows of the weight and block_m of x a
    program) or "matmul_eight_hopper" (sm_90: programs stay, a warp loads, two warpgroups multiply); of these num_warps are a
    warpgroup's.  reason: why it was chosen; rejected: what else there is, and why not.  `print` it."""

    problem: EightProblem
    device: Device
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    splits: int = 1
    group: int = 8
    reason: str = ""
    kernel: str = PORTABLE
    rejected: tuple[Rejected, ...] = ()

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                raise PlanError(f"plan field {name} must be a power of two, got {value!r}")
        if self.kernel not in (PORTABLE, ROWS, HOPPER):
            raise PlanError(f"plan field kernel must be one of {PORTABLE}, {ROWS}, {HOPPER}, got {self.kernel!r}")
        if self.kernel != PORTABLE:
            require_fit(unusable(self.kernel, hopper_refusal(self.problem, self.device)))
        if fault := _fault(self):
            raise PlanError(f"plan field {fault[0]} with {self.kernel} {fault[1]}")

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"{self.kernel} on {self.device.title}: [{p.m}, {p.k}] @ [{p.n}, {p.k}]^T {p.kind}",
            f"  tile {self.block_m} x {self.block_n} x {self.block_k}, {self.num_warps} warps, {self.stages} stages, "
            f"{self.parts} parts of K, {self.items} tiles",
            f"  {self.reason}",
        ]
        return "\n".join([*lines, *(f"  not {other.what}: {other.why}" for other in self.rejected)])

    @property
    def items(self) -> int:
        """Tiles of the result."""
        return -(-self.problem.m // self.block_m) * -(-self.problem.n // self.block_n)

    @property
    def steps(self) -> int:
        """Tiles along K."""
        return -(-self.problem.k // self.block_k)

    @property
    def each(self) -> int:
        """Tiles of K of a split."""
        return -(-self.steps // self.splits)

    @property
    def parts(self) -> int:
        """Splits that have something to do."""
        return -(-self.steps // self.each)

    @property
    def small(self) -> bool:
        """Whether two programs of the kernel for few rows may share an SM: one consumer, and few sums."""
        return self.kernel == ROWS and self.block_n == 64 and self.block_m <= 64

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program's ring (bytes)."""
        return self.stages * (self.block_m + self.block_n) * self.block_k


def _fault(plan: EightPlan) -> Fault:
    """(field, sentence) of what the kernels for sm_90 do not have, or None."""
    if plan.kernel == PORTABLE:
        return None
    accepted = {
        ROWS: {"block_m": (16, 32, 64, 128), "block_n": (64, 128), "block_k": (128, 256), "num_warps": (4,)},
        HOPPER: {"block_m": (128,), "block_n": (128, 256), "block_k": (128,), "num_warps": (4,), "splits": (1,)},
    }[plan.kernel]
    for name, values in accepted.items():
        if getattr(plan, name) not in values:
            return name, f"must be one of {values}, got {getattr(plan, name)}"
    if plan.shared_bytes > plan.device.smem_per_block:
        return "stages", f"needs {plan.shared_bytes} bytes of shared memory, there are {plan.device.smem_per_block}"
    return None


def hopper_refusal(problem: EightProblem, device: Device) -> str | None:
    """Why the kernels for sm_90 cannot serve, as a sentence, or None if they can."""
    if refusal := architecture_refusal("matmul_eight_hopper", device):
        return refusal
    if not problem.aligned:
        return "TMA needs a weight whose base and rows lie at multiples of 16 bytes"
    if max(problem.m, problem.n, problem.k) >= 1 << 31:
        return "TMA takes sides below 2^31"
    return None


@lru_cache(maxsize=4096)
def plan_eight(problem: EightProblem, device: Device, portable: bool = False) -> EightPlan:
    """The plan for a product on a device: pure, the same every time.  portable: without the kernels for sm_90.  Unsupported
    where the device has no such numbers."""
    fp8 = problem.kind == "float8_e4m3fn"
    if fp8 and not device.has("e4m3 products"):
        raise Unsupported(
            f"weight is float8_e4m3fn, which {device.title} cannot multiply; accepted: int8, or sm_89 and newer"
        )
    refusal = "portable kernels were asked for" if portable else hopper_refusal(problem, device)
    if refusal is None:
        return _plan_hopper(problem, device)
    why = sentence(refusal)
    return replace(_plan_portable(problem, device), rejected=(Rejected(ROWS, why), Rejected(HOPPER, why)))


def _plan_portable(problem: EightProblem, device: Device) -> EightPlan:
    if device.backend == "interpreter":
        return EightPlan(problem, device, 16, 32, 64, 4, 2, min(2, -(-problem.k // 64)), reason="small, for tests")
    if problem.m <= 64:
        block_m = 16 if problem.m <= 16 else 32 if problem.m <= 32 else 64
        plan = EightPlan(
            problem, device, block_m, 64, 128, 4, 5, reason=f"few rows ({problem.m}): bound by memory, small tiles"
        )
        splits = max(1, min(2 * device.sms // max(1, plan.items), problem.k // 1024, 8))
        return replace(plan, splits=splits)
    twice = (
        problem.kind != "int8" and device.architecture is SM_90
    )  # sums of tensor cores and of fp32: registers for 128 columns
    tiles = -(-problem.m // 128) * -(-problem.n // 256)
    if twice or problem.m <= 256 or tiles < device.sms:
        items = -(-problem.m // 128) * -(-problem.n // 128)
        splits = max(1, min(device.sms // max(1, items), problem.k // 2048, 4))
        why = "room for two sums" if twice else f"few rows ({problem.m}): tiles of 128 x 128"
        if not twice and tiles < device.sms:
            why = f"{tiles} tiles of 128 x 256 are too few for {device.sms} SMs"
        return EightPlan(problem, device, 128, 128, 128, 8, 4, splits, reason=why)
    return EightPlan(
        problem, device, 128, 256, 128, 8, 3, reason=f"{tiles} tiles for {device.sms} SMs: the largest that fits"
    )


def _plan_hopper(problem: EightProblem, device: Device) -> EightPlan:
    """Of what the kernels for sm_90 have, the one with the least estimated time."""
    made = {kernel: min(found, key=seconds) for kernel, found in (
        (ROWS, _rows(problem, device)), (HOPPER, _large(problem, device))
    )}  # fmt: skip
    best, other = sorted(made.values(), key=seconds)
    slower = f"The estimate is {seconds(other) * 1e6:.1f} us, not {seconds(best) * 1e6:.1f}."
    waits = Rejected(PORTABLE, "Its warps load by pointers and wait for loads and products in turn.")
    few = "The least estimated time: weights stream through a ring that is filled before x's codes are there."
    many = "Loads by TMA and products by two warpgroups run side by side, over tiles that stay in one launch."
    return replace(best, reason=few if best.kernel == ROWS else many, rejected=(Rejected(other.kernel, slower), waits))


def _rows(problem: EightProblem, device: Device) -> list[EightPlan]:
    """Tiles for few rows of x, with one program an SM, or two with half a ring each where there are more of them than SMs."""
    block_m = next((size for size in (16, 32, 64) if problem.m <= size), ROWS_UP_TO)
    block_k = 256 if block_m <= 32 else 128
    made = []
    for block_n in (64, 128):
        room = (block_n + block_m) * block_k
        items = -(-problem.m // block_m) * -(-problem.n // block_n)
        for splits in range(1, max(1, min(16, problem.k // SHORTEST)) + 1):
            shared = block_n == 64 and block_m <= 64 and items * splits > device.sms
            stages = max(2, min(16, (ROOM // 2 if shared else ROOM) // room))
            made.append(EightPlan(problem, device, block_m, block_n, block_k, 4, stages, splits, group=1, kernel=ROWS))
    return made


def _large(problem: EightProblem, device: Device) -> list[EightPlan]:
    return [
        EightPlan(problem, device, rows, columns, BYTES, 4, stages, group=8 * columns // 128, kernel=HOPPER)
        for rows, columns, stages in HOPPER_TILES
    ]


def seconds(plan: EightPlan) -> float:
    """Estimated time of a plan for sm_90: products, DRAM and L2, whichever is longest, over programs that do not share evenly."""
    p, device = plan.problem, plan.device
    programs = max(1, plan.items) * plan.parts
    reached = FEW if plan.kernel == ROWS else WIDE if plan.block_n == 256 else NARROW
    work = 2.0 * programs * plan.block_m * plan.block_n * plan.each * plan.block_k
    multiply = work / (2 * device.matmul_rate("bfloat16") * reached)
    l2 = device.measured_l2_bytes_per_s or 2 * device.dram_rate
    load = programs * (plan.block_m + plan.block_n) * plan.each * plan.block_k / l2
    dram = (p.n * p.k + p.m * p.k + 2 * p.m * p.n) / device.dram_rate
    whole, rest = divmod(programs, device.sms)
    # what is left over, or all there is, has the tensor cores of its own SMs, and at most twice their share of bandwidth
    uneven = (whole + (rest > 0)) * device.sms / programs
    halves = (whole * device.sms + (max(rest, device.sms // 2) if rest else 0)) / programs
    time = START + max(multiply * uneven, load * halves, dram * halves)
    if plan.kernel == HOPPER:
        return time + END * (whole + (rest > 0))
    if plan.parts > 1:
        time += JOIN + 8.0 * plan.parts * p.m * p.n / l2
    return time + END
