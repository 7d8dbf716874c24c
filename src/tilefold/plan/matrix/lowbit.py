"""How a product with weights of few bits is made: fused or by a dequantised copy, tiles, splits of K.  Pure."""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import PlanError, ValueRangeError
from tilefold.plan.device import Device
from tilefold.plan.serialise import from_json, to_json

__all__ = ["LowbitPlan", "LowbitProblem", "plan_lowbit"]

BITS = (8, 4, 3, 2)
ZEROS = ("none", "integer", "float", "table")
PATHS = ("dequantise",)


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


@dataclass(frozen=True, slots=True)
class LowbitPlan:
    """The decision for one product on one device; `print` it.

    path: "dequantise": the weight as floats, then torch's product."""

    problem: LowbitProblem
    device: Device
    path: str
    reason: str
    rejected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise PlanError(f"plan field path must be one of {PATHS}, got {self.path!r}")

    def to_json(self) -> str:
        """The plan as text, every field by value."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "LowbitPlan":
        """The plan that `to_json` wrote; PlanError for anything else."""
        return from_json(cls, text)


@lru_cache(maxsize=4096)
def plan_lowbit(problem: LowbitProblem, device: Device) -> LowbitPlan:
    """The plan for a product on a device: pure, the same every time."""
    return LowbitPlan(problem, device, "dequantise", "the only path there is")
