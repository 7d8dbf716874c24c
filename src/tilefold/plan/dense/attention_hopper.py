"""When the Gluon kernel for sm_90 serves dense attention: its tiles, its versions, and which of them were measured.

What was not timed beside the portable kernels, or was slower, is refused by `hopper_unmeasured` alone, and the versions that
`hopper_options` does not name run only where a plan asks for them (`with_tile`).

To try a tile, at a head dim of 64 (PlanError says what does not fit, by `hopper_violation`):

    plan = tilefold.attention_plan(q, k, v).with_tile(block_m=192, block_n=128, num_stages=2)
    out = tilefold.attention(q, k, v, plan=plan)

To make it the rule: `hopper_tile`, which chooses rows and keys, or STAGES; versions of the kernel are `hopper_options`'s.  A row
of tests/cpu/plan/test_plan_attention.py holds it to what was measured, and docs/performance/attention_hopper.md says that.
"""

from functools import cache, lru_cache

from tilefold.plan.base import Fault, unusable
from tilefold.plan.device import Device
from tilefold.plan.hopper import blocks_fault, held_fault, sizes_fault, tile_fault, type_refusal
from tilefold.plan.limits import Tile, strides_refusal
from tilefold.plan.problem import AttentionProblem

KERNEL = "attention_forward_hopper"
WIDTHS = (64, 96, 128, 192, 256, 384, 512)  # of a tile; TMA fills what a head dim leaves of it with zeros
HELD = {1: 176, 2: 176, 3: 128}  # of a folding thread, by accumulators and probabilities: with more, compilers spill
SPLIT_FROM = 257  # head dim from which on two warpgroups fold the same 64 rows, each with half of V's columns
BARRIER_BYTES = 704  # barriers, the mailbox, overflow flags, and what the compiler keeps to start the partitions
PREFETCH_BYTES = 128  # the same of the second query tile
RESERVED_BYTES = 1024  # of an SM's shared memory, for each program
MAX_PACKED = 64  # rows of a warpgroup
MOD_SLOTS = {1: 2, 2: 2, 4: 1}  # buffers of a warpgroup for tiles of a bias or mask, by bytes an element
INVARIANT_KEYS = {128: 64, 256: 32}  # of a tile, up to a width: numerics="invariant"
CHUNK_KEYS = 1024  # of a chunk
RING_BYTES = 256  # barriers of such a ring, and what its boxes leave free
MOD_BYTES = {"bias": 4, "mask": 2}  # what an element of a tile takes in all of its buffers, at most

