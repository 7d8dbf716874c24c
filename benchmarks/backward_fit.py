"""Fits plan/backward/backward_time.py to results/backward_versions.jsonl and prints its table.

PYTHONPATH=src python benchmarks/backward_fit.py
"""

import json
from pathlib import Path

import numpy as np

from tilefold.plan import AttentionProblem
from tilefold.plan.backward.backward_time import features

RECORD = Path(__file__).parent / "results" / "backward_versions.jsonl"


def main() -> None:
    rows: dict[tuple[str, str, int, bool], list[tuple[tuple[float, ...], float]]] = {}
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["version"].startswith("FA4"):
            continue
        batch, tokens, heads, kv_heads, dim, causal = row["case"]
        if dim not in (64, 128):
            continue
        problem = AttentionProblem(batch, tokens, tokens, heads, kv_heads, dim, dim, causal=causal)
        device = "h200" if "H200" in row["device"] else "h100"
        rows.setdefault((device, row["version"], dim, causal), []).append((features(problem), row["ms"]))
    print("RATES = {")
    for key, found in sorted(rows.items()):
        x, y = np.array([one for one, _ in found]), np.array([ms for _, ms in found])
        rates = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
        print(f"    {key!r}: ({', '.join(f'{one:.3g}' for one in rates)}),".replace("'", '"'))
    print("}  # fmt: skip")


if __name__ == "__main__":
    main()
