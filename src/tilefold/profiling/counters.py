"""Hardware counters through Nsight Compute: which are asked for, how `ncu` runs a program, and its CSV read.

`ncu --csv --page raw` prints lines of its own (==PROF== ...) and what the program prints, then a head, a line of units, and
one line a launch. Metrics that a chip or a version does not have are left out before, and read as None.
"""

import csv
import math
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilefold.errors import Unsupported, ValueRangeError
from tilefold.profiling.evidence import FULL_SECTOR, Counters

ROLE_VARIABLE = "TILEFOLD_PROFILE_ROLE"
"""Set to "ncu" in a process that Nsight Compute watches: there `tilefold.profile` only marks what is to be measured."""

PEAK = ".avg.pct_of_peak_sustained_elapsed"
# Field of Counters -> metrics in percent of the peak; the largest that can be read counts. The way from L2 to the SMs has
# two ends: what leaves the slices, and what arrives at the L1 caches (by loads and by copies to shared memory alike).
SHARES: dict[str, tuple[str, ...]] = {
    "dram": ("dram__throughput" + PEAK,),
    "l2": ("lts__t_sectors" + PEAK, "lts__d_sectors" + PEAK, "lts__t_tag_requests" + PEAK),
    "l2_to_sm": ("l1tex__m_xbar2l1tex_read_sectors" + PEAK, "lts__lts2xbar_cycles_active" + PEAK),
    "l1": (
        "l1tex__data_pipe_lsu_wavefronts" + PEAK,
        "l1tex__lsuin_requests" + PEAK,
        "l1tex__lsu_writeback_active" + PEAK,
    ),
    "shared": ("l1tex__data_pipe_lsu_wavefronts_mem_shared" + PEAK,),
    "tensor": ("sm__pipe_tensor_cycles_active" + PEAK, "sm__inst_executed_pipe_tensor" + PEAK),
    "fma": ("sm__pipe_fma_cycles_active" + PEAK,),
    "alu": ("sm__inst_executed_pipe_alu" + PEAK,),
    "exp": ("sm__inst_executed_pipe_xu" + PEAK,),
    "issue": ("sm__inst_issued" + PEAK,),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
TIME = "gpu__time_duration.sum"
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
USED_LOADS = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio"
USED_STORES = "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.ratio"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
SHARED_PASSES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
SECTORS = tuple(
    f"l1tex__t_sectors_pipe_lsu_mem_{space}_op_{op}.sum" for space in ("global", "local") for op in ("ld", "st")
)
# Sectors that arrive at the L1 caches, by loads and by copies to shared memory alike; the second, where a report has only that.
ARRIVED = "l1tex__m_xbar2l1tex_read_sectors.sum"
ARRIVED_AT = (ARRIVED, "lts__t_sectors_srcunit_tex_op_read.sum")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "tex_throttle", "wait",
)  # fmt: skip
METRICS: tuple[str, ...] = (
    TIME, *(name for names in SHARES.values() for name in names), DRAM_READ, DRAM_WRITTEN, USED_LOADS, USED_STORES, CONFLICTS,
    SHARED_PASSES, *SECTORS, ARRIVED, *(STALL.format(reason) for reason in REASONS),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel as Nsight Compute saw it: medians over its launches. programs, threads: of grid and program, if printed."""

    kernel: str
    launches: int
    seconds: float | None
    counters: Counters
    programs: int | None = None
    threads: int | None = None


def find_ncu() -> str:
    """Where `ncu` is: $NCU, the PATH, CUDA's folder. Unsupported if it is nowhere."""
    places = [os.environ.get("NCU"), shutil.which("ncu"), "/usr/local/cuda/bin/ncu"]
    found = next((place for place in places if place and os.access(place, os.X_OK)), None)
    if found is None:
        raise Unsupported("hardware counters need Nsight Compute; ncu is neither on the PATH nor in $NCU")
    return found


def available(ncu: str) -> tuple[str, ...]:
    """Those of METRICS that this ncu has for the device here; all of them if it does not say."""
    try:
        done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return METRICS
    bases = set(re.findall(r"^(\w+__\w+)\b", done.stdout, re.MULTILINE))
    ratios = any(name.startswith("smsp__average") for name in bases)  # some versions do not list them
    kept = tuple(name for name in METRICS if name.split(".")[0] in bases or (not ratios and name.endswith(".ratio")))
    return kept if TIME in kept else METRICS


def command_of(
    ncu: str, program: Sequence[str], metrics: Sequence[str], kernels: str | None = None, launches: int | None = None,
    marked: bool = False,
) -> list[str]:  # fmt: skip
    """The command that runs `program` under ncu and prints CSV.

    kernels: a regular expression of the names to measure, each launch of which is replayed some ten times; launches: at most so
    many. marked: only what runs between cudaProfilerStart and Stop, which `tilefold.profile` calls. Clocks are left as they are.
    """
    output = "--csv --page raw --print-units base --clock-control none --target-processes all"
    command = [ncu, *output.split(), "--metrics", ",".join(metrics)]
    command += ["--kernel-name", f"regex:{kernels}"] if kernels else []
    command += ["--launch-count", str(launches)] if launches else []
    command += ["--profile-from-start", "off"] if marked else []
    return [*command, *program]


def run_ncu(
    program: Sequence[str], kernels: str | None = None, launches: int | None = None, marked: bool = False, timeout_s: float = 600
) -> tuple[Measured, ...]:  # fmt: skip
    """Run a program under ncu and read what it measured. Unsupported, with what ncu said, if it could not."""
    ncu = find_ncu()
    command = command_of(ncu, program, available(ncu), kernels, launches, marked)
    try:
        watched = {**os.environ, ROLE_VARIABLE: "ncu"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=watched)
    except subprocess.TimeoutExpired:
        raise Unsupported(f"ncu took more than {timeout_s:.0f} s; measure fewer launches") from None
    return _checked(done)


def import_report(path: Path) -> tuple[Measured, ...]:
    """Read a report that ncu wrote: its .ncu-rep by ncu itself, its CSV (--page raw --csv) directly."""
    if not path.is_file():
        raise ValueRangeError(f"the report of ncu must be a .ncu-rep or a CSV file, got {str(path)!r}")
    if path.suffix != ".ncu-rep":
        return parse_csv(path.read_text(encoding="utf-8"))
    command = [find_ncu(), "--import", str(path), "--csv", "--page", "raw", "--print-units", "base"]
    return _checked(subprocess.run(command, capture_output=True, text=True, timeout=300, check=False))


def _checked(done: subprocess.CompletedProcess[str]) -> tuple[Measured, ...]:
    try:
        return parse_csv(done.stdout)
    except ValueRangeError:
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        said = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))] or lines
        raise Unsupported(
            f"ncu measured nothing (exit code {done.returncode}): {' | '.join(said[-3:]) or 'it said nothing'}"
        ) from None


