"""When the Gluon kernel for sm_90 that adds dq in memory makes the gradients of dense attention, and in which version.

A plan takes it in any order of additions for a call that says deterministic=False, in order for the others; where was measured:
benchmarks/results/backward_versions.jsonl."""

from dataclasses import dataclass
from typing import Any

from tilefold.plan.backward.attention_backward_hopper import is_kept_well, width_of
from tilefold.plan.backward.attention_backward_packed import packed_refusal
from tilefold.plan.backward.backward import rows_refusal
from tilefold.plan.backward.kept_backward import divisors, heads_fault
from tilefold.plan.base import Fault, unusable
from tilefold.plan.dense.attention_hopper import LISTS_FROM
from tilefold.plan.device import Device
from tilefold.plan.hopper import tile_fault, type_refusal
from tilefold.plan.limits import MAX_GRID, Tile, box_refusal, strides_refusal
from tilefold.plan.problem import AttentionProblem

KERNEL = "attention_backward_reduce"
Tokens = tuple[int, int] | None
"""Queries and keys of all sequences of a packed batch."""
KEYS = 128  # of a program
COLUMNS = (64, 80, 96, 128)
CHANGES = ("softcap", "alibi", "bias", "mask", "user")  # of scores
LEAST_DIM, LEAST_DIM_CHANGED = 16, 32  # below 64 they are padded; without, with changes of scores
LEAST_CHANGED = {32: (512, 1024), 64: (256, 512), 80: (128, 128), 96: (128, 128), 128: (128, 512)}
"""By columns, or 32 below a head dim of 64, without and with a causal mask: queries and keys from which on it is taken with
changes of scores, which of these kernels it alone has (benchmarks/results/changed_scores.jsonl, from 128 tokens on).  Half of
it, to 64 columns and without a causal mask, where softcap or a mask alone changes them."""
LEAST_STORED = {32: (512, 512), 64: (128, 128), 80: (128, 128), 96: (128, 128), 128: (128, 128)}
"""The same where dS is stored for the gradient of a bias, which else has a kernel of its own."""
LEAST_NARROW = (512, 1024)
"""Queries and keys from which on it was faster than keeping dS at D=64, without and with a causal mask."""
LEAST_WINDOW = {(1, True): 512, (1, False): 0, (2, True): 2048, (2, False): 1024}
"""Keys of a window, its own included, from which on it is faster at D=64 than keeping dS where that has room: tiles of 64 queries
fit narrow windows better than those of 128.  By the heads of a group (2: several), and whether it keeps an order."""
LEAST_ALONE, LEAST_OF_GROUPS = 8192, 2048
"""The same of 128 columns, where each head has its own K and V, and, where DRAM is slow, without a mask where heads share them;
else it is taken where there is no room for dS."""
LEAST_TILES = (384, 1024)
"""At D=64, without and with a causal mask: tiles of queries from which on an order is faster than keeping dS, since the last
block of keys waits in the beginning for all others (the first where DRAM is slow)."""
LEAST_IN_PARTS = {80: (512, 1024), 96: (1024, 1024)}
"""By columns, without and with a causal mask: queries, keys or a window from which on an order is faster than keeping dS, whose
tiles have 128 columns.  Without an order half of it is, and at least 512."""
APART_FROM = 4096
"""Queries and keys from which on heads of a group are faster by themselves, in order under a window, of fewer than 128 columns;
of 64 under one of LEAST_WINDOW."""
NEVER = 1 << 62
LEAST_PACKED = {64: ((512, 1024), (512, 1024)), 128: ((8192, NEVER), (8192, 4096))}
"""By the width of tiles, of packed batches: the mean length, and keys that a query sees at most, from which on an order, and any
order, is faster than keeping dS, each without and with a causal mask.  Of 128 columns without one never, where DRAM is fast."""
LEAST_MEAN = {32: (512, 1024), 64: (128, 128), 80: (128, 128), 96: (128, 256), 128: (256, 256)}
"""The same, by columns or 32, where the kernel that keeps dS does not serve the batch: below it portable ones are as
fast."""
SLOW_DRAM = 4e12
SUMS_AT_ONCE = 16 << 20
"""Bytes of sums of dq that the programs of one batch of query heads add to: of 50 MiB of L2, each half of which keeps its own
copy.  In order see `sums_at_once`."""
WIDE_SUMS = {80: 4096, 96: 4096, 128: 8192}
"""By columns, in order under a causal mask: queries from which on the whole of it is faster than half, since fewer blocks of a
head wait for one another."""
LONG_SUMS = 16384
"""Queries from which on, of 128 columns, in order without a mask, twice of it is faster; and of 64 columns, in any order, the
whole of it."""
FEW_SUMS = 2048
"""Queries below which half of it is faster in any order, of wider tiles."""
ONE_BATCH = 40 << 20
"""Bytes of sums of dq of one batch of all heads, which no second one shares L2 with."""
MOST_STORED = 4 << 30
"""Bytes of dS that may be stored for the gradient of a bias."""
FEW_SEEN = 8  # a window of fewer than a FEW_SEEN-th of the keys leaves most of that empty
ENTRY_BYTES = 32  # of a packed batch's block of keys
SHARED = 768  # barriers, and what the compiler keeps to start the partitions


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """Which version of the kernel.

    ordered: each tile of queries gets its additions in the order of the keys' blocks, so the bits are the same every run.
    late: with changes of scores, dP is issued behind them: the two do not run side by side, but nothing has to leave registers
    for the other.
    lists: tiles that a mask_mod or a mask hides are left out, and the mod is not asked about those that it shows whole.
    anew: the lists are made in every call, not kept until the mask_mod's args change.
    apart: each query head of a group has programs of its own, which add to dk and dv in memory in the heads' order.
    stored: dS of all pairs goes to memory, for the gradient of a bias."""

    ordered: bool = False
    late: bool = False
    lists: bool = False
    anew: bool = False
    apart: bool = False
    stored: bool = False

    def __str__(self) -> str:
        late = ", dP behind the changes of scores" if self.late else ""
        late += ", over lists of the tiles that the mask shows" if self.lists else ""
        late += ", made in every call" if self.anew else ""
        late += ", each head of a group by itself" if self.apart else ""
        late += ", dS stored for the bias" if self.stored else ""
        return "dq added in memory, " + ("in the order of the keys" if self.ordered else "in any order") + late


