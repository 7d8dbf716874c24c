"""The plan of the backward pass of dense attention: one tile for dq, one for dk and dv, one for the gradient of a bias."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from tilefold.errors import PlanError
from tilefold.plan.architecture import SM_90
from tilefold.plan.backward import attention_backward_hopper as dense
from tilefold.plan.backward import attention_backward_packed as packed
from tilefold.plan.backward import attention_backward_reduce as reduced
from tilefold.plan.backward import attention_backward_short as short
from tilefold.plan.backward import attention_backward_spans as spans
from tilefold.plan.backward.attention_backward_hopper import KERNEL as HOPPER
from tilefold.plan.backward.attention_backward_reduce import KERNEL as REDUCE
from tilefold.plan.backward.attention_backward_reduce import ReduceOptions
from tilefold.plan.backward.attention_backward_short import KERNEL as SHORT
from tilefold.plan.backward.backward import (
    PASS,
    backward_box_refusal,
    backward_tile_violation,
    backward_tiles,
    not_a_tile,
)
from tilefold.plan.backward.backward_time import RATES, features
from tilefold.plan.backward.kept_backward import NARROW, backward_tile, backward_tile_fault
from tilefold.plan.base import Fault, Plan, changed, require_device, require_fit, unusable
from tilefold.plan.cost import Cost, attention_cost
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_BOX_ROWS, MAX_GRID, MOD_BYTES, Tile, first_fit, require_supported
from tilefold.plan.problem import AttentionProblem, next_power_of_two

POINTERS, BOX = "attention_backward", "attention_backward_box"
KERNELS = (POINTERS, BOX, SHORT, HOPPER, REDUCE)
WAVES = 2  # programs for each SM that shares of a bias's sum aim at
SMALL_WAVES = 6  # the same of the smallest of BIAS_TILES
STORED_WAVES = 4  # the same where dS is stored
STORED_TILE = Tile(64, 32, 4, 1)
"""Of the sum of dS that is stored: the fastest of four up to 64 x 64, which stand 1 to 9 % apart (H200)."""
MAX_SHARES = 64
BIAS_TILES = {
    16: Tile(64, 32, 4, 4), 32: Tile(64, 32, 4, 4), 64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2),
    512: Tile(64, 32, 8, 1),
}  # fmt: skip
"""By the padded head dim; above 128 not measured.  A step is a pair of tiles of another head or sequence: L2 brings all of it, so
larger ones are faster until registers or buffers end (docs/performance/attention_backward.md)."""
STORED_REASON = " dS is stored, and summed up for the bias."
GRID_Y = 65535


class OtherGradients(NamedTuple):
    """What else gets a gradient, by portable kernels behind those of dq, dk and dv: the fields of the plan."""

    bias: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    load_passes: int = 0


NO_OTHERS = OtherGradients()


@dataclass(frozen=True, slots=True)
class AttentionBackwardPlan(Plan):
    """The decision for the backward pass of one problem on one device. `print` it; keep it as JSON.

    problem: that of the forward pass. kernel:
    "attention_backward" (pointer loads), "attention_backward_box" (what streams by comes by tensor descriptors) or
    "attention_backward_hopper" (Gluon, sm_90: one kernel, whose programs for dk and dv keep dS for those that make dq). queries:
    the tile of what makes dq, block_m of its own queries against block_n keys a step. keys: the tile of what makes dk and dv,
    block_n of its own keys against block_m queries a step. scores: the tile of the gradient of a bias. bias: (batch, heads, rows)
    of a bias that gets a gradient, each 1 where it is broadcast; () if none does. bias_shares: parts of the sum over what shares
    the bias, made apart and added in order; 0 without a bias. loads: the elements of each tensor of score_args that gets a
    gradient, by tiles of `scores`; load_passes: 2, integer sums whose size a first pass finds, or 1, fp32 sums in an order that
    changes from run to run; 0 without loads. heads_at_once, keys_at_once: KV heads, and keys of them, of one
    batch of the Hopper kernel's work, 0 with the others; of a packed batch 1, and the keys with room for dS at a time. Also
    "attention_backward_reduce" (Gluon, sm_90): adds dq in memory, in one order or in any; it has heads_at_once
    (query heads where options.apart), whose sums of dq share L2, and options, its version, None with the others.
    "attention_backward_short": a program makes every gradient of a KV head of a short sequence; stored: dS, too, for the gradient
    of a bias.
    queries_at_once: of a span, where the Hopper kernel makes the queries in spans, since dS of all would have too little
    room; 0 if not. Raises PlanError, naming the field, if a tile exceeds a limit.
    """

    problem: AttentionProblem
    device: Device
    kernel: str
    queries: Tile
    keys: Tile
    scores: Tile
    bias: tuple[int, ...]
    bias_shares: int
    rule: str
    reason: str
    heads_at_once: int = 0
    keys_at_once: int = 0
    options: ReduceOptions | None = None
    queries_at_once: int = 0
    loads: tuple[int, ...] = ()
    load_passes: int = 0
    stored: bool = False

    def __post_init__(self) -> None:
        require_fit(_violation(self))

    @property
    def stores_ds(self) -> bool:
        """Does the kernel for dq, dk and dv store dS, of which the gradient of a bias is the sum?"""
        return self.stored if self.options is None else self.options.stored

    def without_bias(self) -> "AttentionBackwardPlan":
        """The plan of a call whose bias gets no gradient."""
        options = self.options and replace(self.options, stored=False)
        scores = self.scores if self.loads or self.kernel in (POINTERS, BOX) else self.keys
        reason = self.reason.replace(STORED_REASON, "")
        return replace(self, bias=(), bias_shares=0, options=options, scores=scores, reason=reason, stored=False)

    @property
    def spans(self) -> tuple[spans.Span, ...]:
        """Which queries meet which keys in each launch of the Hopper kernel: one of all but for long sequences."""
        return spans.spans_of(self.problem, self.queries_at_once)

    @property
    def grids(self) -> tuple[tuple[int, int, int], ...]:
        """Programs that make dq, dk and dv, the gradient of the bias, and a pass of those of loads (0 without)."""
        n = self.problem
        queries = -(-n.seq_q // self.queries.block_m) * n.batch * n.heads
        keys = -(-n.seq_k // self.keys.block_n) * n.batch * n.kv_heads
        if self.kernel == SHORT:
            queries = keys = n.batch * n.kv_heads
        loads = -(-n.seq_q // self.scores.block_m) * n.batch * n.heads if self.loads else 0
        bias = _bias_programs(n, self.scores, self.bias), self.bias_shares, 1
        return (queries, 1, 1), (keys, 1, 1), bias, (loads, 1, 1)

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside the gradients: two fp32 numbers a query and head, and the shares of the gradient of the bias; of an fp32
        call also the weights of the rows, and dout and delta times them; for loads a sum an element, and in two passes a number a
        program and tensor, if each is loaded from once; with the Hopper kernel room for dS, and for sums of dq
        where keys come in KV splits; for dk and dv in fp32 where queries come in spans; with the one that adds dq, sums of it,
        and dS where it stores that for a bias.

        For a packed batch, whose tokens the plan does not know, an upper estimate."""
        n = self.problem
        rows = n.batch * n.heads * n.seq_q
        if self.kernel == REDUCE:
            made = self.loads or n.sinks or (self.bias and not self.stores_ds)
            beside = 8 * rows * bool(made) + self._others_bytes
            return reduced.scratch_bytes(n, self.options) + beside
        if self.kernel == SHORT:
            made = self.loads or n.sinks or (self.bias and not self.stored)
            return 8 * rows * bool(made) + short.ds_bytes(n) * self.stored + self._others_bytes
        if self.kernel == HOPPER:
            at_once = self.heads_at_once, self.keys_at_once
            if n.varlen:
                return packed.scratch_bytes(n, self.keys_at_once)
            return spans.scratch_bytes(n, self.device, self.queries_at_once, *at_once)
        return 4 * (4 + n.dim_v if n.dtype == "float32" else 2) * rows + self._others_bytes

    @property
    def _others_bytes(self) -> int:
        shares = self.bias_shares if self.bias_shares > 1 else 0
        entries = self.bias[0] * self.bias[1] * self.bias[2] * self.problem.seq_k if self.bias else 0
        loads = 4 * self.load_passes * sum(self.loads)
        if self.load_passes == 2:
            loads += 4 * next_power_of_two(len(self.loads)) * self.grids[3][0]
        return 4 * shares * entries + loads

    @property
    def _others(self) -> OtherGradients:
        return OtherGradients(self.bias, self.loads, self.load_passes)

    @property
    def seconds(self) -> float | None:
        """Of the whole pass, by what was measured on this device; None where this kernel, head dim or mask was not."""
        n = self.problem
        if self.kernel not in (HOPPER, REDUCE) or not n.plain or n.varlen or n.dim_qk != n.dim_v or min(n.sides) >= 0:
            return None
        if (self.kernel == HOPPER and not dense.is_kept_well(n, self.device)) or (self.options and self.options.apart):
            return None
        version = "dS kept" if self.options is None else "added in order" if self.options.ordered else "added"
        rates = RATES.get((self.device.name, version, n.dim_qk, max(n.sides) >= 0))
        return rates and sum(a * b for a, b in zip(rates, features(n), strict=True)) / 1e3

    def __str__(self) -> str:
        from tilefold.plan.explain import problem_text  # here: only who prints a plan needs it

        n = self.problem
        cost = attention_backward_cost(n)
        lines = [
            f"Attention backward plan for {self.device.title}",
            f"  problem   {problem_text(n)}",
            f"  kernel    {self.kernel}: {self._tiles()}",
            f"  grid      {self._programs()} on {self.device.sms} SMs",
            f"  work      {cost.flops / 1e9:.4g} GFLOP in five products a pair; {self._made()}",
        ]
        if self.bias:
            shares = f" in {self.bias_shares} shares, added in order" if self.bias_shares > 1 else ""
            batch, heads, rows = self.bias
            how = "the sum of dS that is stored" if self.stores_ds else "two more products a pair"
            lines.append(
                f"  bias      [{batch}, {heads}, {rows}, {n.seq_k}] by tiles of {self.scores}, {how}: "
                f"{self.grids[2][0]} programs{shares}"
            )
        if self.loads:
            tensors = (
                f"{len(self.loads)} tensor{'s' * (len(self.loads) > 1)} of score_args, {sum(self.loads):,} elements"
            )
            sums = "a pass for the size of the sums, one adds 64-bit integers" if self.load_passes == 2 else "adds fp32"
            lines.append(
                f"  loads     {tensors}: by tiles of {self.scores}, {2 * self.load_passes} more products a pair; {sums}: "
                f"{self.grids[3][0]} programs"
            )
        if self.queries_at_once:
            lines.append(f"  spans     {spans.described(n, self.queries_at_once)}")
        memory = f"  memory    {self.scratch_bytes / 2**20:.4g} MiB beside inputs and gradients"
        time = self.seconds
        lines.append(
            memory if time is None else f"{memory}; about {1e3 * time:.3g} ms, {cost.flops / time / 1e12:.0f} TFLOP/s"
        )
        return "\n".join([*lines, f"  rule      {self.rule}. {self.reason}"])

    def _tiles(self) -> str:
        if self.kernel == SHORT:
            slices = short.slices_of(self.problem, self.keys)
            return f"all gradients by tiles of {self.keys}; queries in {slices} slice{'s' * (slices > 1)}"
        return f"dq by tiles of {self.queries}; dk and dv by tiles of {self.keys}"

    def _programs(self) -> str:
        queries, keys = self.grids[0][0], self.grids[1][0]
        return f"{queries} programs" if self.kernel == SHORT else f"{queries} and {keys} programs"

    def _made(self) -> str:
        if self.kernel == REDUCE:
            kind = "query" if self.options and self.options.apart else "KV"
            heads = f"{self.heads_at_once} {kind} head{'s' * (self.heads_at_once != 1)} at a time"
            return f"as many are made: {self.options}, {heads}"
        if self.kernel == SHORT:
            return "as many are made: a program makes all of a KV head"
        if self.kernel != HOPPER:
            made = "eight" if self.problem.dtype == "float32" else "seven"
            return f"{made} are made: nothing is added in memory"
        whose = "" if self.problem.varlen else f"{self.heads_at_once} KV heads and "
        of = "keys" if self.problem.varlen else "of their keys"
        return f"as many are made: dS of {whose}{self.keys_at_once} {of} is kept at a time"

    def with_tiles(
        self,
        queries: Tile | None = None,
        keys: Tile | None = None,
        scores: Tile | None = None,
        kernel: str | None = None,
        bias_shares: int | None = None,
        heads_at_once: int | None = None,
        keys_at_once: int | None = None,
        options: ReduceOptions | None = None,
        queries_at_once: int | None = None,
        stored: bool | None = None,
    ) -> "AttentionBackwardPlan":
        """The plan with other tiles, another kernel (and the tiles that go with it), another number of shares, or of heads, keys
        or queries at a time, or another version of attention_backward_reduce; PlanError names the field that does not fit.
        Another kernel or version has its own tile of scores and shares.  stored: of attention_backward_short."""
        base = self
        makers = {HOPPER: _hopper, REDUCE: _reduce, SHORT: _short}
        made = makers.get(kernel or self.kernel, _portable)
        if made is not makers.get(self.kernel, _portable):
            base = made(self.problem, self.device, self._others)
        if made is _reduce and isinstance(options, ReduceOptions):  # heads of a group that are apart are more at once
            base = _reduce(self.problem, self.device, self._others, options)
        if queries_at_once is not None and made is _hopper and not spans.span_violation(self.problem, queries_at_once):
            batch = spans.batches_at_once(self.problem, self.device, queries_at_once)
            base = replace(base, heads_at_once=batch[0], keys_at_once=batch[1], queries_at_once=queries_at_once)
        return changed(
            base,
            queries=queries, keys=keys, scores=scores, kernel=kernel, bias_shares=bias_shares, heads_at_once=heads_at_once,
            keys_at_once=keys_at_once, options=options, queries_at_once=queries_at_once, stored=stored,
            rule="override", reason="The caller chose these fields.",
        )  # fmt: skip

    def check(
        self, problem: AttentionProblem, device: Device, bias: tuple[int, ...], loads: tuple[int, ...] = ()
    ) -> None:
        """PlanError, naming what differs, unless this plan serves exactly `problem`, `bias` and `loads` on a device of this kind.

        The descriptors may differ as long as a kernel with boxes is not asked to read tensors that have none."""
        self.problem.require_same(problem)
        if self.bias != bias:
            raise PlanError(f"plan was made for a bias gradient of {self.bias or None}, the call has {bias or None}")
        if self.loads != loads:
            raise PlanError(
                f"plan was made for gradients of loads of {self.loads or None}, the call has {loads or None}"
            )
        require_device(self.device, device)
        replace(self, problem=problem, device=device)  # which looks at every limit


