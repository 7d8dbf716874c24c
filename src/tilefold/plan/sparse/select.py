"""How block selection is run: rows that fit the registers of a warp or a few go through one kernel, longer ones through torch."""

import math
from dataclasses import dataclass

from ...errors import Unsupported
from ..device import Device
from ..limits import MAX_GRID

LONGEST_ROW = 4096  # blocks a row that the kernel sorts in registers
ONE_WARP = 32  # numbers a thread that one warp may sort: at 64 they no longer fit its registers
FORCED = 16  # the same where blocks are forced, which takes as many registers again
MOST_WARPS = 4  # that search a row without sorting it; more numbers a thread above that
SEVERAL_WARPS = 16  # numbers a thread where a row needs more than one warp
INTERPRETED_ROWS = 64  # rows a program in the interpreter, whose cost is that of its steps
# What of a sparsity counts as the rounding of its binary number: 1 - 0.7 of 10 blocks are 3, in fp32, too.
SHARE_ROUNDING = 1e-6


def kept_blocks(sparsity: float, blocks: int) -> int:
    """How many of `blocks` a sparsity, 0 to 1, keeps: the fewest that are a share of at least 1 - sparsity, and one."""
    return max(1, math.ceil((1.0 - sparsity - SHARE_ROUNDING) * blocks))


@dataclass(frozen=True, slots=True)
class SelectProblem:
    """Scores [batch, heads, q_blocks, kv_blocks], a row a query block; forced: some blocks are kept whatever their score; gini:
    rows are sorted for their Gini coefficients."""

    batch: int
    heads: int
    q_blocks: int
    kv_blocks: int
    forced: bool = False
    gini: bool = True

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.q_blocks


@dataclass(frozen=True, slots=True)
class SelectPlan:
    """rows: of scores a program; regs, lanes: a row lies over `lanes` threads with `regs` numbers each, both powers of two.

    kernel: "select", or "torch" for rows that are too long for it (the other fields are 0 then)."""

    problem: SelectProblem
    device: Device
    kernel: str
    rows: int
    regs: int
    lanes: int
    num_warps: int
    reason: str

    @property
    def log(self) -> int:
        """log2 of the numbers that are sorted for a row."""
        return (self.regs * self.lanes).bit_length() - 1

    @property
    def ranked(self) -> bool:
        """Whether what is kept follows from the sorted row, instead of a search of its own."""
        return self.problem.gini and not self.problem.forced and self.num_warps == 1

    @property
    def programs(self) -> int:
        return -(-self.problem.rows // self.rows) if self.rows else 0


def plan_select(problem: SelectProblem, device: Device) -> SelectPlan:
    """The plan of one selection; Unsupported if there are more rows than a grid holds."""
    if problem.rows > MAX_GRID:
        raise Unsupported(f"selection is made for at most {MAX_GRID} rows of scores a call, got {problem.rows}")
    if problem.kv_blocks > LONGEST_ROW:
        reason = f"a row of more than {LONGEST_ROW} blocks does not fit the registers of a program"
        return SelectPlan(problem, device, "torch", 0, 0, 0, 0, reason)
    warp = device.warp_size
    block = max(warp, 1 << max(0, problem.kv_blocks - 1).bit_length())
    if block <= warp * (FORCED if problem.forced or not problem.gini else ONE_WARP):
        warps, reason = 1, "a warp a row: nothing passes through shared memory"
    else:
        warps, reason = block // (warp * SEVERAL_WARPS), "a row does not fit the registers of one warp"
        if not problem.gini:
            warps, reason = min(warps, MOST_WARPS), "a row is searched by several warps"
    lanes = warp * warps
    rows = INTERPRETED_ROWS if device.backend == "interpreter" else 1
    return SelectPlan(problem, device, "select", rows, block // lanes, lanes, warps, reason)
