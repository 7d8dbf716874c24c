"""Shared by the ahead-of-time tests: a device for each target, and attention problems of a common size."""

import os
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from aot_kept import compile_again, unpack
from tilefold.aot import Job, JobResult, newest_triton, run_jobs
from tilefold.aot.jobs import NEWEST_VARIABLE
from tilefold.plan import AttentionProblem

TESTS = Path(__file__).resolve().parent  # where builders of jobs may lie
DEVICES = {"sm_80": "a100", "sm_90": "h200", "sm_100": "b200", "gfx942": "mi300x"}


def problem(dim: int = 128, dim_v: int | None = None, **changes: object) -> AttentionProblem:
    shape = {"batch": 2, "seq_q": 4096, "seq_k": 4096, "heads": 16, "kv_heads": 4, "dim_qk": dim, "dim_v": dim_v or dim}
    return AttentionProblem(**{**shape, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Results:
    """What became of the jobs (name, target) that one Triton compiled."""

    found: Mapping[tuple[str, str], JobResult]

    def of(self, name: str, target: str) -> JobResult:
        if (name, target) not in self.found:
            pytest.skip(
                "to save time a sample of kernels and targets is compiled (TILEFOLD_AOT=all: all), few by the newest Triton"
            )
        return self.found[name, target]


def is_sampled(name: str, target: str) -> bool:
    """Half of the kernels for sm_90, a sixth for each other target, the same ones in every run; all with TILEFOLD_AOT=all."""
    share = 2 if target == "sm_90" else 6
    return os.environ.get("TILEFOLD_AOT") == "all" or zlib.crc32(f"{name} {target}".encode()) % share == 0


def compiled(
    jobs: Mapping[tuple[str, str], Job], which: str, newest: Collection[str], everywhere: Collection[str] = ()
) -> Results:
    """Compile all under the "installed" Triton, or under the "newest" one those named: `newest` for sm_90, `everywhere` for all
    targets; skip where there is no second Triton."""
    folder = newest_triton() if which == "newest" else None
    if which == "newest" and folder is None:
        pytest.skip(f"no second Triton here: run scripts/fetch_triton.py (needs a network) or set {NEWEST_VARIABLE}")
    unknown = {*newest, *everywhere} - {name for name, _ in jobs}
    assert not unknown, f"no job has a name of {sorted(unknown)}"
    also = {(name, "sm_90") for name in newest}
    chosen = {
        key: job
        for key, job in jobs.items()
        if (folder is None and is_sampled(*key)) or key in also or key[0] in everywhere
    }
    unpack()
    found = dict(zip(chosen, run_jobs(list(chosen.values()), triton=folder, import_from=(TESTS,)), strict=True))
    if folder is None:
        compile_again(found, (TESTS,))
    return Results(found)
