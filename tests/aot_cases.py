"""Shared by the ahead-of-time tests: a device for each target, and attention problems of a common size."""

import functools
import os
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aot_kept import compile_again, unpack
from tilefold.aot import CompileReport, Job, JobResult, newest_triton, run_jobs
from tilefold.aot.jobs import NEWEST_VARIABLE
from tilefold.plan import AttentionProblem

TESTS = Path(__file__).resolve().parent  # where builders of jobs may lie
DEVICES = {"sm_80": "a100", "sm_90": "h200", "sm_100": "b200", "gfx942": "mi300x"}


def problem(dim: int = 128, dim_v: int | None = None, **changes: object) -> AttentionProblem:
    shape = {"batch": 2, "seq_q": 4096, "seq_k": 4096, "heads": 16, "kv_heads": 4, "dim_qk": dim, "dim_v": dim_v or dim}
    return AttentionProblem(**{**shape, **changes})  # type: ignore[arg-type]


def job(builder: str, target: str, /, **kwargs: Any) -> Job:
    """What `example_launch` of a module of `tilefold.ops` makes of the arguments, compiled for a target; another function of it
    is named behind a colon."""
    function = builder if ":" in builder else f"{builder}:example_launch"
    return Job(f"tilefold.ops.{function}", kwargs, target)


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

    def clean(self, name: str, target: str, **asked: Any) -> CompileReport:
        """The report of a job in which nothing is wrong; asked: as of `JobResult.problems`."""
        result = self.of(name, target)
        assert result.problems(**asked) == ()
        assert result.report is not None
        return result.report


def is_sampled(name: str, target: str) -> bool:
    """Half of the kernels for sm_90, a sixth for each other target, the same ones in every run; all with TILEFOLD_AOT=all."""
    share = 2 if target == "sm_90" else 6
    return os.environ.get("TILEFOLD_AOT") == "all" or zlib.crc32(f"{name} {target}".encode()) % share == 0


@dataclass(frozen=True)
class Listed:
    """What a test file compiles: jobs by (name, target); of the newest Triton the names, for sm_90 or for all targets."""

    jobs: Mapping[tuple[str, str], Job]
    newest: Collection[str]
    everywhere: Collection[str]
    whole: bool

    def chosen(self, which: str) -> dict[tuple[str, str], Job]:
        """Those for one Triton."""
        also = {(name, "sm_90") for name in self.newest}
        return {
            key: job
            for key, job in self.jobs.items()
            if (which == "installed" and (self.whole or is_sampled(*key))) or key in also or key[0] in self.everywhere
        }


LISTED: dict[str, Listed] = {}  # by test module


def compiled(
    module: str,
    jobs: Mapping[tuple[str, str], Job],
    newest: Collection[str] = (),
    everywhere: Collection[str] = (),
    *,
    whole: bool = False,
    tritons: Collection[str] = ("installed", "newest"),
) -> Any:
    """The fixture `results` of a test file: its jobs compiled by the "installed" Triton, and by the "newest" one those named,
    `newest` for sm_90, `everywhere` for all targets; skipped where there is no second Triton.

    module: its __name__.  whole: all jobs, not a sample.  A process that compiles takes seconds to begin: one serves all files
    of a run, at the first that asks."""
    unknown = {*newest, *everywhere} - {name for name, _ in jobs}
    assert not unknown, f"no job has a name of {sorted(unknown)}"
    LISTED[module] = Listed(jobs, newest, everywhere, whole)

    @pytest.fixture(scope="module", params=tritons)
    def results(request: pytest.FixtureRequest) -> Results:
        asked = {item.module.__name__ for item in request.session.items if isinstance(item, pytest.Function)}
        found, again = _compiled(request.param, frozenset(asked & LISTED.keys()))
        mine = {key: result for (owner, key), result in found.items() if owner == module}
        for (owner, key), result in again.items():
            same = owner != module or result.report == mine[key].report
            assert same, f"{key}: the report kept is not what is compiled now"
        return Results(mine)

    return results


@functools.cache
def _compiled(which: str, modules: frozenset[str]) -> tuple[dict[Any, JobResult], dict[Any, JobResult]]:
    """Results by (module, (name, target)), and those of some that were kept and are compiled again."""
    folder = newest_triton() if which == "newest" else None
    if which == "newest" and folder is None:
        pytest.skip(f"no second Triton here: run scripts/fetch_triton.py (needs a network) or set {NEWEST_VARIABLE}")
    unpack()
    jobs = {(module, key): job for module in sorted(modules) for key, job in LISTED[module].chosen(which).items()}
    found = dict(zip(jobs, run_jobs(list(jobs.values()), triton=folder, import_from=(TESTS,)), strict=True))
    return found, compile_again(found, (TESTS,)) if folder is None else {}
