"""Tests of operations, made again on the architecture `cpu`: the same cases and oracles, with plain torch instead of the kernels.

A module says `globals().update(again("test_attention", "bands dtypes"))` and has `torch_cpu` among its fixtures."""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

import cases.decode
import cases.select
from cases import DEEP
from tilefold.ops import records
from tilefold.ops.matrix import lowbit_launch
from tilefold.plan import TorchPlan, device_named

CPU = Path(__file__).resolve().parent / "cpu"
KERNELS = ("kernel",)  # parameters that name a kernel: None is whatever the plan takes


def forget() -> None:
    """Records of calls know which architecture they are of."""
    records.CACHE.clear()
    lowbit_launch._BOUND.clear()


@pytest.fixture
def torch_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors outside of the interpreter, in one thread: others share the cores."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(TorchPlan, "with_tile", with_tile)
    monkeypatch.setattr(TorchPlan, "with_tiles", with_tiles, raising=False)
    monkeypatch.setattr(cases.decode, "changed", lambda plan, of_kernels: plan)
    monkeypatch.setattr(
        cases.select, "device_of", lambda _: device_named("interpreter")
    )  # for the roundings of its kernel
    forget()
    before = set(sys.modules)
    yield
    forget()
    kernels = [name for name in set(sys.modules) - before if name.startswith(("tilefold.kernels", "tilefold.device"))]
    for name in kernels:  # imported outside of the interpreter, they would stay so for the tests behind this one
        del sys.modules[name]
    assert not kernels, f"plain torch imports no kernels: {sorted(kernels)}"
    torch.set_num_threads(threads)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


def with_tile(self: TorchPlan, block_m: int | None = None, block_n: int | None = None, **of_kernels: Any) -> TorchPlan:
    """As the plans of kernels have it, without what kernels alone have; and one KV head of one sequence at a time."""
    cut = dataclasses.replace(self.cut, sequences=1, heads=1)
    given = {name: value for name, value in (("block_m", block_m), ("block_n", block_n)) if value is not None}
    return dataclasses.replace(self, cut=dataclasses.replace(cut, **given))


def with_tiles(self: TorchPlan, queries: Any = None, *tiles: Any, **of_kernels: Any) -> TorchPlan:
    return with_tile(self, **({} if queries is None else {"block_m": queries.block_m, "block_n": queries.block_n}))


def again(file: str, names: str) -> dict[str, Any]:
    """The tests of these names, without their "test_", of a file under tests/cpu, with their parameters but for those that name a
    kernel."""
    (path,) = CPU.rglob(f"{file}.py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.import_module(file)
    if hasattr(module, "planned"):  # the plan of a call, with a tile of the test's choice
        module.planned = lambda *args, **fields: None  # type: ignore[attr-defined]
    return {f"{file}_{name}": _unnamed(getattr(module, f"test_{name}")) for name in names.split()}


def _unnamed(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def made(*args: Any, **given: Any) -> None:
        test(*args, **given)

    marks = [_none_alone(mark) for mark in getattr(test, "pytestmark", [])]
    given = [mark for mark in marks if mark.name == "parametrize" and not mark.kwargs.get("indirect")]
    if len(given) > 1 and not DEEP:
        marks = [mark for mark in marks if mark not in given] + [_each_value_once(given)]
    made.pytestmark = marks  # type: ignore[attr-defined]
    return made


def _each_value_once(marks: list[pytest.Mark]) -> pytest.Mark:
    """Products are the kernels': here each value of each parameter is in one test, with others of the others."""
    names, columns = [], []
    for mark in marks:
        some = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names += [name.strip() for name in some]
        rows = [each if isinstance(each, ParameterSet) else pytest.param(*(each if len(some) > 1 else (each,)))
                for each in mark.args[1]]  # fmt: skip
        columns.append(rows)
    most = max(map(len, columns))
    picked = [[rows[i % len(rows)] for rows in columns] for i in range(most)]
    values = [
        pytest.param(*(value for each in row for value in each.values), marks=[m for each in row for m in each.marks])
        for row in picked
    ]
    return pytest.mark.parametrize(names, values).mark


def _none_alone(mark: pytest.Mark) -> pytest.Mark:
    if mark.name != "parametrize" or mark.args[0] not in KERNELS:
        return mark
    return pytest.mark.parametrize(mark.args[0], [None]).mark
