"""Lists of compilations as data, and running them in a process of their own, under the installed Triton or another one.

Kernels compile only where TRITON_INTERPRET is off when their modules are imported, and a process holds one Triton only;
hence the worker process. A job names a builder by import path; the builder runs in the worker and returns
`(jit_function, args, kwargs)` with CPU tensors (or host tensor descriptors on them) as example arguments.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilefold.aot import cache
from tilefold.aot.report import CompileReport, SpillRule, TensorRule
from tilefold.aot.targets import target_named

__all__ = ["NEWEST_VARIABLE", "Job", "JobResult", "newest_triton", "run_jobs"]

NEWEST_VARIABLE = "TILEFOLD_TRITON_NEWEST"
"""Environment variable: folder of an unpacked wheel of the newest Triton (scripts/fetch_triton.py makes one)."""

JOB_MARK = "tilefold.aot job: "
"""What the worker writes to standard error before each job, so that the last words of a dead one can be found."""


@dataclass(frozen=True, slots=True)
class Job:
    """One compilation: builder ("package.module:function"), its keyword arguments (picklable), target name."""

    builder: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: str = "sm_90"
    label: str = ""

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items())
        return self.label or f"{self.builder}({arguments}) for {self.target}"


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job: a report, or the error (`Type: text`) that the builder or the compiler ended with."""

    job: Job
    report: CompileReport | None
    error: str = ""
    cached: bool = False
    seconds: float = 0.0

    def problems(self, *, tensor: TensorRule = "best", spills: SpillRule = "none") -> tuple[str, ...]:
        """`CompileReport.problems`, or the failure to compile at all."""
        if self.report is None:
            return (f"does not compile: {self.error}",)
        return self.report.problems(tensor=tensor, spills=spills)


def newest_triton() -> Path | None:
    """Folder of the unpacked newest Triton: $TILEFOLD_TRITON_NEWEST, else the highest version in the checkout's .cache.

    None when there is none; FileNotFoundError when the variable names a folder without a Triton.
    """
    if chosen := os.environ.get(NEWEST_VARIABLE):
        if not (Path(chosen) / "triton" / "__init__.py").is_file():
            raise FileNotFoundError(f"{NEWEST_VARIABLE}: {chosen} holds no triton/__init__.py")
        return Path(chosen)
    root = cache.checkout()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = sorted((root / ".cache").glob(f"triton-*-{tag}"), key=_version) if root else []
    return found[-1] if found else None


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.name.split("-")[1].split(".") if part.isdigit())


def run_jobs(
    jobs: Sequence[Job],
    *,
    triton: Path | None = None,
    import_from: Sequence[Path] = (),
    processes: int = 1,
    timeout_s: float = 600.0,
) -> tuple[JobResult, ...]:
    """Run `jobs` in worker processes and return their results in the same order.

    `triton`: folder of an unpacked Triton to use instead of the installed one. `import_from`: more folders to import
    builders from. A compiler that dies takes only its job with it: that job's error is what the process last said.
    `timeout_s` is for one job. Raises ValueRangeError, before anything starts, for an unknown target.
    """
    for job in jobs:
        target_named(job.target)
    count = max(1, min(processes, len(jobs)))
    environment = _environment(triton, import_from)
    with ThreadPoolExecutor(count) as pool:
        parts = list(pool.map(lambda start: _run_part(jobs[start::count], environment, timeout_s), range(count)))
    return tuple(parts[index % count][index // count] for index in range(len(jobs)))


def _environment(triton: Path | None, import_from: Sequence[Path]) -> dict[str, str]:
    """The worker's environment: no interpreter, the chosen Triton first, this tilefold, then what was there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own = Path(__file__).resolve().parents[2]
    paths = [*([triton] if triton else []), own, *import_from]
    inherited = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(
        [*(str(Path(path).resolve()) for path in paths), *([inherited] if inherited else [])]
    )
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what every version up to 3.9 does; unset it warns
    return environment


def _run_part(jobs: Sequence[Job], environment: Mapping[str, str], timeout_s: float) -> list[JobResult]:
    """Run jobs one after another; a worker that dies is replaced by one that starts behind the job that killed it."""
    results: list[JobResult] = []
    while len(results) < len(jobs):
        rest = jobs[len(results) :]
        done, last_words = _run_worker(rest, environment, timeout_s)
        results += done
        if len(done) < len(rest):
            results.append(JobResult(rest[len(done)], None, f"WorkerDied: {last_words}"))
    return results


def _run_worker(jobs: Sequence[Job], environment: Mapping[str, str], timeout_s: float) -> tuple[list[JobResult], str]:
    """One worker process: the results that it printed, in order, and why it ended early (its last words) if it did."""
    results: list[JobResult] = []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as stderr:
        listed = Path(folder) / "jobs.pickle"
        listed.write_bytes(pickle.dumps(list(jobs)))
        own = {**environment, "TRITON_CACHE_DIR": folder}  # what it writes there is never read again
        command = [sys.executable, "-m", "tilefold.aot.worker", str(listed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=own) as process:
            assert process.stdout is not None
            overdue = threading.Event()
            while True:
                watch = threading.Timer(timeout_s, _overdue, (process, overdue))
                watch.start()
                line = process.stdout.readline()
                watch.cancel()
                if not line.endswith("\n"):  # the end, or a line cut off by a crash
                    break
                results.append(_result(jobs[len(results)], line))
            code = process.wait()
        stderr.seek(0)
        said = stderr.read().rpartition(JOB_MARK)[2].partition("\n")[2][-2000:].strip()
    return results, f"no result within {timeout_s:g} s" if overdue.is_set() else f"exit status {code}; {said}"


def _overdue(process: "subprocess.Popen[str]", overdue: threading.Event) -> None:
    overdue.set()
    process.kill()


def _result(job: Job, line: str) -> JobResult:
    """Read one line of the worker's output."""
    fields = json.loads(line)
    report = CompileReport.from_json(json.dumps(fields["report"])) if fields["report"] else None
    return JobResult(job, report, fields["error"], fields["cached"], fields["seconds"])
