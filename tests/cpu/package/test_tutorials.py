"""Tutorials and the guides' examples run as they stand, without a GPU, and print what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from run_page import BLOCK, PROGRAM

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


def environment(interpreter: bool) -> dict[str, str]:
    """That of a reader, with the kernels in Triton's interpreter or without."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), kept.get("PYTHONPATH", "")])
    return kept | ({"TRITON_INTERPRET": "1"} if interpreter else {})


def asks_for_the_interpreter(name: str) -> bool:
    return "TRITON_INTERPRET=1" in TEXTS[name].split("```python")[0]


def test_every_tutorial_has_examples() -> None:
    for name, text in TEXTS.items():
        assert len(BLOCK.findall(text)) >= (0 if name == "index.md" else 3), name
    assert len(TEXTS) == 8
    assert {name for name in TEXTS if asks_for_the_interpreter(name)} >= {"masks.md", "training.md"}


@pytest.mark.parametrize("interpreter", [False, True])
def test_they_print_what_they_say(interpreter: bool, tmp_path: Path) -> None:
    pages = [page for page in PAGES if asks_for_the_interpreter(page.name) == interpreter]
    command = [sys.executable, str(ROOT / "tests" / "run_page.py"), *map(str, pages)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(interpreter), cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == len(pages)
    for page, blocks in zip(pages, results, strict=True):
        for line, printed, shown in blocks:
            assert printed == (shown or ""), f"{page.name}:{line}"
    assert sum(shown is not None for blocks in results for _, _, shown in blocks) >= (10 if interpreter else 15)


def test_the_program_of_two_processes_runs(tmp_path: Path) -> None:
    (program,) = (code for code, _ in BLOCK.findall(TEXTS["several_gpus.md"]) if code.startswith(PROGRAM))
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    environ = environment(interpreter=False) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\(1, 30, 4, 32\) \(1, 60, 4, 32\)\nTrue\n", done.stdout)
    for said in ("2 program.py   # on a CPU", "It prints the shapes"):
        assert said in TEXTS["several_gpus.md"]


# ---------------------------------------------------------------- guides


DOCS = Path(__file__).resolve().parents[3] / "docs"


def examples(name: str, device: str) -> list[str]:
    """The page's Python; without a GPU, for the interpreter, and without what captures a graph."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S)
    if device == "cuda":
        return found
    return [text.replace('"cuda"', f'"{device}"') for text in found if "CUDAGraph" not in text]


@pytest.mark.no_poison
def test_the_guide_to_caches_runs(device):
    names: dict[str, object] = {}
    texts = examples("explanation/cache_append.md", device)
    assert len(texts) == 4
    for text in texts:
        exec(text, names)
    assert names["pages_k"].any() and names["eighths"][0].float().any()  # type: ignore[attr-defined,index]
    assert names["out"].isfinite().all()  # type: ignore[attr-defined]


@pytest.mark.no_poison
def test_the_guide_to_pages_runs(device):
    names: dict[str, object] = {}
    texts = examples("explanation/paged_cache.md", device)
    assert len(texts) == (5 if device == "cuda" else 4)
    for text in texts:
        exec(text, names)
    assert names["cache"].sequences == ()  # type: ignore[attr-defined]


@pytest.mark.no_poison
def test_the_page_of_checks_runs(device):
    names: dict[str, object] = {}
    (text,) = examples("reference/checks.md", device)
    exec(text, names)
    assert names["fault"].argument == "block_table"  # type: ignore[attr-defined]
