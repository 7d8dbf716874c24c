"""What a problem costs, exactly and in closed form, and the least time that a device needs for it."""

import math
from dataclasses import dataclass

from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of the whole problem.

    flops: floating-point operations of the two products. bytes: DRAM traffic with every tensor moved once.
    exps: exponentials, one per live score and one more for a softcap's tanh.
    l2_bytes: what tiles draw from the L2 cache, as often as they do; 0 where that depends on a plan that is not known.
    """

    flops: int
    bytes: int
    exps: int
    l2_bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """One after the other."""
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.exps + other.exps,
            self.l2_bytes + other.l2_bytes,
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """The roofline: `resource` is busy longest and needs `seconds`; `times` lists every resource with its seconds."""

    resource: str
    seconds: float
    times: tuple[tuple[str, float], ...] = ()


def _triangle(n: int, cap: int) -> int:
    """Sum of min(t, cap) over t = 0 .. n - 1."""
    inside = min(max(n, 0), cap)
    return inside * (inside - 1) // 2 + (max(n, 0) - inside) * cap


def _pairs_below(problem: AttentionProblem, right: int) -> int:
    """Pairs (query i, key j) with 0 <= j < seq_k and j <= i + seq_k - seq_q + right."""
    first = problem.seq_k - problem.seq_q + right + 1
    return _triangle(first + problem.seq_q, problem.seq_k) - _triangle(first, problem.seq_k)


def live_pairs(problem: AttentionProblem) -> int:
    """The exact number of (query, key) pairs of one batch entry and head that causal and window leave alive.

    With `varlen` the maxima of the lengths stand for every sequence, so this is an upper estimate.
    """
    left, right = problem.sides
    below = _pairs_below(problem, right) if right >= 0 else problem.seq_q * problem.seq_k
    return below - (_pairs_below(problem, -left - 1) if left >= 0 else 0)


def live_keys(problem: AttentionProblem) -> int:
    """How many keys of one sequence some query can see."""
    if not problem.seq_q:
        return 0
    # The last query sits at position seq_k - 1, so only the left side of the window can hide a key from everyone.
    left = problem.sides[0]
    hidden = max(0, problem.seq_k - problem.seq_q - left) if left >= 0 else 0
    return problem.seq_k - hidden


def attention_cost(problem: AttentionProblem) -> Cost:
    """FLOPs 2 pairs (dim_qk + dim_v); bytes of q, out, lse and of the k and v rows that some query sees."""
    pairs = live_pairs(problem) * problem.batch * problem.heads
    dims = problem.dim_qk + problem.dim_v
    rows_q = problem.batch * problem.heads * problem.seq_q
    rows_k = problem.batch * problem.kv_heads * live_keys(problem)
    bytes_moved = (rows_q + rows_k) * dims * problem.itemsize + rows_q * 4
    return Cost(flops=2 * pairs * dims, bytes=bytes_moved, exps=pairs * (1 + problem.score_mods.count("softcap")))


def bound(cost: Cost, device: Device, dtype: str = "bfloat16") -> Bound:
    """The roofline bound of a cost on a device, for products in `dtype`: the slowest of the resources, each alone."""
    if device.backend == "interpreter":
        names = ("interpreter", "memory", "exp")
    else:
        names = ("FP32 pipe" if dtype == "float32" else "tensor pipe", "DRAM", "exp unit")
    seconds = (cost.flops / device.matmul_rate(dtype), cost.bytes / device.dram_rate, cost.exps / device.exp_rate)
    times = tuple(zip(names, seconds, strict=True))
    if cost.l2_bytes and device.measured_l2_bytes_per_s:
        times += (("L2 to SM", cost.l2_bytes / device.measured_l2_bytes_per_s),)
    resource, longest = max(times, key=lambda entry: entry[1])
    return Bound(resource if longest else "none", longest, times)


def even_shares(items: int, tiles: int, slots: int, most: int) -> int:
    """Fewest shares, up to `most`, of items of `tiles` tiles each whose efficiency reaches 95 % of the best reachable one.

    The efficiency is that of waves over the slots that run at once, times that of the uneven shares, which differ by a tile."""

    def efficiency(shares: int) -> float:
        waves, share = items * shares / slots, tiles / shares
        return waves / math.ceil(waves) * share / math.ceil(share)

    if not items * tiles:
        return 1
    possible = range(1, most + 1)
    best = max(map(efficiency, possible))
    return next(shares for shares in possible if efficiency(shares) >= 0.95 * best)


def _floor_sum(count: int, step: int, start: int, divisor: int) -> int:
    """Sum of floor((start + step * t) / divisor) over t = 0 .. count - 1, for start, step >= 0, in logarithmic time."""
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        last = step * count + start
        count, start, step, divisor = last // divisor, last % divisor, divisor, step
        if not divisor:
            break
    return total


def _clamped_floor_sum(count: int, step: int, start: int, cap: int, divisor: int) -> int:
    """Sum of floor(min(max(start + step * t, 0), cap) / divisor) over t = 0 .. count - 1."""
    zeros = min(count, max(0, -(start // step)))
    below = min(count, max(zeros, -((start - cap) // step)))
    return _floor_sum(below - zeros, step, start + step * zeros, divisor) + (count - below) * (cap // divisor)


def visited_tiles(problem: AttentionProblem, block_m: int, block_n: int) -> int:
    """How many block_m x block_n score tiles of one batch entry and head the kernel computes.

    For each query tile these are the key tiles from the first key that one of its queries sees to the last.
    """
    if not problem.seq_q or not problem.seq_k:
        return 0
    left, right = problem.sides
    offset, tiles_m = problem.seq_k - problem.seq_q, -(-problem.seq_q // block_m)
    # The keys of query tile t end before its last query + offset + right + 1; those of the last tile at seq_k.
    if right >= 0:
        ends = _clamped_floor_sum(
            tiles_m - 1, block_m, block_m + offset + right + block_n - 1, problem.seq_k + block_n - 1, block_n
        )
        ends += -(-problem.seq_k // block_n)
    else:
        ends = tiles_m * -(-problem.seq_k // block_n)
    starts = _clamped_floor_sum(tiles_m, block_m, offset - left, problem.seq_k, block_n) if left >= 0 else 0
    return ends - starts