def attention_backward_cost(problem: AttentionProblem) -> Cost:
    """FLOPs of the five products that the gradients need (2.5 times the forward pass's where the head dims are equal); bytes of
    q, k, v, out, dout, lse read and dq, dk, dv written once; exponentials of both kernels."""
    forward = attention_cost(problem)
    pairs = forward.flops // (2 * (problem.dim_qk + problem.dim_v))
    flops = 2 * pairs * (3 * problem.dim_qk + 2 * problem.dim_v)
    return Cost(flops=flops, bytes=2 * forward.bytes, exps=2 * forward.exps)


@lru_cache(maxsize=4096)
def plan_attention_backward(
    problem: AttentionProblem,
    device: Device,
    bias: tuple[int, ...] = (),
    portable: bool = False,
    deterministic: bool = True,
    loads: tuple[int, ...] = (),
    exact_bias: bool = False,
) -> AttentionBackwardPlan:
    """The backward plan for a problem on a device: pure, the same every time, no GPU needed.

    bias: (batch, heads, rows) of a bias that gets a gradient.  portable: leave the kernels written for one architecture alone.
    deterministic: leave those alone that add in memory in any order.  loads: the elements of each tensor of score_args that gets
    a gradient.  exact_bias: dS of the bias's gradient has more bits than q.  Unsupported if no tile fits."""
    require_supported(problem, device)
    others = OtherGradients(bias, loads, (2 if deterministic else 1) if loads else 0)
    if bias and "bias" not in problem.score_mods:
        raise PlanError(f"bias: its gradient of {bias} is asked for, and the problem has no bias")
    if short.is_short(problem, device):
        return _short(problem, device, others, exact_bias)
    if portable:
        return _portable(problem, device, others)
    stored = not exact_bias and reduced.is_stored(problem, bias)
    options = reduced.options_for(problem, device, deterministic, stored)
    if isinstance(options, ReduceOptions):
        return _reduce(problem, device, others, options)
    changed = problem.score_mods or problem.mask_mods
    if changed and (others != NO_OTHERS or dense.width_of(problem) <= NARROW):
        return _refusing(_portable(problem, device, others), REDUCE, options)
    if not deterministic:
        plan = plan_attention_backward(problem, device)
        return replace(plan, reason=f"{plan.reason} {REDUCE} is not taken: {options}.")
    if refusal := _hopper_refusal(problem, device):
        return _refusing(_portable(problem, device), HOPPER, refusal)
    return _hopper(problem, device)


