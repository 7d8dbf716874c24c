"""`tilefold ladder`: the list, the table with its JSON, a student's own kernel that is right, wrong or broken, refusals."""

import json

import pytest
from typer.testing import CliRunner

from tilefold.cli.app import app
from tilefold.ladder import RUNGS
from tilefold.plan import device_named
from tilefold.plan.problem import AttentionProblem

pytestmark = [pytest.mark.interpreter, pytest.mark.no_poison]
TINY = ("--seq", "16,24", "--heads", "1", "--dim", "16")

RIGHT = """
import torch

def attention(q, k, v, causal=False):
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    s = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), float("-inf"))
    return (s.softmax(3) @ v).transpose(1, 2).bfloat16()
"""
KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def copy(X, Y, n, N: tl.constexpr):
    o = tl.arange(0, N)
    x = tl.load(X + o, mask=o < n)
    tl.store(Y + o, x + missing, mask=o < n)

def attention(q, k, v, causal=False):
    out = torch.empty_like(q)
    copy[(1,)](q, out, q.numel(), N=512)
    return out
"""


def run(*arguments):
    return CliRunner().invoke(app, ["ladder", *map(str, arguments)], env={"COLUMNS": "150", "NO_COLOR": "1"})


def new(tmp_path, text, *arguments, rung="naive"):
    path = tmp_path / "my_kernel.py"
    path.write_text(text)
    return run("--new", path, "--rung", rung, *TINY[2:], "--seq", "16", *arguments)


def test_the_list_has_every_rung_and_its_lesson():
    result = run()
    assert result.exit_code == 0
    for each in RUNGS.values():
        assert each.name in result.output and each.lesson[:40] in result.output


def test_the_table_and_its_json(tmp_path):
    path = tmp_path / "ladder.json"
    result = run("--rung", "split", "--queries", "0", *TINY, "--dtype", "fp16", "--causal", "--json", path)
    assert result.exit_code == 0, result.output
    assert "no speeds" in result.output and result.output.count("all agree with fp64") == 2
    document = json.loads(path.read_text())
    for found, n in zip(document["results"], (16, 24), strict=True):
        assert found["problem"]["seq_q"] == found["problem"]["seq_k"] == n and found["problem"]["causal"]
        assert [line["name"] for line in found["lines"]] == [*RUNGS, "tilefold"]
        for name in RUNGS:
            counts, cost = found["counts"][name], found["costs"][name]
            assert counts["loaded"] + counts["stored"] == cost["l2_bytes"] and counts["flops"] == cost["flops"]
    assert document["sweep"] == {}


def test_one_query_is_the_split_rungs_default(tmp_path):
    result = run("--rung", "split", "--seq", "40", *TINY[2:])
    assert result.exit_code == 0 and "1 queries, 40 keys" in result.output


def test_an_own_kernel_that_is_right(tmp_path):
    result = new(tmp_path, RIGHT, "--causal")
    assert result.exit_code == 0, result.output
    assert any(line.startswith("my_kernel.py") and line.rstrip().endswith("ok") for line in result.output.splitlines())


def test_an_own_kernel_that_is_wrong(tmp_path):
    result = new(tmp_path, RIGHT.replace("** 0.5", "** 0.4"))
    assert result.exit_code == 1
    assert "my_kernel.py is WRONG: max error" in result.output and "all agree" not in result.output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (RIGHT.replace("q @ k.tr", "q @ nothing.tr"), "my_kernel.py:6: NameError: name 'nothing' is not defined"),
        (RIGHT.replace("causal:", "causal"), "my_kernel.py:7: SyntaxError: "),
        ("import triton\n1 / 0\n", "my_kernel.py:2: ZeroDivisionError: division by zero"),
        (KERNEL, "my_kernel.py:10: NameError: name 'missing' is not defined"),
    ],
    ids=["call", "syntax", "import", "kernel"],
)
def test_errors_show_the_line_of_the_students_file(tmp_path, text, line):
    result = new(tmp_path, text)
    assert result.exit_code == 1, result.output
    assert line in result.output and "Traceback" not in result.output


def test_quick_is_the_shortest_length(tmp_path):
    result = run("--rung", "naive", *TINY[2:], "--seq", "24,16", "--quick", "--json", tmp_path / "quick.json")
    assert result.exit_code == 0, result.output
    (only,) = json.loads((tmp_path / "quick.json").read_text())["results"]
    assert "N=16" in result.output and "N=24" not in result.output and only


def test_refusals(tmp_path):
    for arguments, message in (
        (("--new",), "--new needs a file, as in `tilefold ladder --new my_kernel.py`"),
        (("--new", "--rung", "flash"), "--new needs a file"),
        (("--rung", "fast"), "rung must be one of naive, profile, paged, flash, split, got 'fast'"),
        (("--rung", "flash", "--seq", "1024,x"), "--seq must be integers of at least 1, comma-separated, got '1024,x'"),
        (("--rung", "flash", "--queries", 9, "--seq", 8, "--causal"), "--queries must be at most --seq under --causal"),
        (("--rung", "flash", "--heads", 3, "--kv-heads", 2), "kv_heads must divide heads"),
        (("--rung", "flash", "--dtype", "fp4"), "dtype must be bf16, fp16 or fp32"),
        (("--new", tmp_path / "none.py"), "--new must be a Python file that defines attention(q, k, v, causal=False)"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
    for text, message in (
        ("x = 1", "defines no function attention(q, k, v, causal=False)"),
        ("def attention(q, k, v): return q", "takes no argument causal"),
        ("def attention(q, k, v, causal=False): return q.float()", "must return a tensor of q's dtype"),
        ("def attention(q, k, v, causal=False): return q[:, 1:]", "must return q's shape (1, 16, 1, 16)"),
    ):
        result = new(tmp_path, text)
        assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output


def test_what_a_table_says_of_measured_times():
    """Rates, speed-ups and shares of the bound from given times; naive's products are those of the FP32 pipe."""
    from tilefold.ladder import profile

    p = AttentionProblem(1, 4096, 4096, 16, 16, 128, 128)
    costs = {name: RUNGS[name].cost(p) for name in ("naive", "flash")}
    rows = profile.table({"naive": 10.0, "flash": 0.5, "tilefold": 0.25}, costs, p, device_named("h200"))
    assert [row.speedup for row in rows] == [1.0, 20.0, 40.0]
    naive, flash, library = rows
    assert flash.tflops == pytest.approx(4 * 4096**2 * 128 * 16 / 0.5e-3 * 1e-12)
    assert flash.gbs == pytest.approx(costs["flash"].bytes / 0.5e-3 * 1e-9)
    assert dict(naive.bound.times).keys() >= {"FP32 pipe", "DRAM"} and flash.bound.resource == "tensor pipe"
    assert flash.of_bound == pytest.approx(flash.bound.seconds / 0.5e-3)
    assert library.gbs is library.bound is None and profile.why(library) == ""
    assert "latency" in profile.why(naive) and "tensor pipe" in profile.why(flash)


def test_the_sweeps_table(capsys):
    from rich.console import Console

    from tilefold.cli.ladder import _show_sweep
    from tilefold.ladder import Tile

    a, b = Tile(16, 16), Tile(32, 64)
    _show_sweep(Console(width=100), "flash", {64: {a: 2.0, b: 1.0}, 128: {a: "OutOfResources: shared memory", b: 3.0}})
    lines = capsys.readouterr().out.splitlines()
    assert "[1.000]" in lines[-1] and "[3.000]" in lines[-1] and "OutOfResources" in lines[-2]


def test_a_sweep_keeps_what_cannot_run():
    from tilefold.ladder import Tile, profile

    def made(tile):
        if tile.block_m == 32:
            raise RuntimeError("out of shared memory")
        return lambda: None

    found = profile.sweep(made, (Tile(16, 16), Tile(32, 16)), False, lambda tile: None)
    assert isinstance(found[Tile(16, 16)], float) and found[Tile(32, 16)] == "RuntimeError: out of shared memory"
