"""The plan of a matrix product: kernel, tile, order of tiles, shares of the sum over k; by rules, or a table of measurements."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilefold.errors import PlanError, Unsupported
from tilefold.plan.base import (
    Fault,
    Plan,
    changed,
    fields_of,
    require_derived,
    require_device,
    require_equal,
    require_fit,
    unusable,
)
from tilefold.plan.cost import Bound, Cost, bound
from tilefold.plan.dense.attention import Rejected
from tilefold.plan.device import Device
from tilefold.plan.limits import require_kernels
from tilefold.plan.matrix.problem import ITEMSIZE, MatmulProblem
from tilefold.plan.matrix.tiles import (
    HOPPER,
    PORTABLE,
    MatmulTile,
    by_wgmma,
    choose_hopper,
    choose_invariant,
    choose_portable,
    hopper_refusal,
    hopper_slower,
    invariant_hopper_refusal,
    invariant_rows,
    invariant_tiles,
    shared_bytes,
    tile_violation,
    traffic,
)
from tilefold.plan.table import RULE, measured
from tilefold.plan.words import sentence

ORDERS = ("grouped", "plain")


@dataclass(frozen=True, slots=True)
class MatmulPlan(Plan):
    """The decision for one product on one device.  `print` it; keep it as JSON; change it with `with_tile`.

    kernel: "matmul" (portable) or "matmul_hopper" (sm_90: one warp loads by TMA, two warpgroups multiply).
    block_m, block_n, block_k: tile of the result, and how much of k at a time. num_warps: of a program (of a warpgroup with
        "matmul_hopper"); num_stages: buffers of A and of B.
    order: "grouped" (`group` rows of tiles are made together, column by column) or "plain" (row by row, group 1).
    splits: shares of the sum over k, each a program's; their sums are added up in a fixed order by a second launch.
    grid: programs; shared_bytes: an estimate for "matmul", exact but for barriers for "matmul_hopper".
    rule, reason: what decided; rejected: what else there is, and why not; cost, bound: work, and the least time for it.

    Raises PlanError, naming the field, if the fields contradict one another or a limit of the device.
    """

    problem: MatmulProblem
    device: Device
    kernel: str
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    order: str
    group: int
    splits: int
    grid: tuple[int, int, int]
    shared_bytes: int
    rule: str
    reason: str
    cost: Cost
    bound: Bound
    rejected: tuple[Rejected, ...] = ()

    def __post_init__(self) -> None:
        require_fit(_violation(self.problem, self.device, self.kernel, self.tile, self.order))
        require_derived(self, {"grid": _grid(self.problem, self.device, self.kernel, self.tile)})

    def __str__(self) -> str:
        n, tile = self.problem, self.tile
        lines = [
            f"{self.kernel} on {self.device.title}: {n.batch} x [{n.m}, {n.k}] @ [{n.k}, {n.n}] {n.dtype}"
            f"{', summed over the batch' if n.fold else ''}, bias {n.bias}, activation {n.activation}",
            f"  tile {tile.block_m} x {tile.block_n} x {tile.block_k}, {tile.num_warps} warps, {tile.num_stages} stages, order "
            f"{self.order} ({tile.group}), splits {tile.splits}, grid {self.grid[0]}, {self.shared_bytes / 1024:.0f} KiB shared",
            f"  {self.rule}: {self.reason}",
            f"  bound: {self.bound.resource}, {self.bound.seconds * 1e6:.1f} us for {self.cost.flops / 1e9:.1f} GFLOP and "
            f"{self.cost.bytes / 1e6:.1f} MB",
        ]
        return "\n".join([*lines, *(f"  not {other.what}: {other.why}" for other in self.rejected)])

    @property
    def tile(self) -> MatmulTile:
        """The tile as one value."""
        return MatmulTile(
            self.block_m, self.block_n, self.block_k, self.num_warps, self.num_stages, self.group, self.splits
        )

    def with_tile(
        self,
        *,
        block_m: int | None = None,
        block_n: int | None = None,
        block_k: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        group: int | None = None,
        splits: int | None = None,
        kernel: str | None = None,
    ) -> "MatmulPlan":
        """The plan with a chosen tile or kernel (None keeps the field, or takes the kernel's own); PlanError names the field
        that does not fit."""
        chosen = self.kernel if kernel is None else kernel
        base = self.tile
        if chosen != self.kernel:
            base = (choose_hopper if chosen == HOPPER else choose_portable)(self.problem, self.device, self.order)
        tile = changed(
            base, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages, group=group,
            splits=splits,
        )  # fmt: skip
        require_fit(_violation(self.problem, self.device, chosen, tile, self.order))
        replaced = Rejected(self.kernel, f"Replaced by the caller; rule {self.rule} had chosen it.")
        return _plan(
            self.problem, self.device, chosen, tile, self.order, "override", "The caller chose this.", (replaced,)
        )

    def require_invariant(self) -> None:
        """PlanError, naming the field, unless its results have the bits of numerics="invariant"."""
        if by_wgmma(self.problem, self.device):
            if self.kernel == HOPPER and (why := invariant_hopper_refusal(self.problem, self.device)):
                raise PlanError(f'plan field kernel: numerics="invariant" has {PORTABLE!r} here: {why}')
            if self.kernel == PORTABLE and not invariant_rows(self.block_m, self.num_warps):
                raise PlanError(
                    'plan field block_m, num_warps: numerics="invariant" has 64 rows with 4 warps or 128 with 8, the plan has '
                    f"{self.block_m} with {self.num_warps}"
                )
            if self.splits != 1:
                raise PlanError(f'plan field splits: numerics="invariant" has 1, the plan has {self.splits}')
            return
        (wanted,) = invariant_tiles(self.problem, self.device)
        fields = ("block_m", "block_n", "block_k", "num_warps", "splits")
        chosen, fixed = (tuple(getattr(one, name) for name in fields) for one in (self, wanted))
        if self.kernel != PORTABLE or chosen != fixed:
            raise PlanError(
                f'plan field kernel, {", ".join(fields)}: numerics="invariant" has {PORTABLE!r} with {fixed}, the plan has '
                f"{self.kernel!r} with {chosen}"
            )

    def check(self, problem: MatmulProblem, device: Device, order: str) -> None:
        """PlanError, naming the field, unless this plan serves exactly `problem` on `device` in this order."""
        require_equal(self.problem, problem)
        require_device(self.device, device)
        if self.order != order:
            raise PlanError(f"plan was made for order={self.order!r}, this call has order={order!r}")


@lru_cache(maxsize=4096)
def plan_matmul(problem: MatmulProblem, device: Device, order: str = "grouped", portable: bool = False) -> MatmulPlan:
    """The plan of one product: no GPU needed.  portable: without the kernel for sm_90, and, as in plain order, without the table
    of measured plans.  PlanError for an unknown order, Unsupported where no kernel can serve."""
    ruled = rules_matmul(problem, device, order, portable)
    return ruled if portable or order != "grouped" else measured("matmul", ruled, _follow)


@lru_cache(maxsize=4096)
def invariant_matmul(
    problem: MatmulProblem, device: Device, order: str = "grouped", portable: bool = False
) -> MatmulPlan:
    """The plan of numerics="invariant": an element's bits depend on its row of A, its column of B and its bias alone.  portable:
    without the kernel for sm_90, which has the same bits.  Raises as `plan_matmul` does."""
    _require_supported(problem, device)
    kernel, tile = choose_invariant(problem, device, order, portable)
    require_fit(_violation(problem, device, kernel, tile, order))
    reason = "One order of sums over k, whatever the rows; no shares of it."
    if kernel == HOPPER:
        other = Rejected(PORTABLE, "Has the same bits; more time is estimated for it.")
    else:
        why = "portable kernels were asked for" if portable else invariant_hopper_refusal(problem, device)
        other = Rejected(HOPPER, sentence(why or "it has the same bits; more time is estimated for it"))
    return _plan(problem, device, kernel, tile, order, "numerics=invariant", reason, (other,))


def _follow(ruled: MatmulPlan, fields: dict[str, Any], evidence: str) -> MatmulPlan:
    """The plan of a table's entry."""
    t = ruled.tile
    what = f"{ruled.kernel}, tile {t.block_m} x {t.block_n} x {t.block_k}, splits {t.splits}"
    other = Rejected(what, f"Rule {ruled.rule} takes it; it was measured to be slower.")
    return replace(ruled.with_tile(**fields), rule=RULE, reason=evidence, rejected=(other,))


def rules_matmul(problem: MatmulProblem, device: Device, order: str = "grouped", portable: bool = False) -> MatmulPlan:
    """The plan by rules alone: pure.  Raises as `plan_matmul` does."""
    if order not in ORDERS:
        raise PlanError(f"order must be 'grouped' or 'plain', got {order!r}")
    _require_supported(problem, device)
    refusal = "portable kernels were asked for" if portable else hopper_refusal(problem, device)
    if refusal is None:
        refusal = hopper_slower(problem, device, order)
    if refusal is None:
        tile = choose_hopper(problem, device, order)
        reason = "Loads by TMA and products by two warpgroups run side by side, over tiles that stay in one launch."
        other = Rejected(PORTABLE, "Its warps wait for loads and products in turn, and every tile pays for its start.")
        return _plan(problem, device, HOPPER, tile, order, _rule(problem, device, tile), reason, (other,))
    tile = choose_portable(problem, device, order)
    reason = _portable_reason(problem, device, tile)
    rejected = (Rejected(HOPPER, sentence(refusal)),)
    return _plan(problem, device, PORTABLE, tile, order, _rule(problem, device, tile), reason, rejected)


def _rule(problem: MatmulProblem, device: Device, tile: MatmulTile) -> str:
    if tile.splits > 1:
        return "split-k"
    return "full" if tile.tiles(problem) >= device.sms else "few tiles"


def _portable_reason(problem: MatmulProblem, device: Device, tile: MatmulTile) -> str:
    tiles = tile.tiles(problem)
    made = f"{tiles} tile{'s' * (tiles != 1)}"
    if tile.splits > 1:
        used = tiles * tile.splits
        idle = f"{made} would leave {device.sms - tiles} of {device.sms} SMs idle"
        return f"{idle}; {tile.splits} shares of the sum over k use {used}."
    if tiles >= device.sms:
        return f"The least estimated time: {made} on {device.sms} SMs."
    return f"{made} on {device.sms} SMs; sharing the sum over k would not pay."


def _require_supported(problem: MatmulProblem, device: Device) -> None:
    require_kernels(device)
    if problem.dtype == "float8_e4m3fn" and not device.has("e4m3 products"):
        raise Unsupported(f"a and b in float8_e4m3fn need sm_89 or newer, this is {device.target}; convert them first")


def _violation(problem: MatmulProblem, device: Device, kernel: str, tile: MatmulTile, order: str) -> Fault:
    """(field, sentence) of the first thing that does not fit, or None."""
    if order not in ORDERS:
        return "order", f"must be 'grouped' or 'plain', got {order!r}"
    if kernel not in (PORTABLE, HOPPER):
        return "kernel", f"must be {PORTABLE!r} or {HOPPER!r}, got {kernel!r}"
    if kernel == HOPPER and (fault := unusable(HOPPER, hopper_refusal(problem, device))):
        return fault
    if order == "plain" and tile.group != 1:
        return "group", f"must be 1 in plain order, got {tile.group!r}"
    return tile_violation(problem, device, kernel, tile)


def _grid(problem: MatmulProblem, device: Device, kernel: str, tile: MatmulTile) -> tuple[int, int, int]:
    programs = tile.tiles(problem) * tile.splits
    return (min(programs, device.sms) if kernel == HOPPER else programs, 1, 1)


def _plan(
    problem: MatmulProblem,
    device: Device,
    kernel: str,
    tile: MatmulTile,
    order: str,
    rule: str,
    reason: str,
    rejected: tuple[Rejected, ...],
) -> MatmulPlan:
    cost = replace(problem.cost, l2_bytes=traffic(problem, tile))
    # no device lists a rate of bytes: twice that of 16 bits where there are such products
    eight = ITEMSIZE[problem.dtype] == 1
    timed = replace(cost, flops=cost.flops // 2) if eight and device.backend == "cuda" else cost
    return MatmulPlan(
        problem=problem,
        device=device,
        kernel=kernel,
        **fields_of(tile),
        order=order,
        grid=_grid(problem, device, kernel, tile),
        shared_bytes=shared_bytes(problem, kernel, tile),
        rule=rule,
        reason=reason,
        cost=cost,
        bound=bound(timed, device, "bfloat16" if eight else problem.rate),
        rejected=rejected,
    )