def _refusing(plan: AttentionBackwardPlan, kernel: str, why: str) -> AttentionBackwardPlan:
    """The portable plan, which says on sm_90 why a kernel for it is not taken."""
    if plan.device.architecture is not SM_90:
        return plan
    return replace(plan, reason=f"{plan.reason} {kernel} is not taken: {why}.")


def _portable(problem: AttentionProblem, device: Device, others: OtherGradients = NO_OTHERS) -> AttentionBackwardPlan:
    kernel = POINTERS if device.backend == "interpreter" or backward_box_refusal(problem, device) else BOX
    queries, keys = (_portable_tile(problem, device, kernel, own) for own in ("block_m", "block_n"))
    scores = _scores_tile(problem, device, kernel, others)
    reason = "Each program owns its rows and adds nothing in memory: the same bits every run."
    if others.loads:
        reason = "Each program owns its rows; what a score_mod loads gets fp32 sums in memory, in any order."
    if others.load_passes == 2:
        reason = "Each program owns its rows; what a score_mod loads gets sums of integers: the same bits every run."
    shares = _shares(problem, device, scores, others.bias)
    return AttentionBackwardPlan(
        problem, device, kernel, queries, keys, scores, bias_shares=shares, rule="owned-rows", reason=reason, **others._asdict()
    )  # fmt: skip


