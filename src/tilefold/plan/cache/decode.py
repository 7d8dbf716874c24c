"""How attention of few queries over a KV cache is cut: rows, tiles of keys, programs, who merges.  Pure, and one value.

The host knows the cache's capacity, not the lengths in it, so the plan of a cache is the same while it fills, as CUDA graphs
need; what depends on lengths (who owns which tiles) every program finds on the device, by the rule of `slices_of`.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilefold.cache_formats import FORMATS, format_named
from tilefold.errors import PlanError, Unsupported, ValueRangeError
from tilefold.plan.base import Plan, require_device, require_equal
from tilefold.plan.cache.cached import MAX_SPLITS, require_splits
from tilefold.plan.cost import Bound, Cost, bound, live_keys
from tilefold.plan.dense.attention import Rejected
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID
from tilefold.plan.problem import MAX_HEAD_DIM, AttentionProblem, next_power_of_two, padded_head_dim
from tilefold.plan.table import RULE, measured
from tilefold.plan.words import counted

STORAGES = ("plain", *[each.name for each in FORMATS])  # elements of K and V: as q's, or bytes with scales
MERGES = ("last", "kernel")  # the last program to arrive, or a second kernel
MOST_ROWS = 128  # query heads of a KV head times query tokens that are taken from attention_cached
MOST_DIM_V, MOST_DIM_REST = 512, 256  # of a V that is the first columns of K, and of K's others
MOST_STAGES = 4
MOST_WAVES = 8  # of programs: each begins by adding up all lengths
LEAST_KEYS = 512  # of a slice, or of a share where lengths differ: with fewer, merging takes longer than the keys
SHORT_SHARE = 4  # tiles of a share: up to so many, three stages are faster than four (measured)
FIXED_BELOW = 40e-6  # seconds that a full cache takes: below that finding even slices costs more than uneven shares do
GATHERED = 4096  # keys of a share from which on even slices are better, where keys of a tile lie in several pages
MOST_PARTS = 3  # of an item, on average, that the last program to arrive puts together sooner than a second kernel does


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """attention: the call with the cache's capacity as seq_k.  storage: one of STORAGES.  page_size: 0 for a cache in one piece.
    shared: V is the first dim_v columns of K in the same memory.  equal: every sequence has seq_k keys, and the host knows it."""

    attention: AttentionProblem
    storage: str = "plain"
    page_size: int = 0
    shared: bool = False
    equal: bool = False

    def __post_init__(self) -> None:
        if self.storage not in STORAGES:
            raise ValueRangeError(f"storage must be one of {', '.join(STORAGES)}, got {self.storage!r}")

    def __hash__(self) -> int:
        return hash((self.attention, self.storage, self.page_size))  # tables ask often

    def require_same(self, asked: "DecodeProblem") -> None:
        """PlanError, naming the field, unless a plan of this problem serves `asked`; `equal` changes the speed alone."""
        self.attention.require_same(asked.attention)
        require_equal(self, asked, ("storage", "page_size", "shared"))

    @property
    def rows(self) -> int:
        """Rows of one KV head: its query heads, for each query token."""
        return self.attention.seq_q * self.attention.group

    @property
    def block_k(self) -> int:
        """Columns of K in its first piece: V's if shared, else all."""
        return padded_head_dim(self.attention.dim_v if self.shared else self.attention.dim_qk)

    @property
    def block_v(self) -> int:
        """Columns of V and of the output: as many as of K's first piece if shared, which is V."""
        return self.block_k if self.shared else self.attention.block_v

    @property
    def block_rest(self) -> int:
        """Columns of K's second piece, 0 for none."""
        rest = self.attention.dim_qk - self.attention.dim_v if self.shared else 0
        return padded_head_dim(rest) if rest else 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element of K and V."""
        return self.attention.itemsize if self.storage == "plain" else format_named(self.storage).itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one key in a tile."""
        return (self.block_k + self.block_rest + (0 if self.shared else self.block_v)) * self.itemsize

    @property
    def cost(self) -> Cost:
        """Of a full cache: K and V once for all heads of a KV head."""
        a = self.attention
        pairs, rows_q = live_keys(a) * a.seq_q * a.batch * a.heads, a.batch * a.heads * a.seq_q
        width = a.dim_qk + (0 if self.shared else a.dim_v)
        once = a.batch * a.kv_heads * live_keys(a) * width * self.itemsize
        return Cost(2 * pairs * (a.dim_qk + a.dim_v), once + rows_q * ((a.dim_qk + a.dim_v) * a.itemsize + 4), pairs)


