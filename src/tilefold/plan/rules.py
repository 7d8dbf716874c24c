"""The rules that pick a tile: ordered, named, each with its evidence. The first that applies and fits decides."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.plan.architecture import SM_90
from tilefold.plan.dense.specialised import SPECIALISED, SpecialisedKernel
from tilefold.plan.device import Device
from tilefold.plan.limits import BOX, MOD_BYTES, POINTER, VARLEN, Tile, box_refusal, grid_of
from tilefold.plan.problem import AttentionProblem, next_power_of_two
from tilefold.plan.tuned import MANY_MODS, tuned_tile

SHORT_QUERIES = 64  # below this a full tile of rows would be mostly padding


@dataclass(frozen=True, slots=True)
class Choice:
    """A tile for a kernel, and its evidence where that is not the rule's."""

    kernel: str
    tile: Tile
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A named decision: when it applies, which choices it proposes (best first), why, and on what evidence."""

    name: str
    reason: str
    evidence: str
    applies: Callable[[AttentionProblem, Device], bool]
    choices: Callable[[AttentionProblem, Device], tuple[Choice, ...]]


def _pointer_kernel(problem: AttentionProblem) -> str:
    return VARLEN if problem.varlen else POINTER


def _best_kernel(problem: AttentionProblem, device: Device) -> str:
    """Box loads where they can be used, pointer loads elsewhere."""
    return BOX if box_refusal(problem, device) is None else _pointer_kernel(problem)


def _width(problem: AttentionProblem) -> int:
    return max(problem.block_qk, problem.block_v)


def _with(kernel: str, *tiles: Tile) -> tuple[Choice, ...]:
    return tuple(Choice(kernel, tile) for tile in tiles)


# ---- the interpreter


def _interpreter(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    block_m = min(64, max(16, next_power_of_two(problem.seq_q)))
    block_n = min(64, max(16, next_power_of_two(problem.seq_k)))
    return _with(_pointer_kernel(problem), Tile(block_m, block_n, 4, 1))


# ---- short sequences

MOST_SHORT, MOST_NARROW, MOST_LOADING, MOST_PACKED = 64, 192, 256, 384  # tokens
LONGER = (
    "96 and 144 tokens, D=32: 0.98 and 0.72 times the time of the kernel for sm_90, with a bias 0.85 and 0.63; 196 with a bias "
    "that pointers load: 0.36 times that of 64 x 64 keys at D=32, 0.70 at D=128 (H200, 2026-11-30, triton 3.6.0)."
)

PACKED = (
    "Packed, up to 64 tokens: 0.08 to 0.62 times the time before, 0.06 to 0.74 times FlashAttention-2's; longer ones 0.47 to "
    "1.01 times the time of the kernel for sm_90 (H200, 2026-11-30, triton 3.6.0)."
)


def is_short(problem: AttentionProblem, device: Device) -> bool:
    """Sequences of which a small tile holds all, or nearly all: with larger ones programs are few and mostly padding.

    Up to 64 tokens; head dims up to 32 also up to 96, or with 129 to 192 queries, which fill half of a second tile of 128; and a
    bias or mask that no descriptor reads up to 256.  On sm_90 not of groups of heads wider than 32 with more than 16 queries,
    whose kernel packs heads (measured with groups of four); of packed sequences it packs none: `_packed_are_short`."""
    n, width = problem, _width(problem)
    if device.backend != "cuda" or n.dtype == "float32" or width > 128:
        return False
    longest = max(n.seq_q, n.seq_k)
    if n.varlen:
        return longest <= MOST_SHORT or (device.architecture is SM_90 and _packed_are_short(n, longest, width))
    if device.architecture is SM_90 and n.group > 1 and width > 32 and n.seq_q > 16:
        return False
    return (
        longest <= MOST_SHORT
        or (width <= 32 and (longest <= 96 or (n.seq_q > 2 * MOST_SHORT and longest <= MOST_NARROW)))
        or (_loads_by_pointers(n) and longest <= MOST_LOADING and not 32 < width <= 64)
    )


def _packed_are_short(problem: AttentionProblem, longest: int, width: int) -> bool:
    """Beyond 64 tokens: up to 384 at head dims up to 32; up to 96 at 64, or 128 where they have 64 in the mean."""
    if width <= 32:
        return longest <= MOST_PACKED
    return width <= 64 and longest <= (128 if 0 < problem.mean_q <= MOST_SHORT else 96)


def _loads_by_pointers(problem: AttentionProblem) -> bool:
    """Whether no descriptor reads the bias or the mask."""
    n = problem
    return ("bias" in n.score_mods and not n.bias_descriptors) or ("mask" in n.mask_mods and not n.mask_descriptors)


def _short_sequences(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    n, width = problem, _width(problem)
    rows, keys = (min(64, max(16, next_power_of_two(each))) for each in (n.seq_q, n.seq_k))
    loads = any(mod in MOD_BYTES for mod in n.score_mods + n.mask_mods)
    if rows < 64:
        narrow = rows == 16 or width <= 32 or (n.varlen and n.plain)
        tile = Tile(rows, min(keys, 32), 1 if narrow else 2, 1)
    elif n.varlen or width <= 32 or n.seq_q > 64 or (loads and not _loads_by_pointers(n)):
        tile = Tile(64, min(keys, 32), 4, 2)
    else:
        tile = Tile(64, keys, 4, 1)
    evidence = PACKED if n.varlen else "" if max(n.seq_q, n.seq_k) <= MOST_SHORT else LONGER
    kernel = _best_kernel(n, device)
    return Choice(kernel, tile, evidence), Choice(kernel, Tile(16, 16, 4, 1), evidence)


# ---- kernels of one architecture


def _rule_of(name: str, kernel: SpecialisedKernel) -> Rule:
    return Rule(
        *kernel.why,
        lambda problem, device: not kernel.unserved(problem, device),
        lambda problem, device: (Choice(name, kernel.tile(problem, device)),),
    )


SPECIALISED_RULES = tuple(map(_rule_of, SPECIALISED, SPECIALISED.values()))


# ---- fp32


def _fp32(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    rows, width = min(64, max(16, next_power_of_two(problem.seq_q))), _width(problem)
    if width <= 64:
        first = Tile(rows, 32, 8 if rows == 64 else 4, 2)
    elif width <= 128:
        first = Tile(min(rows, 32), 16, 4, 2)
    else:
        first = Tile(16, 32, 8, 2)
    return _with(_pointer_kernel(problem), first, Tile(16, 16, 4, 2), Tile(16, 16, 4, 1))


# ---- short queries


def _short(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    block_m = min(SHORT_QUERIES, max(16, next_power_of_two(problem.seq_q)))
    if block_m == SHORT_QUERIES:  # enough rows for the tensor cores' full rate: as for long queries
        return tuple(_with_rows(choice, block_m) for choice in _long_choices(problem, device))
    keys = 128 if _width(problem) <= 128 else 64
    deep = (Tile(block_m, keys, 4, 3), Tile(block_m, keys // 2, 4, 3), Tile(block_m, keys // 2, 4, 2))
    return _with(_pointer_kernel(problem), *deep, Tile(block_m, 32, 4, 2), Tile(block_m, 16, 4, 1))


# ---- long queries, by architecture


def _tuned(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    kernel = _best_kernel(problem, device)
    found = tuned_tile(problem, device, "box" if kernel == BOX else "pointer")
    return (Choice(kernel, *found),) if found else ()


NARROW_BIAS = (
    "With a bias 0.20 ms, by 128 rows, of which an SM has room for one program, 0.32 (384 x 384 tokens, 4 heads, D=32, H200, "
    "2026-11-30, triton 3.6.0)."
)


def _sm90up_64(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    kernel = _best_kernel(problem, device)
    longest = (Tile(128, 128, 8, 3),) if problem.plain else ()  # modifications need the registers of the longer tile
    large, small = Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)
    if kernel == BOX and problem.bias_descriptors == "tiles" and _width(problem) <= 32:
        return Choice(kernel, small, NARROW_BIAS), *_with(kernel, large)
    return _with(kernel, *longest, large, small)


def _sm90up_128(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    kernel = _best_kernel(problem, device)
    if (
        len(problem.score_mods + problem.mask_mods) >= MANY_MODS
    ):  # 64 keys spill with every modification under Triton 3.9
        return _with(kernel, Tile(64, 32, 4, 3), Tile(64, 32, 4, 2), Tile(64, 16, 4, 1))
    first = Tile(64, 64, 4, 3) if kernel == BOX else Tile(128, 64, 8, 3)
    return _with(kernel, first, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))


def _sm90up_256(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    kernel = _best_kernel(problem, device)
    first = () if problem.dropout else (Tile(64, 32, 4, 2),)
    return _with(kernel, *first, Tile(64, 16, 4, 2), Tile(64, 16, 4, 1))


def _sm90up_512(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    kernel = _best_kernel(problem, device)
    first = (Tile(64, 64, 8, 1),) if kernel == BOX and not problem.dropout else ()
    return _with(kernel, *first, Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(64, 16, 8, 1), Tile(16, 16, 4, 1))


def _ampere(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    kernel, width = _pointer_kernel(problem), _width(problem)
    if width <= 64:
        tiles = [Tile(128, 64, 4, 3), Tile(64, 64, 4, 2)]
    elif width <= 128:
        tiles = [Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)]
    elif width <= 256:
        tiles = [Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)]
    else:
        tiles = [Tile(32, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)]
    return _with(kernel, *tiles, Tile(64, 16, 4, 2), Tile(32, 16, 4, 1))


def _cdna(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    kernel, width = _pointer_kernel(problem), _width(problem)
    wide = width <= 128 and not problem.dropout  # random numbers are made in registers
    first = Tile(128, 64, 8, 2) if wide else Tile(64, 32, 4, 2)
    return _with(kernel, first, Tile(64, 32, 4, 2), Tile(64, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))


# ---- few programs: the tile of the deciding rule with fewer rows


@lru_cache(maxsize=256)  # asked by several rules of a plan
def _long_choices(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    for rule in _LONG_RULES:
        if rule.applies(problem, device):
            choices = rule.choices(problem, device)
            if choices:
                return choices
    return ()


def _with_rows(choice: Choice, rows: int) -> Choice:
    """The choice with at most `rows` rows, and as many warps fewer, at least 4."""
    tile, warps = choice.tile, choice.tile.num_warps
    if tile.block_m <= rows:
        return Choice(choice.kernel, tile)
    warps = min(warps, max(4, warps * rows // tile.block_m))
    return Choice(choice.kernel, replace(tile, block_m=rows, num_warps=warps))


def _least_rows(device: Device) -> int:
    """Fewest rows that keep the tensor cores' full rate: 64 where wgmma computes, 32 elsewhere."""
    return 64 if device.generation >= 90 else 32


