"""The plan of attention with q, k and v in e4m3: the kernel for sm_90, or bf16 attention of dequantised tensors."""

from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.plan.base import Fault, Plan, changed, require_derived, require_device, require_fit
from tilefold.plan.cost import Bound, Cost, attention_cost, bound, live_keys
from tilefold.plan.dense.attention import AttentionPlan, Buffer, Rejected, plan_attention, result_buffers
from tilefold.plan.dense.fp8_hopper import (
    DEQUANTISE,
    KERNEL,
    fp8_options,
    fp8_refusal,
    fp8_shared_bytes,
    fp8_slower,
    fp8_tile,
    fp8_violation,
    places_of,
)
from tilefold.plan.device import Device
from tilefold.plan.limits import Tile, grid_of, require_supported
from tilefold.plan.problem import NARROW_HEAD_DIM, AttentionProblem
from tilefold.plan.words import sentence

EVIDENCE = "Measured on an H200 beside bfloat16's kernel; the figures are in docs/performance/attention_fp8.md."
NO_TILE = Tile(0, 0, 0, 0)  # of tensors that are dequantised


@dataclass(frozen=True, slots=True)
class AttentionFp8Plan(Plan):
    """The decision for one problem with e4m3 inputs on one device. `print` it; keep it as JSON; change it with `with_tile`.

    problem: sizes and mask; its dtype, bfloat16, is the output's, its descriptors are those of the e4m3 tensors.
    kernel: "attention_forward_fp8" (sm_90: V is transposed first; a warpgroup folds 64 queries each, one more warp loads) or
        "dequantise" (q, k and v become bfloat16 tensors, for which `portable` is the plan; tile, grid and options are empty).
    block_m, block_n, num_warps, num_stages, options, grid, shared_bytes: as of an AttentionPlan.
    buffers: what the host allocates. rule, reason, evidence, rejected, cost, bound: as of an AttentionPlan.

    Raises PlanError, naming the field, if the fields contradict one another or a limit of the device.
    """

    problem: AttentionProblem
    device: Device
    kernel: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    options: tuple[str, ...]
    grid: tuple[int, int, int]
    buffers: tuple[Buffer, ...]
    shared_bytes: int
    rule: str
    reason: str
    evidence: str
    cost: Cost
    bound: Bound
    rejected: tuple[Rejected, ...] = ()

    def __post_init__(self) -> None:
        require_fit(_violation(self.problem, self.device, self.kernel, self.tile, self.options))
        require_derived(self, _derived(self.problem, self.kernel, self.tile))

    def __str__(self) -> str:
        from tilefold.plan.explain import explain_fp8

        return explain_fp8(self)

    @property
    def tile(self) -> Tile:
        """The tile as one value."""
        return Tile(self.block_m, self.block_n, self.num_warps, self.num_stages)

    @property
    def portable(self) -> AttentionPlan:
        """The plan of the same attention on dequantised tensors, contiguous ones."""
        n = self.problem
        aligned = n.dim_qk % 8 == 0
        plain = replace(n, descriptors=aligned and n.dim_v % 8 == 0 and n.seq_k > 0, query_descriptors=aligned)
        return plan_attention(plain, self.device)

    def with_tile(
        self,
        *,
        block_m: int | None = None,
        block_n: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        kernel: str | None = None,
        options: tuple[str, ...] | None = None,
    ) -> "AttentionFp8Plan":
        """The plan with a chosen tile, kernel or versions of it (None keeps the field, or takes the kernel's own); PlanError
        names the field that does not fit."""
        chosen = self.kernel if kernel is None else kernel
        base = self.tile if chosen == self.kernel else fp8_tile(self.problem) if chosen == KERNEL else NO_TILE
        tile = changed(base, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        if options is None:
            own = fp8_options(self.problem) if chosen == KERNEL else ()
            options = self.options if chosen == self.kernel else own
        require_fit(_violation(self.problem, self.device, chosen, tile, options))
        replaced = Rejected(self.kernel, f"Replaced by the caller; rule {self.rule} had chosen it.")
        why = (
            "override",
            "The caller chose this.",
            "None is needed: what the caller gives is used as it is.",
        )
        return _plan(self.problem, self.device, chosen, tile, options, why, (replaced,))

    def check(self, problem: AttentionProblem, device: Device) -> None:
        """PlanError, naming the field, unless this plan serves exactly `problem` on `device`; as of an AttentionPlan."""
        self.problem.require_same(problem)
        require_device(self.device, device)
        require_fit(_violation(problem, device, self.kernel, self.tile, self.options))


@lru_cache(maxsize=4096)
def plan_attention_fp8(problem: AttentionProblem, device: Device, portable: bool = False) -> AttentionFp8Plan:
    """The plan for a problem with e4m3 inputs (dtype: the output's, bfloat16): pure, no GPU needed.  portable: without the
    kernel for sm_90.  Unsupported, naming the argument, if head dims or lengths are beyond the kernels."""
    require_supported(problem, device, NARROW_HEAD_DIM)
    refusal = fp8_refusal(problem, device, ()) or fp8_slower(problem)
    if refusal is None and not portable:
        tile = fp8_tile(problem)
        options = fp8_options(problem)
        fault = _violation(problem, device, KERNEL, tile, options)
        if fault is None:
            reason = "Products of bytes take half the time of bfloat16's on sm_90."
            other = Rejected(DEQUANTISE, "It writes q, k and v as bfloat16 first and multiplies at half the rate.")
            return _plan(problem, device, KERNEL, tile, options, ("fp8", reason, EVIDENCE), (other,))
        refusal = fault[1]
    why = refusal or "portable kernels were asked for"
    reason = "q, k and v become bfloat16 tensors, as exact as they are, which the kernel of bfloat16 attention reads."
    rejected = (Rejected(KERNEL, sentence(why)),)
    plan = _plan(problem, device, DEQUANTISE, NO_TILE, (), ("dequantise", reason, ""), rejected)
    return replace(plan, evidence=plan.portable.evidence)


def _violation(problem: AttentionProblem, device: Device, kernel: str, tile: Tile, options: tuple[str, ...]) -> Fault:
    """(field, sentence) of the first limit that is broken, or None."""
    if problem.dtype != "bfloat16":
        return "problem", f"its dtype is the output's, bfloat16, got {problem.dtype}"
    if problem.varlen or not problem.plain:
        return "problem", "must be of sequences of one length and have no changes of scores, masks, sinks or dropout"
    if kernel == KERNEL:
        return fp8_violation(problem, device, tile, options)
    if kernel != DEQUANTISE:
        return "kernel", f"must be {KERNEL!r} or {DEQUANTISE!r}, got {kernel!r}"
    if tile != NO_TILE or options:
        return "options" if options else "block_m", f"must be empty with {DEQUANTISE!r}: `portable` has its own"
    return None


def _derived(problem: AttentionProblem, kernel: str, tile: Tile) -> dict[str, object]:
    """The fields that follow exactly from problem and tile."""
    grid = grid_of(problem, tile.block_m) if kernel == KERNEL else (0, 0, 0)
    return {"grid": grid, "buffers": _buffers(problem, kernel), "cost": _cost(problem, kernel)}


def _buffers(n: AttentionProblem, kernel: str) -> tuple[Buffer, ...]:
    made = result_buffers(n)
    if kernel == KERNEL:
        return (*made, Buffer("v_transposed", (n.batch, n.kv_heads, n.dim_v, places_of(n.seq_k)), "float8_e4m3fn"))
    rows_k = (n.batch, n.seq_k, n.kv_heads)
    return (
        *made,
        Buffer("q_bfloat16", (n.batch, n.seq_q, n.heads, n.dim_qk), "bfloat16"),
        Buffer("k_bfloat16", (*rows_k, n.dim_qk), "bfloat16"),
        Buffer("v_bfloat16", (*rows_k, n.dim_v), "bfloat16"),
    )


def _cost(n: AttentionProblem, kernel: str) -> Cost:
    """Bytes with every tensor moved once by each kernel that needs it: V to be transposed, or all to be dequantised, too."""
    base = attention_cost(n)
    rows_q = n.batch * n.heads * n.seq_q
    rows_k = n.batch * n.kv_heads * live_keys(n)
    inputs = rows_q * n.dim_qk + rows_k * (n.dim_qk + n.dim_v)
    out = rows_q * (2 * n.dim_v + 4)
    moved = inputs + 2 * n.batch * n.kv_heads * n.seq_k * n.dim_v if kernel == KERNEL else 5 * inputs
    return replace(base, bytes=moved + out)


def _plan(
    problem: AttentionProblem,
    device: Device,
    kernel: str,
    tile: Tile,
    options: tuple[str, ...],
    why: tuple[str, str, str],
    rejected: tuple[Rejected, ...],
) -> AttentionFp8Plan:
    cost = _cost(problem, kernel)
    # products of bytes run at twice the rate of bfloat16's
    timed = replace(cost, flops=cost.flops // 2) if kernel == KERNEL else cost
    return AttentionFp8Plan(
        problem=problem,
        device=device,
        kernel=kernel,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options=options,
        shared_bytes=fp8_shared_bytes(problem, tile) if kernel == KERNEL else 0,
        rule=why[0],
        reason=why[1],
        evidence=why[2],
        bound=bound(timed, device),
        rejected=rejected,
        **_derived(problem, kernel, tile),  # type: ignore[arg-type]
    )
