"""The plan of RMSNorm with a residual: how many rows a program holds, and how many programs share the sum of dw."""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import Unsupported
from tilefold.plan.base import Shown
from tilefold.plan.device import Device
from tilefold.plan.problem import next_power_of_two

ELEMENTS = 4096  # of a tile with several rows: 32 a thread of 4 warps
MOST_COLUMNS = 16384  # which 16 warps hold three times in 96 registers a thread; of 32768 columns 1 KiB spilled
PROGRAMS = 2  # an SM, in the backward pass: each keeps a row of dw, which the host adds


@dataclass(frozen=True, slots=True)
class RMSNormProblem:
    """[rows, columns] of `size` bytes an element; residual: one is added first."""

    rows: int
    columns: int
    size: int
    residual: bool = False


@dataclass(frozen=True, slots=True)
class RMSNormPlan(Shown):
    """The decision: rows and (padded) columns of a tile, warps, programs of the backward pass; reason."""

    problem: RMSNormProblem
    device: Device
    block_rows: int
    block_columns: int
    num_warps: int
    backward_programs: int
    reason: str

    @property
    def tiles(self) -> int:
        """Of rows: programs of the forward pass."""
        return -(-self.problem.rows // self.block_rows)

    @property
    def bytes(self) -> int:
        """Of the forward pass: x read, out written, and where there is a residual, it read and the sum written."""
        return self.problem.rows * self.problem.columns * self.problem.size * (4 if self.problem.residual else 2)

    @property
    def bound_s(self) -> float:
        """Seconds that the forward pass takes at least."""
        return self.bytes / self.device.dram_rate

    def __str__(self) -> str:
        n = self.problem
        what = "with a residual" if n.residual else "alone"
        return (
            f"RMSNorm of [{n.rows}, {n.columns}] of {n.size} bytes, {what}, on {self.device.title}: {self.tiles} programs of "
            f"{self.block_rows} x {self.block_columns}, {self.num_warps} warps ({self.reason}); {self.bytes} bytes, at least "
            f"{self.bound_s * 1e6:.1f} us; backward {self.backward_programs} programs, each with its share of dw"
        )


@lru_cache(maxsize=4096)
def plan_rms_norm(problem: RMSNormProblem, device: Device) -> RMSNormPlan:
    """The plan: pure.  Unsupported for rows that no program can hold."""
    n = problem
    if n.columns > MOST_COLUMNS:
        raise Unsupported(f"x has {n.columns} columns: a program holds a whole row, of at most {MOST_COLUMNS}")
    columns = max(16, next_power_of_two(n.columns))
    rows = max(1, ELEMENTS // columns)  # whatever the number of rows: it sets the order of a row's additions
    warps = 4 if columns <= ELEMENTS else 8 if columns <= 2 * ELEMENTS else 16
    tiles = max(1, -(-n.rows // rows))
    programs = min(tiles, PROGRAMS * max(1, device.sms))
    if rows > 1:
        reason = f"a row has {n.columns} columns, so a program takes {rows} rows"
    else:
        reason = f"a program holds one row of {n.columns} columns, which is read once"
    return RMSNormPlan(n, device, rows, columns, warps, programs, reason)