@lru_cache(maxsize=256)
def _few(problem: AttentionProblem, device: Device) -> tuple[Choice, ...]:
    smaller = []
    for choice in _long_choices(problem, device):
        full = rows = choice.tile.block_m
        while rows > _least_rows(device) and grid_of(problem, rows)[0] < device.sms:
            rows //= 2
        if grid_of(problem, rows)[0] > grid_of(problem, full)[0]:
            smaller.append(_with_rows(choice, rows))
    return tuple(smaller)


def _cuda(problem: AttentionProblem, device: Device, least: int, below: int, width: int) -> bool:
    return least <= device.generation < below and _width(problem) <= width


_LONG_RULES = (
    Rule(
        "tuned",
        "This class of problem was measured on this class of device.",
        "See the table of measured tiles.",
        lambda problem, device: bool(_tuned(problem, device)),
        _tuned,
    ),
    Rule(
        "sm90up-d64",
        "Head dims up to 64 leave registers for 128 rows and long key tiles.",
        "128 rows of 8 warps were the best portable tile at D=64 on an H200; this width is unmeasured.",
        lambda problem, device: _cuda(problem, device, 90, 1000, 64),
        _sm90up_64,
    ),
    Rule(
        "sm90up-d128",
        "Softmax and products do not overlap inside a program, so programs small enough to share an SM hide one another's.",
        "64 rows of 4 warps with box loads were the best portable tile at D=128 on an H200; this width is unmeasured.",
        lambda problem, device: _cuda(problem, device, 90, 1000, 128),
        _sm90up_128,
    ),
    Rule(
        "sm90up-d256",
        "An output tile of 64 x 256 takes 128 registers per thread, which leaves room for at most 32 keys a step.",
        "Chosen by the limits of registers and shared memory; not measured.",
        lambda problem, device: _cuda(problem, device, 90, 1000, 256),
        _sm90up_256,
    ),
    Rule(
        "sm90up-d512",
        "An output tile of 64 x 512 takes 128 registers of each thread of 8 warps; a buffer of 64 keys fills shared memory.",
        "4096 x 4 causal, D=512: 228 TFLOP/s, with two buffers of 32 keys 209 (H100, 2026-11-26, triton 3.6.0).",
        lambda problem, device: _cuda(problem, device, 90, 1000, 512),
        _sm90up_512,
    ),
    Rule(
        "ampere",
        "sm_80 to sm_89 keep Q in registers and load K and V by asynchronous copies through pointers.",
        "The largest of the tiles tried that compile for sm_80 without spills; not measured.",
        lambda problem, device: 80 <= device.generation < 90,
        _ampere,
    ),
    Rule(
        "cdna",
        "A CDNA compute unit has 64 KiB of shared memory, so K and V are buffered once.",
        "Chosen by the limits of shared memory; compiled, not measured.",
        lambda problem, device: device.backend == "hip",
        _cdna,
    ),
)

