"""The plan of block-sparse attention: tile, loads and splits for lists of KV blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.errors import ShapeError, Unsupported, ValueRangeError
from tilefold.plan.base import Fault, Plan, require_device, require_equal, require_fit, said_sizes
from tilefold.plan.capabilities import architecture_refusal
from tilefold.plan.cost import even_shares
from tilefold.plan.device import Device
from tilefold.plan.limits import (
    BOX,
    MAX_GRID,
    POINTER,
    VARLEN,
    Tile,
    box_refusal,
    first_fit,
    programs_per_sm,
    require_supported,
    tile_violation,
    uses_wgmma,
)
from tilefold.plan.problem import NARROW_HEAD_DIM, AttentionProblem
from tilefold.plan.sparse.sparse_hopper import KERNEL as HOPPER_KERNEL
from tilefold.plan.sparse.sparse_hopper import hopper_programs, hopper_refusal, hopper_tile, hopper_violation
from tilefold.plan.sparse.sparse_hopper import programs_per_sm as hopper_programs_per_sm

POINTER_KERNEL, BOX_KERNEL = "sparse_forward", "sparse_forward_box"
VARLEN_KERNEL, PAGED_KERNEL = "sparse_forward_varlen", "sparse_forward_paged"
KERNELS = (POINTER_KERNEL, BOX_KERNEL, VARLEN_KERNEL, PAGED_KERNEL, HOPPER_KERNEL)
MAX_SPLITS = 128
MAX_STAGES = 16
MIN_KEYS = 256  # a split with fewer keys costs more to merge than it saves


@dataclass(frozen=True)
class SparseProblem:
    """What is asked: the dense problem that the lists thin out, and the lists' shape.

    attention: lengths, heads, dims, dtype and mods, as for the dense kernel. block_q, block_k: tokens per query and KV block.
    capacity: most KV blocks that a list can name. masked: some block may have fewer valid tokens than block_k.
    descriptors: Q can be read by tensor descriptors too (attention.descriptors says it of K and V).
    page_size: keys per page of a paged cache, seq_k then being its room (tokens); 0: K and V are not paged. For a packed batch
    (attention.varlen) lengths are the longest and every sequence has lists of its own.
    query_masked: some query block may have fewer valid tokens than block_q (the forward pass does not mind).
    """

    attention: AttentionProblem
    block_q: int
    block_k: int
    capacity: int
    masked: bool = False
    descriptors: bool = True
    page_size: int = 0
    query_masked: bool = False

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if type(value) is not int or value < 16 or value & (value - 1):
                raise ValueRangeError(f"{name} must be a power of two of at least 16, got {value!r}")
        if type(self.capacity) is not int or self.capacity < 0:
            raise ShapeError(f"capacity must be an integer of at least 0, got {self.capacity!r}")
        if type(self.page_size) is not int or self.page_size < 0:
            raise ShapeError(f"page_size must be an integer of at least 0, got {self.page_size!r}")
        if self.page_size and self.attention.varlen:
            raise Unsupported("a packed batch with paged keys has no kernel: page_size must be 0 with varlen=True")

    def of_lengths(self, seq_q: int, seq_k: int) -> "SparseProblem":
        """The same problem with other lengths; nothing is checked again."""
        made = object.__new__(SparseProblem)
        made.__dict__.update(self.__dict__, attention=self.attention.of_lengths(seq_q, seq_k))
        return made

    @property
    def layout(self) -> str:
        """Where K and V lie, to print."""
        return ", packed" if self.attention.varlen else f", in pages of {self.page_size}" if self.page_size else ""

    def __hash__(self) -> int:
        return hash((self.attention, self.block_q, self.block_k, self.capacity))  # tables ask often

    def require_same(self, other: "SparseProblem") -> None:
        """PlanError, naming the field, unless a plan made for this problem serves `other`."""
        require_equal(self, other, ("block_q", "block_k", "capacity", "masked", "page_size"))
        self.attention.require_same(other.attention)


@dataclass(frozen=True, slots=True)
class SparsePlan(Plan):
    """The decision for one sparse problem on one device. `print` it; keep it as JSON; change it with `with_tile`.

    kernel: "sparse_forward" (pointer loads), "sparse_forward_box" (K and V by tensor descriptors), "sparse_forward_varlen"
    (packed sequences), "sparse_forward_paged" (K and V in pages) or "sparse_forward_hopper" (Gluon, sm_90, wherever K and V lie).
    block_m rows of one query block per program, block_n keys per step (of the Hopper kernel: per listed block; its num_stages are
    buffers of V); splits: shares of each list, folded apart and merged by `combine` if more than 1; programs: how many the Hopper
    kernel launches, each making several query blocks in turn, 0: one per query block.
    Raises PlanError, naming the field, if a tile does not divide its block or exceeds a limit of the device.
    """

    problem: SparseProblem
    device: Device
    kernel: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    rule: str
    reason: str
    programs: int = 0

    def __post_init__(self) -> None:
        fault = _violation(self.problem, self.device, self.kernel, self.tile, self.splits)
        if not fault and (self.programs < 0 or (self.programs and self.kernel != HOPPER_KERNEL)):
            fault = "programs", f"must be 0, or positive with {HOPPER_KERNEL}, got {self.programs} with {self.kernel}"
        require_fit(fault)

    @property
    def tile(self) -> Tile:
        """The tile as one value."""
        return Tile(self.block_m, self.block_n, self.num_warps, self.num_stages)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs: query tiles x heads x batch, and splits."""
        items = _programs(self.problem, self.block_m)
        return (min(self.programs or items, items), self.splits, 1)

    def __str__(self) -> str:
        n = self.problem.attention
        return (
            f"Sparse attention plan for {self.device.title}\n"
            f"  problem   {said_sizes(n)}; blocks {self.problem.block_q} x {self.problem.block_k}, at most "
            f"{self.problem.capacity} per list{', some partly valid' if self.problem.masked else ''}{self.problem.layout}\n"
            f"  kernel    {self.kernel}, tile {self.tile}\n"
            f"  grid      {self.grid[0]} programs x {self.splits} {'split' if self.splits == 1 else 'splits'} on "
            f"{self.device.sms} SMs\n"
            f"  rule      {self.rule}. {self.reason}"
        )

    def with_tile(self, **fields: int | str) -> "SparsePlan":
        """The plan with other tile fields, kernel, splits or programs; PlanError names the field that does not fit.
        Another kernel brings its own tile, where the fields do not say otherwise."""
        if HOPPER_KERNEL in (self.kernel, kernel := fields.get("kernel", self.kernel)) and kernel != self.kernel:
            own = _tiles(self.problem, self.device)[0]
            tile = hopper_tile(self.problem, self.device) if kernel == HOPPER_KERNEL else own
            names = ("block_m", "block_n", "num_warps", "num_stages")
            fields = {**{name: getattr(tile, name) for name in names}, "programs": 0, **fields}
        return replace(self, rule="override", reason="The caller chose these fields.", **fields)  # type: ignore[arg-type]

    def check(self, problem: SparseProblem, device: Device) -> None:
        """PlanError, naming what differs, unless this plan serves exactly `problem` on a device of this kind."""
        self.problem.require_same(problem)
        require_device(self.device, device)
        require_fit(_violation(problem, device, self.kernel, self.tile, self.splits))


