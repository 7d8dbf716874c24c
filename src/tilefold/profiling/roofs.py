"""The machine's roofs, measured by kernels that do one thing each, and kept in a file per machine and software.

A datasheet's figure is not reached by any kernel; a measured one is, by the kernel that measured it. `with_roofs` puts them where
bounds look for them. Plans never see them: what was measured in a user's cache decides a plan only where the user took it
(`tilefold tune --take`).
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilefold.bench.setting import now
from tilefold.plan.device import Device, Rates

if TYPE_CHECKING:
    from tilefold.profiling.roof_launches import Sizes

CPU = "cpu"
FOLDER_VARIABLE = "TILEFOLD_ROOFS"
"""Environment variable: folder of the measured roofs, or "off" to keep none."""


@dataclass(frozen=True, slots=True)
class Roofs:
    """What one machine reached. Rates per second (bytes, FLOPs, exponentials), times in seconds.

    device, driver, torch, triton: of the measurement; other drivers and compilers are other machines. date: ISO.
    dram_read, dram_write, dram_copy (read and written bytes together), l2_read: bytes/s. flops: (dtype, FLOP/s) pairs; "float32"
    is multiply-adds without tensor cores. exps: exp2 per second. launch_device: from one empty kernel to the next in a CUDA
    graph; launch_host: host time of an eager launch by Triton.
    """

    device: str
    driver: str
    torch: str
    triton: str
    date: str
    dram_read: float
    dram_write: float
    dram_copy: float
    l2_read: float
    flops: Rates
    exps: float
    launch_device: float
    launch_host: float

    @property
    def dram(self) -> float:
        """The most that DRAM gave in any of the three ways."""
        return max(self.dram_read, self.dram_write, self.dram_copy)

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """(what, figure, how) for a table."""
        times: tuple[tuple[float, str, str], ...]
        times = ((self.launch_device, "launch, device", "empty kernels in a CUDA graph, one after the other"),
                 (self.launch_host, "launch, host", "eager launches of an empty kernel"))  # fmt: skip
        if self.device == CPU:
            times = ((self.launch_host, "launch", "an empty kernel in the interpreter"),)
        how = {"float32": "multiply-adds in registers, no tensor cores"}
        return (
            ("DRAM read", scaled(self.dram_read, "B/s", 3), "a large buffer, read once"),
            ("DRAM write", scaled(self.dram_write, "B/s", 3), "a large buffer, written once"),
            ("DRAM copy", scaled(self.dram_copy, "B/s", 3), "read and written bytes together"),
            ("L2 to SM", scaled(self.l2_read, "B/s", 3), "every SM reads the same part of the L2 cache, past L1"),
            *((dtype, scaled(rate, "FLOP/s", 1), how.get(dtype, "a loop of tl.dot over tiles on the SM"))
              for dtype, rate in self.flops),
            ("exp2", scaled(self.exps, "/s", 3), "in registers"),
            *((name, f"{seconds * 1e6:.2f} us", what) for seconds, name, what in times),
        )  # fmt: skip

    def to_json(self) -> str:
        """Text that `from_json` turns back into an equal record."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Roofs":
        """The record that `to_json` wrote; ValueError, KeyError or TypeError if it did not."""
        fields = json.loads(text)
        return cls(**{**fields, "flops": tuple((str(name), float(rate)) for name, rate in fields["flops"])})


def scaled(value: float, unit: str, digits: int) -> str:
    """A rate with the prefix that leaves something to be seen: "4.270 TB/s" of a GPU, "31.250 MB/s" of the interpreter."""
    factor, prefix = next(
        ((f, p) for f, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= f / 10), (1.0, "")
    )
    return f"{value / factor:.{digits}f} {prefix}{unit}"


def with_roofs(device: Device, roofs: Roofs | None) -> Device:
    """The device with what was measured in place of what was recorded; itself if nothing was measured."""
    if roofs is None:
        return device
    return replace(
        device,
        measured_dram_bytes_per_s=roofs.dram,
        measured_flops=tuple({**dict(device.measured_flops), **dict(roofs.flops)}.items()),
        measured_l2_bytes_per_s=roofs.l2_read,
        source=f"measured {roofs.date[:10]} on {roofs.device}; limits: {device.source}",
    )


def _path(identity: tuple[str, ...]) -> Path | None:
    """A file in $TILEFOLD_ROOFS, else in tilefold/roofs in the user's cache; None if off."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen == "off":
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", "_".join(identity)).strip("-").lower()
    return (Path(chosen) if chosen else cache / "tilefold" / "roofs") / f"{name}.json"


def identity_of(index: int | None = None) -> tuple[str, str, str, str]:
    """(device, driver, torch, triton) of this process: what a measurement holds for."""
    import triton

    here = (torch.cuda.get_device_name(index), _driver()) if torch.cuda.is_available() else (CPU, "none")
    return *here, torch.__version__, triton.__version__


def _driver() -> str:
    """The version of NVIDIA's kernel module, "unknown" where it does not say."""
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "unknown"
    return found.group(1) if found else "unknown"


def load_roofs(index: int | None = None) -> Roofs | None:
    """What was measured on this machine with this software, None if nothing was or it cannot be read."""
    path = _path(identity_of(index))
    try:
        return None if path is None else Roofs.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store_roofs(roofs: Roofs) -> Path | None:
    """Keep them for `load_roofs`; where, or None if nothing is kept."""
    path = _path((roofs.device, roofs.driver, roofs.torch, roofs.triton))
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(roofs.to_json(), encoding="utf-8")
    part.replace(path)
    return path


def measure_roofs(device: Device, torch_device: Any, sizes: "Sizes | None" = None) -> Roofs:
    """Measure every roof of `torch_device`, whose record is `device`: about 20 s on a GPU, most of it compiling.

    In the interpreter the figures say nothing; give small sizes. Raises what a launch raises.
    """
    from tilefold.profiling import roof_launches as run

    sizes = sizes or run.sizes_of(device)
    timer = run.timer(torch_device)
    work = run.Work(device, torch_device, sizes)
    moved = 4 * sizes.elements
    l2_bytes = 4 * sizes.l2_elements * sizes.l2_turns * work.l2_programs
    name, driver, torch, triton = identity_of(torch_device.index)

    def rate(amount: float, call: Callable[[], object]) -> float:
        return amount / timer(call)

    return Roofs(
        device=name, driver=driver, torch=torch, triton=triton,
        date=now(),
        dram_read=rate(moved, work.read()),
        dram_write=rate(moved, work.write()),
        dram_copy=rate(2 * moved, work.copy()),
        l2_read=rate(l2_bytes, work.read_l2()),
        flops=tuple((dtype, rate(work.flops_of(dtype), work.multiply(dtype))) for dtype in work.dtypes),
        exps=rate(work.exps, work.exponentials()),
        launch_device=run.launch_on_device(work.nothing(), torch_device),
        launch_host=run.launch_on_host(work.nothing(), torch_device),
    )  # fmt: skip
