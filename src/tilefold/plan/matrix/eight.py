"""How a product of 8-bit numbers is cut.  Pure."""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import PlanError, Unsupported
from tilefold.plan.device import Device

__all__ = ["EightPlan", "EightProblem", "plan_eight"]


@dataclass(frozen=True, slots=True)
class EightProblem:
    """x [m, k] in 8 bits times the transpose of a weight [n, k]; kind: "int8" or "float8_e4m3fn"."""

    m: int
    n: int
    k: int
    kind: str


@dataclass(frozen=True, slots=True)
class EightPlan:
    """Tile, warps, stages and parts of K of a product; group: rows of tiles that programs make together."""

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

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                raise PlanError(f"plan field {name} must be a power of two, got {value!r}")

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


@lru_cache(maxsize=4096)
def plan_eight(problem: EightProblem, device: Device) -> EightPlan:
    """The plan for a product on a device: pure, the same every time.  Unsupported where the device has no such numbers."""
    fp8 = problem.kind == "float8_e4m3fn"
    if fp8 and device.backend != "interpreter" and device.generation < 89:
        raise Unsupported(
            f"weight is float8_e4m3fn, which {device.title} cannot multiply; accepted: int8, or sm_89 and newer"
        )
    if device.backend == "interpreter":
        return EightPlan(problem, device, 16, 32, 64, 4, 2, min(2, -(-problem.k // 64)), reason="small, for tests")
    if problem.m <= 64:
        block_m = 16 if problem.m <= 16 else 32 if problem.m <= 32 else 64
        plan = EightPlan(problem, device, block_m, 64, 128, 4, 5, reason="few rows: memory-bound, many small programs")
        splits = max(1, min(2 * device.sms // plan.items, problem.k // 1024, 8))
        return EightPlan(problem, device, block_m, 64, 128, 4, 5, splits, reason=plan.reason)
    if problem.m <= 256 or -(-problem.m // 128) * -(-problem.n // 256) < device.sms:
        items = -(-problem.m // 128) * -(-problem.n // 128)
        splits = max(1, min(device.sms // items, problem.k // 2048, 4))
        return EightPlan(
            problem, device, 128, 128, 128, 8, 4, splits, reason="too few tiles of 128 x 256 for the device"
        )
    return EightPlan(problem, device, 128, 256, 128, 8, 3, reason="many tiles: the largest that fits")