@lru_cache(maxsize=4096)
def plan_sparse(problem: SparseProblem, device: Device, portable: bool = False) -> SparsePlan:
    """The plan for a sparse problem on a device: pure, the same every time.  Unsupported if no tile fits.

    portable: leave the kernels written for one architecture alone."""
    require_supported(problem.attention, device, NARROW_HEAD_DIM)
    plan = _portable(problem, device)
    if portable or architecture_refusal(HOPPER_KERNEL, device):
        return plan
    refusal = hopper_refusal(problem, device) or ("it makes no shares of lists" if plan.splits > 1 else None)
    if refusal:
        return plan.later(reason=lambda: f"{plan.reason} {HOPPER_KERNEL} does not serve it: {refusal}.")
    tile = hopper_tile(problem, device)
    require_fit(_violation(problem, device, HOPPER_KERNEL, tile, 1))
    items = _programs(problem, tile.block_m)

    def reason() -> str:
        places = device.sms * hopper_programs_per_sm(problem)
        use = _use(items, "query block", 1, places, _uncut(problem, plan.tile))
        return f"A loading warp, folding warpgroups and wgmma; {use}"

    programs = hopper_programs(problem, device, items)
    return _plan(problem, device, HOPPER_KERNEL, tile, 1, "hopper-lists", reason, programs)


