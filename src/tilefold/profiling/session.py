"""`with tilefold.profile() as p:` watches what runs inside; `p.profile` is what was found, with a verdict for each kernel."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from tilefold.bench.timers import exported
from tilefold.errors import DeviceError, Unsupported, ValueRangeError
from tilefold.ops.device import device_of
from tilefold.plan.device import Device
from tilefold.profiling import launches
from tilefold.profiling.counters import ROLE_VARIABLE, Measured
from tilefold.profiling.evidence import Evidence
from tilefold.profiling.report import Profile, Row
from tilefold.profiling.roofs import Roofs, load_roofs, with_roofs
from tilefold.profiling.verdict import judge_region

FINISHED: list[Profile] = []
"""Profiles that this process has finished, oldest first: what `tilefold profile script --marked` shows."""

MIXED = 8  # kernels, the longest ones, whose machine code is read
_ACTIVE: "list[Session]" = []


@dataclass(frozen=True, slots=True)
class Declared:
    """Work of one launch: flops in products of `dtype`, bytes moved between memory and the device, bytes drawn from L2."""

    flops: float | None = None
    bytes: float | None = None
    l2_bytes: float | None = None
    dtype: str = "bfloat16"


class Session:
    """One profiled region. `profile`: what was found, there once the region has ended. marks_only: Nsight Compute watches."""

    def __init__(self, declare: Mapping[str, Declared], metadata: bool) -> None:
        self._declare, self._metadata = dict(declare), metadata
        self._seen: dict[str, list[Declared]] = {}
        self._profiler: Any = None
        self._profile: Profile | None = None
        self.marks_only = os.environ.get(ROLE_VARIABLE) == "ncu"

    @property
    def profile(self) -> Profile:
        """The result. Unsupported while the region has not ended, and under Nsight Compute, which keeps it."""
        if self._profile is None:
            why = "Nsight Compute watches this process" if self.marks_only else "its region has not ended"
            raise Unsupported(f"the profile is not there: {why}")
        return self._profile

    def __enter__(self) -> "Session":
        if not torch.cuda.is_available():
            raise DeviceError("tilefold.profile watches a GPU, and torch sees none here")
        torch.cuda.synchronize()
        if self.marks_only:
            torch.cuda.profiler.start()
            return self
        if _ACTIVE:
            raise Unsupported(
                "tilefold.profile: a region is being profiled already; regions cannot be nested (a script with "
                "regions of its own: tilefold profile --marked)"
            )
        _ACTIVE.append(self)
        if self._metadata:
            from triton import knobs

            knobs.runtime.launch_enter_hook.add(self._declared_by_launch)
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            torch.cuda.synchronize()
            if self.marks_only:
                torch.cuda.profiler.stop()
        finally:
            if self._profiler is not None:
                self._profiler.__exit__(kind, error, trace)
                _ACTIVE.remove(self)
            if self._metadata and not self.marks_only:
                from triton import knobs

                knobs.runtime.launch_enter_hook.remove(self._declared_by_launch)
        if kind is None and not self.marks_only:
            index = torch.cuda.current_device()
            device = device_of(torch.device("cuda", index))
            declare = {name: _mean(each) for name, each in self._seen.items()} | self._declare
            found, self._profiler = exported(self._profiler), None
            self._profile = profile_of(found, device, load_roofs(index), declare)
            FINISHED.append(self._profile)

    def _declared_by_launch(self, metadata: Any) -> None:
        """Triton's hook before a launch: what the kernel's `launch_metadata` says of its work, by Proton's names."""
        said = metadata.get()
        flops = sum(float(said[name]) for name in ("flops", "flops8", "flops16", "flops32", "flops64") if name in said)
        if flops or "bytes" in said:
            dtype = "float32" if "flops32" in said else "float8_e4m3fn" if "flops8" in said else "bfloat16"
            each = Declared(flops or None, float(said["bytes"]) if "bytes" in said else None, dtype=dtype)
            self._seen.setdefault(str(said["name"]).split(" ")[0], []).append(each)


def profile(*, declare: Mapping[str, Declared] | None = None, metadata: bool = False) -> Session:
    """Watch every kernel that runs inside: `with tilefold.profile() as p: step()`, then `print(p.profile)`.

    declare: by kernel name, the work of one launch, for achieved rates and bounds; a name that did not run is an error of the
        caller's that the profile notes. metadata: ask kernels' own `launch_metadata` (the convention of Triton's Proton) for
        it, which makes launches slower for the host.
    Warm up before: a region that compiles shows a device that waits. The region begins and ends with a synchronisation. Under
    Nsight Compute it only marks what is to be measured. Raises DeviceError without a GPU, Unsupported inside another region.
    """
    if declare is not None and not isinstance(declare, Mapping):
        raise ValueRangeError(f"declare must map kernels' names to tilefold.profiling.Declared, got {declare!r}")
    for name, each in (declare or {}).items():
        if not isinstance(each, Declared):
            raise ValueRangeError(f"declare[{name!r}] must be a tilefold.profiling.Declared, got {each!r}")
    return Session(declare or {}, metadata)