LEAST_DIM, LEAST_DIM_CHANGED = 16, 32  # below 64 they are padded; without, with changes of scores
LEAST_BIASED = 256
"""Tokens from which on portable tiles fold a bias of head dims up to 32 faster (benchmarks/results/changed_scores.jsonl)."""
STAGES = {(64, 64): 4, (128, 128): 2}  # measured; elsewhere as many as there is room for
THREE_FROM = (
    3072  # keys a query sees, from which on masked halves of tiles of 192 queries cost less than three warpgroups save
)
PAIR_KEYS = {64: 128, 96: 64, 128: 64}  # by head dim: keys of a tile where two programs share an SM
SPLIT_THREE_FROM = 2048  # the same where rows of K and V split sectors
SPLIT_LEAST = 512  # keys a query sees, from which on three warpgroups pay for that at a width of 96
WINDOW_PAIRS_UNTIL = {64: THREE_FROM - 1, 96: 256, 128: 512}  # keys of a window up to which pairs win, by width
PACKED_PAIRS_UNTIL = {
    64: {"full": 512, "causal": 2048},
    96: {"full": 256, "causal": 256},
    128: {"full": 512, "causal": 512},
}
"""Queries of a packed batch's sequence in the mean up to which pairs win, by width and mask."""
PREFETCH_UNTIL = (
    2048  # keys a query sees up to which a second buffer for Q gains more than a fourth for K and V, at a width of 96
)
LISTED_PAIRS_UNTIL = 1024
"""Keys up to which pairs win over a mask_mod's lists of tiles at a width of 128 (at 64 they always do): one program's masks are
made beside the other's products."""
NARROW_UNTIL = 1024  # keys up to which such lists win with tiles of 64 keys over those of 128, at a width of 64
RATE = {64: {64: 0.92, 128: 0.86, 192: 1.0}, 128: {64: 0.90, 128: 1.0}}
"""Scores an SM makes in a second beside its fastest version, by head dim and queries a block: 512 to 2048 keys, all seen."""
LAZY_FROM = {64: {"full": 2048, "causal": 2048, "window": 1536}, 128: {"full": 2048, "causal": 4096, "window": 3072}}
"""Keys that a query sees at most, by width and mask; windows of 1024, 2047 and 4096 keys were measured."""
PAIRS_UNTIL = 640  # keys up to which pairs win at a head dim of 128 under a causal mask
POLYNOMIALS = tuple(f"polynomial {n}" for n in range(1, 17))
LISTS_FROM = 1 << 20  # scores of a head from which on the tiles of a mask_mod or a mask are listed
INVARIANT = "invariant"
SPLIT_OPTIONS = {"fence", "late", "turns", "skip", "tanh", "pack"}  # with head dims from SPLIT_FROM on
OPTIONS = (
    "fence",
    "late",
    "turns",
    "skip",
    "lazy",
    "prefetch",
    "tanh",
    "pack",
    "lists",
    "anew",
    INVARIANT,
    *POLYNOMIALS,
)
"""Versions of the kernel, all of the same results but for rounding. fence: the wait for a product stays behind the softmax;
late: a tile's K is given back with its V; turns: the warpgroups issue their products in turns; skip: sums are rescaled only
when a maximum has grown by 2^8; lazy, with skip: or a sum, and no maxima are looked for; prefetch: Q has two buffers, so that
the next block's is loaded while the present one is folded; tanh: softcap by the instruction;
pack: the query heads of a KV head are rows of one block; lists: tiles that a mask_mod or a mask hides are left out, and the mod
is not asked about those that it shows whole; the lists are kept until its args change, or, with anew, made in every call;
polynomial n: n sixteenths of the exponentials on the FMA units. invariant: of other bits, those of attention_invariant."""


