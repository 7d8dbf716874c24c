"""How attention of numerics="invariant" is cut: what fixes the order of additions, and what is free.  Pure, and one value.

A row's bits follow from the keys of a tile, the keys of a chunk and the instruction that multiplies.  These depend on dtype, head
dims and architecture alone (`constants_of`).  How many rows share a tile, how many programs share the chunks of a row and how
many tiles are in flight follow the call, and move no bit."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tilefold.errors import PlanError, Unsupported
from tilefold.plan.cache.cached import MAX_SPLITS, require_splits
from tilefold.plan.cache.decode import CachePlan, DecodeProblem, require_dims
from tilefold.plan.dense.attention import AttentionPlan, Rejected, plan_attention
from tilefold.plan.dense.attention_hopper import (
    CHUNK_KEYS,
    hopper_few,
    hopper_refusal,
    hopper_unmeasured,
    invariant_tile,
    invariant_unserved,
    keys_of_tile,
)
from tilefold.plan.dense.attention_hopper import KERNEL as HOPPER
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID, MAX_LENGTH, require_kernels
from tilefold.plan.problem import AttentionProblem, next_power_of_two
from tilefold.plan.words import counted

CHUNK = CHUNK_KEYS  # keys that are folded from nothing: what a program has at least while it decodes
MOST_PART_BYTES = 1 << 28  # of the states of chunks; where they take more, a program has all chunks of its rows

FEW_ROWS = 64  # of a KV head: so few have a program a chunk, whose states are small beside keys; measured with batches on an H200


class Constants(NamedTuple):
    """What fixes bits: keys of a tile, keys of a chunk; rows of a tile, where there are few, which choose the instruction."""

    block_n: int
    chunk: int
    rows: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class InvariantPlan(CachePlan):
    """The decision for one problem on one device; `print` it.

    block_n, chunk: keys of a tile and of a chunk; both are counted from a sequence's first key.  block_m: rows of a tile, query
    heads of a KV head times tokens.  num_warps, num_stages: launch options.  splits: programs that share a row's chunks.
    reason, rejected: why.  cost, bound: of a full cache, or of the longest sequences.

    Raises PlanError, naming the field, for what no kernel can do."""

    problem: DecodeProblem
    device: Device
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int
    splits: int = 1
    reason: str = ""
    rejected: tuple[Rejected, ...] = ()

    def __post_init__(self) -> None:
        self._require("plan field ", block_m=(16, 128), block_n=(16, 256), num_warps=(1, 16), num_stages=(1, 16))
        self._require("plan field ", splits=(1, MAX_SPLITS), chunk=(self.block_n, MAX_LENGTH))
        if self.chunk % self.block_n:
            raise PlanError(f"plan field chunk must be a multiple of block_n={self.block_n}, got {self.chunk}")
        if self.grid > MAX_GRID:
            raise PlanError(f"batch, heads and seq_q make {self.grid} programs, a grid takes {MAX_GRID}")

    @property
    def pack(self) -> int:
        """Query heads that share a tile; the user's functions are told of one."""
        a = self.problem.attention
        return 1 if "user" in a.score_mods + a.mask_mods else a.group

    @property
    def rows(self) -> int:
        """Rows that share their keys' tiles: tokens times `pack`."""
        return self.problem.attention.seq_q * self.pack

    @property
    def blocks(self) -> int:
        """Row blocks of these."""
        return -(-self.rows // self.block_m)

    @property
    def items(self) -> int:
        """Row blocks of all heads and sequences."""
        a = self.problem.attention
        return a.batch * a.heads // self.pack * self.blocks

    @property
    def chunks(self) -> int:
        """The most chunks of a sequence."""
        return max(1, -(-self.problem.attention.seq_k // self.chunk))

    @property
    def grid(self) -> int:
        """Programs that are launched."""
        return self.items * self.splits

    @property
    def slots(self) -> int:
        """Places for states of chunks, each of `held` rows."""
        return 0 if self.splits == 1 else self.items * self.chunks

    @property
    def held(self) -> int:
        """Rows of such a place."""
        return next_power_of_two(min(self.rows, self.block_m))

    def require_invariant(self) -> None:
        """PlanError, naming the field, unless its results have the bits of numerics="invariant"."""
        fixed = constants_of(self.problem, self.device)
        for name in ("block_n", "chunk"):
            if getattr(self, name) != getattr(fixed, name):
                raise PlanError(_broken(name, getattr(fixed, name), getattr(self, name)))
        tiles = _tiles(self.problem, self.device, fixed)
        if tiles and (self.block_m, self.num_warps) not in tiles:
            which = " or ".join(f"{rows} with {warps} warps" for rows, warps in tiles)
            raise PlanError(_broken("block_m", which, f"{self.block_m} with {self.num_warps}"))

    def __str__(self) -> str:
        a, p = self.problem.attention, self.problem
        place = f"pages of {p.page_size}" if p.page_size else "packed" if a.varlen else "one piece"
        size = f"{counted(a.batch, 'sequence')} of {counted(a.seq_q, 'query', 'queries')}"
        shared = (
            f"{counted(self.splits, 'program')} share them, merge_chunks merges"
            if self.splits > 1
            else "one program has all of a row"
        )
        lines = [
            f"Attention plan, numerics=invariant, for {self.device.title}",
            f"  problem    {size} over {a.seq_k} keys in {place}, {a.heads} heads on {a.kv_heads} KV heads, "
            f"D={a.dim_qk}/{a.dim_v}, {a.dtype}{'' if p.storage == 'plain' else ', K and V in ' + p.storage}",
            f"  kernel     attention_invariant, {counted(self.items, 'tile')} of {self.block_m} rows, {self.num_warps} warps, "
            f"{self.num_stages} stages",
            f"  fixed      tiles of {self.block_n} keys, chunks of {self.chunk}, from a sequence's first key; no lazy rescaling",
            f"  chunks     at most {self.chunks} a row, each folded from nothing, merged in order; {shared}",
            f"  bound      {self.bound.resource}: at least {self.bound.seconds * 1e6:.1f} us with all keys",
            f"  reason     {self.reason}",
        ]
        lines += [f"  rejected   {one.what}: {one.why}" for one in self.rejected]
        return "\n".join(lines)


def _broken(field: str, fixed: object, given: object) -> str:
    return (
        f'plan field {field}: numerics="invariant" has {fixed} for this dtype and these head dims, the plan has {given}'
    )


def require_keepable(problem: AttentionProblem) -> None:
    """Unsupported where a query's bits cannot depend on its own sequence alone."""
    if problem.dropout:
        why = "dropout_p is not 0: what is dropped goes by a sequence's number in the batch"
        raise Unsupported(f'{why}; numerics="invariant" cannot keep that')


def constants_of(problem: DecodeProblem, device: Device) -> Constants:
    """What fixes bits, by dtype, storage, head dims and architecture: no length, no batch, no number of SMs."""
    if device.backend == "interpreter":
        return Constants(16, 64, 16, 4)
    width = max(problem.block_k + problem.block_rest, problem.block_v)
    if problem.attention.dtype == "float32":
        return Constants(32, CHUNK, 16, 8)
    if width > 256:
        return Constants(32, CHUNK, 16, 8)
    if problem.storage != "plain":  # products of 64 rows read shared memory, where bytes would have to be converted to
        return Constants(64 if width <= 128 else 32, CHUNK, 32, 4)
    return Constants(keys_of_tile(problem.attention) if width <= 256 else 32, CHUNK, 64, 4)


@lru_cache(maxsize=4096)
def plan_prompt(problem: AttentionProblem, device: Device) -> AttentionPlan | str:
    """The plan of many queries by the kernel for sm_90, which has the bits of attention_invariant there; else why it does not
    serve, as a sentence."""
    fixed = constants_of(DecodeProblem(problem), device)
    why = hopper_refusal(problem, device) or invariant_unserved(problem) or hopper_unmeasured(problem)
    if why or (why := hopper_few(problem, device)):
        return why
    assert (fixed.block_n, fixed.chunk, fixed.rows) == (keys_of_tile(problem), CHUNK_KEYS, 64)
    tile, options = invariant_tile(problem, device)
    plan = plan_attention(problem, device).with_tile(
        kernel=HOPPER, block_m=tile.block_m, block_n=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages,
        options=options,
    )  # fmt: skip
    pairs = ", two at a time," if tile.block_n > fixed.block_n else ""
    reason = (
        f"Tiles of {fixed.block_n} keys{pairs} and chunks of {fixed.chunk}, from a sequence's first key, as "
        "attention_invariant has."
    )
    other = Rejected(
        "attention_invariant", "Has the same bits; it is the kernel of few queries, caches and changed scores."
    )
    return replace(plan, rule="invariant", reason=reason, evidence="No other plan has these bits.", rejected=(other,))


@lru_cache(maxsize=4096)
def plan_invariant(problem: DecodeProblem, device: Device, splits: int = 0) -> InvariantPlan:
    """The plan of a problem.  splits: programs that share a row's chunks, 0: the plan decides.

    Raises ValueRangeError (splits), Unsupported (dropout, head dims, dtypes that the device lacks)."""
    require_splits(splits)
    require_kernels(device)
    require_dims(problem)
    a = problem.attention
    require_keepable(a)
    fixed = constants_of(problem, device)
    made = _plan(problem, device, fixed, 1)
    if splits:
        return _plan(problem, device, fixed, splits, f"The caller asked for {counted(splits, 'split')}.")
    held = made.items * made.chunks * made.held * (a.dim_v + 2) * 4
    few = made.rows <= FEW_ROWS
    if made.chunks == 1 or (made.items >= device.sms and not few) or held > MOST_PART_BYTES:
        why = f"{counted(made.items, 'tile')} of rows for {device.sms} SMs, {counted(made.chunks, 'chunk')} of keys at most."
        return _plan(problem, device, fixed, 1, why)
    shares = min(made.chunks, MAX_SPLITS, made.chunks if few else -(-2 * device.sms // made.items))
    left = f"{counted(made.items, 'tile')} of rows leave SMs without work"
    why = f"{'Rows are few' if few else left}: {counted(shares, 'program')} share the chunks of each tile."
    return _plan(problem, device, fixed, shares, why)


def _plan(problem: DecodeProblem, device: Device, fixed: Constants, splits: int, reason: str = "") -> InvariantPlan:
    tiles = _tiles(problem, device, fixed) or ((min(64, max(16, next_power_of_two(problem.rows))), 4),)
    rows, warps = tiles[problem.rows >= 128 and len(tiles) > 1]
    others = (
        Rejected("attention_forward_hopper", "Sums of a row are a thread's, and maxima may be lazy: other bits than decoding's."),
        Rejected("attention_decode", "Its shares of the keys follow lengths, or the whole batch."),
    )  # fmt: skip
    made = InvariantPlan(
        problem, device, rows, fixed.block_n, warps, 1, fixed.chunk, splits, reason, others if reason else ()
    )
    return replace(made, num_stages=_stages(made))


def _tiles(problem: DecodeProblem, device: Device, fixed: Constants) -> tuple[tuple[int, int], ...]:
    """(rows, warps) of tiles whose rows have the same bits, for few rows and for many; () where any have.

    By wgmma, with 128 rows and 8 warps each warp has the 16 rows and the instruction that it has with 64 and 4.  tcgen05 has
    other instructions for them, and other layouts."""
    if device.backend == "interpreter":
        return ()
    wgmma = device.has("shared operands") and not device.has("tcgen05")
    wide = wgmma and fixed.rows == 64 and problem.block_v <= 128
    return ((fixed.rows, fixed.num_warps), (128, 8))[: 1 + wide]


def _stages(plan: InvariantPlan) -> int:
    """Tiles in flight: 3, or as many as leave room for a second program on the SM, if there is one, or for this one.

    4096 keys, 28 heads on 4, H200: 20.6 us with 3 where programs leave SMs without work, 30.6 with the 2 of a pair."""
    problem, device = plan.problem, plan.device
    if device.backend == "interpreter":
        return 1
    tile, size = plan.block_n * problem.row_bytes, problem.attention.itemsize
    others = plan.block_m * (problem.block_k + problem.block_rest + plan.block_n) * size + 4096
    spare = 0 if plan.block_m >= 64 and device.has("shared operands") and size == 2 else 1
    shared = (device.smem_per_sm // 2 - others, device.smem_per_block - others)
    for room in shared[plan.grid <= device.sms :]:
        if room >= (2 - spare) * tile:
            return max(1, min(3, spare + room // tile))
    return 1
