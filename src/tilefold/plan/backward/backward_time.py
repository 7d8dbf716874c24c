"""How long a backward pass takes on sm_90, where that was measured: full and causal, head dims of 64 and 128.

RATES is printed by benchmarks/backward_fit.py, which fits it to benchmarks/results/backward_versions.jsonl; a test holds what
plans predict to that record."""

from tilefold.plan.cost import live_pairs
from tilefold.plan.problem import AttentionProblem

RATES: dict[tuple[str, str, int, bool], tuple[float, float, float]] = {
    ("h100", "added", 64, False): (18.8, 0.65, -0.304),
    ("h100", "added", 64, True): (17.7, 0.903, 0.197),
    ("h100", "added", 128, False): (16.7, 0.175, -0.299),
    ("h100", "added", 128, True): (14, 0.709, 1.34),
    ("h100", "added in order", 64, False): (18.3, 0.942, 0.238),
    ("h100", "added in order", 64, True): (17.5, 1.41, 0.54),
    ("h100", "added in order", 128, False): (16.4, 0.296, -0.167),
    ("h100", "added in order", 128, True): (11.1, 1.37, 4.2),
    ("h100", "dS kept", 64, False): (26.6, -0.263, -0.339),
    ("h100", "dS kept", 64, True): (24.4, 0.672, 0.268),
    ("h100", "dS kept", 128, False): (16.8, -0.373, 1.26),
    ("h100", "dS kept", 128, True): (15.3, 0.577, 0.704),
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