def parse_csv(text: str) -> tuple[Measured, ...]:
    """The kernels of a `--csv --page raw` output, each grid apart, by their first launch. ValueRangeError if none."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"') and '"Kernel Name"' in line), None)
    if start is None:
        raise ValueRangeError('the text has no table of ncu (a line that begins with "ID" and names "Kernel Name")')
    # what the profiled program prints, and ncu's own lines, may stand among the rows
    table = [line for line in lines[start:] if line.startswith('"')]
    rows = list(csv.DictReader(table))
    units = rows.pop(0) if rows and not (rows[0].get("ID") or "").strip() else {}
    by_shape: dict[tuple[str, int | None, int | None], list[dict[str, float]]] = {}
    for row in rows:
        if name := row.get("Kernel Name"):
            shape = name, _volume(row.get("Grid Size")), _volume(row.get("Block Size"))
            by_shape.setdefault(shape, []).append(_numbers(row, units))
    if not by_shape:
        raise ValueRangeError("the table of ncu is empty")
    return tuple(_measured(name, launches, *shape) for (name, *shape), launches in by_shape.items())


SCALES = {
    "%": 1.0, "ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1.0, "second": 1.0,
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip


def _numbers(row: Mapping[str, str], units: Mapping[str, str]) -> dict[str, float]:
    """The metrics of a row in base units (seconds, bytes); "n/a" and text are left out."""
    found = {}
    for name, text in row.items():
        if not name or "__" not in name or not isinstance(text, str):
            continue
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            continue
        if math.isfinite(value):
            found[name] = value * SCALES.get((units.get(name) or "").strip(), 1.0)
    return found


def _volume(text: str | None) -> int | None:
    """24 of "(2, 3, 4)"."""
    numbers = [int(part) for part in re.findall(r"\d+", text or "")]
    return math.prod(numbers) if numbers else None


def _measured(
    name: str, launches: Sequence[Mapping[str, float]], programs: int | None, threads: int | None
) -> Measured:
    values = {
        metric: statistics.median(each[metric] for each in launches if metric in each)
        for metric in {metric for each in launches for metric in each}
    }
    return Measured(name, len(launches), values.get(TIME), counters_of(values), programs, threads)


def counters_of(values: Mapping[str, float]) -> Counters:
    """Counters from metrics by name, whichever of them are there."""
    shares = {
        field: max(known)
        for field, names in SHARES.items()
        if (known := [values[name] for name in names if name in values])
    }
    used = values.get(USED_LOADS) or None, values.get(USED_STORES) or None  # 0 where nothing was loaded
    local, wasted = _shares_of_traffic(values, *used)
    passes, conflicts = values.get(SHARED_PASSES), values.get(CONFLICTS)
    stalls = {reason: values[STALL.format(reason)] for reason in REASONS if STALL.format(reason) in values}
    dram = values.get(DRAM_READ, 0.0) + values.get(DRAM_WRITTEN, 0.0) if DRAM_READ in values else None
    return Counters(
        **shares,
        bytes_per_sector=used[0],
        store_bytes_per_sector=used[1],
        wasted_share=wasted,
        conflict_share=None if conflicts is None or not passes else min(1.0, conflicts / passes),
        local_share=local,
        stalls=stalls,
        dram_bytes=dram,
    )


def _shares_of_traffic(
    values: Mapping[str, float], load_bytes: float | None, store_bytes: float | None
) -> tuple[float | None, float | None]:
    """(local_share, wasted_share) of `Counters`. The metrics of sectors by load and store leave copies to shared memory out;
    what arrives from L2 has them. More sectors than arrive were loaded where L1 held some of them."""
    global_loads, global_stores, local_loads, local_stores = (values.get(name) for name in SECTORS)
    loads, stores = (global_loads or 0.0) + (local_loads or 0.0), (global_stores or 0.0) + (local_stores or 0.0)
    arrived = next((values[name] for name in ARRIVED_AT if name in values), None)
    traffic = max(loads, arrived or 0.0) + stores
    if not traffic:
        return None, None
    local = None if local_loads is None or local_stores is None else (local_loads + local_stores) / traffic
    if arrived is None or global_loads is None or global_stores is None:
        return local, None
    ways = (global_loads, load_bytes), (global_stores, store_bytes)
    return local, sum(sectors * (1 - used / FULL_SECTOR) for sectors, used in ways if used) / traffic