ANY_ORDER = ReduceOptions()


def reduce_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this problem, as a sentence, or None if it does."""
    n = problem
    if refusal := type_refusal(n, device):
        return refusal
    if min(n.dim_qk, n.dim_v) < LEAST_DIM or max(n.dim_qk, n.dim_v) > 128 or n.dim_qk % 4 or n.dim_v % 4:
        return f"it has head dims of {LEAST_DIM} to 128, multiples of 4, not {n.dim_qk} and {n.dim_v}"
    if n.varlen and not n.unchanged:
        return "of packed batches it has no changes of scores"
    if refusal := strides_refusal(keys=n.descriptors) if n.varlen else box_refusal(n, device):
        return refusal
    if n.dropout:
        return "it has no dropout"
    if not n.unchanged and min(n.dim_qk, n.dim_v) < LEAST_DIM_CHANGED:
        return f"not measured yet with changes of scores and head dims below {LEAST_DIM_CHANGED}"
    if others := [name for name in (*n.score_mods, *n.mask_mods) if name not in CHANGES]:
        return f"it has no {others[0]}"
    if not n.unchanged and n.seq_q == 0:
        return "there are no queries"
    if refusal := rows_refusal(n):
        return refusal
    if n.seq_k == 0:
        return "there are no keys"
    if rows(n) * (queries_of(n) * columns_of(n) // 32) >= 1 << 31:
        return "the sums of dq have more rows than a descriptor can count"
    if programs(n, ReduceOptions(apart=True)) > MAX_GRID:
        return f"there are more than {MAX_GRID} blocks of {KEYS} keys"
    return None


def storing_refusal(problem: AttentionProblem) -> str | None:
    """Why dS cannot be stored for the gradient of a bias, as a sentence, or None if it can."""
    n = problem
    if "bias" not in n.score_mods:
        return "the problem has none"
    if "softcap" in n.score_mods:
        return "dS has the derivative of softcap, which lies before the bias"
    rows, columns = ds_shape(n)
    if rows >= 1 << 31:
        return "it has more rows than a descriptor can count"
    if rows * columns * n.itemsize > MOST_STORED:
        return f"it would take {rows * columns * n.itemsize / 2**30:.3g} GiB, more than {MOST_STORED >> 30}"
    return None


def is_stored(problem: AttentionProblem, bias: tuple[int, ...]) -> bool:
    """Whether the gradient of such a bias (batch, heads, rows) is summed up from dS, in 16 bits, that the kernel stores.

    Not of a narrow window, since dS has room for all pairs.  Not of a shared bias in float16: its smallest terms would become 0
    before they are added."""
    n = problem
    shared = bias[:2] != (n.batch, n.heads)
    few = min(n.sides) >= 0 and FEW_SEEN * _window(n) < n.seq_k
    if bias[2:] != (n.seq_q,) or few or (shared and n.dtype == "float16"):
        return False
    return storing_refusal(n) is None


def options_for(
    problem: AttentionProblem, device: Device, deterministic: bool, stored: bool = False
) -> ReduceOptions | str:
    """The version that was measured to be the fastest kernel for this problem, or why there is none.  stored: a bias
    has a gradient for which dS can be stored.

    With changes of scores it is that without, wherever the kernel serves: at these head dims the other kernels for sm_90 have
    no changes."""
    n = problem
    if refusal := reduce_refusal(n, device):
        return refusal
    if n.varlen:
        return _packed_options(n, device, deterministic)
    if not n.unchanged:
        diagonal = max(n.sides) >= 0
        width = columns_of(n) if max(n.dim_qk, n.dim_v) >= 64 else 32
        least = (LEAST_STORED if stored else LEAST_CHANGED)[width][diagonal]
        if columns_of(n) == 64 and not diagonal and {*n.score_mods, *n.mask_mods} <= {"softcap", "mask"}:
            least //= 2
        if min(n.seq_q, n.seq_k) < least:
            return f"with fewer than {least} queries or keys and changes of scores it was not faster, or not measured"
        lists = n.mask_by_place and n.seq_q * n.seq_k >= LISTS_FROM
        apart = _is_apart(n, deterministic) and not lists
        return ReduceOptions(deterministic, is_late(n), lists, apart=apart, stored=stored)
    causal, tokens, fast = max(n.sides) >= 0, min(n.seq_q, n.seq_k), not _is_slow(device)
    if width_of(n) == 64:
        least = LEAST_NARROW[causal]
        if tokens < least:
            return f"with fewer than {least} queries or keys it was not faster than keeping dS"
        least = LEAST_WINDOW[min(n.group, 2), deterministic]
        if min(n.sides) >= 0 and _window(n) < least and is_kept_well(n, device):
            return f"of windows of fewer than {least} keys keeping dS is faster"
        if waits := _order_refusal(n, causal, device):
            return waits if deterministic else ANY_ORDER
    elif columns_of(n) in LEAST_IN_PARTS:
        least = LEAST_IN_PARTS[columns_of(n)][n.causal]
        if not deterministic:
            least = max(least // 2, 512)
        if min(tokens, _window(n)) < least and is_kept_well(n, device):
            return f"with fewer than {least} queries or keys keeping dS is faster"
        if deterministic and not causal and (waits := _order_refusal(n, causal, device)):
            return waits
    elif is_kept_well(n, device) and (
        min(tokens, _window(n)) < LEAST_ALONE if n.group == 1 or fast else causal or tokens < LEAST_OF_GROUPS
    ):
        return "there is room for dS, and keeping it is faster"
    return ReduceOptions(deterministic, apart=_is_apart(n, deterministic))


def _packed_options(n: AttentionProblem, device: Device, deterministic: bool) -> ReduceOptions | str:
    """`options_for` of a packed batch."""
    causal, tokens = max(n.sides) >= 0, min(n.mean_q or n.seq_q, _window(n))
    if packed_refusal(n, device):
        least = LEAST_MEAN[32 if max(n.dim_qk, n.dim_v) <= 32 else columns_of(n)][causal]
        few = f"with fewer than {least} queries in the mean, or keys that one sees, portable kernels are faster"
        return few if tokens < least else ReduceOptions(ordered=deterministic)
    order, any_order = LEAST_PACKED[width_of(n)]
    if width_of(n) == 128 and not causal and not _is_slow(device):
        order, any_order = (NEVER, NEVER), (NEVER, NEVER)
    if not deterministic and tokens >= any_order[causal]:
        return ANY_ORDER
    if tokens >= order[causal]:
        return ReduceOptions(ordered=True)
    least = (order if deterministic else any_order)[causal]
    return (
        "keeping dS is faster"
        if least == NEVER
        else f"with fewer than {least} queries in the mean, or keys that one sees, keeping dS is faster"
    )


def is_late(problem: AttentionProblem) -> bool:
    """Whether dP is issued behind the changes of scores: all but a mask that boxes read would spill beside it."""
    n = problem
    return bool(n.score_mods or {*n.mask_mods} - {"mask"} or (n.mask_mods and not n.mask_descriptors))


def _is_apart(n: AttentionProblem, ordered: bool) -> bool:
    """Whether each head of a group is faster by itself: where the mask has a diagonal, and L2 does not hold the sums of a group.

    There blocks are unlike in length, and so heads come to be at work side by side."""
    if max(n.sides) < 0 or n.group == 1:
        return False
    if ordered and n.sides[0] < 0 and n.unchanged:
        return n.group * _sums_of_head(n) > SUMS_AT_ONCE // 2
    if columns_of(n) == 64 and not (n.unchanged and _window(n) >= LEAST_WINDOW[2, True]):
        return False
    return columns_of(n) == 128 or (ordered and min(n.seq_q, n.seq_k) >= APART_FROM)


def _window(n: AttentionProblem) -> int:
    """How many keys a query sees at most."""
    return n.seq_k if min(n.sides) < 0 else sum(n.sides) + 1


def _is_slow(device: Device) -> bool:
    """Whether DRAM is slow."""
    return device.dram_bytes_per_s < SLOW_DRAM


def _order_refusal(n: AttentionProblem, causal: bool, device: Device) -> str | None:
    """Why keeping dS is faster than the ordered version, by the tiles of queries that wait."""
    least = LEAST_TILES[causal and not _is_slow(device)]
    if rows(n) - 1 < least and is_kept_well(n, device):
        return f"with fewer than {least} tiles of queries waiting for one's turn takes too long"
    return None


# ---------------------------------------------------------------- sizes


def columns_of(problem: AttentionProblem) -> int:
    """Columns of products and of sums of dq: the least of COLUMNS that hold both head dims.

    A product's sides are powers of two; 80 and 96 are two of them, 64 + 16 and 64 + 32."""
    most = max(problem.dim_qk, problem.dim_v)
    return next(columns for columns in COLUMNS if most <= columns)


