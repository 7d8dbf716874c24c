"""Build an environment for this checkout: `python environment.py DIRECTORY EXTRA,EXTRA`.  Run by make; standard library only.

Without a GPU: a fresh environment, every version pinned by constraints/cpu.txt.  Where the running Python already has a
torch that sees a GPU: an environment on top of that Python's packages, whose torch and triton are kept; nothing is
downloaded unless something is missing.  Nothing is written outside the checkout.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = "constraints/cpu.txt"  # relative to ROOT: pip splits PIP_CONSTRAINT at spaces
LOG = ".cache/pip.log"
KEPT = ("torch", "triton")  # never replaced where they already drive a GPU
BACKEND = ("hatchling", "editables")
TOOLS = ("ruff", "mypy", *BACKEND)  # the tests run without these
SITE = ("mkdocs-material", "mkdocstrings-python", "nbclient", "ipykernel")
SKIPPING = ("transformers", "diffusers", *SITE)  # the tests that need these skip themselves

INSTALLED = """
import sys
from importlib.metadata import version, PackageNotFoundError
for name in sys.argv[1:]:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""
ADVICE = "On Debian and Ubuntu: apt install python3-venv"
VERSIONS = "import torch, triton; print('environment: torch', torch.__version__, 'triton', triton.__version__)"
CONSOLE_SCRIPT = """#!/bin/sh
exec "$(dirname "$0")/python" -c 'import sys; from tilefold.cli import main; sys.exit(main())' "$@"
"""


def say(text: str) -> None:
    """Tell the person what happens, at once."""
    print(f"environment: {text}", flush=True)


def stop(text: str) -> None:
    """End with an explanation and no traceback."""
    raise SystemExit(f"environment: {text}")


def run(*command: str, **variables: str) -> bool:
    """Run a command in the checkout with extra environment variables; whether it succeeded."""
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode == 0


