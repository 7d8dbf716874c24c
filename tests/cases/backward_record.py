"""benchmarks/results/backward_versions.jsonl, and which of its versions plans take: for tests of plans and of documents."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.backward import attention_backward_reduce as rules
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward

__all__ = ["APART", "NAMES", "PEERS", "planned", "rate", "record"]

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "backward_versions.jsonl"
ORDERED = rules.ReduceOptions(ordered=True)
PEERS = "FA4", "FA4 deterministic"
APART = {replace(options, apart=True): f"{name} apart" for options, name in
         ((rules.ANY_ORDER, "added"), (ORDERED, "added in order"))}  # fmt: skip
NAMES = {None: "dS kept", rules.ANY_ORDER: "added", ORDERED: "added in order", **APART}

Case = tuple[Any, ...]  # batch, tokens, heads, KV heads, head dim, causal


def record() -> dict[tuple[str, str, Case], dict[str, float]]:
    """ms by version, of each case of each run: (device, date, case)."""
    runs: dict[tuple[str, str, Case], dict[str, float]] = defaultdict(dict)
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        runs[row["device"], row["date"], tuple(row["case"])][row["version"]] = row["ms"]
    return runs


def planned(device: str, case: Case, deterministic: bool) -> AttentionBackwardPlan:
    """The plan of a case on a device of the record."""
    batch, tokens, heads, kv_heads, dim, causal = case
    problem = AttentionProblem(batch, tokens, tokens, heads, kv_heads, dim, dim, causal=causal)
    return plan_attention_backward(
        problem, device_named("h200" if "H200" in device else "h100"), deterministic=deterministic
    )


def rate(case: Case, ms: float) -> float:
    """TFLOP/s of five products."""
    batch, tokens, heads, _, dim, causal = case
    return 10 * batch * tokens**2 * heads * dim / (2 if causal else 1) / ms * 1e-9
