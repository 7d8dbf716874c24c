"""What a run's records say: problems and pairs by operation, kernels reached, failures with a line that shows each again."""

import json
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .axes import covered_by, packed_options, pairs_of, valid_pairs
from .families import FAMILIES
from .problem import kind_of
from .worker import rows_of

MOST = 25  # kinds of failure that are printed; the records hold all


def summarise(folder: Path, record: Path | None = None) -> int:
    """Print the tables; add a row to `record`; 1 if anything failed."""
    rows = rows_of(folder)
    run = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
    problems, seconds, kernels = Counter(), Counter(), Counter()
    covered: dict[str, set[Any]] = {}
    failures: dict[str, list[Any]] = {}
    for row in rows:
        problems[row["op"]] += row["problems"]
        seconds[row["op"]] += row["seconds"]
        kernels.update(row["kernels"])
        if row["op"] in FAMILIES and row["problems"]:
            covered.setdefault(row["op"], set()).update(pairs_of(row["o"]) & valid_pairs(FAMILIES[row["op"]]).keys())
        for failure in row["failures"]:
            failures.setdefault(f"{row['op']} {kind_of(failure['said'])}", []).append(failure)
    for kind, found in sorted(failures.items())[:MOST]:
        smallest = min(found, key=lambda f: len(json.dumps(f["problem"])))
        print(f"FAILED {len(found)}x {kind}\n  {smallest['said'][:300]}")
        print(f"  python -m sweep --reproduce '{json.dumps(smallest['problem'])}'")
    print(f"{'operation':12} {'problems':>8} {'kinds':>6} {'pairs':>13} {'seconds':>8}")
    kinds = Counter(row["op"] for row in rows)
    for op in sorted(problems):
        every = len(valid_pairs(FAMILIES[op])) if op in FAMILIES else 0
        print(f"{op:12} {problems[op]:8} {kinds[op]:6} {len(covered.get(op, ())):6}/{every:6} {seconds[op]:8.0f}")
    have, every = (
        sum(map(len, covered.values())),
        sum(len(valid_pairs(FAMILIES[op])) for op in problems if op in FAMILIES),
    )
    print(f"{'all':12} {sum(problems.values()):8} {len(rows):6} {have:6}/{every:6} {sum(seconds.values()):8.0f}")
    print(f"kernels ({len(kernels)}): " + " ".join(sorted(kernels)))
    print(f"{'no failure' if not failures else f'{len(failures)} kinds of failure'}", flush=True)
    if record is not None:
        failed = [(row["op"], row["o"]) for row in rows if row["problems"]]
        _record(record, run, problems, covered, kernels, failures, failed)
    return 1 if failures or not rows else 0


def _record(record: Path, run: Any, problems: Any, covered: Any, kernels: Any, failures: Any, drawn: list[Any]) -> None:
    import torch
    import triton

    gpu = torch.cuda.is_available()
    asked = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": run.pop("commit", "") or asked.stdout.strip() or "unknown",
        "device": torch.cuda.get_device_name() if gpu else f"interpreter on {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        **run,
        "problems": dict(sorted(problems.items())),
        "total": sum(problems.values()),
        "pairs": {op: [len(found), len(valid_pairs(FAMILIES[op]))] for op, found in sorted(covered.items())},
        "drawn": packed_options(drawn),
        "kernels": sorted(kernels),
        "failures": {kind: len(found) for kind, found in sorted(failures.items())},
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def tell_union(record: Path) -> int:
    """Print what all rows of a record cover together."""
    done, left = covered_by(record), 0
    for name, family in FAMILIES.items():
        every = valid_pairs(family).keys()
        have = len(done.get(name, set()) & every)
        left += len(every) - have
        print(f"{name:12} {have:6}/{len(every):6}")
    print(f"{left} pairs are left" if left else "every pair of options was drawn")
    return 0