def _short(
    problem: AttentionProblem, device: Device, others: OtherGradients = NO_OTHERS, exact_bias: bool = False
) -> AttentionBackwardPlan:
    stored = bool(others.bias) and not exact_bias and short.stores_ds(problem, others.bias)
    tile = short.short_tile(problem, stored)
    require_fit(short.short_violation(problem, device, tile))
    scores, shares = tile, 0
    reason = "A program makes every gradient of a KV head: five products a pair, tensors are read once, the same bits every run."
    if others != NO_OTHERS:
        scores = short.sum_tile(problem) if stored else _scores_tile(problem, device, POINTERS, others)
        shares = _shares(problem, device, scores, others.bias, stored)
        reason += STORED_REASON if stored else " Other gradients have kernels of their own."
    return AttentionBackwardPlan(
        problem, device, SHORT, tile, tile, scores, bias_shares=shares, rule="short-sequences", reason=reason, stored=stored,
        **others._asdict(),
    )  # fmt: skip


def _hopper(problem: AttentionProblem, device: Device, others: OtherGradients = NO_OTHERS) -> AttentionBackwardPlan:
    tile = backward_tile(dense.width_of(problem))
    require_fit(_hopper_fault(problem, device, tile))
    reason = "A loading warp, wgmma, five products a pair of tiles; the order of every sum is that of the keys or the queries."
    queries = 0 if problem.varlen else spans.queries_at_once(problem, device)
    if queries:
        at_once = spans.batches_at_once(problem, device, queries)
        reason += f" Queries come in spans: of all at once, {spans.why(problem, device)}."
    else:
        at_once = (packed.kept_at_once if problem.varlen else dense.kept_at_once)(problem, device)
    return _gluon(problem, device, HOPPER, tile, others, "hopper-ranges", reason, at_once, queries=queries)