def _mean(each: Sequence[Declared]) -> Declared:
    """Of several launches."""

    def mean(values: list[float | None]) -> float | None:
        return None if None in values else statistics.fmean(values)  # type: ignore[arg-type]

    return Declared(mean([d.flops for d in each]), mean([d.bytes for d in each]), dtype=each[0].dtype)


def profile_of(
    trace: Mapping[str, Any],
    device: Device,
    roofs: Roofs | None = None,
    declare: Mapping[str, Declared] | None = None,
) -> Profile:
    """The profile of a trace that torch's profiler made on `device`."""
    declare = declare or {}
    kernels, spans, replayed = launches.read_trace(trace)
    region = launches.region_of(kernels, spans, replayed, roofs.launch_host if roofs else None)
    codes = launches.codes_of({each.kernel for each in kernels})
    total = sum(sum(each.seconds) for each in kernels)
    rows = []
    for place, launched in enumerate(kernels):
        code = launches.code_for(launched, codes)
        found = evidence_of(launched, code, device, roofs, declare.get(launched.kernel, Declared()))
        share = sum(launched.seconds) / total if total else None
        opcodes = launches.opcodes_of(code) if code and place < MIXED else {}
        rows.append(Row.of(replace(found, share=share, opcodes=opcodes)))
    absent = [name for name in declare if not any(each.kernel == name for each in kernels)]
    notes = [f"declared work of {name}, which did not run" for name in absent]
    if roofs is None:
        notes.append("roofs are recorded ones, not measured here: run `tilefold roofline --measure`")
    return Profile(device.title, tuple(rows), region, judge_region(region), tuple(notes))


def evidence_of(
    launched: launches.Launched, code: launches.Code | None, device: Device, roofs: Roofs | None, work: Declared
) -> Evidence:
    """What the trace, the compiler and the caller say of one kernel."""
    machine = with_roofs(device, roofs)
    threads, registers, shared_bytes = launched.threads, launched.registers, launched.shared_bytes
    fit = launches.occupancy_on(device, threads, registers, shared_bytes or 0) if threads and registers else None
    return Evidence(
        launched.kernel,
        seconds=launched.median,
        launches=len(launched.seconds),
        programs=launched.programs,
        threads=threads,
        registers=registers,
        spills=code.spills if code else None,
        shared_bytes=shared_bytes,
        resident=fit.programs if fit else None,
        limit=fit.limit if fit else None,
        sms=device.sms,
        flops=work.flops,
        bytes=work.bytes,
        l2_bytes=work.l2_bytes,
        tensor_rate=dict(machine.tensor_flops + machine.measured_flops).get(work.dtype),
        dram_rate=machine.dram_rate,
        l2_rate=machine.measured_l2_bytes_per_s,
        measured_roofs=roofs is not None,
        launch_seconds=roofs.launch_device if roofs else None,
    )


def with_counters(made: Profile, measured: Sequence[Measured]) -> Profile:
    """The same kernels, judged again by what Nsight Compute read of them; notes name those that it did not see."""
    rows: list[Row] = []
    unseen: list[str] = []
    for row in made.rows:
        e = row.evidence
        alike = [each for each in measured if (each.programs, each.threads) == (e.programs, e.threads)]
        found = next((each for each in alike if launches.same_kernel(each.kernel, e.kernel)), None)
        unseen += [] if found else [e.kernel]
        rows.append(Row.of(replace(e, counters=found.counters)) if found else row)
    notes = made.notes + ((f"no counters of {', '.join(dict.fromkeys(unseen))}",) if unseen else ())
    return replace(made, rows=tuple(rows), notes=notes)


def with_declared(made: Profile, work: Declared, calls: int, machine: Device) -> Profile:
    """The work of one call given to its kernel, where all of them together are launches of one; else noted for the whole.

    Which kernel of several does how much of a call's work is not known."""
    if len(made.rows) != 1 or not made.rows[0].evidence.launches or not made.region:
        busy = made.region.busy / calls if made.region else 0.0
        rates = "no time"
        if busy:
            rates = f"{(work.flops or 0) / busy * 1e-12:.1f} TFLOP/s, {(work.bytes or 0) / busy * 1e-9:.0f} GB/s"
        note = f"a call keeps the device busy for {busy * 1e6:.1f} us: {rates} of declared work"
        return replace(made, notes=(*made.notes, note))
    e = made.rows[0].evidence
    scale = calls / e.launches
    evidence = replace(
        e,
        flops=work.flops and work.flops * scale,
        bytes=work.bytes and work.bytes * scale,
        l2_bytes=work.l2_bytes and work.l2_bytes * scale,
        tensor_rate=dict(machine.tensor_flops + machine.measured_flops).get(work.dtype),
    )
    return replace(made, rows=(Row.of(evidence),))


def profile_of_counters(measured: Sequence[Measured], title: str) -> Profile:
    """A profile of what Nsight Compute alone saw."""
    total = sum((each.seconds or 0.0) * each.launches for each in measured)
    rows = []
    for each in measured:
        share = (each.seconds or 0.0) * each.launches / total if total else None
        seen = Evidence(each.kernel, each.seconds, each.launches, share, each.programs, each.threads)
        rows.append(Row.of(replace(seen, counters=each.counters)))
    rows.sort(key=lambda row: -(row.evidence.share or 0.0))
    return Profile(title, tuple(rows), None, None, ())
