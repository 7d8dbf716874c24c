"""The plan of coarse attention: tiles and loads of its forward and backward kernels, and shares of the queries for dk and dv."""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import PlanError, ValueRangeError
from tilefold.plan.architecture import SM_90
from tilefold.plan.base import Fault, Shown
from tilefold.plan.cost import even_shares
from tilefold.plan.device import Device
from tilefold.plan.limits import (
    BOX,
    MAX_GRID,
    POINTER,
    Tile,
    box_refusal,
    first_fit,
    require_supported,
    tile_violation,
)
from tilefold.plan.problem import NARROW_HEAD_DIM, AttentionProblem

REDUCTIONS = ("mean", "max", "each")
MAX_SHARES = 64
TILES_PER_SHARE = 8  # of queries, at least: fewer cost more to add up than they save
TILE_ELEMENTS = 8192  # of a tile that a projection keeps in registers
SUMMED_ELEMENTS, SUMMING_WARPS = 2048, 1
"""The same where it sums the tokens of short blocks.  H200, blocks of 64, D=128: 1, 2, 4, 8 warps 4.9, 4.3, 2.8, 1.6 TB/s."""
SHORT_BLOCK = 1 << 14  # elements of the longest of them: all reads of a block are written out


@dataclass(frozen=True, slots=True)
class CoarseProblem:
    """What is asked: the dense problem over the projected rows, and how queries are counted in blocks.

    attention: lengths (seq_k: projected rows), heads, dims and dtype, without mods; its `descriptors` says that K, V can be read
    by tensor descriptors and hold finite numbers throughout.  block: queries a block.  reduction: "mean" or "max" over a block's
    queries, "each" if every query is a block of its own.  masked: some rows may be dead.  query_masked: some queries may be.
    descriptors: the same as attention's, of Q and of the gradient of the output.
    """

    attention: AttentionProblem
    block: int
    reduction: str = "mean"
    masked: bool = False
    query_masked: bool = False
    descriptors: bool = True

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueRangeError(
                f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {self.reduction!r}"
            )
        if type(self.block) is not int or self.block < 1 or self.block & (self.block - 1):
            raise ValueRangeError(f"block must be a power of two, got {self.block!r}")

    @property
    def rows(self) -> int:
        """Most queries that one program can make."""
        return 64 if self.reduction == "each" else min(self.block, 64)