def hopper_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel cannot serve this problem, as a sentence, or None if it can."""
    n = problem
    if refusal := type_refusal(n, device):
        return refusal
    if n.dropout:
        return "it has no dropout"
    if n.band:
        return f"its bands are causal and window, not a {n.band}"
    for name in ("bias", "mask"):
        if name in (*n.score_mods, *n.mask_mods) and not rows_of_tile(n, name):
            return f"the base or the strides of the {name} are not multiples of 16 bytes, or its keys do not lie side by side"
    if max(n.dim_qk, n.dim_v) > WIDTHS[-1]:
        return f"it has head dims to {WIDTHS[-1]}, not {n.dim_qk} and {n.dim_v}"
    if is_split(n) and (changed := {*n.score_mods, *n.mask_mods} - {"softcap", "alibi"}):
        return f"with head dims above {SPLIT_FROM - 1} it has no {min(changed)}"
    if n.dim_v % 4:
        return f"it stores 4 columns at a time, V has {n.dim_v}"
    return strides_refusal(n.query_descriptors, n.descriptors)


def hopper_unmeasured(problem: AttentionProblem) -> str | None:
    """Why the kernel is not taken though it could be, as a sentence, or None where it was measured to be faster: the one place to
    change when it has been."""
    n = problem
    least = min(n.dim_qk, n.dim_v)
    if least < LEAST_DIM:
        return f"not measured yet with head dims below {LEAST_DIM}"
    if least < LEAST_DIM_CHANGED and (n.score_mods or n.mask_mods):
        return f"not measured yet with changes of scores and head dims below {LEAST_DIM_CHANGED}"
    biased = n.score_mods == ("bias",) and n.bias_descriptors == "tiles" and not n.mask_mods and max(n.sides) < 0
    if biased and max(n.dim_qk, n.dim_v) <= 32 and min(n.seq_q, n.seq_k) >= LEAST_BIASED:
        return f"a bias at head dims up to 32 is faster in portable tiles from {LEAST_BIASED} tokens on"
    return None


@lru_cache(maxsize=256)  # a plan asks several times
def hopper_options(problem: AttentionProblem, tile: Tile, device: Device) -> tuple[str, ...]:
    """The versions that are taken: those that were measured to be faster."""
    n = problem
    chosen = {
        "fence": width_of(n.dim_v) >= 96,
        "turns": warpgroups_of(n, tile) > 1,
        "skip": width_of(n.dim_v) <= 128 or not _mod_bytes(n, 64, 64),  # a number would spill in the loop
        "lazy": _lazy_pays(n),
        "prefetch": _prefetch_pays(n, tile, device),
        "late": width_of(n.dim_qk) == 192 or (warpgroups_of(n, tile) == 1 and width_of(n.dim_qk) == 128),
        "tanh": "softcap" in n.score_mods
        and n.dtype == "bfloat16",  # fp16's own rounding is finer than the instruction's
        "pack": _pack_fault(n) is None
        and (columns_of(n) <= 128 or n.seq_q < 128 or is_split(n)),  # else its numbers spill in the loop
        "lists": _lists_pay(n),
    }
    return tuple(name for name, taken in chosen.items() if taken)


def lists_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel makes no lists of tiles for this problem, as a sentence, or None if it does wherever it is taken."""
    n = problem
    few = f"its lists pay from {LISTS_FROM} scores a head on" if n.seq_q * n.seq_k < LISTS_FROM else None
    return hopper_refusal(n, device) or hopper_unmeasured(n) or _lists_fault(n) or few


def hopper_few(problem: AttentionProblem, device: Device) -> str | None:
    """Why it would leave the device idle, as a sentence, or None if half of the SMs have a block, at least half full."""
    tile = hopper_tile(problem, device)
    options = hopper_options(problem, tile, device)
    rows, used = tile.block_m, problem.seq_q * packed_heads(problem, options)
    if 2 * used < rows:
        return f"only {used} of the {rows} rows of a block would be used"
    blocks, programs = hopper_grid(problem, tile, options)[0], hopper_programs(problem, tile, device, options)
    if 2 * blocks >= programs:
        return None
    pairs = ", two programs each" if programs > device.sms else ""
    return f"it would have {blocks} blocks of {rows} queries for {device.sms} SMs{pairs}"


@cache
def width_of(dim: int) -> int:
    """Width of the tile that holds a head dim."""
    return next(width for width in WIDTHS if width >= dim)


def is_split(problem: AttentionProblem) -> bool:
    """Whether two warpgroups fold the same 64 rows: one's registers have no room for O, or shared memory for Q of 128."""
    return max(problem.dim_qk, problem.dim_v) >= SPLIT_FROM


