"""When a prefix that a batch shares is attended to once, apart, and merged: a rule of bytes and FLOPs, a value that says why."""

from dataclasses import dataclass
from functools import lru_cache

from tilefold.cache_formats import format_named
from tilefold.plan.device import Device
from tilefold.plan.problem import DTYPE_BYTES

LAUNCHES_S = (
    8e-6  # what two launches more take, the prefix's and the merge's: beginning, end, and half-empty SMs between them
)
PRODUCT_SHARE = 0.4  # of the matrix rate, that a fold over a cache reaches
L2_OVER_DRAM = 1.3  # rates, where the L2 cache was not measured
KEPT = 0.7  # of the L2 cache, that a prefix may fill and still be there when the next sequence reads it


@dataclass(frozen=True, slots=True)
class PrefixProblem:
    """A batch of `batch` sequences with `tokens` queries in all, whose first `prefix` keys are the same."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    prefix: int
    dtype: str
    storage: str = "plain"  # of keys and values: "plain" as the queries, else in 8 bits


@dataclass(frozen=True, slots=True)
class SharedPrefixPlan:
    """cascade: the prefix is attended to apart.  plain_s, cascade_s: predicted seconds for the prefix either way (the rest costs
    the same); plain_bytes, cascade_bytes: of keys, values and partial results; reason: in words."""

    cascade: bool
    plain_s: float
    cascade_s: float
    plain_bytes: int
    cascade_bytes: int
    reason: str


@lru_cache(maxsize=4096)
def plan_shared_prefix(problem: PrefixProblem, device: Device) -> SharedPrefixPlan:
    """Compare the prefix read once for each sequence with the prefix read once for all.

    Plain: batch * prefix rows of keys and values; the first from DRAM, the others from L2 if the prefix stays there, else from
    DRAM too.  Cascade: prefix rows from DRAM, two partial results written, read and merged, and two launches more.
    Either takes as long as its products, if that is longer."""
    p = problem
    size = DTYPE_BYTES[p.dtype]
    once = (
        p.prefix
        * p.kv_heads
        * (p.dim_qk + p.dim_v)
        * (size if p.storage == "plain" else format_named(p.storage).itemsize)
    )
    results = (
        3 * p.tokens * p.heads * (p.dim_v * size + 4)
    )  # one partial more written, both read; the merged was written anyway
    flops = 2 * p.tokens * p.heads * p.prefix * (p.dim_qk + p.dim_v)
    products = flops / (PRODUCT_SHARE * device.matmul_rate(p.dtype))
    again = device.dram_rate
    held = once <= KEPT * device.l2_bytes
    if held:
        again = device.measured_l2_bytes_per_s or L2_OVER_DRAM * device.dram_rate
    plain = once / device.dram_rate + (p.batch - 1) * once / again
    plain_s = max(plain, products)
    cascade_s = max((once + results) / device.dram_rate, products) + LAUNCHES_S
    where = "L2" if held else "DRAM"
    if p.batch < 2 or p.prefix == 0:
        return SharedPrefixPlan(False, plain_s, cascade_s, p.batch * once, once + results, "nothing is shared")
    cascade = cascade_s < plain_s
    words = (
        f"{p.batch} sequences read {once / 1e6:.1f} MB of prefix from {where}: {plain_s * 1e6:.0f} us; once for all, merged: "
        f"{cascade_s * 1e6:.0f} us"
    )
    return SharedPrefixPlan(cascade, plain_s, cascade_s, p.batch * once, once + results, words)