class CachePlan(Plan):
    """What the plans of calls over a cache have in common."""

    __slots__ = ()
    problem: DecodeProblem
    device: Device

    def _require(self, what: str, **limits: tuple[int, int]) -> None:
        """PlanError, naming the field after `what`, unless fields are ints within limits, those of a tile powers of two."""
        for name, (low, high) in limits.items():
            value, power = getattr(self, name), name in ("block_m", "block_n", "num_warps")
            if type(value) is not int or not low <= value <= high or (power and value & (value - 1)):
                raise PlanError(f"{what}{name} must be {'a power of two from ' * power}{low} to {high}, got {value!r}")

    @property
    def cost(self) -> Cost:
        """Of a full cache."""
        return self.problem.cost

    @property
    def bound(self) -> Bound:
        """The roofline of a full cache."""
        return bound(self.cost, self.device, self.problem.attention.dtype)

    def check(self, problem: AttentionProblem, device: Device) -> None:
        """PlanError, naming the field, unless this plan serves a call of `attention` with exactly `problem` on `device`."""
        self.problem.require_same(DecodeProblem(problem))
        require_device(self.device, device)


@dataclass(frozen=True, slots=True)
class DecodePlan(CachePlan):
    """The decision for one problem on one device; `print` it, change it with dataclasses.replace, give it as plan=.

    block_m, block_n: rows and keys of a tile; `blocks` row blocks hold a KV head's rows.
    num_warps, num_stages, maxnreg: launch options.
    programs: the grid, where splits is 0: each owns an even slice of all tiles, of at least `least`.
    splits: if not 0, every sequence and KV head is cut into so many shares instead, whatever its length.  merge: one of MERGES.
    reason, rejected: why.  cost, bound: of a full cache.

    Raises PlanError, naming the field, for what no kernel can do."""

    problem: DecodeProblem
    device: Device
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    least: int = 1
    splits: int = 0
    merge: str = "last"
    maxnreg: int | None = None
    reason: str = ""
    rejected: tuple[Rejected, ...] = ()

    def __post_init__(self) -> None:
        self._require("", block_m=(16, 64), block_n=(16, 256), num_warps=(1, 16))
        self._require("", num_stages=(1, 16), programs=(1, MAX_GRID), least=(1, 1 << 20), splits=(0, MAX_SPLITS))
        if self.merge not in MERGES:
            raise PlanError(f"merge must be one of {', '.join(MERGES)}, got {self.merge!r}")
        if self.most_tiles >= 1 << 30:
            raise PlanError(
                f"block_n={self.block_n} makes {self.most_tiles} tiles of a full cache, 2^30 - 1 are counted"
            )
        if self.grid >= MAX_GRID:
            raise PlanError(f"splits={self.splits} makes {self.grid} programs, a grid takes {MAX_GRID}")

    @property
    def rows(self) -> int:
        """Rows of a KV head."""
        return self.problem.rows

    @property
    def blocks(self) -> int:
        """Row blocks of a KV head."""
        return -(-self.rows // self.block_m)

    @property
    def items(self) -> int:
        """Sequences times KV heads times row blocks."""
        return self.problem.attention.batch * self.problem.attention.kv_heads * self.blocks

    @property
    def most_tiles(self) -> int:
        """Tiles of a full cache, over all items."""
        return self.items * max(1, -(-self.problem.attention.seq_k // self.block_n))

    @property
    def grid(self) -> int:
        """Programs that are launched."""
        return self.items * self.splits if self.splits else self.programs

    @property
    def slots(self) -> int:
        """Places for partial results."""
        return self.grid if self.splits else 2 * self.grid

    def _merges(self) -> str:
        if self.splits == 1:
            return "none: one share has all keys of an item"
        return "the last program to arrive" if self.merge == "last" else "decode_combine, a second kernel"

    def __str__(self) -> str:
        a, p = self.problem.attention, self.problem
        cut = (
            f"{self.splits} shares of each of {self.items} items"
            if self.splits
            else f"{self.programs} programs, even slices of all tiles of keys"
        )
        place = f"pages of {p.page_size}" if p.page_size else "one piece"
        size = f"{a.batch} sequence{'s' * (a.batch != 1)} of {a.seq_q} quer{'y' if a.seq_q == 1 else 'ies'}"
        lines = [
            f"Decoding on {self.device.title}",
            f"  problem    {size}, a cache of {a.seq_k} keys in {place}, {a.heads} heads on {a.kv_heads} KV heads, "
            f"D={a.dim_qk}/{a.dim_v}, {a.dtype}{'' if p.storage == 'plain' else ', K and V in ' + p.storage}"
            f"{', V is part of K' if p.shared else ''}",
            f"  kernel     attention_decode, tile {self.block_m} x {self.block_n}, {self.num_warps} warps, "
            f"{self.num_stages} stages",
            f"  cut        {cut}",
            f"  merge      {self._merges()}",
            f"  bound      {self.bound.resource}: at least {self.bound.seconds * 1e6:.1f} us with a full cache",
            f"  reason     {self.reason}",
        ]
        lines += [f"  rejected   {one.what}: {one.why}" for one in self.rejected]
        return "\n".join(lines)


def decode_kernel_refusal(problem: AttentionProblem) -> str:
    """Empty if the kernel takes the call from attention_cached, else why not."""
    if problem.dropout:
        return "attention_decode has no dropout"
    rows = problem.seq_q * problem.group
    if rows > MOST_ROWS:
        return f"{rows} rows a KV head are more than the {MOST_ROWS} that attention_decode takes"
    return ""


@lru_cache(maxsize=4096)
def plan_decode(problem: DecodeProblem, device: Device, splits: int = 0) -> DecodePlan:
    """The plan of a problem, by the table of measured plans or the rules.  splits: 0: the plan decides; else so many shares of
    each item, 1 to 128, by the rules.

    Raises ValueRangeError (splits), Unsupported (head dims, dtypes that the device lacks)."""
    ruled = rules_decode(problem, device, splits)
    return ruled if splits else measured("decode", ruled, _follow)


def _follow(ruled: DecodePlan, fields: dict[str, Any], evidence: str) -> DecodePlan:
    """The plan of a table's entry."""
    cut = f"{counted(ruled.splits, 'share')} of each item" if ruled.splits else "even slices"
    what = f"tile {ruled.block_m} x {ruled.block_n}, {ruled.num_warps} warps, {ruled.num_stages} stages, {cut}"
    other = Rejected(what, "The rules take it; it was measured to be slower.")
    return replace(ruled, **fields, reason=f"{RULE}. {evidence}", rejected=(*ruled.rejected[:1], other))


def rules_decode(problem: DecodeProblem, device: Device, splits: int = 0) -> DecodePlan:
    """The plan by rules alone: pure.  Arguments and errors as of `plan_decode`."""
    require_splits(splits)
    a = problem.attention
    require_dims(problem)
    block_m = min(64, max(16, next_power_of_two(problem.rows)))
    if max(problem.block_k, problem.block_v) > 256 or a.dtype == "float32":
        block_m = 16  # the output's rows, and the query's, are held in registers
    if problem.storage != "plain":
        block_m = min(block_m, 32)  # products of 64 rows read shared memory, where bytes would have to be converted to
    if device.backend == "interpreter":
        return DecodePlan(problem, device, block_m, 32, 4, 1, 6, splits=splits, reason="The interpreter has no limits.")
    block_n, num_warps, stages, resident = _tile(problem, device, block_m)
    items = a.batch * a.kv_heads * -(-problem.rows // block_m)
    cut: dict[str, Any] = {"num_stages": stages, "programs": device.sms * resident, "least": 1, "splits": splits}
    if not splits and _takes_fixed_shares(problem, device, block_n, items):
        cut["splits"] = _fixed_shares(problem, device, block_n, items)
        if num_warps == 4 and not problem.page_size and a.seq_k > SHORT_SHARE * cut["splits"] * block_n:
            cut["num_stages"] = MOST_STAGES  # measured; two programs of them fit an SM
        parts = cut["splits"]
    else:  # as many times the resident programs as give equal sequences one an item, in the order of items
        waves = max(1, min(MOST_WAVES, -(-items // cut["programs"])))
        cut |= {"programs": cut["programs"] * waves, "least": max(1, LEAST_KEYS // block_n)}
        parts = splits or min(cut["programs"] // max(1, items), -(-a.seq_k // (cut["least"] * block_n)))
    plan = DecodePlan.decided(
        lambda: {"reason": _reason(plan, splits), "rejected": _rejected(plan, splits)},
        problem=problem,
        device=device,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        maxnreg=None,
        merge="kernel" if parts > MOST_PARTS else "last",
        **cut,
    )
    plan.__post_init__()  # tiles and programs may be more than are counted
    return plan


def _seconds(problem: DecodeProblem, device: Device) -> float:
    """What reading a full cache takes at least."""
    return problem.cost.bytes / device.dram_rate


def _takes_fixed_shares(problem: DecodeProblem, device: Device, block_n: int, items: int) -> bool:
    """A full cache is read sooner than slices are found; or there is one sequence, unless a page number for each key has to be
    awaited for many keys, which two programs an SM hide from one another (131072 keys in pages of 16: 131.7 us, not 142)."""
    a, page = problem.attention, problem.page_size
    awaited = page % block_n != 0 and a.seq_k * items > GATHERED * device.sms
    return (a.batch == 1 and not awaited) or _seconds(problem, device) <= FIXED_BELOW


def _fixed_shares(problem: DecodeProblem, device: Device, block_n: int, items: int) -> int:
    """Each item in as many shares as give every SM a program, down to a tile of keys; two programs, of LEAST_KEYS of a full cache
    at least, for several sequences whose lengths differ.  A program knows its share by its number, 3 to 7 us sooner than its
    slice by adding up lengths."""
    alike = problem.attention.batch == 1 or problem.equal
    each, least = (1, block_n) if alike else (2, LEAST_KEYS)
    return max(1, min(each * device.sms // max(1, items), -(-problem.attention.seq_k // least), MAX_SPLITS))


def _tile(problem: DecodeProblem, device: Device, block_m: int) -> tuple[int, int, int, int]:
    """(keys of a tile, warps, stages, programs an SM): two programs, one of which loads while the other's item ends, where each
    has room for two tiles in flight, of 128, 64 or 32 keys; else one, with as much as there is."""
    a, row = problem.attention, problem.row_bytes
    # else rows come through registers, element by element, or have four bytes an element
    whole = a.dtype != "float32" and a.descriptors
    others = block_m * (problem.block_k + problem.block_rest) * a.itemsize + 4096
    room = device.smem_per_sm // 2 - others
    if whole and block_m < 64 and not problem.shared:
        for block_n in (128, 64, 32):
            if 2 * block_n * row <= room and device.threads_per_sm // 2 >= 128:
                most = MOST_STAGES if problem.storage != "plain" else MOST_STAGES - 1  # measured
                return block_n, 4, min(most, 1 + room // (block_n * row)), 2
    block_n = 64 if whole and row <= 1536 else 32
    room = device.smem_per_block - others - block_m * block_n * a.itemsize
    # stages that hold no tile, see limits.kv_buffers
    spare = 0 if block_m == 64 and device.has("shared operands") else 1
    return block_n, 8, max(1, min(MOST_STAGES, spare + room // (block_n * row))), 1


def require_dims(problem: DecodeProblem) -> None:
    """Unsupported for head dims that no kernel over a cache has."""
    a = problem.attention
    if problem.shared:
        if a.dim_v > MOST_DIM_V or a.dim_qk - a.dim_v > MOST_DIM_REST or a.dim_v > a.dim_qk:
            raise Unsupported(
                f"v_cache is part of k_cache with head dims {a.dim_qk} and {a.dim_v}; accepted: V to {MOST_DIM_V}, K at most "
                f"{MOST_DIM_REST} more"
            )
    elif max(a.dim_qk, a.dim_v) > MAX_HEAD_DIM:
        raise Unsupported(
            f"head dims are {a.dim_qk} and {a.dim_v}; accepted: 1 to {MAX_HEAD_DIM}, or more where v_cache is "
            "k_cache[..., :dim_v]"
        )


def _reason(plan: DecodePlan, splits: int) -> str:
    p = plan.problem
    row = "row is" if p.rows == 1 else "rows are"
    packed = f"{p.rows} {row} {counted(plan.blocks, 'tile')} of {plan.block_m} (query heads x tokens of a KV head)"
    if splits:
        return f"{packed}; the caller asked for {counted(splits, 'split')}."
    if plan.splits:
        why = (
            "one sequence"
            if p.attention.batch == 1
            else f"a full cache takes {_seconds(p, plan.device) * 1e6:.3g} us at least"
        )
        return (
            f"{packed}; {why}: {counted(plan.items, 'item')} in {counted(plan.splits, 'share')} each make "
            f"{counted(plan.grid, 'program')} for {plan.device.sms} SMs."
        )
    return (
        f"{packed}; {plan.programs} programs on {plan.device.sms} SMs own equal numbers of tiles of {plan.block_n} keys, "
        f"at least {plan.least} or none, whatever the lengths."
    )


def _rejected(plan: DecodePlan, splits: int) -> tuple[Rejected, ...]:
    found = [
        Rejected("attention_cached", f"Would read K and V {plan.problem.attention.group} times, once a query head.")
    ]
    if plan.problem.attention.group == 1:
        found = [Rejected("attention_cached", "Splits by capacity, not by the keys that there are.")]
    if not splits:
        found.append(
            Rejected(
                "even slices of all tiles",
                "Sums over lengths come before the first key; they pay where there are many keys of several sequences.",
            )
            if plan.splits
            else Rejected(
                "fixed splits",
                "Lengths are on the device: a long sequence among short ones would be few programs' work.",
            )
        )
    if not splits and plan.splits != 1:
        found.append(
            Rejected("a second kernel to merge", "A launch more; the last program to arrive does the same sums.")
            if plan.merge == "last"
            else Rejected(
                "merging by the last to arrive",
                "One program would read all parts of an item; so every row of it has a program.",
            )
        )
    return tuple(found)


def slices_of(tiles: list[int], each: int, programs: int, least: int = 1) -> list[list[tuple[int, int, int, int]]]:
    """What every program owns, as the kernel finds it: for each program its pieces (item, first tile, end, slot), slot -1 where
    the item is its own alone.  tiles: of each sequence, counted once; each: items of a sequence.  Items without tiles count
    one."""
    counts = [max(1, n) for n in tiles for _ in range(each)]
    length, span = slice_shape(counts, programs, least)
    owned: list[list[tuple[int, int, int, int]]] = [[] for _ in range(programs)]
    first = 0
    for item, count in enumerate(counts):
        low, high = first // length, (first + count - 1) // length
        for program in range(low, high + 1):
            begin, end = max(program * length, first), min((program + 1) * length, first + count)
            slot = -1 if low == high else 2 * program + (program * length < first)
            owned[program].append((item, begin - first, end - first, slot))
        first += span or count
    return owned


def slice_shape(counts: list[int], programs: int, least: int) -> tuple[int, int]:
    """Tiles of a slice, and from an item's first tile to the next one's if not its tiles: as device.work's `slices`."""
    items, most = len(counts), max(counts, default=1)
    even = max(-(-sum(counts) // programs), least)
    shares = programs // max(1, items)
    length = max(-(-most // shares), least) if shares else -(-even // most) * most
    span = -(-most // length) * length if shares else most
    if sum(counts) == items * most and 16 * (length - even) <= even:
        return length, span
    return even, 0
