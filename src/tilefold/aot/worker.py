"""The process that compiles: `python -m tilefold.aot.worker JOBS`, one line of JSON per job on standard output.

JOBS is a `.pickle` file with a list of `Job` (as `run_jobs` writes it; only from a source you trust), a `.json` file,
or `-` for JSON on standard input: a list of objects with "builder", "target" and optionally "kwargs" and "label". Each
line has "label", "report" (or null), "error", "cached" and "seconds". Exit status 0 when all compiled, 1 otherwise, 2
for bad usage.
"""

import importlib
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from tilefold.aot import cache
from tilefold.aot.jobs import JOB_MARK, Job
from tilefold.aot.report import CompileReport, report_of
from tilefold.aot.targets import target_named
from tilefold.errors import ValueRangeError

__all__ = ["compile_report", "main"]


def compile_report(function: Any, args: Any, kwargs: Any, target: str) -> tuple[CompileReport, bool]:
    """Report of one kernel for the target called `target`, and whether it came from the cache.

    `function` is a @triton.jit or @gluon.jit function, `args` and `kwargs` are as in a launch, with CPU tensors.
    """
    from tilefold.aot.versions import triton_version  # imports triton

    triton_version()  # before the private imports, which an unknown version may not have
    from tilefold.aot.compile import compile_prepared, prepare

    prepared = prepare(function, args, kwargs, target_named(target))
    if kept := cache.load(prepared.key):
        return kept, True
    report = report_of(compile_prepared(prepared))
    cache.store(prepared.key, report)
    return report, False


def read_jobs(source: str) -> list[Job]:
    """The job list in file `source` (.pickle or .json) or, for "-", in JSON on standard input."""
    if source.endswith(".pickle"):
        jobs: list[Job] = pickle.loads(Path(source).read_bytes())
        return jobs
    listed = json.loads(sys.stdin.read() if source == "-" else Path(source).read_text())
    return [Job(**fields) for fields in listed]


def _build(job: Job) -> tuple[Any, Any, Any]:
    """Import the builder and call it: (jit_function, args, kwargs)."""
    module, _, name = job.builder.partition(":")
    if not name:
        raise ValueRangeError(f"builder: got {job.builder!r}, expected 'package.module:function'")
    function, args, kwargs = getattr(importlib.import_module(module), name)(**job.kwargs)
    return function, args, kwargs


def run_job(job: Job) -> dict[str, Any]:
    """Compile one job; whatever goes wrong in the builder or the compiler becomes the "error" of its result."""
    start, report, cached, error = time.perf_counter(), None, False, ""
    try:
        report, cached = compile_report(*_build(job), job.target)
    except Exception as problem:  # the compiler raises what it likes; the text is the finding
        error = f"{type(problem).__name__}: {problem}"
    seconds = round(time.perf_counter() - start, 3)
    return {
        "label": str(job),
        "report": json.loads(report.to_json()) if report else None,
        "error": error,
        "cached": cached,
        "seconds": seconds,
    }


def main(arguments: list[str]) -> int:
    """Run the job list named on the command line."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    jobs = read_jobs(arguments[0])
    sys.stdout.flush()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print to standard output what belongs into the log
    failed = False
    for job in jobs:
        print(f"{JOB_MARK}{job}", file=sys.stderr, flush=True)
        result = run_job(job)
        failed = failed or bool(result["error"])
        results.write(json.dumps(result) + "\n")
        results.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
