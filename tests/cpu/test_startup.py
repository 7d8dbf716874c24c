"""What is done ahead of a first launch: the launcher that Triton will ask for, nothing where Triton is another, no collector."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilefold.aot import newest_triton
from tilefold.ops import startup

ROOT = Path(__file__).resolve().parents[2]

# A process that takes this machine for one with an H200: the true compiler and driver sources, but no library of the driver.
PRETEND = """
import json, sys, threading
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from tilefold.ops import launch, startup

class Pretended(nvidia.CudaDriver):
    def __init__(self):
        self.launcher_cls = nvidia.CudaLauncher
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Pretended())
built, places = [], []
def built_instead(name, src, *rest):
    built.append(open(src).read())
    places.append(threading.current_thread().name)
    raise RuntimeError("no C compiler is needed here")
build._build = built_instead
"""
LAUNCHER = (
    PRETEND
    + """
from aot_cases import problem
from tilefold.ops.dense.attention import example_launch
from tilefold.plan import device_named, plan_attention

for given, portable in ((problem(64), True), (problem(64, sinks=True, heads=4), False)):
    fn, args, keywords = example_launch(given, plan_attention(given, device_named("h200"), portable=portable))
    startup.ahead(fn, args, keywords)
    for thread in threading.enumerate():
        if thread.name == "tilefold-startup":
            thread.join()
    if hasattr(nvidia, "make_launcher"):
        kernel = fn.warmup(*args, grid=(1, 1, 1), **keywords)
        try:
            nvidia.CudaLauncher(kernel.src, kernel.metadata)
        except RuntimeError:
            pass
filed = hasattr(triton.runtime.cache.triton_key, "__code__")
print(json.dumps([filed, len(set(built)), [one == other for one, other in zip(built[::2], built[1::2])], places]))
"""
)


def pretended(code: str, folder: Path, triton: Path | None = None, **variables: str) -> list[object]:
    """What the process prints."""
    path = os.pathsep.join(str(each) for each in (triton, ROOT / "src", ROOT / "tests") if each)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": path,
        "TRITON_CACHE_DIR": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        **variables,
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_launcher_built_ahead_is_the_one_that_triton_builds(tmp_path: Path) -> None:
    """With pointers and with descriptors: the same text twice, first from our thread, then from Triton's own call."""
    assert pretended(LAUNCHER, tmp_path) == [True, 2, [True, True], ["tilefold-startup", "MainThread"] * 2]


def test_the_newest_triton_builds_no_launchers(tmp_path: Path) -> None:
    newest = newest_triton()
    if newest is None:
        pytest.skip("no second Triton here")
    assert pretended(LAUNCHER, tmp_path, newest) == [True, 0, [], []]


def test_a_switch_leaves_triton_to_itself(tmp_path: Path) -> None:
    code = (
        PRETEND
        + "startup.ahead(None, (), {})\nprint(json.dumps([hasattr(triton.runtime.cache.triton_key, '__code__')]))"
    )
    assert pretended(code, tmp_path, TILEFOLD_DISABLE_STARTUP="1") == [False]


@pytest.mark.parametrize(("value", "off"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_disabled(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv(startup.DISABLE, value)
    assert startup.disabled() is off


def test_the_collector_waits_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with startup.uncollected():
            assert not gc.isenabled()
            with startup.uncollected():
                pass
            assert not gc.isenabled(), "the inner one must not wake it"
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
    monkeypatch.setenv(startup.DISABLE, "1")
    with startup.uncollected():
        assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with startup.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_done_ahead_never_fails_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_begin", lambda: None)
    startup.ahead(object(), (), {})  # nothing that Triton could compile
