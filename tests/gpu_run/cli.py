"""The command line, the environment of the processes, and what identifies a run: the sources, the device, torch and triton."""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .parent import SEVERAL, run_piece
from .report import add_row, summarise

ROOT = Path(__file__).resolve().parent.parent.parent
EACH = 9 << 29  # bytes of the GPU's memory for a process: with 2.5 GB each 11 of 2200 tests had too little
GREEN, FAILED, NO_GPU, UNFINISHED = 0, 1, 2, 3  # exit codes
ASK = """
import json, platform, subprocess, torch
found = {"python": platform.python_version(), "torch": torch.__version__, "gpus": torch.cuda.device_count()}
try:
    import triton
    found["triton"] = triton.__version__
except ImportError:
    found["triton"] = "none"
try:
    import pytest
    found["pytest"] = pytest.__version__
except ImportError:
    found["pytest"] = "none"
if torch.cuda.is_available():
    found["device"] = torch.cuda.get_device_name()
    found["memory"] = torch.cuda.get_device_properties(0).total_memory
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        found["driver"] = "unknown"
print(json.dumps(found))
"""


def main(argv: list[str] | None = None, machine: dict[str, Any] | None = None) -> int:
    """Run a piece and print the summary so far: 0 all passed, 1 something did not, 2 no GPU, 3 tests are left for the next call.
    machine: instead of asking torch."""
    begin, args = time.time(), _arguments().parse_args(argv)
    args.tests, args.folder = Path(args.tests), Path(args.folder)
    found = _machine() if machine is None else machine
    if why := _unfit(found):
        print(f"test-gpu: {why}", file=sys.stderr)
        return NO_GPU
    cores, memory, args.gpus = len(os.sched_getaffinity(0)), found.pop("memory", None), found.get("gpus", 1)
    others = SEVERAL if args.gpus > 1 else 0
    room = cores if memory is None else args.gpus * memory // EACH
    args.jobs = args.jobs or max(1, min(cores, room) - others)
    run = {**found, **identity(args.tests), "cores": cores, "jobs": args.jobs}
    run["selected"] = shlex.split(args.pytest)
    run = run_piece(args, run, environment(), begin)
    summary = summarise(args.folder, run)
    if args.record is not None:
        print(add_row(args.record, run, summary))
    return UNFINISHED if summary["left"] else FAILED if summary["bad"] else GREEN


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpu_run", description="all of tests/gpu, in pieces")
    parser.add_argument(
        "--seconds", type=float, default=510.0, help="start no test after that; the next call goes on (510)"
    )
    parser.add_argument("--grace", type=float, default=50.0, help="seconds more for tests that run then (50)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that one test may take (240)")
    parser.add_argument(
        "--jobs", type=int, help="processes (default: as many as cores, and a GPU's memory has room for)"
    )
    parser.add_argument("--record", type=Path, help="a JSONL file that the row of a complete run is added to")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever an earlier call left")
    parser.add_argument("--pytest", default="", help="more options for pytest, as -k; such a run is not recorded")
    parser.add_argument("--folder", default=ROOT / ".cache" / "test-gpu", help="where results lie between calls")
    parser.add_argument("--tests", default=ROOT / "tests" / "gpu", help="the folder of tests")
    return parser


def _machine() -> dict[str, Any]:
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    if asked.returncode:
        return {"error": (asked.stderr.strip().splitlines() or ["it ended without a word"])[-1]}
    return dict(json.loads(asked.stdout.splitlines()[-1]))


def _unfit(found: dict[str, Any]) -> str:
    """Why this Python cannot run the tests, as a sentence, or nothing."""
    other = "Another Python: make test-gpu GPU_PYTHON=/path/to/python3"
    if "error" in found:
        return f"needs a GPU and a torch that sees it. {sys.executable} cannot import torch ({found['error']}). {other}"
    if "device" not in found:
        return f"needs a GPU. The torch {found['torch']} of {sys.executable} sees none. {other}"
    missing = [name for name in ("triton", "pytest") if found.get(name) == "none"]
    return f"{sys.executable} has no {' and no '.join(missing)}. {other}" if missing else ""


def identity(tests: Path) -> dict[str, str]:
    """The commit, and a digest of the sources and tests: a checkout may have changes, or no git."""
    digest = hashlib.sha256()
    for folder in (ROOT / "src", ROOT / "tests", ROOT / "examples", tests):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{os.path.relpath(path, ROOT)}\0".encode() + path.read_bytes())
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    return {"commit": os.environ.get("COMMIT", "") or commit or "unknown", "sources": digest.hexdigest()[:12]}


def environment() -> dict[str, str]:
    """Of the processes: the checkout's sources, and caches inside it, which all share."""
    cache, given = ROOT / ".cache", dict(os.environ)
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *given.get("PYTHONPATH", "").split(os.pathsep)]
    kept = {"TRITON_CACHE_DIR": cache / "triton", "TRITON_HOME": cache, "XDG_CACHE_HOME": cache,
            "CUDA_CACHE_PATH": cache / "nv", "TORCHINDUCTOR_CACHE_DIR": cache / "inductor"}  # fmt: skip
    given.pop("TRITON_INTERPRET", None)
    return {
        **{name: str(path) for name, path in kept.items()},
        **given,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
