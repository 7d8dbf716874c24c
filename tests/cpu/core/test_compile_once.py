"""New lengths, mask tensors and numbers compile nothing: counted for two GPUs, over a hundred lengths."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compile_once
import tilefold
from cases import dilated, qkv, relative
from tilefold.ops import launch
from tilefold.ops.integers import RuntimeInt, general, runtime_ints

pytestmark = pytest.mark.xdist_group("compile_once")  # what is counted once serves all
TESTS = Path(compile_once.__file__).parent
TWICE = {  # kernels of which there are two, or three, and why
    "mask": {
        "attention_forward",
        "attention_backward_queries",
        "attention_backward_keys",
        "attention_backward_reduce",
    },  # rows at multiples of 16, or not
    "learned": {"attention_backward_loads"},  # its two passes
    "mods": {"attention_backward_reduce"},  # with lists of tiles, or without
    "sparse": {
        "sparse_forward",
        "sparse_backward_queries",
        "sparse_backward_keys",
        "sparse_backward_hopper",
    },  # whole blocks
}
TWICE |= {"bias": TWICE["mask"], "sparse mods": TWICE["sparse"]}


@pytest.fixture(scope="module")
def counts():
    """{case: {kernel: [by ops.launch, by Triton]}}, of a process without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, TESTS / "compile_once.py"], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("device", compile_once.DEVICES)
@pytest.mark.parametrize("case", compile_once.CASES)
def test_a_hundred_lengths(counts, case, device):
    """One kernel each, but where rows of a tensor or blocks are whole in some; as many for Triton as for the launcher."""
    assert len(set(compile_once.LENGTHS)) == 100
    found = counts[f"{case} {device}"]
    assert found
    for kernel, (ours, tritons) in found.items():
        twice = kernel.removesuffix("_box") in TWICE.get(case, ())
        assert ours == tritons, kernel
        if device == "h100" and kernel.startswith("attention_backward_") and kernel != "attention_backward_reduce":
            twice = twice and ours > 1  # only lengths below 512 are left to the portable ones
        assert 2 <= ours <= 3 if twice and "hopper" not in kernel else ours <= 1 + twice, kernel


def test_integers_of_any_value_are_compiled_for_alike():
    one, other = (((id, (3, x, 2.0)), runtime_ints((x, 2.0, x + 1))) for x in (1, 160))
    assert launch._class(runtime_ints((1,))) == launch._class(runtime_ints((160,)))
    assert launch._class(runtime_ints((1,))) != launch._class(runtime_ints((1 << 40,)))
    assert launch._class(one) != launch._class(other)  # those that are no RuntimeInts
    assert general(((1, RuntimeInt(1)), RuntimeInt(1 << 40), 16)) == ((1, 17), (1 << 32) + 17, 16)
    assert runtime_ints((True, 2.0, 5)) == (True, 2.0, 5)


class Compiled:
    """What Triton returns of a kernel."""

    def __init__(self, launched):
        self.launched, self.run, self.function, self.packed_metadata = launched, self._run, None, None

    def __getitem__(self, grid):
        return lambda *args: self.launched.append(args)

    def _run(self, *args):
        self.launched.append(args[8:])


class Kernel:
    """A @triton.jit function that is compiled when `warmup` is called."""

    arg_names = ("X", "mods", "BLOCK")
    params = ()

    def __init__(self):
        self.warmed, self.launched = [], []

    def warmup(self, *args, grid, **keywords):
        self.warmed.append(args)
        return Compiled(self.launched)


def test_a_kernel_is_launched_with_other_integers_than_it_was_compiled_for(monkeypatch):
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_entry", lambda compiled: (compiled.run, (None,), lambda device: 0, (None,) * 3))
    monkeypatch.setattr(launch, "_specialisations", lambda fn, args: [launch._class(arg) for arg in args])
    kernel, x = Kernel(), torch.zeros(4)
    for value in (1, 16, 7):
        for _ in range(2):
            made = launch.Launch(kernel, (1, 1, 1), {"BLOCK": 8}, {}, 0)
            for _ in range(2):
                made((x, (runtime_ints((value, 0.5)),)))
    assert [args[1] for args in kernel.warmed] == [((17, 0.5),)]
    assert [args[1][0][0] for args in kernel.launched] == [1] * 4 + [16] * 4 + [7] * 4
    assert {args[2] for args in kernel.launched} == {8}
    made((x, (runtime_ints((1 << 40, 0.5)),)))
    launch.Launch(kernel, (1, 1, 1), {"BLOCK": 8}, {}, 0)((x, (runtime_ints((1 << 41, 0.5)),)))
    assert len(kernel.warmed) == 2


@pytest.mark.no_poison
def test_a_hundred_lengths_are_one_graph(monkeypatch):
    """Under torch.compile(dynamic=True), forward and backward: other tensors, other numbers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, args: None)
    score, mask = tilefold.constant(relative), tilefold.constant(dilated)

    def layer(q, k, v, bias, table, span, step):
        options = {"score_mod": score, "score_args": (table, span), "mask_mod": mask, "mask_args": (step,)}
        return tilefold.attention(q, k, v, bias=bias, causal=True, **options)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in range(20, 120):
        q, k, v = (t.requires_grad_() for t in qkv(2, n, n + 3, 2, 2, 16))
        bias, table = torch.zeros(1, 1, n, n + 3), torch.zeros(2, 2 * n + 1).requires_grad_()
        compiled(q, k, v, bias, table, n, n % 50 + 2).sum().backward()
        assert table.grad is not None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
