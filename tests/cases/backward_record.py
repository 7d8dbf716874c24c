"""backward_versions.jsonl, backward_packed.jsonl and backward_windows.jsonl of benchmarks/results, and which of their versions
plans take: for tests of plans and of documents."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.backward import attention_backward_reduce as rules
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.device import Device

__all__ = ["APART", "NAMES", "PEERS", "planned", "planned_packed", "rate", "record"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ORDERED = rules.ReduceOptions(ordered=True)
PEERS = "FA4", "FA4 deterministic"
APART = {replace(options, apart=True): f"{name} apart" for options, name in
         ((rules.ANY_ORDER, "added"), (ORDERED, "added in order"))}  # fmt: skip
NAMES = {None: "dS kept", rules.ANY_ORDER: "added", ORDERED: "added in order", **APART}

Case = tuple[Any, ...]  # batch, tokens, heads, KV heads, head dim, causal or the keys of a window


def record(name: str = "versions") -> dict[tuple[str, str, Case], dict[str, float]]:
    """ms by version, of each case of each run: (device, date, case); of packed batches a case has sequences and their mean."""
    runs: dict[tuple[str, str, Case], dict[str, float]] = defaultdict(dict)
    for line in (RESULTS / f"backward_{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        runs[row["device"], row["date"], tuple(row["case"])][row["version"]] = row["ms"]
    return runs


def planned(device: str, case: Case, deterministic: bool) -> AttentionBackwardPlan:
    """The plan of a case on a device of the record."""
    batch, tokens, heads, kv_heads, dim, mask = case
    changes: dict[str, Any] = {"causal": mask} if isinstance(mask, bool) else {"window": (mask, 0)}
    problem = AttentionProblem(batch, tokens, tokens, heads, kv_heads, dim, dim, **changes)
    return plan_attention_backward(problem, _named(device), deterministic=deterministic)


def _named(device: str) -> Device:
    return device_named("h200" if "H200" in device else "h100")


def planned_packed(device: str, case: Case, deterministic: bool) -> AttentionBackwardPlan:
    """The plan of a packed batch whose longest sequence is three times the mean."""
    batch, mean, heads, kv_heads, dim, causal = case
    shape = batch, 3 * mean, 3 * mean, heads, kv_heads, dim, dim
    problem = AttentionProblem(*shape, causal=causal, varlen=True, mean_q=mean)
    return plan_attention_backward(problem, _named(device), deterministic=deterministic)


def rate(case: Case, ms: float) -> float:
    """TFLOP/s of five products."""
    batch, tokens, heads, _, dim, causal = case
    return 10 * batch * tokens**2 * heads * dim / (2 if causal else 1) / ms * 1e-9
