"""Ahead-of-time compilation: what the compiler makes of each kernel on GPUs that are not there.

`run_jobs` compiles a list of `Job`s in a worker process and returns a `CompileReport` for each: registers, spills,
shared memory, occupancy, instruction counts, the main loops, and `problems()`. Importing this package loads no triton.
It may import plan, ops and kernels; only the command line, the benchmarks and the tests import it.
"""

from tilefold.aot.jobs import Job, JobResult, newest_triton, run_jobs
from tilefold.aot.report import CompileReport, Occupancy, occupancy
from tilefold.aot.sass import Loop
from tilefold.aot.targets import TARGETS, Target, target_named

__all__ = [
    "TARGETS",
    "CompileReport",
    "Job",
    "JobResult",
    "Loop",
    "Occupancy",
    "Target",
    "newest_triton",
    "occupancy",
    "run_jobs",
    "target_named",
]
