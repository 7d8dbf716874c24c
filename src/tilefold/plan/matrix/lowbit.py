"""How a product with weights of few bits is made: fused or by a dequantised copy, tiles, splits of K.  Pure."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.errors import PlanError, ValueRangeError
from tilefold.plan.architecture import SM_90
from tilefold.plan.base import Plan
from tilefold.plan.cost import Bound, Cost
from tilefold.plan.device import Device
from tilefold.plan.explain import time_text
from tilefold.plan.matrix.lowbit_choices import Choice, choice_for
from tilefold.plan.matrix.problem import MatmulProblem
from tilefold.plan.matrix.tiles import ADD_BYTES, FIRST_LOADS, LAUNCH, LOADED, by_wgmma, estimated_invariant

BITS = (8, 4, 3, 2)
ZEROS = ("none", "integer", "float", "table")
HALVES = ("float16", "bfloat16")
PATHS = ("rows", "hopper", "tile", "dequantise")
OF_SM_90 = PATHS[:2]
SLAB = 32  # columns
SHARED = 232448  # bytes that a program can have on sm_90
FEW_ROWS = 16  # of x that the "rows" path takes
MOST_SPLITS = 16
LIMITS = {"block_n": (1, 256), "block_m": (1, 256), "num_warps": (1, 32), "stages": (1, 16), "splits": (1, 65535),
          "registers": (0, 255)}  # fields of a plan: least, most  # fmt: skip
POWERS = ("block_n", "block_m", "num_warps")
ADD_TILE = 1.5e-6  # seconds for a tile of 256 rows of x of another part
MOST_FEW = 64  # rows of x whose calls have one launch wherever a kernel unpacks: the host's time counts
TILE_UP_TO = 128  # rows of x, where no row of the table says something else

# By wgmma: (path, rows of the weight, rows of x, stages) -> seconds of a slab of one tile an SM, 4 bits and 8, and how much
# longer two tiles take.  Fitted to 60 products on an H200: benchmarks/products.py.  2 and 3 bits, not timed, take 4 bits'.
STEPPED = {
    ("tile", 64, 16, 4): (0.083e-6, 0.145e-6, 1.45),
    ("tile", 64, 64, 4): (0.135e-6, 0.175e-6, 1.45),
    ("tile", 128, 64, 4): (0.19e-6, 0.28e-6, 1.55),
    ("hopper", 128, 128, 5): (0.265e-6, 0.345e-6, 2.0),
    ("hopper", 128, 256, 4): (0.355e-6, 0.45e-6, 2.0),
}


@dataclass(frozen=True, slots=True)
class LowbitProblem:
    """One product x [m, k] times the transpose of a weight [n, k] of `bits` bits.

    group: columns that share a scale (k: one group a row).  zeros: "none" (symmetric), "integer", "float" or "table".
    dtype, scales: of activations and of scales.  aligned: x's rows begin at multiples of 16 bytes.
    deterministic: the same bits every run."""

    m: int
    n: int
    k: int
    bits: int
    group: int
    zeros: str = "none"
    dtype: str = "bfloat16"
    scales: str = "bfloat16"
    aligned: bool = True
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.zeros not in ZEROS:
            raise ValueRangeError(f"bits must be one of {BITS} and zeros of {ZEROS}, got {self.bits!r}, {self.zeros!r}")
        if min(self.n, self.k, self.group) < 1 or self.m < 0:
            raise ValueRangeError(f"m must be at least 0, n, k and group at least 1, got {self}")

    @property
    def slabs(self) -> int:
        """Slabs of 32 columns in a block of the (low) plane."""
        return 8 if self.bits == 3 else 16 // self.bits

    @property
    def blocks(self) -> int:
        """Blocks along K."""
        return -(-self.k // (self.slabs * SLAB))

    @property
    def whole(self) -> bool:
        """Whether no slab lies in two groups."""
        return self.group >= self.k or self.group % SLAB == 0

    @property
    def chunk(self) -> int:
        """Slabs of a block that share a scale."""
        if self.group >= self.k:
            return self.slabs
        return math.gcd(self.group, self.slabs * SLAB) // SLAB

    @property
    def exact(self) -> bool:
        """Whether code minus zero point is a whole number, which 16 bits hold exactly."""
        return self.zeros in ("none", "integer")

    @property
    def cost(self) -> Cost:
        """FLOPs of the product; bytes of codes, scales, zero points, x and y, each moved once."""
        size = 4 if self.dtype == "float32" else 2
        groups = -(-self.k // self.group)
        each = (4 if self.scales == "float32" else 2) + {"none": 0, "integer": 1, "float": 2, "table": 0}[self.zeros]
        weights = self.n * self.k * self.bits // 8 + groups * self.n * each
        return Cost(2 * self.m * self.n * self.k, weights + size * self.m * (self.k + self.n), 0)


@dataclass(frozen=True, slots=True)
class LowbitPlan(Plan):
    """The decision for one product on one device; `print` it.

    path: "rows": few rows of x, each warp a part of K, weights from memory to registers;
          "hopper": sm_90's tensor instructions with weights dequantised in registers, loads by TMA;
          "tile": the portable kernel; "dequantise": the weight as floats, then torch's product.
    block_n, block_m: tile of rows of the weight and rows of x.  num_warps: of a program ("hopper": of a consumer).
    stages: slots of the ring of weights ("rows"), of blocks ("hopper"), of the pipeline ("tile").
    splits: parts of K that programs make apart.  atomic: sums in memory in the order of arrival.
    scaled: "after" the product in fp32, or "before" it in the weight.  early: a dependent launch.
    registers: most a thread may have, 0: no limit.
    join: a product a group ("tile") instead of one for 32 columns."""

    problem: LowbitProblem
    device: Device
    path: str
    reason: str
    rejected: tuple[str, ...] = ()
    block_n: int = 64
    block_m: int = 16
    num_warps: int = 4
    stages: int = 3
    splits: int = 1
    atomic: bool = False
    scaled: str = "after"
    early: bool = False
    registers: int = 0
    join: bool = False

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise PlanError(f"plan field path must be one of {PATHS}, got {self.path!r}")
        if refusal := refused(self.problem, self.device, self.path):
            raise PlanError(f"plan field path: {self.path!r} {refusal}")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most or (name in POWERS and value & (value - 1)):
                power = "a power of two" if name in POWERS else "an integer"
                raise PlanError(f"plan field {name} must be {power} from {least} to {most}, got {value!r}")
        if self.scaled not in ("after", "before"):
            raise PlanError(f"plan field scaled must be 'after' or 'before', got {self.scaled!r}")
        if self.path == "rows" and (self.block_n not in (16, 32, 64) or self.block_m not in (8, 16)):
            raise PlanError(
                f"plan field block_n, block_m: rows takes 16, 32 or 64 and 8 or 16, got {self.block_n}, {self.block_m}"
            )
        if self.path == "hopper" and self.block_n != 128 and not (self.block_n == 256 and self.block_m <= 64):
            raise PlanError(
                f"plan field block_n: hopper takes 128, or 256 with block_m up to 64, got {self.block_n} with {self.block_m}"
            )
        if self.path == "hopper" and self.stages > _slots(self.problem, self.block_n, self.block_m):
            most = _slots(self.problem, self.block_n, self.block_m)
            raise PlanError(f"plan field stages: {most} blocks fit into shared memory here, got {self.stages}")
        if self.path == "rows" and self.problem.m > self.block_m:
            raise PlanError(
                f"plan field block_m: rows makes all of x's {self.problem.m} rows at once, got {self.block_m}"
            )
        if self.atomic and self.problem.deterministic:
            raise PlanError("plan field atomic: the call asks for the same bits every run")

    def require_invariant(self) -> None:
        """PlanError, naming the field, unless its results have the bits of numerics="invariant"."""
        fields: tuple[str, ...] = ("block_n", "num_warps", "splits", "scaled", "join")
        if _as_dequantised(self.problem, self.device):
            if self.path == "rows":
                raise PlanError('plan field path: numerics="invariant" has no "rows", whose warps share the sum')
            for name, least in (("block_n", 64), ("block_m", 16)):
                if self.path == "tile" and getattr(self, name) < least:
                    given = getattr(self, name)
                    raise PlanError(
                        f'plan field {name}: numerics="invariant" has at least {least} here, the plan has {given}'
                    )
            wanted = LowbitPlan(self.problem, self.device, self.path, "", block_n=128, scaled="before")
            fields = ("splits",) if self.path == "hopper" else ("num_warps", "splits", "scaled")
        elif self.path != (wanted := invariant_lowbit(self.problem, self.device)).path:
            raise PlanError(f'plan field path: numerics="invariant" has {wanted.path!r}, the plan has {self.path!r}')
        for name in fields if self.path != "dequantise" else ():
            fixed, given = getattr(wanted, name), getattr(self, name)
            if fixed != given:
                raise PlanError(f'plan field {name}: numerics="invariant" has {fixed!r}, the plan has {given!r}')

    @property
    def each(self) -> int:
        """Blocks of K of a split."""
        return -(-self.problem.blocks // self.splits)

    @property
    def parts(self) -> int:
        """Splits that have something to do."""
        return -(-self.problem.blocks // self.each)

    @property
    def items(self) -> int:
        """Tiles of the result."""
        return -(-self.problem.m // self.block_m) * -(-self.problem.n // self.block_n)

    @property
    def bound(self) -> Bound:
        """The least time of the product on the device, by memory or by arithmetic."""
        cost = self.problem.cost
        times = (
            ("tensor cores", cost.flops / self.device.matmul_rate(self.problem.dtype)),
            ("dram", cost.bytes / self.device.dram_rate),
        )
        resource, seconds = max(times, key=lambda t: t[1])
        return Bound(resource, seconds, times)

    def __str__(self) -> str:
        p, bound = self.problem, self.bound
        lines = [
            f"Low-bit product plan for {self.device.title}",
            f"  problem   x [{p.m}, {p.k}] {p.dtype}, weight [{p.n}, {p.k}] of {p.bits} bits, groups of {p.group}, "
            f"zeros: {p.zeros}",
            f"  path      {self.path}: {self.reason}",
        ]
        if self.path != "dequantise":
            lines.append(
                f"  tile      {self.block_n} x {self.block_m}, {self.num_warps} warps, {self.stages} stages, {self.items} items "
                f"in {self.parts} parts of K, scaled {self.scaled} the product"
            )
        lines.append(f"  bound     {bound.resource}, {time_text(bound.seconds)}")
        return "\n".join([*lines, *(f"  rejected  {text}" for text in self.rejected)])


def refused(problem: LowbitProblem, device: Device, path: str) -> str | None:
    """Why a path cannot make a problem on a device, None if it can."""
    if path == "dequantise":
        return None
    if problem.dtype not in HALVES:
        return f"is for fp16 and bf16 activations, not {problem.dtype}"
    if not problem.whole:
        return f"needs groups of a multiple of {SLAB} columns or of whole rows, not {problem.group}"
    if path == "tile":
        return None
    if not device.has("tma") or (path == "hopper" and device.architecture is not SM_90):
        return f"needs sm_90, not {device.target}"
    if not problem.exact:
        return f"takes whole zero points, not zeros: {problem.zeros}"
    if problem.k % 16:
        return f"needs K a multiple of 16, not {problem.k}"
    if not problem.aligned:
        return "needs rows of x at multiples of 16 bytes"
    if path == "rows" and problem.m > (8 if problem.bits < 4 else FEW_ROWS):
        return f"makes at most {FEW_ROWS} rows of x (8 at 2 and 3 bits), not {problem.m}"
    if path == "hopper" and problem.scales != problem.dtype:
        return f"scales weights in x's dtype, and the scales are {problem.scales}"
    return None


def _splits(problem: LowbitProblem, items: int, slots: int, least: int) -> int:
    """As many parts of K as one wave of programs holds, each with at least `least` blocks."""
    return max(1, min(slots // max(items, 1), problem.blocks // least, MOST_SPLITS))


def _chosen(problem: LowbitProblem, device: Device, row: Choice) -> dict[str, object]:
    """The plan's fields by a row of the table."""
    block_m = row.block_m or max(16, 1 << (problem.m - 1).bit_length())
    items = -(-problem.m // block_m) * -(-problem.n // row.block_n)
    splits = _splits(problem, items, row.per_sm * device.sms, row.least)
    stages = row.stages
    if row.path == "hopper":
        stages = min(stages, _slots(problem, row.block_n, block_m))
    made = {name: getattr(row, name) for name in ("block_n", "num_warps", "scaled", "join", "early", "registers")}
    return {**made, "block_m": block_m, "stages": stages, "splits": splits}


def _slots(problem: LowbitProblem, block_n: int, block_m: int) -> int:
    """Blocks of K that fit into the ring of the "hopper" kernel, beside the room in which a tile changes its layout."""
    planes = 2 if problem.bits == 3 else 1
    block = planes * block_n * 64 + problem.slabs * SLAB * block_m * 2
    return (SHARED - block_n * 64 * 2 - 1024) // block


def _tile(problem: LowbitProblem, device: Device) -> dict[str, object]:
    small = problem.m <= 16
    block_m = 16 if small else 32 if problem.m <= 32 else 64
    block_n = 64
    items = -(-problem.m // block_m) * -(-problem.n // block_n)
    interpreted = device.backend == "interpreter"
    splits = min(2, problem.blocks) if interpreted else _splits(problem, items, 2 * device.sms, 8)
    atomic = splits > 1 and not problem.deterministic
    before = block_m >= 64 and problem.scales == problem.dtype
    stages = 2 if problem.slabs == 8 and block_m == 64 else 3
    return {"block_n": block_n, "block_m": block_m, "num_warps": 4, "stages": stages, "splits": splits, "atomic": atomic,
            "scaled": "before" if before else "after"}  # fmt: skip


def _as_dequantised(problem: LowbitProblem, device: Device) -> bool:
    """Whether all paths without shares of K have the bits of `matmul` with the dequantised weight: by wgmma, one chain over K."""
    wgmma = device.backend == "cuda" and by_wgmma(_product(problem), device)
    return wgmma and refused(problem, device, "tile") is None


def _product(problem: LowbitProblem) -> MatmulProblem:
    """That with the dequantised weight."""
    p = problem
    return MatmulProblem(1, p.m, p.n, p.k, p.dtype, p.dtype, b_major="k", descriptors=p.aligned and p.k % 8 == 0)


@lru_cache(maxsize=4096)
def invariant_lowbit(problem: LowbitProblem, device: Device, portable: bool = False) -> LowbitPlan:
    """The plan of numerics="invariant": a row's bits depend on it and the weight alone.  By wgmma every path has the bits of
    `invariant_matmul` with the dequantised weight, so rows of x choose it; else one path unpacks, or where none does the weight
    is dequantised.  portable: without the kernel for sm_90."""
    refusal = refused(problem, device, "tile")
    if refusal is not None:
        return LowbitPlan(problem, device, "dequantise", "numerics=invariant", (f"tile {refusal}",))
    reason = "numerics=invariant: one order of sums over K, no parts of it"
    if not _as_dequantised(problem, device):
        return LowbitPlan(problem, device, "tile", reason, block_m=16 if problem.m <= 16 else 64, stages=2)
    reason += ", that of the dequantised weight's product; the least estimated time"
    return min(_whole_sums(problem, device, reason, portable), key=lambda one: one[0])[1]


def _whole_sums(
    problem: LowbitProblem, device: Device, reason: str, portable: bool = False
) -> list[tuple[float, LowbitPlan]]:
    """(estimated seconds, plan) of what has the bits of the dequantised weight's product."""
    whole = LowbitPlan(problem, device, "dequantise", reason)
    size = 2 * problem.n * problem.k
    made = LAUNCH + (size + size * problem.bits // 16) / (LOADED * device.dram_rate)
    found = [(made + estimated_invariant(_product(problem), device, portable), whole)] if problem.m > MOST_FEW else []
    for path, block_n, block_m, stages in STEPPED:
        if refused(problem, device, path) or (portable and path == "hopper"):
            continue
        if path == "hopper":
            stages = min(stages, _slots(problem, block_n, block_m))
        elif problem.slabs == 8:  # blocks of 256 columns: x's take twice the room
            stages = 3 if block_n == 64 else 0
        if stages > 1:
            plan = LowbitPlan(problem, device, path, reason, block_n=block_n, block_m=block_m, stages=stages, scaled="before",
                              join=path == "tile")  # fmt: skip
            found.append((_seconds(plan), plan))
    return found


def _seconds(plan: LowbitPlan) -> float:
    """Estimated time of a plan with a tile of STEPPED: of pairs of tiles an SM, and a rest, in slabs of so many seconds, or of
    DRAM; and of splits' sums."""
    problem, device = plan.problem, plan.device
    four, eight, pair = next(
        times for tile, times in STEPPED.items() if tile[:3] == (plan.path, plan.block_n, plan.block_m)
    )
    whole, rest = divmod(plan.items * plan.parts, 2 * device.sms)
    waves = pair * whole + (0.0 if not rest else pair if rest > device.sms else 1.0)
    made = waves * plan.each * problem.slabs * (eight if problem.bits == 8 else four)
    sums = 0.0
    if plan.parts > 1:  # the last to arrive has a tile of each part to read
        sums = 8 * plan.parts * problem.m * problem.n / ADD_BYTES + (plan.parts - 1) * ADD_TILE * (plan.block_m == 256)
    return FIRST_LOADS + max(made, problem.cost.bytes / (LOADED * device.dram_rate)) + sums


def by_table(
    problem: LowbitProblem, device: Device, possible: tuple[str, ...] = PATHS, rejected: tuple[str, ...] = ()
) -> LowbitPlan | None:
    """The plan of the table of choices for sm_90, by one of the possible paths; None where it has none."""
    row = choice_for(problem.bits, problem.m, problem.n, problem.k, possible) if device.architecture is SM_90 else None
    if row is None:
        return None
    reason = f"{problem.m} row{'s' * (problem.m != 1)} of x, at most {row.m}"
    plan = LowbitPlan(problem, device, row.path, reason, rejected, **_chosen(problem, device, row))  # type: ignore[arg-type]
    return replace(plan, splits=plan.parts)


@lru_cache(maxsize=4096)
def plan_lowbit(problem: LowbitProblem, device: Device, portable: bool = False) -> LowbitPlan:
    """The plan for a product on a device: pure, the same every time.  portable: without the kernels for sm_90."""
    refusals = {path: refused(problem, device, path) for path in PATHS}
    if portable:
        for path in OF_SM_90:
            refusals[path] = refusals[path] or "is left out: portable kernels were asked for"
    rejected = tuple(f"{path} {refusal}" for path, refusal in refusals.items() if refusal)
    possible = tuple(path for path, refusal in refusals.items() if not refusal)
    if (plan := by_table(problem, device, possible, rejected)) is not None:
        measured = problem.bits in (4, 8) and (plan.path, plan.block_n, plan.block_m) in (tile[:3] for tile in STEPPED)
        if problem.m <= MOST_FEW or not measured:
            return plan
        own, other = _seconds(plan), f"{plan.path} with tiles of {plan.block_n} x {plan.block_m} in {plan.splits}"
        reason = f"The least estimated time: {other} part{'s' * (plan.splits != 1)} of K would take {own * 1e6:.0f} us"
        best = min([(own, plan), *_whole_sums(problem, device, reason, portable)], key=lambda one: one[0])[1]
        return replace(best, early=plan.early and best.path != "dequantise", rejected=rejected)
    if refusals["tile"] is None and problem.m <= TILE_UP_TO:
        reason = f"{problem.m} row{'s' * (problem.m != 1)} of x, at most {TILE_UP_TO}"
        plan = LowbitPlan(problem, device, "tile", reason, rejected, **_tile(problem, device))  # type: ignore[arg-type]
        return replace(plan, splits=plan.parts)
    slower = () if refusals["tile"] else (f"kernels that unpack are slower with {problem.m} rows of x",)
    return LowbitPlan(problem, device, "dequantise", "serves every problem", (*rejected, *slower))