def install(*command: str, **variables: str) -> bool:
    """Run pip, whose pages go to LOG; where it fails, its last lines are printed.  Whether it succeeded."""
    with (ROOT / LOG).open("w") as log:
        env = {**os.environ, **variables}
        done = subprocess.run(command, cwd=ROOT, env=env, check=False, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        print("\n".join((ROOT / LOG).read_text().splitlines()[-30:]), file=sys.stderr, flush=True)
    return done.returncode == 0


def sees_gpu() -> bool:
    """Whether the running Python has a torch that can use a GPU."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return False
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode == 0


def create(directory: Path) -> Path:
    """Make an empty environment with pip.  Returns its Python."""
    shutil.rmtree(directory, ignore_errors=True)
    python = directory / "bin" / "python"
    if importlib.util.find_spec("ensurepip") is not None and run(sys.executable, "-m", "venv", str(directory)):
        return python
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("pip") is None:
        stop(f"{sys.executable} has neither ensurepip nor pip.  {ADVICE}")
    say("this Python has no working ensurepip; its own pip installs pip into the environment")
    shutil.rmtree(directory, ignore_errors=True)
    made = run(sys.executable, "-m", "venv", "--without-pip", str(directory))
    # pip 22.3 and newer work on another interpreter's packages.
    if not made or not run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "pip"):
        stop(f"could not put pip into the environment.  {ADVICE}")
    return python


def create_on_top(directory: Path) -> Path:
    """Make an environment that sees all packages of the running Python, its pip too.  Returns the new Python."""
    shutil.rmtree(directory, ignore_errors=True)
    if not run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(directory)):
        stop(f"could not make an environment.  {ADVICE}")
    python = directory / "bin" / "python"
    if sys.prefix != sys.base_prefix:
        # This Python is itself an environment, and --system-site-packages reaches past it to its base.
        (packages(python) / "parent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def packages(python: Path) -> Path:
    """The environment's site-packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary, on Python 3.10 too."""
    try:
        import tomllib as reader
    except ImportError:
        reader = importlib.import_module("pip._vendor.tomli")
    return reader.loads(path.read_text())


def requirements(extras: Iterable[str]) -> list[str]:
    """The project's requirements with these extras, tilefold[...] replaced by what it stands for."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    found: list[str] = list(project["dependencies"])
    waiting = list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            nested = re.fullmatch(r"tilefold\[(.*)\]", line)
            if nested:
                waiting += nested[1].split(",")
            else:
                found.append(line)
    return list(dict.fromkeys(found))


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.11.0+cu130' is (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].strip(".").split("."))  # type: ignore[index]


def missing(python: Path, wanted: Sequence[str]) -> list[str]:
    """Those of `wanted` ('name' or 'name>=version') that the environment does not satisfy."""
    split = {line: re.split(r">=", line) for line in wanted}
    names = [parts[0] for parts in split.values()]
    text = subprocess.check_output([str(python), "-c", INSTALLED, *names], text=True)
    have = dict(line.split() for line in text.splitlines())
    return [
        line
        for line, (name, *least) in split.items()
        if name not in have or (least and numbers(have[name]) < numbers(least[0]))
    ]


def install_pinned(python: Path, extras: str) -> None:
    """Install the checkout and its extras, every version from the constraints file."""
    say(
        f"installing tilefold[{extras}], versions from {CONSTRAINTS}; minutes if torch is downloaded (pip's log: {LOG})"
    )
    pins = {"PIP_CONSTRAINT": CONSTRAINTS, "PIP_BUILD_CONSTRAINT": CONSTRAINTS}
    if not install(str(python), "-m", "pip", "install", "--progress-bar", "off", "-e", f".[{extras}]", **pins):
        stop(
            "pip failed (see above).  It must be able to find the CPU build of the pinned torch: if the package index in use\n"
            "has only CUDA builds, put the address of PyTorch's CPU wheel index into PIP_EXTRA_INDEX_URL"
        )


def install_on_top(python: Path, extras: str) -> None:
    """Add to a Python that drives a GPU only what it lacks, then put the checkout on its path."""
    lacking = missing(python, requirements(extras.split(",")))
    if kept := [line for line in lacking if line.split(">=")[0] in KEPT]:
        stop(f"this machine's Python has a GPU torch, but tilefold needs {', '.join(kept)}")
    if lacking:
        say(f"installing what this Python lacks: {' '.join(lacking)} (pip's log: {LOG})")
        text = subprocess.check_output([str(python), "-c", INSTALLED, *KEPT], text=True)
        pins = [f"{name}=={version}" for name, version in (line.split() for line in text.splitlines())]
        pip = [str(python), "-m", "pip", "--retries", "1", "--timeout", "15", "install", "--progress-bar", "off"]
        # What the site needs comes by itself: where that cannot be had, the rest still can.
        parts = ([line for line in lacking if (line.split(">=")[0] in SITE) == site] for site in (False, True))
        done = [install(*pip, *part, *pins) for part in parts if part]
        if not all(done):
            lacking = missing(python, requirements(extras.split(",")))
            if needed := [line for line in lacking if line.split(">=")[0] not in (*TOOLS, *SKIPPING)]:
                stop(
                    f"could not install {', '.join(needed)}, which {sys.executable} lacks.  Without a network, point pip at a\n"
                    "folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels"
                )
            say(f"going on without {', '.join(lacking)}: what needs them will not run here")
    build = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", "."]
    if missing(python, BACKEND) or not run(*build):
        say("no build backend here: src goes on the path as it is")
        (packages(python) / "tilefold.pth").write_text(f"{ROOT / 'src'}\n")
        script = python.parent / "tilefold"
        script.write_text(CONSOLE_SCRIPT)
        script.chmod(0o755)


def main() -> None:
    """Build the environment named on the command line."""
    if len(sys.argv) != 3:
        stop("usage: environment.py DIRECTORY EXTRA,EXTRA")
    directory, extras = ROOT / sys.argv[1], sys.argv[2]
    gpu = sees_gpu()
    say(f"{directory.name} from {sys.executable}" + (", keeping its torch and triton (a GPU is there)" if gpu else ""))
    (ROOT / LOG).parent.mkdir(exist_ok=True)
    python = create_on_top(directory) if gpu else create(directory)
    (install_on_top if gpu else install_pinned)(python, extras)
    if not run(str(python), "-c", VERSIONS):
        stop("torch and triton cannot be imported in the new environment")


if __name__ == "__main__":
    main()
