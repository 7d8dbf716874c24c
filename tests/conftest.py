"""What every test gets: the interpreter where there is no GPU, poisoned fresh memory, a fixed seed, hypothesis profiles.

TRITON_INTERPRET must be set before triton is first imported, so it is set here, before any test module is read.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["TILEFOLD_TUNED"] = "none"  # plans by rules, whatever was measured on this machine

if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores; torch would give every one all of them
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.configuration import set_hypothesis_home_dir
    from hypothesis.database import DirectoryBasedExampleDatabase
except ImportError:  # the tests that need it skip themselves
    pass
else:
    set_hypothesis_home_dir(ROOT / ".cache" / "hypothesis")
    _common = {
        "deadline": None,  # the interpreter is slow and a first launch compiles
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        "print_blob": True,
    }
    _found = DirectoryBasedExampleDatabase(ROOT / ".cache" / "hypothesis" / "examples")
    settings.register_profile("quick", max_examples=25, database=_found, **_common)
    settings.register_profile(
        "ci", max_examples=100, derandomize=True, database=None, **_common
    )  # the same in every run
    settings.register_profile("deep", max_examples=5000, database=_found, **_common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected lives to the end: garbage is not looked for meanwhile, nor among it afterwards, and then less often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests under tests/gpu need a GPU; tests of the interpreter need that there is none; long ones begin, so that no process
    ends with one while the others have nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    no_gpu = pytest.mark.skip(reason="no GPU that torch can use")
    no_interpreter = pytest.mark.skip(reason="kernels run on the GPU here, not in the interpreter")
    for item in items:
        if not GPU and (ROOT / "tests" / "gpu") in item.path.parents:
            item.add_marker(no_gpu)
        if GPU and item.get_closest_marker("interpreter"):
            item.add_marker(no_interpreter)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests of kernels put their tensors."""
    return torch.device("cuda" if GPU else "cpu")


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """The interpreter takes a fraction of the time."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tilefold.debug import patch_interpreter

        patch_interpreter()


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random tensors in every run of a test, whichever ran before it."""
    torch.manual_seed(0)


def _poisoned(allocate):
    """`allocate`, but floating-point results come back full of NaN."""

    def allocate_nan(*args, **kwargs):
        fresh = allocate(*args, **kwargs)
        if fresh.is_floating_point() or fresh.is_complex():
            with torch.no_grad():
                fresh.fill_(float("nan"))
        return fresh

    return allocate_nan


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so an output that no program wrote and a read past what was written show in the result."""
    if request.node.get_closest_marker("no_poison"):
        return
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
