"""What cannot work is refused at the first call, with what mends it; the smoke test of an installed wheel is what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import smoke
import torch

import tilefold
from cases import qkv
from tilefold.ops import environment

ROOT = Path(__file__).resolve().parents[3]
CALL = "import torch, tilefold; q = torch.ones(1, 16, 1, 16{}); tilefold.attention(q, q, q); print('ran')"
LATE = "import triton, os; os.environ['TRITON_INTERPRET'] = '1'; " + CALL.format("")


def python(code, **variables):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300, env=env
    )


@pytest.fixture
def forgotten():
    environment.check_environment.cache_clear()
    yield
    environment.check_environment.cache_clear()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"numpy": "2.4.1"}, "numpy 2.4.1 breaks the interpreter of triton 3.6.0: loops fail; pip install 'numpy<2.4'"),
        ({"numpy": None}, "numpy is not installed; the interpreter needs it: pip install 'numpy<2.4'"),
        ({"triton": "3.4.1"}, "triton 3.4.1 is too old; 3.6 or newer is needed: pip install 'triton>=3.6'"),
        ({"torch": "2.8.0"}, "torch 2.8.0 is too old; 2.9 or newer is needed: pip install 'torch>=2.9'"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_at_the_first_call(versions, text, monkeypatch, forgotten, device):
    """Of any operation, and again until it is fixed; doctor has the same sentence."""
    there = {"torch": "2.13.0", "triton": "3.6.0", "numpy": "2.3.5"}
    monkeypatch.setattr(environment, "installed", (there | versions).get)
    n = len(text)  # a shape that no other test has: what was checked once is not looked at again
    q, k, v = qkv(1, 17, n, 2, 2, 24, device=device)
    for call in (
        lambda: tilefold.attention(q, k, v),
        lambda: tilefold.attention(q, k, v),
        lambda: tilefold.apply_rotary(q, torch.ones(n, 5), torch.ones(n, 5)),
    ):
        with pytest.raises(tilefold.DeviceError, match=re.escape(text)):
            call()
    assert environment.interpreter_fault() == text
    monkeypatch.setattr(environment, "installed", there.get)
    tilefold.attention(q, k, v)


def test_on_a_gpu_numpy_does_not_matter(monkeypatch):
    monkeypatch.setattr(environment, "installed", {"torch": "2.13.0", "triton": "3.6.0", "numpy": None}.get)
    assert environment.triton_fault() is None


@pytest.mark.interpreter
def test_the_variable_set_after_triton_was_imported():
    done = python(LATE)
    assert done.returncode == 1 and "ran" not in done.stdout
    assert "DeviceError: TRITON_INTERPRET=1 was set after triton was imported" in done.stderr
    early = python(CALL.format(""), TRITON_INTERPRET="1")
    assert early.stdout == "ran\n", early.stderr


def test_the_smoke_test_sees_nothing_of_the_checkout(monkeypatch):
    for name in ("PYTHONPATH", "TRITON_INTERPRET", "TILEFOLD_CHECK", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "1")
    assert not {name for name in smoke.clean(False) if name.startswith(("PYTHON", "TILEFOLD", "VIRTUAL_ENV"))}
    assert "TRITON_INTERPRET" not in smoke.clean(False) and smoke.clean(True)["TRITON_INTERPRET"] == "1"


def test_a_step_that_fails_ends_the_smoke_test(tmp_path):
    with pytest.raises(SystemExit, match="no such thing"):
        smoke.step("a step", [sys.executable, "-c", "raise SystemExit('no such thing')"], dict(os.environ), tmp_path)


def test_workflows_cover_the_supported_pythons():
    """Those that the package declares: no more, no fewer."""
    stated = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    text = (ROOT / ".github" / "workflows" / "install.yml").read_text()
    matrix = re.search(r"python: \[(.*)\]", text)
    assert matrix is not None and set(re.findall(r"[\d.]+", matrix[1])) == stated
    assert "scripts/smoke.py" in text and "make --no-print-directory smoke" in (ROOT / ".ci" / "run").read_text()
