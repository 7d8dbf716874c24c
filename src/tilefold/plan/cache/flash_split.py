"""flash-attention's split decision as a pure function, so that its choice can be predicted for any device.

Written from the behaviour of flash-attention 2.8.3 (github.com/Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp:
num_splits_heuristic, set_params_splitkv, mha_fwd, mha_varlen_fwd, mha_fwd_kvcache; src/flash_fwd_launch_template.h for tiles).
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem

FUNCTIONS = {"dense": "flash_attn_func", "varlen": "flash_attn_varlen_func", "kvcache": "flash_attn_with_kvcache"}
CALLS = tuple(FUNCTIONS)
PLAIN, SPLIT, COMBINE = "flash_fwd_kernel", "flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel"
MOST_SPLITS = 128
PROGRAMS_PER_SM = 2  # it counts each SM twice, because its programs have 128 threads
ENOUGH = 0.8  # of the slots: from there on nothing is split
GOOD = 0.85  # of the best efficiency: the fewest splits that reach it are taken
SPLIT_ROWS = 64
HEAD_DIMS = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A number of splits that it weighs: the share of slots used in `waves` rounded up, waves / ceil(waves)."""

    splits: int
    waves: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class FlashWork:
    """What a call is to the heuristic.

    rows, heads: queries and heads per sequence after packing; packed: the query heads of a KV head have become rows.
    tiles: query tiles of all sequences and heads, 64 rows each; slots: programs that it takes to run at a time.
    key_block, blocks: keys a block, and blocks of the keys (of the whole cache with kvcache).
    causal: the kernel's own flag; chooses: the heuristic is asked; forced: only the split kernel reads such a cache.
    """

    rows: int
    heads: int
    packed: bool
    tiles: int
    slots: int
    key_block: int
    blocks: int
    causal: bool
    chooses: bool
    forced: bool