def _reduce(
    problem: AttentionProblem, device: Device, others: OtherGradients = NO_OTHERS, options: ReduceOptions | None = None
) -> AttentionBackwardPlan:
    options = options or ReduceOptions(late=reduced.is_late(problem))
    require_fit(unusable(REDUCE, reduced.reduce_refusal(problem, device)))
    tile, heads = reduced.reduce_tile(problem), reduced.heads_at_once(problem, options)
    require_fit(reduced.reduce_violation(problem, device, tile, options, heads, 0))
    order = (
        "in the order of the keys: the same bits every run"
        if options.ordered
        else "so its last bits change from run to run"
    )
    reason = f"Five products a pair of tiles; dq is added in memory, {order}."
    return _gluon(problem, device, REDUCE, tile, others, "hopper-reduce", reason, (heads, 0), options)


def _gluon(
    problem: AttentionProblem, device: Device, kernel: str, tile: Tile, others: OtherGradients, rule: str, reason: str,
    at_once: tuple[int, int], options: ReduceOptions | None = None, queries: int = 0,
) -> AttentionBackwardPlan:  # fmt: skip
    """The plan of a Gluon kernel that breaks no limit."""
    scores, shares = tile, 0
    stored = options is not None and options.stored
    if others != NO_OTHERS:
        scores = STORED_TILE if stored else _scores_tile(problem, device, BOX, others)
        shares = _shares(problem, device, scores, others.bias, stored)
        reason += STORED_REASON if stored else ""
        reason += "" if stored and not others.loads else " Other gradients have portable kernels of their own."
    return AttentionBackwardPlan.decided(
        dict, problem=problem, device=device, kernel=kernel, queries=tile, keys=tile, scores=scores, bias_shares=shares,
        rule=rule, reason=reason, heads_at_once=at_once[0], keys_at_once=at_once[1], options=options, queries_at_once=queries,
        stored=False, **others._asdict(),
    )  # fmt: skip


