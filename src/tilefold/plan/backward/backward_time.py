"""How long a backward pass takes on sm_90, where that was measured: full and causal, head dims of 64 and 128.

RATES is printed by benchmarks/backward_fit.py, which fits it to benchmarks/results/backward_versions.jsonl; a test holds what
plans predict to that record."""

from tilefold.plan.cost import live_pairs
from tilefold.plan.problem import AttentionProblem

RATES: dict[tuple[str, str, int, bool], tuple[float, float, float]] = {
    ("h100", "added", 64, False): (16.9, 0.844, 0.172),
    ("h100", "added", 64, True): (14.8, 1.27, 0.991),
    ("h100", "added", 128, False): (15, 0.544, 0.253),
    ("h100", "added", 128, True): (13.7, 0.59, 1.88),
    ("h100", "added in order", 64, False): (15.7, 0.875, 1.65),
    ("h100", "added in order", 64, True): (15.3, 1.28, 1.35),
    ("h100", "added in order", 128, False): (15.9, 0.312, 0.418),
    ("h100", "added in order", 128, True): (13.8, 0.773, 1.59),
    ("h100", "dS kept", 64, False): (27.1, 0.377, -0.539),
    ("h100", "dS kept", 64, True): (25, 0.787, 0.438),
    ("h100", "dS kept", 128, False): (17.2, -0.716, 1.4),
    ("h100", "dS kept", 128, True): (14.9, 0.586, 1.09),
    ("h200", "added", 64, False): (20.4, -0.0179, -0.992),
    ("h200", "added", 64, True): (18.4, 0.716, 0.0601),
    ("h200", "added", 128, False): (17.7, -0.564, -0.498),
    ("h200", "added", 128, True): (15.9, 0.184, 0.461),
    ("h200", "added in order", 64, False): (18.5, 0.535, 0.246),
    ("h200", "added in order", 64, True): (17.1, 1.17, 0.613),
    ("h200", "added in order", 128, False): (16.6, 0.0444, -0.0626),
    ("h200", "added in order", 128, True): (14.1, 0.533, 1.87),
    ("h200", "dS kept", 64, False): (23.4, -0.458, -0.719),
    ("h200", "dS kept", 64, True): (22.3, 0.336, -0.125),
    ("h200", "dS kept", 128, False): (15.2, 0.0957, 0.919),
    ("h200", "dS kept", 128, True): (14.6, 0.434, 0.731),
}  # fmt: skip
"""ms for each of `features`, by device, version of the kernel, head dim and causal."""


def features(problem: AttentionProblem) -> tuple[float, float, float]:
    """What the time is linear in: pairs of a query and a key times the head dim (10^12), the mean of the numbers of q and of k
    (10^8), and the tiles of queries that the longest program walks over (10^3), which the end of a launch waits for."""
    n = problem
    columns, tile = n.batch * n.dim_qk, 8192 // n.dim_qk
    rows = (n.seq_q * n.heads + n.seq_k * n.kv_heads) / 2
    return live_pairs(n) * n.heads * columns / 1e12, rows * columns / 1e8, n.seq_q / tile * n.group / 1e3
