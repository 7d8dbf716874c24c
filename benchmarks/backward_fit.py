"""Fits plan/backward/backward_time.py to results/backward_versions.jsonl and prints its table.

PYTHONPATH=src python benchmarks/backward_fit.py
"""

import json
from pathlib import Path

import numpy as np

from tilefold.plan import AttentionProblem
from tilefold.plan.backward.backward_time import features

RECORD = Path(__file__).parent / "results" / "backward_versions.jsonl"


def nearest(x: np.ndarray) -> np.ndarray:
    """Rates with x @ rates near 1 whose largest error is small: least squares that weigh what is far off more and more."""
    weights, best, least = np.ones(len(x)), np.zeros(x.shape[1]), np.inf
    for _ in range(300):
        root = np.sqrt(weights / weights.sum())
        rates = np.linalg.lstsq(x * root[:, None], root, rcond=None)[0]
        errors = np.abs(x @ rates - 1)
        if errors.max() < least:
            best, least = rates, errors.max()
        weights *= 0.05 + errors / errors.max()
    return best


def main() -> None:
    rows: dict[tuple[str, str, int, bool], list[tuple[tuple[float, ...], float]]] = {}
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["version"].startswith("FA4") or row["version"].endswith("apart"):  # of apart too few
            continue
        batch, tokens, heads, kv_heads, dim, causal = row["case"]
        if dim not in (64, 128):
            continue
        problem = AttentionProblem(batch, tokens, tokens, heads, kv_heads, dim, dim, causal=causal)
        device = "h200" if "H200" in row["device"] else "h100"
        rows.setdefault((device, row["version"], dim, causal), []).append((features(problem), row["ms"]))
    print("RATES = {")
    for key, found in sorted(rows.items()):
        rates = nearest(np.array([np.array(one) / ms for one, ms in found]))
        print(f"    {key!r}: ({', '.join(f'{one:.3g}' for one in rates)}),".replace("'", '"'))
    print("}  # fmt: skip")


if __name__ == "__main__":
    main()