def _float32(value: float) -> float:
    """Rounded as C++ floats are: at exact thresholds the rounding decides."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@lru_cache(maxsize=4096)
def flash_candidates(tiles: int, slots: int, blocks: int) -> tuple[Candidate, ...]:
    """The numbers of splits that are weighed: up to MOST_SPLITS, slots and blocks, without those that leave as many blocks
    to a split as one fewer did, since some split would stay empty."""
    found = []
    for splits in range(1, min(MOST_SPLITS, slots, blocks) + 1):
        if splits > 1 and -(-blocks // splits) == -(-blocks // (splits - 1)):
            continue
        waves = _float32(_float32(tiles * splits) / slots)
        found.append(Candidate(splits, waves, _float32(waves / -(-waves // 1))))
    return tuple(found)


@lru_cache(maxsize=4096)
def flash_splits(tiles: int, slots: int, blocks: int) -> int:
    """How many parts the keys are folded in: 1 if the query tiles fill at least 80 % of the slots, else the fewest whose wave
    efficiency reaches 85 % of the best one's.

    tiles: query tiles of all sequences and heads; slots: twice the SMs; blocks: of keys.  ValueRangeError, naming the
    argument, for numbers below 1 (blocks below 0)."""
    for name, value, least in (("tiles", tiles, 1), ("slots", slots, 1), ("blocks", blocks, 0)):
        if value < least:
            raise ValueRangeError(f"{name} must be at least {least}, got {value}")
    if fills(tiles, slots):
        return 1
    weighed = flash_candidates(tiles, slots, blocks)
    best = max((one.efficiency for one in weighed), default=0.0)
    return next((one.splits for one in weighed if one.efficiency >= GOOD * best), 1)


def fills(tiles: int, slots: int) -> bool:
    """Whether so many tiles count as enough for the device: the comparison is one of 32-bit floats."""
    return tiles >= _float32(_float32(ENOUGH) * slots)


def flash_head_dim(dim: int) -> int:
    """The head dim that its kernels are compiled for and that holds `dim`, which is at most 256."""
    return next(size for size in HEAD_DIMS if dim <= size)


def flash_split_tile(dim: int) -> tuple[int, int]:
    """(queries, keys) of a tile of the split kernel, which the heuristic counts with whichever kernel runs."""
    return SPLIT_ROWS, 256 if dim <= 64 else 128 if dim <= 128 else 64


def flash_plain_tile(dim: int, device: Device, causal: bool, dropout: bool) -> tuple[int, int]:
    """(queries, keys) of a tile of the kernel without splits; `causal` as in `FlashWork`."""
    width = flash_head_dim(dim)
    small = device.generation // 10 == 8 and device.generation > 80  # sm_86, sm_89: less shared memory than sm_80
    if width == 32:
        return 128, 128
    if width == 64:
        return 128, 64 if dropout else 128
    if width == 128 and dropout:
        return 128, 32
    if width in (96, 128) and small:
        return (64, 64) if causal else (128, 64 if width == 96 else 32)
    if width == 192 and dropout:
        return 64, 64
    # At 256 a tile of 128 rows is taken where one fits, and two of 64 rows do not.
    roomy = device.smem_per_block >= 2 * 256 * (128 + 2 * 64) and device.smem_per_sm < 4 * 256 * (64 + 2 * 64)
    return (64, 64) if width == 256 and not roomy else (128, 64)


def flash_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """What flash-attention 2.8 refuses of a problem, as the argument and a reason, or None."""
    if device.backend != "cuda" or device.generation < 80:
        return f"device must be an NVIDIA GPU from sm_80 on, got {device.name} ({device.target})"
    if problem.dtype == "float32":
        return "dtype must be float16 or bfloat16, got 'float32'"
    if max(problem.dim_qk, problem.dim_v) > 256:
        return f"dim must be at most 256, got {max(problem.dim_qk, problem.dim_v)}"
    if problem.dim_qk != problem.dim_v:
        return f"dim_v must be dim, got {problem.dim_v} and {problem.dim_qk}"
    if not problem.batch:
        return "batch must be at least 1, got 0"
    extra = [mod for mod in (*problem.score_mods, *problem.mask_mods) if mod not in ("softcap", "alibi")]
    if problem.dropout and "softcap" in problem.score_mods:
        return "softcap does not go with dropout"
    if extra or problem.sinks:
        return f"scores and masks may have softcap and alibi only, got {', '.join(extra) or 'sinks'}"
    return None


def flash_work(
    problem: AttentionProblem, device: Device, call: str, capacity: int, paged: bool = False, append: bool = False
) -> FlashWork:
    """What the call (one of `CALLS`) is to the heuristic.

    capacity: rows of the cache with kvcache, else the keys; paged: there is a block table; append: new keys are written.
    Unsupported, naming the argument, for what flash-attention refuses."""
    refusal = flash_refusal(problem, device)
    if refusal:
        raise Unsupported(f"policy flash-attn: {refusal}")
    alibi = "alibi" in problem.score_mods
    left, right = problem.window
    if (
        call == "dense"
    ):  # here a window as wide as the keys is dropped before heads are packed, in the other calls after
        left, right = (-1 if side >= capacity else side for side in (left, right))
    if problem.causal and (problem.seq_q != 1 or alibi):  # one query sees every key, causal or not
        right = 0
    # Python pads head dims to 8 in front of these two; flash_attn_with_kvcache looks at the caller's.
    whole = call != "kvcache" or problem.dim_qk % 8 == 0
    packed = problem.seq_q == 1 and problem.group > 1 and left < 0 and right < 0 and whole
    packed = packed and not alibi and not problem.dropout
    rows, heads = (problem.group, problem.kv_heads) if packed else (problem.seq_q, problem.heads)
    left, right = (-1 if side >= capacity else side for side in (left, right))
    _, key_block = flash_split_tile(problem.dim_qk)
    return FlashWork(
        rows=rows,
        heads=heads,
        packed=packed,
        tiles=problem.batch * heads * -(-rows // SPLIT_ROWS),
        slots=PROGRAMS_PER_SM * device.sms,
        key_block=key_block,
        blocks=-(-capacity // key_block),
        causal=left < 0 and right == 0,
        chooses=not problem.dropout and (call != "varlen" or packed),
        forced=paged or append,
    )
