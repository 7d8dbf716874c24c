"""The summary of a run: how many ran, passed, failed, were skipped and why, what was slow; and the row of a record."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .records import rows_of

BAD = ("failed", "crashed", "hung")
SLOWEST = 10
TOLD = 25  # tests whose words are printed, too; the results hold all
LINES = {"failed": 12, "crashed": 40, "hung": 40}  # of the words about a test that are printed


def summarise(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Print the run so far and return it: counts, lists of ids, reasons."""
    rows = {test: row for test, row in rows_of(folder).items() if row["outcome"] != "again"}
    collected = folder / "collected.json"
    tests = json.loads(collected.read_text()).keys() if collected.exists() else set()
    counts = Counter(row["outcome"] for row in rows.values())
    found: dict[str, Any] = {
        "tests": len(tests | rows.keys()),
        "passed": counts["passed"],
        "bad": {test: row["outcome"] for test, row in sorted(rows.items()) if row["outcome"] in BAD},
        "skipped": dict(Counter(row["why"] for row in rows.values() if row["outcome"] == "skipped").most_common()),
        "left": len(tests - rows.keys()) if collected.exists() else 1,
        "seconds": round(sum(seconds for seconds, _ in run["pieces"]), 1),
        "slowest": [
            [test, row["seconds"]] for test, row in sorted(rows.items(), key=lambda it: -it[1]["seconds"])[:SLOWEST]
        ],
    }
    _print(found, rows, run, folder)
    return found


def _print(found: dict[str, Any], rows: dict[str, Any], run: dict[str, Any], folder: Path) -> None:
    for i, (test, outcome) in enumerate(found["bad"].items()):
        print(f"{outcome.upper()} {test}")
        if i < TOLD:
            print("\n".join(rows[test]["why"].strip().splitlines()[-LINES[outcome] :]), end="\n\n")
    print("\nslowest:")
    for test, seconds in found["slowest"]:
        print(f"{seconds:8.1f} s  {test}")
    if found["skipped"]:
        print("skipped:")
        for why, number in found["skipped"].items():
            print(f"{number:8}    {why}")
    bad = Counter(found["bad"].values())
    ran = found["passed"] + sum(bad.values())
    processes = f"{run['jobs']} processes on {run['cores']} cores"
    processes += f" and {run['gpus']} GPUs" if run.get("gpus", 1) > 1 else ""
    several = f", in {len(run['pieces'])} pieces" if len(run["pieces"]) > 1 else ""
    print(
        f"\n{run['device']}, driver {run.get('driver')}, torch {run['torch']}, triton {run['triton']}, commit {run['commit']}"
    )
    print(
        f"{found['tests']} tests: {ran} ran, {found['passed']} passed, "
        + "".join(f"{bad[name]} {name}, " for name in BAD)
        + f"{sum(found['skipped'].values())} skipped; {found['seconds']:.0f} s{several}, {processes}"
    )
    if found["left"]:
        print(f"{found['left'] if rows else 'all'} tests are left: the same command goes on with them")
    print(f"results and logs: {folder}", flush=True)


def add_row(record: Path, run: dict[str, Any], found: dict[str, Any]) -> str:
    """Add a complete run to the record; returns a sentence that says so, or why not."""
    if found["left"] or run["selected"]:
        return f"not recorded: {'some tests are left' if found['left'] else 'not all tests were selected'}"
    named = ("commit", "sources", "device", "driver", "python", "torch", "triton", "gpus", "cores", "jobs", "pieces")
    row = {"date": time.strftime("%Y-%m-%d"), **{name: run.get(name) for name in named}, "seconds": found["seconds"]}
    row |= {name: found[name] for name in ("tests", "passed", "bad", "skipped", "slowest")}
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    return f"recorded in {record}"