def _portable_tile(
    problem: AttentionProblem, device: Device, kernel: str, own: str, best: tuple[Tile, ...] = ()
) -> Tile:
    fits = partial(_tile_violation, problem, device, kernel, own=own)
    return first_fit((*best, *_tiles(problem, device, kernel, own)), device, fits, PASS)


def _scores_tile(problem: AttentionProblem, device: Device, kernel: str, others: OtherGradients) -> Tile:
    """Of a bias whose rows have gradients, dense, by boxes, sm_90 has tiles of its own, which were measured (see BIAS_TILES)."""
    n, width = problem, max(problem.block_qk, problem.block_v)
    if not (others.bias and others.bias[2] > 1 and kernel == BOX and device.architecture is SM_90):
        return _portable_tile(n, device, kernel, "scores")
    changed = bool(n.mask_mods) or "user" in n.score_mods
    crowded = changed and 32 < width <= 128  # what they load would spill in the loop
    streams = not (others.loads or n.varlen or n.dropout or crowded) and min(n.seq_q, n.seq_k) >= 128
    best = BIAS_TILES.get(width) if streams else None
    return _portable_tile(n, device, kernel, "scores", () if best is None else (best,))


def _tiles(problem: AttentionProblem, device: Device, kernel: str, own: str) -> tuple[Tile, ...]:
    """Best first.  own: "block_m" of dq, "block_n" of dk and dv, "scores" of the bias.

    64 x 64 with 4 warps, and 8 past a head dim of 128, were the best of the block-sparse backward pass on an H200, whose steps
    these are (docs/performance/sparse_backward.md).  Where something else needs registers, half a tile streams by at a time: in
    the block-sparse kernels that was no slower than spilled registers; not measured here yet."""
    n, mods = problem, problem.score_mods + problem.mask_mods
    rows, keys = (min(64, max(16, next_power_of_two(length))) for length in (n.seq_q, n.seq_k))
    width = max(n.block_qk, n.block_v)
    loading = any(mod in MOD_BYTES for mod in mods)
    crowded = loading or n.dropout  # random numbers are made in registers
    if own == "block_n":
        other = kernel != BOX or mods or n.group > 1 or n.causal or n.window != (-1, -1)
        crowded = crowded or bool(other and width <= 128)
    found = backward_tiles(n, device, rows, keys, own, crowded, loading)
    if width <= 256 or device.backend == "interpreter" or n.dtype == "float32":
        return found
    # dk and dv of 32 keys are 128 registers in each thread of 8 warps
    wide = Tile(rows, min(keys, 32), 8, 1) if own == "block_n" else Tile(min(rows, 32), keys, 8, 1)
    narrow = Tile(min(rows, 32), min(keys, 32), 8, 2)
    boxed = (wide,) if kernel == BOX else ()  # tiles that pointers load are copied once more
    return (*boxed, narrow, replace(narrow, num_stages=1), *found[-2:])