RULES: tuple[Rule, ...] = (
    Rule(
        "interpreter",
        "The interpreter runs programs one after the other, so tiles need only suit short test lengths.",
        "Its time is the number of operations it interprets, not their size.",
        lambda problem, device: device.backend == "interpreter",
        _interpreter,
    ),
    Rule(
        "fp32",
        "fp32 products run on the FP32 pipe and hold their operands in registers, so tiles are small.",
        "The largest tiles that compile for sm_80, sm_90 and gfx942 with at most 8 bytes of spills; not measured.",
        lambda problem, device: problem.dtype == "float32",
        _fp32,
    ),
    Rule(
        "short-sequences",
        "A tile as small as the sequence: many programs share an SM and hide one another's loads, and little is padding.",
        "Batches of 2 to 64 tokens, D=32 to 128: 0.11 to 0.80 times the time of decoding's kernel or of the one for sm_90, 0.07 "
        "to 0.80 times cuDNN's (H200, 2026-11-30, triton 3.6.0).",
        is_short,
        _short_sequences,
    ),
    *SPECIALISED_RULES,
    Rule(
        "short-queries",
        "There are fewer queries than rows in a full tile, so the tile takes the next power of two of rows, at least 16.",
        "K and V are read once per tile whatever its rows, so memory sets the time, not the rows.",
        lambda problem, device: problem.seq_q < SHORT_QUERIES,
        _short,
    ),
    Rule(
        "few-programs",
        "Full tiles make fewer programs than there are SMs, so rows are halved, as far as the tensor cores allow.",
        "An idle SM costs more than the extra reads of K and V, which the L2 serves.",
        lambda problem, device: bool(_few(problem, device)),
        _few,
    ),
    *_LONG_RULES,
)

BEFORE = RULES[: RULES.index(SPECIALISED_RULES[0])]
"""Rules that decide before those of kernels for one architecture."""