def queries_of(problem: AttentionProblem) -> int:
    """Queries of a tile: as many as S and dP have registers for."""
    return 128 if width_of(problem) == 64 else 64


def blocks(problem: AttentionProblem, tokens: Tokens = None) -> int:
    """Blocks of 128 keys of a head; of a packed batch places of all sequences' blocks, at most if nobody says the tokens."""
    n = problem
    return _places(n, KEYS, n.seq_k, tokens and tokens[1]) if n.varlen else -(-n.seq_k // KEYS)


def q_tiles(problem: AttentionProblem, tokens: Tokens = None) -> int:
    """Tiles of queries of a head, likewise."""
    n, queries = problem, queries_of(problem)
    return _places(n, queries, n.seq_q, tokens and tokens[0]) if n.varlen else -(-n.seq_q // queries)


def _places(problem: AttentionProblem, rows: int, longest: int, total: int | None) -> int:
    """Of tiles of so many rows in all sequences (device.sequences)."""
    return (problem.batch * longest if total is None else total) // rows + problem.batch


def entries(problem: AttentionProblem) -> int:
    """Batch entries that have places of their own: packed sequences share theirs."""
    return 1 if problem.varlen else problem.batch


def members(problem: AttentionProblem, options: ReduceOptions | None) -> int:
    """Query heads of a program."""
    return 1 if options is not None and options.apart else problem.group


def programs(problem: AttentionProblem, options: ReduceOptions | None, tokens: Tokens = None) -> int:
    """Programs of a launch."""
    return blocks(problem, tokens) * entries(problem) * problem.heads // members(problem, options)


def rows(problem: AttentionProblem, tokens: Tokens = None) -> int:
    """Tiles of queries, and one more without any."""
    return entries(problem) * problem.heads * q_tiles(problem, tokens) + 1


def counters(problem: AttentionProblem, options: ReduceOptions | None, tokens: Tokens = None) -> int:
    """Numbers that are 0 at launch: of each tile of queries where additions have an order; where heads of a group are apart, of
    each 64 keys behind them."""
    if options is None or not (options.ordered or options.apart):
        return 1
    return rows(problem, tokens) + options.apart * 2 * programs(problem, None, tokens)


def key_sums(problem: AttentionProblem, options: ReduceOptions | None, tokens: Tokens = None) -> int:
    """Elements of the fp32 sums of dk and dv, where heads of a group are apart."""
    apart = options is not None and options.apart
    return apart * 2 * programs(problem, None, tokens) * KEYS * columns_of(problem)


def ds_shape(problem: AttentionProblem) -> tuple[int, int]:
    """Rows and columns of dS in memory: keys of all query heads, and queries, in whole tiles."""
    n = problem
    return n.batch * n.heads * blocks(n) * KEYS, q_tiles(n) * queries_of(n)


def tails(problem: AttentionProblem) -> int:
    """Rows of 64 elements that hold the sequences' last tiles of q, dout, K and V."""
    n = problem
    rows_of_tiles = 2 * (n.heads * queries_of(n) + n.kv_heads * KEYS)
    return n.batch * rows_of_tiles * (width_of(n) // 64) if n.varlen else 0


def scratch_bytes(problem: AttentionProblem, options: ReduceOptions | None) -> int:
    """Memory for the fp32 sums of dq, statistics, the counters, the fp32 sums of dk and dv over the heads of a group, dS; of a
    packed batch, whose tokens nobody says, at most, with the last tiles and the blocks' entries."""
    n = problem
    sums = rows(n) * queries_of(n) * (columns_of(n) + 2)
    packed = tails(n) * 64 * n.itemsize + ENTRY_BYTES * blocks(n) if n.varlen else 0
    rows_of_keys, queries = ds_shape(n) if options is not None and options.stored else (0, 0)
    return 4 * (sums + counters(n, options) + key_sums(n, options)) + packed + rows_of_keys * queries * n.itemsize


def heads_at_once(problem: AttentionProblem, options: ReduceOptions | None = None) -> int:
    """Programs' heads of a batch, a divisor of all: as many as `sums_at_once` holds dq of.  Where they fill half of it or less it
    is the next divisor, if that is nearer to it, or all heads.

    Of a program's heads it is one, where a walk ends a head before the next or all go over the same queries; in order under a
    causal mask all of them.  Windows and changes of scores were not measured."""
    n, ordered = problem, options is not None and options.ordered
    masked, known = max(n.sides) >= 0, n.unchanged and n.sides[0] < 0
    head = _sums_of_head(n) * (members(n, options) if ordered and known and masked else 1)
    room, heads = sums_at_once(n, options), divisors(_programs_heads(n, options))
    few = max(d for d in heads if d == 1 or d * head <= room)
    # In any order without a mask no block waits for another, and none ends late.
    if few == heads[-1] or 2 * few * head > room or not (known and (ordered or masked)):
        return few
    more = min(d for d in heads if d > few)
    alone = more == heads[-1] and more * head <= ONE_BATCH
    return more if alone or few * more * head**2 <= room**2 else few


def sums_at_once(problem: AttentionProblem, options: ReduceOptions | None) -> int:
    """Bytes of sums of dq that one batch adds to, as was measured."""
    n, columns, apart = problem, columns_of(problem), options is not None and options.apart
    masked = max(n.sides) >= 0
    if options is None or options.lists or not n.unchanged or n.sides[0] >= 0:
        return SUMS_AT_ONCE
    if masked and options.ordered and n.group > 1 and not apart:
        return SUMS_AT_ONCE
    tokens = n.mean_q or n.seq_q
    if not options.ordered:
        return SUMS_AT_ONCE // (2 if tokens < (LONG_SUMS if columns == 64 else FEW_SUMS) else 1)
    if masked and not apart and tokens >= WIDE_SUMS.get(columns, NEVER):
        return SUMS_AT_ONCE
    return SUMS_AT_ONCE * 2 if columns == 128 and tokens >= LONG_SUMS and not masked else SUMS_AT_ONCE // 2


def _sums_of_head(n: AttentionProblem) -> int:
    """Bytes of the sums of dq of one query head of a batch entry."""
    return (n.mean_q or n.seq_q) * columns_of(n) * 4


def _programs_heads(problem: AttentionProblem, options: ReduceOptions | None) -> int:
    """Heads, or batch entries' heads, that have programs of their own."""
    return entries(problem) * problem.heads // members(problem, options)


def reduce_tile(problem: AttentionProblem) -> Tile:
    """num_stages: buffers for q and dout."""
    return Tile(block_m=queries_of(problem), block_n=KEYS, num_warps=4, num_stages=2)


def reduce_shared(problem: AttentionProblem, stages: int) -> int:
    """Shared memory of one program (bytes): rings of q, dout and a mask, K, V, two dS, a tile of dq, statistics, barriers."""
    n, queries = problem, queries_of(problem)
    halves = (2 * stages * queries + 2 * KEYS) * width_of(n) + 2 * KEYS * queries
    mask = {"": 0, "keys": 1, "tiles": queries}[n.mask_descriptors if "mask" in n.mask_mods else ""]
    return (
        halves * n.itemsize
        + 4 * queries * (width_of(n) + stages * 2)
        + stages * max(mask * KEYS, 256 * (mask > 0))
        + SHARED
    )


# ---------------------------------------------------------------- limits


def reduce_violation(
    problem: AttentionProblem, device: Device, tile: Tile, options: ReduceOptions | None, heads: int, keys: int
) -> Fault:
    """(field, sentence) of the first thing that does not fit, or None."""
    n = problem
    if fault := unusable(KERNEL, reduce_refusal(n, device)) or options_violation(options):
        return fault
    if n.unchanged and options is not None and options.late:
        return "options.late", "is a version of changes of scores, which the problem does not have"
    if options is not None and options.lists and not n.mask_by_place:
        return (
            "options.lists",
            "are of a mask_mod that looks at indices alone, or of a mask that heads share; the problem has neither",
        )
    if options is not None and options.apart and n.group == 1:
        return "options.apart", "is a version of groups of query heads, and each KV head has one"
    if options is not None and options.stored and (why := storing_refusal(n)):
        return "options.stored", f"dS cannot be stored for a bias: {why}"
    if options is not None and options.anew and not options.lists:
        return "options.anew", "is a version of lists"
    fixed = {"block_m": queries_of(n), "block_n": KEYS, "num_warps": 4}
    if fault := tile_fault(KERNEL, tile, fixed, reduce_shared(n, tile.num_stages), device):
        return fault
    if tile.num_stages < 2:
        return "num_stages", f"must be at least 2 with {KERNEL}, got {tile.num_stages}"
    if fault := heads_fault(heads, _programs_heads(n, options), "batch x KV heads, or heads that are apart"):
        return fault
    if keys:
        return "keys_at_once", f"must be 0 with {KERNEL}, which keeps no dS, got {keys!r}"
    return None


def options_violation(options: object) -> Fault:
    """As reduce_violation, of the options alone."""
    if not isinstance(options, ReduceOptions):
        return "options", f"must be ReduceOptions with {KERNEL}, got {options!r}"
    for name in ("ordered", "late", "lists", "anew", "apart", "stored"):
        given: Any = getattr(options, name)
        if type(given) is not bool:
            return f"options.{name}", f"must be a bool, got {given!r}"
    return None