def _bias_programs(problem: AttentionProblem, tile: Tile, bias: tuple[int, ...]) -> int:
    if not bias:
        return 0
    batch, heads, rows = bias
    tiles_m = -(-problem.seq_q // tile.block_m) if rows > 1 else 1
    return -(-problem.seq_k // tile.block_n) * tiles_m * batch * heads


def _shares(problem: AttentionProblem, device: Device, tile: Tile, bias: tuple[int, ...], stored: bool = False) -> int:
    """As many as fill the device, if what is shared can be cut so often."""
    if not bias:
        return 0
    batch, heads, rows = bias
    parts = problem.batch // batch * (problem.heads // heads) if rows > 1 else -(-problem.seq_q // tile.block_m)
    waves = STORED_WAVES if stored else SMALL_WAVES if tile == BIAS_TILES[32] else WAVES
    programs = waves * max(1, device.sms)
    wanted = -(-programs // max(1, _bias_programs(problem, tile, bias)))
    return max(1, min(wanted, parts, MAX_SHARES))


def _tile_violation(problem: AttentionProblem, device: Device, kernel: str, tile: Tile, own: str) -> Fault:
    most = MAX_BOX_ROWS if kernel == BOX else 1024
    for name, size in (("block_m", tile.block_m), ("block_n", tile.block_n)):
        if type(size) is not int or not 16 <= size <= most or size & (size - 1):
            return name, f"must be a power of two from 16 to {most}, got {size}"
    if own == "scores":
        return backward_tile_violation(problem, device, tile, own, tile.block_m * tile.block_n)
    return backward_tile_violation(problem, device, tile, own)


def _violation(plan: AttentionBackwardPlan) -> Fault:
    """(field, sentence) of the first limit that is broken, or None."""
    n, device = plan.problem, plan.device
    if fault := not_a_tile(queries=plan.queries, keys=plan.keys, scores=plan.scores):
        return fault
    if plan.kernel not in KERNELS:
        return "kernel", f"must be one of {', '.join(map(repr, KERNELS))}, got {plan.kernel!r}"
    if plan.kernel != REDUCE and plan.options is not None:
        return "options", f"must be None with {plan.kernel}, got {plan.options!r}"
    if plan.queries_at_once and (plan.kernel != HOPPER or n.varlen):
        return "queries_at_once", f"must be 0 with {plan.kernel} of this problem, got {plan.queries_at_once!r}"
    if type(plan.stored) is not bool or (plan.stored and plan.kernel != SHORT):
        return (
            "stored",
            f"must be {'a bool' if plan.kernel == SHORT else 'False'} with {plan.kernel}, got {plan.stored!r}",
        )
    if plan.kernel in (SHORT, HOPPER, REDUCE):
        return _whole_violation(plan)
    if plan.heads_at_once or plan.keys_at_once:
        return (
            "heads_at_once",
            f"must be 0, as keys_at_once, with {plan.kernel}, got {plan.heads_at_once!r} and {plan.keys_at_once!r}",
        )
    if plan.kernel == BOX and (fault := unusable(BOX, backward_box_refusal(n, device))):
        return fault
    for name, tile, own in (("queries", plan.queries, "block_m"), ("keys", plan.keys, "block_n")):
        fault = _tile_violation(n, device, plan.kernel, tile, own)
        if fault:
            return f"{name}.{fault[0]}", fault[1]
    return _scores_violation(plan) or _bias_violation(plan) or _loads_violation(plan) or _grid_violation(plan)


def _grid_violation(plan: AttentionBackwardPlan) -> Fault:
    return ("grid", f"more than {MAX_GRID} programs") if max(grid[0] for grid in plan.grids) > MAX_GRID else None


def _whole_violation(plan: AttentionBackwardPlan) -> Fault:
    """Of a plan whose kernel makes dq, dk and dv."""
    beside = plan.kernel != HOPPER and plan._others != NO_OTHERS
    for name in ("queries",) if beside else ("queries", "scores"):
        if getattr(plan, name) != plan.keys:
            return name, f"must be the tile of keys ({plan.keys}) with {plan.kernel}, got {getattr(plan, name)}"
    n, device, at_once = plan.problem, plan.device, (plan.heads_at_once, plan.keys_at_once)
    if plan.kernel == SHORT:
        fault = short.short_violation(n, device, plan.keys) or _stored_violation(plan)
        if any(at_once):
            at = f"{plan.heads_at_once!r} and {plan.keys_at_once!r}"
            fault = fault or ("heads_at_once", f"must be 0, as keys_at_once, with {SHORT}, got {at}")
    elif plan.kernel == REDUCE:
        fault = reduced.reduce_violation(n, device, plan.keys, plan.options, *at_once) or _stored_violation(plan)
    elif n.varlen:
        fault = _hopper_fault(n, device, plan.keys) or packed.kept_violation(n, *at_once)
    else:
        fault = _hopper_fault(n, device, plan.keys)
        fault = fault or spans.kept_violation(n, device, plan.queries_at_once, *at_once)
    return (
        fault
        or (("bias", f"must be () with {plan.kernel}, got {plan.bias!r}") if plan.bias and not beside else None)
        or (("loads", f"must be () with {plan.kernel}, got {plan.loads!r}") if plan.loads and not beside else None)
        or (_scores_violation(plan) if beside else None)
        or _bias_violation(plan)
        or _loads_violation(plan)
        or (_grid_violation(plan) if plan.kernel == SHORT else None)
    )


def _scores_violation(plan: AttentionBackwardPlan) -> Fault:
    kernel = BOX if plan.kernel == REDUCE else plan.kernel  # boxes read what a bias needs
    fault = _tile_violation(plan.problem, plan.device, kernel, plan.scores, "scores")
    return fault and (f"scores.{fault[0]}", fault[1])


def _stored_violation(plan: AttentionBackwardPlan) -> Fault:
    if not plan.stores_ds:
        return None
    if plan.bias[2:] != (plan.problem.seq_q,):
        return (
            "stored" if plan.kernel == SHORT else "options.stored",
            f"is a version of gradients of a bias with a row for each query, got {plan.bias or None}",
        )
    if plan.stored and (refusal := short.storing_refusal(plan.problem)):
        return "stored", f"must be False: {refusal}"
    rows, keys = (short.side_of_tile(n) for n in (plan.problem.seq_q, plan.problem.seq_k)) if plan.stored else (64, 128)
    if plan.scores.block_m > rows or plan.scores.block_n > keys:
        return "scores", f"must be at most {rows} x {keys} where dS is stored, got {plan.scores}"
    return None


def _hopper_refusal(problem: AttentionProblem, device: Device) -> str | None:
    return (packed.packed_refusal if problem.varlen else spans.hopper_backward_refusal)(problem, device)


def _hopper_fault(problem: AttentionProblem, device: Device, tile: Tile) -> Fault:
    fault = unusable(HOPPER, _hopper_refusal(problem, device))
    return fault or backward_tile_fault(HOPPER, dense.width_of(problem), problem.itemsize, device, tile)


def _bias_violation(plan: AttentionBackwardPlan) -> Fault:
    n, bias = plan.problem, plan.bias
    if bias:
        accepted = [{1, n.batch}, {1, n.heads}, {1, n.seq_q}]
        if len(bias) != 3 or any(size not in sizes for size, sizes in zip(bias, accepted, strict=True)):
            return "bias", f"must be () or (batch or 1, heads or 1, seq_q or 1) of this problem, got {bias!r}"
    least, most = (1, GRID_Y) if bias else (0, 0)
    if type(plan.bias_shares) is not int or not least <= plan.bias_shares <= most:
        shares = f"from {least} to {most}" if bias else "0, as no bias gets a gradient"
        return "bias_shares", f"must be {shares}, got {plan.bias_shares!r}"
    return None


def _loads_violation(plan: AttentionBackwardPlan) -> Fault:
    if any(type(elements) is not int or elements < 1 for elements in plan.loads):
        return "loads", f"must hold numbers of elements, at least 1, got {plan.loads!r}"
    accepted = (1, 2) if plan.loads else (0,)
    if type(plan.load_passes) is not int or plan.load_passes not in accepted:
        return "load_passes", f"must be {' or '.join(map(str, accepted))}, got {plan.load_passes!r}"
    return None
