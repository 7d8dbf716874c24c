"""What processes tell one another in the run's folder: which test is taken, how tests ended."""

import hashlib
import json
from pathlib import Path
from typing import Any

LOST = 3  # exit code of a process whose context on the device is gone; the test is written down


def key_of(test: str) -> str:
    """The name of the file that says a test is taken."""
    return hashlib.sha256(test.encode()).hexdigest()[:24]


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The last result of every test, by its id; a line that a dead process left half written does not count."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            old = found.get(row["test"])
            if old is None or row["at"] >= old["at"]:
                found[row["test"]] = row
    return found


def slow_ones(record: Path) -> set[str]:
    """The tests that were among the slowest of any run of a record."""
    lines = record.read_text().splitlines() if record.exists() else []
    return {test for line in lines for test, _ in json.loads(line)["slowest"]}
