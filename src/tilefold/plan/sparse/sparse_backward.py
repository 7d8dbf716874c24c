"""The plan of the backward pass of block-sparse attention: one tile for dq, one for dk and dv."""

from dataclasses import dataclass
from functools import lru_cache, partial

from tilefold.plan.backward.backward import (
    PASS,
    backward_box_refusal,
    backward_tile_violation,
    backward_tiles,
    not_a_tile,
)
from tilefold.plan.backward.kept_backward import backward_tile, backward_tile_fault
from tilefold.plan.base import Fault, Plan, changed, require_device, require_fit, said_sizes, unusable
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID, Tile, first_fit, require_supported, strides_refusal
from tilefold.plan.problem import NARROW_HEAD_DIM
from tilefold.plan.sparse.sparse import SparseProblem
from tilefold.plan.sparse.sparse_backward_hopper import KERNEL as HOPPER
from tilefold.plan.sparse.sparse_backward_hopper import (
    heads_at_once,
    heads_violation,
    hopper_backward_refusal,
    kept_bytes,
    queries_at_once,
    spans,
    sum_numbers,
)

POINTERS, BOX = "sparse_backward", "sparse_backward_box"
KERNELS = (POINTERS, BOX, HOPPER)


@dataclass(frozen=True, slots=True)
class SparseBackwardPlan(Plan):
    """The decision for the backward pass of one sparse problem on one device. `print` it; keep it as JSON.

    problem: that of the forward pass. kernel: "sparse_backward" (two kernels with pointer loads), "sparse_backward_box" (what
    streams by comes by tensor descriptors) or "sparse_backward_hopper" (Gluon, sm_90: one kernel, whose programs for dk and dv
    keep dS for those that make dq). queries: the tile of what makes dq, block_m of its own queries against block_n listed keys a
    step. keys: the tile of what makes dk and dv, block_n of its own keys against block_m listed queries a step. heads_at_once: KV
    heads of which the Hopper kernel keeps dS at a time, 0 with the others; queries_at_once: of how many of their queries, 0 for
    all. Raises PlanError, naming the field, if a tile does not divide its blocks or exceeds a limit of the device.
    """

    problem: SparseProblem
    device: Device
    kernel: str
    queries: Tile
    keys: Tile
    rule: str
    reason: str
    heads_at_once: int = 0
    queries_at_once: int = 0

    def __post_init__(self) -> None:
        require_fit(self._violation(self.problem, self.device))

    def _violation(self, problem: SparseProblem, device: Device) -> Fault:
        return _violation(
            problem, device, self.kernel, self.queries, self.keys, self.heads_at_once, self.queries_at_once
        )

    @property
    def grids(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Programs of the two kernels: query tiles x heads x batch, and key tiles x KV heads x batch."""
        queries, keys = _programs(self.problem, self.queries, self.keys)
        return (queries, 1, 1), (keys, 1, 1)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of dS that are kept at a time, and of dk and dv between spans of queries.  Beside them there are two fp32 numbers
        a query and head, and a number an entry of the lists."""
        if not self.heads_at_once:
            return 0
        at_once = self.heads_at_once, self.queries_at_once
        return kept_bytes(self.problem, *at_once) + 4 * sum_numbers(self.problem, *at_once)

    def __str__(self) -> str:
        n = self.problem.attention
        kept = f"; dS of {self.heads_at_once} KV heads at a time" if self.heads_at_once else ""
        if self.queries_at_once:
            count = spans(self.problem, self.queries_at_once)
            kept += f", in {count} spans of {self.queries_at_once} queries"
        kept += f", {self.scratch_bytes / 2**20:.0f} MiB" if self.heads_at_once else ""
        return (
            f"Sparse attention backward plan for {self.device.title}\n"
            f"  problem   {said_sizes(n)}; blocks {self.problem.block_q} x {self.problem.block_k}\n"
            f"  kernel    {self.kernel}: dq by tiles of {self.queries}; dk and dv by tiles of {self.keys}{kept}\n"
            f"  grid      {self.grids[0][0]} and {self.grids[1][0]} programs on {self.device.sms} SMs\n"
            f"  rule      {self.rule}. {self.reason}"
        )

    def with_tiles(
        self,
        queries: Tile | None = None,
        keys: Tile | None = None,
        kernel: str | None = None,
        heads_at_once: int | None = None,
        queries_at_once: int | None = None,
    ) -> "SparseBackwardPlan":
        """The plan with other tiles, another kernel (and the tiles that go with it) or another number of heads or queries at a
        time; PlanError names the field that does not fit."""
        base = self
        if kernel is not None and (kernel == HOPPER) != (self.kernel == HOPPER):
            if kernel == HOPPER:
                require_fit(unusable(HOPPER, hopper_backward_refusal(self.problem, self.device)))
            base = _hopper(self.problem, self.device) if kernel == HOPPER else _portable(self.problem, self.device)
        return changed(
            base, queries=queries, keys=keys, kernel=kernel, heads_at_once=heads_at_once, queries_at_once=queries_at_once,
            rule="override", reason="The caller chose these fields.",
        )  # fmt: skip

    def check(self, problem: SparseProblem, device: Device) -> None:
        """PlanError, naming what differs, unless this plan serves exactly `problem` on a device of this kind."""
        self.problem.require_same(problem)
        require_device(self.device, device)
        require_fit(self._violation(problem, device))


@lru_cache(maxsize=4096)
def plan_sparse_backward(problem: SparseProblem, device: Device, portable: bool = False) -> SparseBackwardPlan:
    """The backward plan for a sparse problem on a device: pure, the same every time.  Unsupported if no tile fits.

    portable: leave the kernels written for one architecture alone."""
    require_supported(problem.attention, device, NARROW_HEAD_DIM)
    if portable or hopper_backward_refusal(problem, device):
        return _portable(problem, device)
    return _hopper(problem, device)


def _hopper(problem: SparseProblem, device: Device) -> SparseBackwardPlan:
    tile, heads = backward_tile(problem.attention.dim_qk), heads_at_once(problem, device)
    reason = "A loading warp, wgmma, five products a pair of blocks; the order of every sum is that of one list, span by span."
    return SparseBackwardPlan(
        problem, device, HOPPER, tile, tile, "hopper-lists", reason, heads, queries_at_once(problem)
    )


def _portable(problem: SparseProblem, device: Device) -> SparseBackwardPlan:
    kernel = POINTERS if _box_refusal(problem, device) or device.backend == "interpreter" else BOX
    queries, keys = (
        first_fit(
            _tiles(problem, device, kernel, own), device, partial(_tile_violation, problem, device, own=own), PASS
        )
        for own in ("block_m", "block_n")
    )
    reason = "Each program owns its rows and follows one list."
    return SparseBackwardPlan(problem, device, kernel, queries, keys, "lists", reason)


def _tiles(problem: SparseProblem, device: Device, kernel: str, own: str) -> tuple[Tile, ...]:
    """Best first; every tile divides its blocks.  own: which side the program owns."""
    n = problem.attention
    width = max(n.block_qk, n.block_v)
    plain = kernel == BOX and not n.score_mods and not n.mask_mods and not n.causal
    # With half the queries a step there are no spilled registers: as fast or faster where something else needs them.
    crowded = (width <= 128 and not plain) or (width <= 64 and n.group > 1)
    rows, keys = min(problem.block_q, 64), min(problem.block_k, 64)
    return backward_tiles(n, device, rows, keys, own, crowded and own == "block_n")


def _programs(problem: SparseProblem, queries: Tile, keys: Tile) -> tuple[int, int]:
    n = problem.attention
    return (
        -(-n.seq_q // queries.block_m) * n.batch * n.heads,
        -(-n.seq_k // keys.block_n) * n.batch * n.kv_heads,
    )


def _tile_violation(problem: SparseProblem, device: Device, tile: Tile, own: str) -> Fault:
    for name, block, size in (("block_m", problem.block_q, tile.block_m), ("block_n", problem.block_k, tile.block_n)):
        if type(size) is not int or size < 16 or block % size:
            return name, f"must be at least 16 and divide the block of {block} tokens, got {size}"
    return backward_tile_violation(problem.attention, device, tile, own)


def _box_refusal(problem: SparseProblem, device: Device) -> str | None:
    if refusal := strides_refusal(problem.descriptors):
        return refusal
    if problem.masked or problem.query_masked:
        return "rows past a block's valid tokens may hold anything, and a box would read them"
    return backward_box_refusal(problem.attention, device)


def _violation(
    problem: SparseProblem, device: Device, kernel: str, queries: Tile, keys: Tile, heads: int, at_once: int
) -> Fault:
    """(field, sentence) of the first limit that is broken, or None."""
    if fault := not_a_tile(queries=queries, keys=keys):
        return fault
    if kernel not in KERNELS:
        return "kernel", f"must be one of {', '.join(map(repr, KERNELS))}, got {kernel!r}"
    if kernel == HOPPER:
        if queries != keys:
            return "queries", f"must be the tile of keys ({keys}) with {kernel}, got {queries}"
        fault = unusable(HOPPER, hopper_backward_refusal(problem, device))
        fault = fault or backward_tile_fault(HOPPER, problem.attention.dim_qk, problem.attention.itemsize, device, keys)
        return fault or heads_violation(problem, heads, at_once)
    for name, number in (("heads_at_once", heads), ("queries_at_once", at_once)):
        if number != 0:
            return name, f"must be 0 with {kernel}, which keeps no dS, got {number}"
    if kernel == BOX and (fault := unusable(BOX, _box_refusal(problem, device))):
        return fault
    for name, tile, own in (("queries", queries, "block_m"), ("keys", keys, "block_n")):
        fault = _tile_violation(problem, device, tile, own)
        if fault:
            return f"{name}.{fault[0]}", fault[1]
    if max(_programs(problem, queries, keys)) > MAX_GRID:
        return "grid", f"more than {MAX_GRID} programs"
    return None
