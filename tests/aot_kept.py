"""Reports of compiled kernels that lie in the repository, so that a fresh checkout compiles only what changed.

They are put into the cache of `tilefold.aot`, whose keys cover a kernel's source with all that it calls, its signature and
options, the target, the Triton and the package that reads them: what is found there is what compiling would give.  Some are
compiled again in every run and compared.  `make reports` writes them anew.
"""

import functools
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tilefold.aot import Job, JobResult, run_jobs
from tilefold.aot.cache import CACHE_VARIABLE, cache_folder

REPORTS = Path(__file__).with_name("aot_reports.jsonl")
IGNORED = "TILEFOLD_AOT_REPORTS"  # "ignore": nothing is taken from the repository
AGAIN = 48  # one report in so many is compiled again


@functools.cache
def unpack() -> None:
    """Put the reports into the cache, once a process; those that it has already stay."""
    folder = cache_folder()
    if folder is None or os.environ.get(IGNORED) == "ignore" or not REPORTS.is_file():
        return
    for line in REPORTS.read_text().splitlines():
        kept = json.loads(line)
        path = folder / kept["file"]
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(kept["report"]))
            part.replace(path)  # other processes see the whole file or none


def compile_again(results: Mapping[Any, JobResult], import_from: tuple[Path, ...]) -> dict[Any, JobResult]:
    """Compile some of those that came from the cache, by (module, (name, target)): the reports have to be equal."""
    chosen: dict[Any, Job] = {
        key: found.job
        for key, found in results.items()
        if found.cached and zlib.crc32(repr(key[1]).encode()) % AGAIN == 0
    }
    with mock.patch.dict(os.environ, {CACHE_VARIABLE: "off"}):
        return dict(zip(chosen, run_jobs(list(chosen.values()), import_from=import_from), strict=True))


def pack() -> int:
    """Write the repository's reports from the cache, in the order of kernels; how many."""
    folder = cache_folder()
    assert folder is not None
    kept = [
        {"file": path.relative_to(folder).as_posix(), "report": json.loads(path.read_text())}
        for path in folder.glob("*/*.json")
    ]
    kept.sort(key=lambda each: [each["report"][name] for name in ("kernel", "target", "triton")] + [each["file"]])
    REPORTS.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in kept))
    return len(kept)


if __name__ == "__main__":
    print(f"{pack()} reports in {REPORTS.name}")