def _plan(
    problem: SparseProblem, device: Device, kernel: str, tile: Tile, splits: int, rule: str, reason: Callable[[], str],
    programs: int = 0,
) -> SparsePlan:  # fmt: skip
    """The plan of a tile that breaks no limit."""
    return SparsePlan.decided(
        lambda: {"reason": reason()}, problem=problem, device=device, kernel=kernel, block_m=tile.block_m,
        block_n=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages, splits=splits, rule=rule,
        programs=programs,
    )  # fmt: skip


def _portable(problem: SparseProblem, device: Device) -> SparsePlan:
    """The first portable tile that fits."""
    kernel = _layout_kernel(problem) or (BOX_KERNEL if _box_refusal(problem, device) is None else POINTER_KERNEL)
    tile = first_fit(
        _tiles(problem, device),
        device,
        lambda tile: _violation(problem, device, kernel, tile, 1),
        "this sparse problem",
    )
    return _with_splits(problem, device, kernel, tile)


def _most_splits(tiles: int, keys_per_tile: int) -> int:
    """Shares that a list of `tiles` tiles may have."""
    return max(1, min(MAX_SPLITS, tiles * keys_per_tile // MIN_KEYS, tiles))


def choose_splits(items: int, tiles: int, keys_per_tile: int, slots: int) -> int:
    """`even_shares` of a list of `tiles` tiles, each of at least MIN_KEYS keys; items: programs without splitting."""
    if items == 0 or tiles == 0 or items >= slots:
        return 1
    return even_shares(items, tiles, slots, _most_splits(tiles, keys_per_tile))


def _with_splits(problem: SparseProblem, device: Device, kernel: str, tile: Tile) -> SparsePlan:
    items = _programs(problem, tile.block_m)
    slots = device.sms * max(1, programs_per_sm(problem.attention, device, _dense(kernel), _as_dense(problem, tile)))
    interpreted = device.backend == "interpreter"
    splits = 1 if interpreted else choose_splits(items, _tiles_of_list(problem, tile), tile.block_n, slots)

    def reason() -> str:
        if interpreted:
            return "The interpreter runs programs one after the other; each folds its whole list."
        return _use(items, "query tile", splits, slots, _uncut(problem, tile, splits))

    return _plan(problem, device, kernel, tile, splits, "lists" if splits == 1 else "split-lists", reason)


def _tiles_of_list(problem: SparseProblem, tile: Tile) -> int:
    """Of the longest that there can be."""
    return problem.capacity * (problem.block_k // tile.block_n)


def _use(items: int, what: str, splits: int, slots: int, uncut: str) -> str:
    """How programs fill the device, as a sentence.  uncut: why lists are not cut, or not further."""
    queries, programs = f"{items} {what}{'s' * (items != 1)}", items * splits
    if not items:
        return f"{queries}: there is nothing to compute."
    made = f"{queries}, each with its whole list,"
    if splits > 1:
        idle = f"{queries} would leave {slots - items} of {slots} places idle"
        made = f"{idle}; {splits} shares of each list are {programs} programs, which"
    if programs >= slots:
        return f"{made} fill {slots} places."
    return f"{made} use {programs} of {slots} places: {uncut}."


def _uncut(problem: SparseProblem, tile: Tile, splits: int = 1) -> str:
    """Why lists are not cut in more than `splits` shares, as the rest of a sentence."""
    tiles = _tiles_of_list(problem, tile)
    if splits < _most_splits(tiles, tile.block_n):
        return "at most a twentieth is lost against the best number of shares"
    if splits == MAX_SPLITS:
        return f"{MAX_SPLITS} shares of a list are the most"
    shares = "two shares" if splits == 1 else f"{splits + 1} shares"
    return f"lists of at most {tiles * tile.block_n} keys are too short for {shares} of at least {MIN_KEYS}"


def _tiles(problem: SparseProblem, device: Device) -> tuple[Tile, ...]:
    """Best first; every tile divides its blocks."""
    rows, keys = min(problem.block_q, 64), min(problem.block_k, 64)
    width = max(problem.attention.block_qk, problem.attention.block_v)
    if device.backend == "interpreter":
        return (Tile(rows, keys, 4, 1),)
    stages = 3 if problem.page_size else 2  # see _as_dense
    if problem.attention.dtype == "float32":
        small = min(keys, 32 if width <= 64 else 16)
        return (Tile(min(rows, 32), small, 8 if width > 128 else 4, stages), Tile(16, 16, 4, 1))
    narrow, last = Tile(rows, min(keys, 32), 4, stages), Tile(min(rows, 32), 16, 4, 1)
    if width > 128 and _layout_kernel(problem):  # wider tiles spill, and leave room for one program an SM
        return (narrow if uses_wgmma(problem.attention, device, narrow) else replace(narrow, num_warps=8), last)
    if _programs(problem, rows) < device.sms:  # few programs: each must keep the memory busy by itself
        most = 8 if device.generation < 100 else 4  # tcgen05 keeps addresses of every buffer in registers
        buffers = max(2, min(most, device.smem_per_block * 3 // 5 // (keys * width * 2 * problem.attention.itemsize)))
        deep = tuple(Tile(rows, keys, 4, 2 * b - 1 if _runs_ahead(problem) else b) for b in range(buffers, 2, -1))
    else:
        deep = ()
    return (*deep, Tile(rows, keys, 4, stages), narrow, last)


def _layout_kernel(problem: SparseProblem) -> str | None:
    """The one kernel that finds K and V where they lie, or None if they are ordinary tensors and several do."""
    return VARLEN_KERNEL if problem.attention.varlen else PAGED_KERNEL if problem.page_size else None


def _programs(problem: SparseProblem, block_m: int) -> int:
    n = problem.attention
    return -(-n.seq_q // block_m) * n.batch * n.heads


def _dense(kernel: str) -> str:
    """The dense kernel with the same loads, whose limits hold."""
    return {BOX_KERNEL: BOX, VARLEN_KERNEL: VARLEN}.get(kernel, POINTER)


def _runs_ahead(problem: SparseProblem) -> bool:
    """Whether the pipeline gives the list, or the table of pages, stages of its own ahead of the loads that depend on it: if
    its values are nothing but addresses, as page numbers are, and block numbers where no mask or mod looks at a key's index."""
    n = problem.attention
    looked_at = problem.masked or n.varlen or n.causal or n.score_mods or n.mask_mods or n.seq_k % problem.block_k
    return problem.page_size > 0 or not looked_at


def _as_dense(problem: SparseProblem, tile: Tile) -> Tile:
    """The tile of a dense kernel with as many K and V buffers: a load that runs ahead takes as many stages, so that past two
    every second one buys no buffer (compiled with triton 3.6.0)."""
    if not _runs_ahead(problem):
        return tile
    return replace(tile, num_stages=max(min(tile.num_stages, 2), (tile.num_stages + 1) // 2))


def _box_refusal(problem: SparseProblem, device: Device) -> str | None:
    if problem.masked:
        return "rows of V past a block's valid tokens may hold anything, and a box would read them"
    if device.backend == "interpreter":
        return "the interpreter gains nothing from descriptors"
    return box_refusal(problem.attention, device)


def _violation(problem: SparseProblem, device: Device, kernel: str, tile: Tile, splits: int) -> Fault:
    """(field, sentence) of the first limit that is broken, or None."""
    if kernel not in KERNELS:
        return "kernel", f"must be one of {', '.join(map(repr, KERNELS))}, got {kernel!r}"
    only = _layout_kernel(problem)
    if kernel not in (only, HOPPER_KERNEL) and (only or kernel in (VARLEN_KERNEL, PAGED_KERNEL)):
        return "kernel", f"{kernel} does not serve varlen={problem.attention.varlen}, page_size={problem.page_size}"
    if kernel == HOPPER_KERNEL:
        if _programs(problem, problem.block_q) > MAX_GRID:
            return "grid", f"more than {MAX_GRID} query blocks"
        return hopper_violation(problem, device, tile, splits)
    if kernel == BOX_KERNEL and problem.masked:
        return "kernel", f"{kernel} needs blocks that are valid throughout"
    for name, block, size in (("block_m", problem.block_q, tile.block_m), ("block_n", problem.block_k, tile.block_n)):
        if size < 1 or block % size:
            return name, f"must divide the block of {block} tokens, got {size}"
    if not 1 <= splits <= MAX_SPLITS:
        return "splits", f"must be between 1 and {MAX_SPLITS}, got {splits}"
    if _programs(problem, tile.block_m) > MAX_GRID:
        return "grid", f"more than {MAX_GRID} programs"
    if type(tile.num_stages) is not int or not 1 <= tile.num_stages <= MAX_STAGES:
        return "num_stages", f"must be from 1 to {MAX_STAGES}, got {tile.num_stages!r}"
    return tile_violation(problem.attention, device, _dense(kernel), _as_dense(problem, tile))
