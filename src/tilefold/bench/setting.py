"""How a run measures, and where and with what it was made: what every family and every published figure has in common."""

import datetime
import functools
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tilefold.ops.device import interpreting
from tilefold.ops.environment import installed, triton_version


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure. rounds: turns that each implementation gets. rep_ms: GPU time sampled in a turn. graph: measure CUDA-graph
    replays, too. budget_s: no case is begun after so many seconds."""

    rounds: int = 5
    rep_ms: float = 40.0
    graph: bool = False
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and with what a measurement was made: what every published figure has to carry."""

    device: str
    backend: str
    date: str
    commit: str
    tilefold: str
    torch: str
    triton: str
    python: str = field(default_factory=platform.python_version)


def setting_of(device: str) -> Setting:
    """The setting of a run on "cuda" or "cpu", now, of the checkout that tilefold is imported from."""
    if device == "cuda":
        title, backend = torch.cuda.get_device_name(), "hip" if torch.version.hip else "cuda"
    else:
        what, backend = ("Triton interpreter", "interpreter") if interpreting() else ("plain torch", "cpu")
        title = f"{what} on {platform.machine()}, {os.cpu_count()} cores"
    own = installed("tilefold") or "checkout"
    return Setting(title, backend, now(), commit(), own, torch.__version__, triton_version() or "none")


def now() -> str:
    """The date and time that a measurement carries: ISO, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@functools.cache
def commit() -> str:
    """What TILEFOLD_COMMIT says, for sources copied to another machine; else the short commit of the checkout that holds this
    file, "+" appended if files differ from it; else "unknown"."""
    if given := os.environ.get("TILEFOLD_COMMIT"):
        return given
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
