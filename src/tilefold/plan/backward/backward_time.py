"""How long a backward pass takes on sm_90, where that was measured: full and causal, head dims of 64 and 128.

RATES is printed by benchmarks/backward_fit.py, which fits it to benchmarks/results/backward_versions.jsonl; a test holds what
plans predict to that record."""

from tilefold.plan.cost import live_pairs
from tilefold.plan.problem import AttentionProblem

RATES: dict[tuple[str, str, int, bool], tuple[float, float, float]] = {
    ("h100", "added", 64, False): (17.3, 0.741, -0.3),
    ("h100", "added", 64, True): (16.4, 0.947, 0.244),
    ("h100", "added", 128, False): (15.5, 0.517, -0.354),
    ("h100", "added", 128, True): (14, 0.768, 1.17),
    ("h100", "added in order", 64, False): (17.5, 0.969, 0.0669),
    ("h100", "added in order", 64, True): (16.3, 1.57, 0.524),
    ("h100", "added in order", 128, False): (16.5, 0.281, -0.203),
    ("h100", "added in order", 128, True): (11, 1.37, 4.18),
    ("h100", "dS kept", 64, False): (26.6, -0.265, -0.338),
    ("h100", "dS kept", 64, True): (24.4, 0.681, 0.265),
    ("h100", "dS kept", 128, False): (16.9, -0.42, 1.3),
    ("h100", "dS kept", 128, True): (15.3, 0.554, 0.75),
    ("h200", "added", 64, False): (19.6, 0.304, -0.455),
    ("h200", "added", 64, True): (18.3, 0.685, 0.0349),
    ("h200", "added", 128, False): (17.7, -0.518, -0.129),
    ("h200", "added", 128, True): (15.9, 0.389, 0.216),
    ("h200", "added in order", 64, False): (18.7, 0.567, 0.138),
    ("h200", "added in order", 64, True): (17.9, 0.854, 0.455),
    ("h200", "added in order", 128, False): (16.6, 0.0951, 0.0657),
    ("h200", "added in order", 128, True): (14.3, 0.613, 1.54),
    ("h200", "dS kept", 64, False): (22.4, -0.0259, -0.361),
    ("h200", "dS kept", 64, True): (21.5, 0.54, 0.0463),
    ("h200", "dS kept", 128, False): (15.1, 0.192, 1.02),
    ("h200", "dS kept", 128, True): (14.8, 0.501, 0.437),
}  # fmt: skip
"""ms for each of `features`, by device, version of the kernel, head dim and causal."""


def features(problem: AttentionProblem) -> tuple[float, float, float]:
    """What the time is linear in: pairs of a query and a key times the head dim (10^12), numbers of q (10^8), and the query tiles
    that the longest program walks over (10^3), which the end of a launch waits for."""
    n = problem
    heads, tile = n.batch * n.heads * n.dim_qk, 8192 // n.dim_qk
    return live_pairs(n) * heads / 1e12, n.seq_q * heads / 1e8, n.seq_q / tile * n.group / 1e3
