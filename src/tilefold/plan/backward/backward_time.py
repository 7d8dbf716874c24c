"""How long a backward pass takes on sm_90, where that was measured: full and causal, head dims of 64 and 128.

RATES is printed by benchmarks/backward_fit.py, which fits it to benchmarks/results/backward_versions.jsonl; a test holds what
plans predict to that record."""

from tilefold.plan.cost import live_pairs
from tilefold.plan.problem import AttentionProblem

RATES: dict[tuple[str, str, int, bool], tuple[float, float, float]] = {
    ("h100", "added", 64, False): (16.9, 0.844, 0.13),
    ("h100", "added", 64, True): (15.9, 1.13, 0.484),
    ("h100", "added", 128, False): (15, 0.544, 0.253),
    ("h100", "added", 128, True): (13.7, 0.59, 1.88),
    ("h100", "added in order", 64, False): (16.6, 0.98, 0.624),
    ("h100", "added in order", 64, True): (16.1, 1.14, 0.906),
    ("h100", "added in order", 128, False): (15.9, 0.312, 0.418),
    ("h100", "added in order", 128, True): (13.8, 0.773, 1.59),
    ("h100", "dS kept", 64, False): (27.1, 0.377, -0.539),
    ("h100", "dS kept", 64, True): (25, 0.787, 0.438),
    ("h100", "dS kept", 128, False): (17.2, -0.716, 1.4),
    ("h100", "dS kept", 128, True): (14.9, 0.586, 1.09),
    ("h200", "added", 64, False): (17.3, 0.641, -0.289),
    ("h200", "added", 64, True): (16.4, 0.932, 0.221),
    ("h200", "added", 128, False): (16.2, -0.251, -0.276),
    ("h200", "added", 128, True): (14.9, 0.395, 0.659),
    ("h200", "added in order", 64, False): (17.3, 0.693, 0.124),
    ("h200", "added in order", 64, True): (15.6, 1, 0.878),
    ("h200", "added in order", 128, False): (16.3, 0.0495, 0.0576),
    ("h200", "added in order", 128, True): (14.4, 0.55, 0.963),
    ("h200", "dS kept", 64, False): (22.9, 0.412, -1.15),
    ("h200", "dS kept", 64, True): (22, 0.678, -0.045),
    ("h200", "dS kept", 128, False): (15.2, 0.0952, 0.85),
    ("h200", "dS kept", 128, True): (14.6, 0.434, 0.733),
}  # fmt: skip
"""ms for each of `features`, by device, version of the kernel, head dim and causal."""


def features(problem: AttentionProblem) -> tuple[float, float, float]:
    """What the time is linear in: pairs of a query and a key times the head dim (10^12), the mean of the numbers of q and of k
    (10^8), and the tiles of queries that the longest program walks over (10^3), which the end of a launch waits for."""
    n = problem
    columns, tile = n.batch * n.dim_qk, 8192 // n.dim_qk
    rows = (n.seq_q * n.heads + n.seq_k * n.kv_heads) / 2
    return live_pairs(n) * n.heads * columns / 1e12, rows * columns / 1e8, n.seq_q / tile * n.group / 1e3