def widths_of(problem: AttentionProblem) -> tuple[int, int]:
    """Widths of the tiles of K and of V; halves of V's are 64 columns or more."""
    v = problem.dim_v
    return width_of(problem.dim_qk), -(-v // 128) * 128 if is_split(problem) else width_of(v)


def columns_of(problem: AttentionProblem) -> int:
    """Columns of V that a warpgroup folds."""
    return widths_of(problem)[1] // (2 if is_split(problem) else 1)


def consumers_of(tile: Tile) -> int:
    """Warpgroups that fold rows of their own, 64 each."""
    return tile.block_m // 64


def warpgroups_of(problem: AttentionProblem, tile: Tile) -> int:
    """Warpgroups that fold."""
    return 2 if is_split(problem) else consumers_of(tile)


def packable_heads(problem: AttentionProblem) -> int:
    """Query heads that a block may hold."""
    return problem.group if _pack_fault(problem) is None else 1


def packed_heads(problem: AttentionProblem, options: tuple[str, ...]) -> int:
    """Query heads that are rows of one block."""
    return problem.group if "pack" in options else 1


def polynomial_of(options: tuple[str, ...]) -> int:
    """How many sixteenths of the exponentials are polynomials."""
    return sum(POLYNOMIALS.index(option) + 1 for option in options if option in POLYNOMIALS)


@lru_cache(maxsize=256)
def hopper_tile(problem: AttentionProblem, device: Device) -> Tile:
    """128 queries, 4 warps in each of two warpgroups, 192 of three, or 64 of one, in two programs an SM; num_stages: buffers for
    K, and for V, as many as a bias or a mask leaves room for.

    128 keys, or 64 where V is wider than 128 (its accumulator and 128 scores a row would fill the registers) or where there is
    no room for two buffers.  Head dims from SPLIT_FROM on: 64 queries of two warpgroups, 32 keys."""
    widths = widths_of(problem)
    if is_split(problem):
        made = [Tile(block_m=64, block_n=32, num_warps=4, num_stages=stages) for stages in (4, 3, 2, 1)]
        return next(tile for tile in made if hopper_shared_bytes(problem, tile) <= device.smem_per_block)
    if (
        widths == (96, 96)
        and splits_sectors(problem)
        and _seen(problem) >= SPLIT_LEAST
        and _three_fill(problem, device)
    ):
        return Tile(block_m=192, block_n=64, num_warps=4, num_stages=4)
    if keys := _keys_of_changed_pair(problem):
        return _changed_pair(problem, device, keys)
    three = widths == (64, 64) and _three_pay(problem, device)
    if _pairs_pay(problem, device, 192 if three else 128):
        return Tile(block_m=64, block_n=PAIR_KEYS[widths[0]], num_warps=4, num_stages=3)
    if three:
        return Tile(block_m=192, block_n=128, num_warps=4, num_stages=STAGES[widths])
    for keys in (128, 64):
        for stages in _stages(problem, widths, keys):
            tile = Tile(block_m=128, block_n=keys, num_warps=4, num_stages=stages)
            if (
                _registers_held(problem, tile) <= HELD[2]
                and hopper_shared_bytes(problem, tile) <= device.smem_per_block
            ):
                return tile
    return Tile(block_m=128, block_n=64, num_warps=4, num_stages=1)


def _stages(problem: AttentionProblem, widths: tuple[int, int], keys: int) -> tuple[int, ...]:
    """Numbers of buffers to try; what was measured without a bias or a mask may not leave them room."""
    if widths in STAGES and not _mod_bytes(problem, 64, 64):
        return (STAGES[widths],)
    most = STAGES.get(widths, 4) if keys == 128 else 4
    if widths == (96, 96) and _seen(problem) <= PREFETCH_UNTIL:
        most = 3
    return tuple(range(most, 1, -1))


def hopper_grid(problem: AttentionProblem, tile: Tile, options: tuple[str, ...]) -> tuple[int, int, int]:
    """Blocks of queries to draw; of a packed batch the most that there can be."""
    pack = packed_heads(problem, options)
    return (-(-problem.seq_q * pack // tile.block_m) * problem.batch * problem.heads // pack, 1, 1)


def hopper_shared_bytes(problem: AttentionProblem, tile: Tile, options: tuple[str, ...] = ()) -> int:
    """Shared memory of a program (bytes): Q, the rings of K and V, those of a bias and of a mask, barriers; sums of chunks."""
    qk, v = widths_of(problem)
    ahead = "prefetch" in options
    queries = tile.block_m * (2 if ahead else 1)
    held = (queries * qk + tile.num_stages * tile.block_n * (qk + v)) * problem.itemsize
    totals = tile.block_m * shared_sums(problem) * 4 if INVARIANT in options else 0
    rest = BARRIER_BYTES + (PREFETCH_BYTES if ahead else 0)
    return held + totals + _mod_bytes(problem, tile.block_m, tile.block_n) + rest


def hopper_programs(problem: AttentionProblem, tile: Tile, device: Device, options: tuple[str, ...] = ()) -> int:
    """Programs of a launch that draws its blocks, but for those without one: one an SM, or two of one warpgroup each where an
    SM's shared memory holds both (their registers, 128 of 256 threads at launch, fit)."""
    pair = warpgroups_of(problem, tile) == 1 and hopper_shared_bytes(problem, tile, options) <= _room_of_pair(device)
    return device.sms * (2 if pair else 1)


def _room_of_pair(device: Device) -> int:
    """Shared memory of each of two programs that share an SM (bytes)."""
    return device.smem_per_sm // 2 - RESERVED_BYTES


def rows_of_tile(problem: AttentionProblem, name: str) -> int:
    """Rows of a warpgroup's tile of the "bias" or the "mask": 64, 1 where one serves all queries; 0 without, or without boxes."""
    if name not in (*problem.score_mods, *problem.mask_mods):
        return 0
    return {"tiles": 64, "keys": 1, "": 0}[getattr(problem, f"{name}_descriptors")]


def _mod_bytes(problem: AttentionProblem, block_m: int, block_n: int) -> int:
    """Of the rings of a bias and a mask, with their barriers."""
    rings = [(rows_of_tile(problem, name), size) for name, size in MOD_BYTES.items()]
    return sum(rows * size * block_m // 64 * block_n + RING_BYTES for rows, size in rings if rows)


def hopper_violation(problem: AttentionProblem, device: Device, tile: Tile, options: tuple[str, ...]) -> Fault:
    """(field, sentence) of the first thing that does not fit, or None."""
    if fault := unusable(KERNEL, hopper_refusal(problem, device)):
        return fault
    what, rows, keys = _sizes_of_tile(problem, options)
    if fault := sizes_fault(what, tile, rows, keys):
        return fault
    folding = warpgroups_of(problem, tile)
    if fault := held_fault("probabilities", _registers_held(problem, tile), HELD[folding], folding):
        return fault
    if why := _option_fault(problem, tile, options):
        return "options", why
    if fault := blocks_fault(hopper_grid(problem, tile, options)[0]):
        return fault
    fixed = {"num_warps": 4, "maxnreg": None}
    return tile_fault(KERNEL, tile, fixed, hopper_shared_bytes(problem, tile, options), device)


def _sizes_of_tile(problem: AttentionProblem, options: tuple[str, ...]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The version that has them, rows, and keys."""
    if is_split(problem):
        return f"{KERNEL} and head dims above {SPLIT_FROM - 1}", (64,), (32, 64)
    if INVARIANT in options:
        return f"{KERNEL}, {INVARIANT}", (64, 128, 192), tuple({keys_of_tile(problem), invariant_keys(problem)})
    return KERNEL, (64, 128, 192), (64, 128)


def _option_fault(problem: AttentionProblem, tile: Tile, options: tuple[str, ...]) -> str | None:
    if why := versions_fault(options, OPTIONS):
        return why
    if "tanh" in options and "softcap" not in problem.score_mods:
        return "tanh is a version of softcap, which the problem does not have"
    if "turns" in options and warpgroups_of(problem, tile) == 1:
        return "turns need two warpgroups that fold, 64 queries a block make one"
    if is_split(problem) and (others := {*options} - SPLIT_OPTIONS):
        return f"{min(others)} is not served with head dims above {SPLIT_FROM - 1}"
    if "lazy" in options and (fault := _lazy_fault(problem, options)):
        return fault
    if INVARIANT in options and (fault := _invariant_fault(problem, options)):
        return fault
    if "lists" in options and (fault := _lists_fault(problem)):
        return fault
    if "anew" in options and "lists" not in options:
        return "anew is a version of lists"
    return _pack_fault(problem) if "pack" in options else None


def versions_fault(options: tuple[str, ...], known: tuple[str, ...]) -> str | None:
    """What is wrong with names of versions, of these and polynomials, as a sentence, or None."""
    for option in options:
        if option not in known:
            named = ", ".join(option for option in known if option not in POLYNOMIALS)
            return f"must be among {named}, polynomial 1 to 16, got {option!r}"
    if sum(option in POLYNOMIALS for option in options) > 1 or len(set(options)) < len(options):
        return f"must name each version once, got {options!r}"
    return None


def _lazy_pays(problem: AttentionProblem) -> bool:
    """Whether maxima that are not looked for save more than telling how each block came out costs: measured from LAZY_FROM on,
    without changes of scores, and up to a width of 128.  Not with fp16: its rows' scores may rise by 10 from what was seen
    to the next tile, and bfloat16's by 33, before their block has to be made again."""
    n = problem
    width = max(width_of(n.dim_qk), width_of(n.dim_v))
    mask = "full" if max(n.sides) < 0 else "causal" if n.sides == (-1, 0) else "window"
    few = _seen(n) < LAZY_FROM[64 if width <= 64 else 128][mask]
    wide = width > 128
    other = few or wide or n.varlen or n.score_mods or n.dtype != "bfloat16"
    return not other and not _lazy_fault(n, ("skip",))


def _prefetch_pays(problem: AttentionProblem, tile: Tile, device: Device) -> bool:
    """Whether a second buffer for Q makes the kernel faster: where there is room for it.  ALiBi and lists of tiles gain nothing,
    but for pairs; nor do packed batches of heads wider than 64."""
    n = problem
    if warpgroups_of(n, tile) > 1 and ("alibi" in n.score_mods or _lists_pay(n)):
        return False
    if is_split(n) or (n.varlen and width_of(max(n.dim_qk, n.dim_v)) > 64):
        return False
    room = _room_of_pair(device) if warpgroups_of(n, tile) == 1 else device.smem_per_block
    return hopper_shared_bytes(n, tile, ("prefetch",)) <= room


def _lazy_fault(problem: AttentionProblem, options: tuple[str, ...]) -> str | None:
    if "skip" not in options or polynomial_of(options):
        return "lazy is a version of skip, without polynomials"
    if {*problem.score_mods, *problem.mask_mods} - {"softcap"}:
        return "lazy takes a row's first tile for its scores' size, which a bias, a mask or ALiBi does not leave it"
    return None


def keys_of_tile(problem: AttentionProblem) -> int:
    """Keys of a tile with numerics="invariant", by the wider head dim."""
    width = max(problem.dim_qk, problem.dim_v)
    return next(keys for most, keys in INVARIANT_KEYS.items() if width <= most)


def invariant_keys(problem: AttentionProblem) -> int:
    """Keys that the kernel folds at a time with numerics="invariant": two tiles, whose bits are those of one after the other as
    long as the first one's probabilities may be multiplied by powers of two, or one."""
    return keys_of_tile(problem) * (2 if problem.dtype == "bfloat16" else 1)


def shared_sums(problem: AttentionProblem) -> int:
    """Columns of O of all chunks so far that shared memory has room for; the others lie in L2."""
    return {64: 64, 96: 96, 128: 128, 192: 128, 256: 0}[width_of(problem.dim_v)]


def invariant_tile(problem: AttentionProblem, device: Device) -> tuple[Tile, tuple[str, ...]]:
    """The tile and the versions for numerics="invariant": the rows that others have, in one or two tiles of `keys_of_tile`."""
    usual = hopper_tile(problem, device)
    pair = (
        usual.block_m == 64 and width_of(problem.dim_v) <= 64
    )  # else two programs leave no room for the sums of chunks
    room = _room_of_pair(device) if pair else device.smem_per_block
    keys = invariant_keys(problem)
    rows = 64 if pair else 128 if keys == 128 else max(usual.block_m, 128)  # 192 rows with 128 keys spill at D=64
    for stages in (4, 3, 2):
        tile = Tile(block_m=rows, block_n=keys, num_warps=usual.num_warps, num_stages=stages)
        if hopper_shared_bytes(problem, tile, (INVARIANT,)) <= room:
            break
    late = 64 < width_of(problem.dim_v) <= 128
    pack = "pack" in hopper_options(problem, tile, device)
    return tile, (INVARIANT, *("late",) * late, *("pack",) * pack)  # turns and fence cost 1 to 3 %


def invariant_unserved(problem: AttentionProblem) -> str | None:
    """Why the kernel has no version of the bits of attention_invariant for this problem, as a sentence, or None."""
    n = problem
    if n.score_mods or n.mask_mods:
        return "it changes and masks scores in another order than attention_invariant"
    if is_split(n):
        return f"not with head dims above {SPLIT_FROM - 1}"
    return None


def _invariant_fault(problem: AttentionProblem, options: tuple[str, ...]) -> str | None:
    if why := invariant_unserved(problem):
        return f"invariant is not served: {why}"
    others = {"skip", "lists", *POLYNOMIALS} & {*options}
    return f"invariant excludes {min(others)}" if others else None


def _pack_fault(problem: AttentionProblem) -> str | None:
    if problem.varlen:
        return "pack needs sequences of one length, this is a packed batch"
    if "bias" in problem.score_mods or "mask" in problem.mask_mods:
        return "pack makes heads rows of one block, which a tile of a bias or a mask does not hold"
    if "user" in (*problem.score_mods, *problem.mask_mods):
        return "pack makes heads rows of one block, and a score_mod or mask_mod takes one head"
    if problem.group == 1 or MAX_PACKED % problem.group:
        return f"pack needs a number of query heads a KV head that divides {MAX_PACKED}, got {problem.group}"
    return None


def _lists_fault(problem: AttentionProblem) -> str | None:
    if not problem.mask_by_place:
        return "lists are of a mask_mod that looks at indices alone, or of a mask that heads share; the problem has neither"
    return "lists need sequences of one length, this is a packed batch" if problem.varlen else None


def _lists_pay(problem: AttentionProblem) -> bool:
    """Whether tiles are listed: as measured from LISTS_FROM on."""
    return _lists_fault(problem) is None and problem.seq_q * problem.seq_k >= LISTS_FROM


def _seen(problem: AttentionProblem) -> int:
    """Keys that a query sees at most."""
    left, right = problem.sides
    return problem.seq_k if left < 0 or right < 0 else min(problem.seq_k, left + right + 1)


def _three_pay(problem: AttentionProblem, device: Device) -> bool:
    """Whether three warpgroups are faster than two: where exponentials are the bound, and few rows and scores are in vain."""
    n = problem
    if not _three_fill(n, device):
        return False
    left, right = n.sides
    if left < 0 and right < 0:
        return True
    if splits_sectors(n) and not n.varlen:
        return _seen(n) >= SPLIT_THREE_FROM
    return _seen(n) >= THREE_FROM and (not n.varlen or n.mean_q >= THREE_FROM)


def _three_fill(problem: AttentionProblem, device: Device) -> bool:
    """Whether blocks of 192 queries keep the device busy, with few rows in vain; what changes scores was not measured."""
    n, blocks = problem, -(-problem.seq_q // 192)
    full = n.batch * n.heads * blocks >= device.sms and 192 * blocks <= 1.15 * 128 * -(-n.seq_q // 128)
    return full and not n.score_mods and not n.mask_mods


def splits_sectors(problem: AttentionProblem) -> bool:
    """Whether every other row begins inside a sector of 32 bytes.

    TMA then asks L2 for 8 sectors of such a row's first 128 bytes, not for 4.  L2 is the bound, and a block of more queries needs
    K and V less often."""
    return problem.dim_qk % 16 != 0 or problem.dim_v % 16 != 0


def _pairs_pay(problem: AttentionProblem, device: Device, rows: int) -> bool:
    """Whether two programs an SM, of 64 queries each, are faster than one of `rows`: where a block's beginning and end, which one
    does beside the other's products, and rows in vain cost more than reading K and V twice as often."""
    n = problem
    width = width_of(n.dim_qk)
    if (
        width != width_of(n.dim_v)
        or width not in PAIR_KEYS
        or n.score_mods
        or n.mask_mods
        or n.seq_q * packable_heads(n) <= 64
        or (splits_sectors(n) and not n.varlen)
    ):
        return False
    if n.sides != (-1, 0) and max(n.sides) >= 0 and _seen(n) <= WINDOW_PAIRS_UNTIL[width]:
        return True
    if n.varlen:
        return 0 < n.mean_q <= PACKED_PAIRS_UNTIL[width]["full" if max(n.sides) < 0 else "causal"]
    if _seen(n) >= THREE_FROM or width not in RATE:
        return False  # not measured
    if n.sides == (-1, 0):
        return width == 64 or n.seq_k <= PAIRS_UNTIL
    if max(n.sides) >= 0:
        return False
    keys = PAIR_KEYS[width]
    return _seconds(n, 64, keys, 2 * device.sms) < _seconds(n, rows, 128, device.sms)


def _keys_of_changed_pair(problem: AttentionProblem) -> int:
    """Keys of a tile where two programs an SM are faster for what changes scores or lists tiles; 0 where they are not or were not
    measured: with softcap and a bias they lose, at a width of 128 with changed scores, too."""
    n = problem
    width = width_of(n.dim_qk)
    if (
        width != width_of(n.dim_v)
        or n.varlen
        or n.seq_q <= 64
        or splits_sectors(n)
        or {*n.score_mods} - {"user", "alibi"}
    ):
        return 0
    if not _lists_pay(n):
        return PAIR_KEYS[64] if width == 64 and n.score_mods and not n.mask_mods else 0
    asked = {*n.mask_mods} == {"user"}
    if width == 64:
        return 64 if asked and n.seq_k <= NARROW_UNTIL else PAIR_KEYS[64]
    wide = width == 128 and asked and not n.score_mods
    return PAIR_KEYS[128] if wide and n.seq_k <= LISTED_PAIRS_UNTIL else 0


def _changed_pair(problem: AttentionProblem, device: Device, keys: int) -> Tile:
    """Its tile: as many buffers as an SM has room for beside second ones of Q."""
    for stages in (6, 4, 3, 2):
        tile = Tile(block_m=64, block_n=keys, num_warps=4, num_stages=stages)
        if hopper_shared_bytes(problem, tile, ("prefetch",)) <= _room_of_pair(device):
            break
    return tile


def _seconds(problem: AttentionProblem, rows: int, keys: int, programs: int) -> float:
    """Time of a call that sees all keys, in units of its own: rounds of blocks, by the work of one and the rate of an SM."""
    n = problem
    pack = packable_heads(n)
    blocks = -(-n.seq_q * pack // rows) * n.batch * n.heads // pack
    return -(-blocks // programs) * rows * -(-n.seq_k // keys) * keys / RATE[width_of(n.dim_qk)][rows] * programs


def _registers_held(problem: AttentionProblem, tile: Tile) -> int:
    """Of a folding thread: the output's accumulator, the scores', and the probabilities in 16 bits."""
    return columns_of(problem) // 2 + tile.block_n // 2 + tile.block_n // 4
