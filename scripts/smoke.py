"""Install the wheel into an empty environment and try it: `python scripts/smoke.py --constraints constraints/cpu.txt`.

For any set of versions: `--with "torch==2.13.0 triton==3.6.0"` is installed first, then the wheel with what it declares.  The
README's first example has to run within --seconds; with the extra cli `tilefold doctor` and `tilefold check --quick` have to
pass; with --pages those tutorials have to print what they say.  The checkout is not on the path of any of them.  Standard
library only; nothing is written outside the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import environment

ROOT = environment.ROOT
SMOKE = ROOT / ".cache" / "smoke"
WHERE = """
import importlib.metadata as m, sys, tilefold
print(tilefold.__file__)
for name in ("tilefold", "torch", "triton", "numpy"):
    print(name, m.version(name))
print(tilefold.__version__)
"""
GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def first_example(page: str) -> str:
    """The first Python example of a page."""
    return page.split("```python\n", 1)[1].split("```", 1)[0]


def clean(without_gpu: bool) -> dict[str, str]:
    """The environment variables of a user who has only installed the wheel."""
    ours = ("PYTHON", "TRITON", "TILEFOLD", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    kept = {"PIP_CACHE_DIR": str(ROOT / ".cache" / "pip"), **kept}
    kept |= {"TRITON_HOME": str(SMOKE / "triton"), "TRITON_CACHE_DIR": str(SMOKE / "triton")}
    return kept | ({"TRITON_INTERPRET": "1"} if without_gpu else {})


def step(title: str, command: list[str], variables: dict[str, str], cwd: Path = SMOKE) -> float:
    """Run it, say how long it took, end where it fails."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    print(f"smoke: {title}: {seconds:.1f} s" + ("" if done.returncode == 0 else " FAILED"), flush=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return seconds


def build_wheel(python: Path, pins: dict[str, str]) -> Path:
    """The wheel of this checkout, by pip in the environment's own isolation."""
    folder = SMOKE / "wheel"
    command = [str(python), "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), "."]
    step("build the wheel", command, clean(False) | pins, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def tutorial(python: Path, name: str, variables: dict[str, str]) -> None:
    """Run a tutorial's blocks of Python in one namespace, as a reader would: each has to print what the page shows."""
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    if "TRITON_INTERPRET=1" not in page.read_text(encoding="utf-8").split("```python")[0]:
        variables = {one: value for one, value in variables.items() if one != "TRITON_INTERPRET"}
    printed = SMOKE / f"{name}.json"
    runner = f"{shlex.quote(str(ROOT / 'tests' / 'run_page.py'))} {shlex.quote(str(page))} > {printed.name}"
    step(f"the tutorial {name}", ["sh", "-c", f"{shlex.quote(str(python))} {runner}"], variables)
    (blocks,) = json.loads(printed.read_text(encoding="utf-8"))
    for line, said, shown in blocks:
        if said != (shown or ""):
            raise SystemExit(f"smoke: {page.name}:{line} prints\n{said}\ninstead of\n{shown}")
    print(f"smoke: {len(blocks)} blocks, {sum(shown is not None for *_, shown in blocks)} outputs as shown")


def main() -> None:
    """Make the environment, install, try, remove it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", type=Path, help="a constraints file, such as constraints/cpu.txt")
    parser.add_argument("--with", dest="first", default="", help="requirements that are installed before the wheel")
    parser.add_argument(
        "--extras", default="cli", help="extras of the wheel, comma-separated; empty: the library alone"
    )
    parser.add_argument("--wheel", type=Path, help="a wheel that is there; default: built from this checkout")
    parser.add_argument("--seconds", type=float, default=10.0, help="what the README's first example may take")
    parser.add_argument(
        "--pages", nargs="*", default=[], help="tutorials that have to run, by the names of their files"
    )
    parser.add_argument("--keep", action="store_true", help="leave the environment in .cache/smoke")
    asked = parser.parse_args()
    shutil.rmtree(SMOKE, ignore_errors=True)
    SMOKE.mkdir(parents=True)
    # pip splits PIP_CONSTRAINT at spaces, and the wheel is built in the checkout: relative to it
    where = {} if asked.constraints is None else {"PIP_CONSTRAINT": os.path.relpath(asked.constraints.resolve(), ROOT)}
    build = where | {"PIP_BUILD_CONSTRAINT": where["PIP_CONSTRAINT"]} if where else {}
    try:
        python = environment.create(SMOKE / "env")
        wheel = build_wheel(python, build) if asked.wheel is None else asked.wheel.resolve()
        pip = [str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
        if asked.first:
            step(f"install {asked.first}", [*pip, *shlex.split(asked.first)], clean(False) | where, ROOT)
        extras = f"[{asked.extras}]" if asked.extras else ""
        step(f"install {wheel.name}{extras}", [*pip, f"{wheel}{extras}"], clean(False) | where, ROOT)
        step("pip check", [str(python), "-m", "pip", "check"], clean(False))
        without_gpu = subprocess.run([str(python), "-c", GPU], check=False, capture_output=True).returncode != 0
        variables = clean(without_gpu)
        found = subprocess.check_output([str(python), "-c", WHERE], cwd=SMOKE, env=variables, text=True).splitlines()
        if not Path(found[0]).is_relative_to(SMOKE / "env"):
            raise SystemExit(f"smoke: {found[0]} is not the wheel's")
        (said,) = {line.split()[1] for line in found if line.startswith("tilefold ")}
        if said != found[-1]:
            raise SystemExit(f"smoke: the metadata says tilefold {said}, the package {found[-1]}")
        print(
            f"smoke: Python {sys.version.split()[0]}, {', '.join(found[1:-1])}, {'no GPU' if without_gpu else 'a GPU'}"
        )
        example = SMOKE / "example.py"
        example.write_text(first_example((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
        plain = {name: value for name, value in variables.items() if name != "TRITON_INTERPRET"}  # in plain torch, then
        seconds = step("the README's first example", [str(python), str(example)], plain)
        if seconds > asked.seconds:
            raise SystemExit(f"smoke: the README's first example took {seconds:.1f} s, more than {asked.seconds:g}")
        if "cli" in asked.extras.split(","):
            command = str(SMOKE / "env" / "bin" / "tilefold")
            step("tilefold doctor", [command, "doctor"], variables)
            step("tilefold check --quick", [command, "check", "--quick"], variables)
        for name in asked.pages:
            tutorial(python, name, variables)
    finally:
        if not asked.keep:
            shutil.rmtree(SMOKE, ignore_errors=True)
    print("smoke: ok")


if __name__ == "__main__":
    main()