@dataclass(frozen=True, slots=True)
class CoarsePlan(Shown):
    """The decision for one coarse problem on one device; `print` it.

    forward: tile of coarse_forward, queries and keys: of the backward kernels, rows of Q x rows of K.  boxes: which of the three
    read what streams by through tensor descriptors.  shares: parts of the queries that dk and dv are summed over apart.
    Raises PlanError, naming the field, if a tile does not fit.
    """

    problem: CoarseProblem
    device: Device
    forward: Tile
    queries: Tile
    keys: Tile
    boxes: tuple[bool, bool, bool]
    shares: int

    def __post_init__(self) -> None:
        for name in ("forward", "queries", "keys"):
            tile = self.tile(name)
            if tile.block_m > self.problem.rows and (name != "keys" or self.problem.query_masked):
                raise PlanError(f"plan field {name}: block_m must be at most {self.problem.rows}, got {tile.block_m}")
            if self.grid(name)[0] > MAX_GRID:
                raise PlanError(f"plan field {name}: more than {MAX_GRID} programs")

    def tile(self, part: str) -> Tile:
        """The tile of "forward", "queries" or "keys"."""
        return {"forward": self.forward, "queries": self.queries, "keys": self.keys}[part]

    @property
    def parts(self) -> int:
        """Programs that share a query block: as many partial scores are made of it."""
        return 1 if self.problem.reduction == "each" else self.problem.block // self.forward.block_m

    def grid(self, part: str) -> tuple[int, int, int]:
        """Programs of "forward" (of whole blocks), "queries" or "keys" (for each head of a group and share)."""
        n, tile = self.problem.attention, self.tile(part)
        if part != "keys":
            block = self.problem.block if part == "forward" else 1
            return (-(-(-(-n.seq_q // block) * block) // tile.block_m) * n.batch * n.heads, 1, 1)
        return (-(-n.seq_k // tile.block_n) * n.batch * n.kv_heads, n.group, self.shares)

    def __str__(self) -> str:
        n = self.problem.attention
        loads = ["boxes" if box else "pointers" for box in self.boxes]
        return (
            f"Coarse attention plan for {self.device.title}\n"
            f"  problem   {n.batch} x {n.seq_q} queries in blocks of {self.problem.block}, {n.seq_k} rows, {n.heads} heads on "
            f"{n.kv_heads} KV heads, D={n.dim_qk} (V {n.dim_v}), {n.dtype}, scores: {self.problem.reduction}\n"
            f"  forward   {self.forward}, {loads[0]}, {self.grid('forward')[0]} programs\n"
            f"  dq        {self.queries}, {loads[1]}\n"
            f"  dk, dv    {self.keys}, {loads[2]}, {self.grid('keys')[0]} programs x {n.group} heads x {self.shares} shares"
        )


def rows_at_once(block: int, width: int, sums: bool = False) -> tuple[int, int]:
    """Tokens of a block that a projection reads in one step, and warps of its program; width: of the padded head dim."""
    if sums and block * width <= SHORT_BLOCK:
        return max(1, min(block, SUMMED_ELEMENTS // width)), SUMMING_WARPS
    return max(1, min(block, TILE_ELEMENTS // width)), 4


@lru_cache(maxsize=4096)
def plan_coarse(problem: CoarseProblem, device: Device) -> CoarsePlan:
    """The plan for a coarse problem on a device: pure, the same every time.  Unsupported if no tile fits."""
    n = problem.attention
    require_supported(n, device, NARROW_HEAD_DIM)
    exact = n.dtype == "float32" or device.backend == "interpreter"
    kv_boxes = not exact and box_refusal(n, device) is None
    # A box would read queries past a block's size, which may hold anything.
    q_boxes = kv_boxes and problem.descriptors and not problem.query_masked
    loads = BOX if kv_boxes else POINTER

    def fault(tile: Tile) -> Fault:
        return None if device.backend == "interpreter" else tile_violation(n, device, loads, tile)

    forward = first_fit(_forward_tiles(problem, device), device, fault, "this coarse problem")
    queries, keys = _queries_tile(problem, device), _keys_tile(problem, device, q_boxes)
    shares = _shares(problem, device, keys)
    return CoarsePlan(problem, device, forward, queries, keys, (kv_boxes, kv_boxes, q_boxes), shares)


def _shares(problem: CoarseProblem, device: Device, keys: Tile) -> int:
    """Of the queries, for dk and dv: `even_shares`, each of TILES_PER_SHARE tiles at least."""
    n = problem.attention
    tiles, items = -(-n.seq_q // keys.block_m), -(-n.seq_k // keys.block_n) * n.heads * n.batch
    if device.backend == "interpreter":  # two, so that short tests see the sum
        return min(2, tiles)
    slots = device.sms * (2 if keys.num_warps <= 4 else 1)  # as the accumulators' registers allow
    return even_shares(items, tiles, slots, max(1, min(MAX_SHARES, tiles // TILES_PER_SHARE)))


def _forward_tiles(problem: CoarseProblem, device: Device) -> tuple[Tile, ...]:
    """Best first."""
    n, rows = problem.attention, problem.rows
    width = max(n.block_qk, n.block_v)
    if device.backend == "interpreter":
        return (Tile(rows, 16, 4, 1),)
    last = Tile(min(rows, 16), 16, 4, 1)
    if n.dtype == "float32":
        if width <= 64:
            return (Tile(min(rows, 32), 32, 4, 2), last)
        return (Tile(min(rows, 32 if width <= 128 else 16), 16, 8, 2), last)
    warps = 8 if width > 128 and rows >= 64 else 4
    deep = (Tile(rows, 64, 4, 3),) if width == 128 and device.architecture is SM_90 else ()
    return (*deep, Tile(rows, 64, warps, 2), Tile(rows, 32, 4, 2), Tile(rows, 16, 4, 1), last)


def _queries_tile(problem: CoarseProblem, device: Device) -> Tile:
    """Of dq."""
    n, rows = problem.attention, problem.rows
    width = max(n.block_qk, n.block_v)
    if device.backend == "interpreter":
        return Tile(rows, 16, 4, 1)
    if n.dtype == "float32":
        return Tile(min(rows, 32), 32 if width <= 64 else 16, 8 if width > 64 else 4, 1)
    if width > 128:
        return Tile(rows, 16 if device.backend == "hip" else 32, 8 if rows >= 32 else 4, 2)
    return Tile(rows, 64, 4, 2)


def _keys_tile(problem: CoarseProblem, device: Device, boxes: bool) -> Tile:
    """Of dk and dv, whose accumulators leave few registers: 64 queries a step only where nothing is masked."""
    n = problem.attention
    width = max(n.block_qk, n.block_v)
    most = problem.rows if problem.query_masked else 64  # a tile of queries that are counted lies in one block
    if device.backend == "interpreter":
        return Tile(16, 16, 4, 1)
    if n.dtype == "float32":
        return Tile(min(most, 32), 32 if width <= 64 else 16, 8 if width > 64 else 4, 1)
    if width > 128:
        return Tile(16, 64, 8, 1) if device.backend == "hip" else Tile(min(most, 32), 64, 8, 2)
    whole = boxes and n.seq_q % 64 == 0 and device.architecture is SM_90
    return Tile(min(most, 64 if whole else 32), 64, 4, 2)
