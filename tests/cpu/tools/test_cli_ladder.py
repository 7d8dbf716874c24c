"""`tilefold ladder`: the list, the table with its JSON, a student's own kernel that is right, wrong or broken, refusals."""

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from cases.cli import command, refused, reports
from tilefold.cli.ladder_report import parts_of
from tilefold.cli.runtime import show
from tilefold.ladder import RUNGS, Tile, profile
from tilefold.ladder.course import Result, Swept
from tilefold.plan import device_named
from tilefold.plan.problem import AttentionProblem
from tilefold.reference import Comparison

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


run = command("ladder", columns=150)


def new(tmp_path, text, *arguments, rung="naive", code=0):
    path = tmp_path / "my_kernel.py"
    path.write_text(text)
    return run("--new", path, "--rung", rung, *TINY[2:], "--seq", "16", *arguments, code=code)


def test_the_list_has_every_rung_and_its_lesson():
    run()
    assert max(map(len, run(COLUMNS="80").output.splitlines())) <= 80
    wide = run(COLUMNS="400").output
    for each in RUNGS.values():
        assert each.name in wide and each.lesson in wide and each.best_use in wide


def test_the_table_and_its_json(tmp_path):
    path = tmp_path / "ladder.json"
    result = run("--rung", "split", "--queries", "0", *TINY, "--dtype", "fp16", "--causal", "--json", path)
    assert "no speeds" in result.output and result.output.count("all agree with fp64") == 2
    document = json.loads(path.read_text())
    for found, n in zip(document["results"], (16, 24), strict=True):
        assert found["problem"]["seq_q"] == found["problem"]["seq_k"] == n and found["problem"]["causal"]
        assert [line["name"] for line in found["lines"]] == [*RUNGS, "torch math", "torch SDPA", "tilefold"]
        for name in RUNGS:
            counts, cost = found["counts"][name], found["costs"][name]
            assert counts["loaded"] + counts["stored"] == cost["l2_bytes"] and counts["flops"] == cost["flops"]
        for line in found["lines"]:
            assert line["over_torch"] == pytest.approx(found["lines"][-2]["ms"] / line["ms"])
    assert document["sweeps"] == []
    assert document["command"].startswith("tilefold ladder --rung split") and document["setting"]["triton"]


def test_dtypes_splits_and_files(tmp_path):
    """Several dtypes, several numbers of parts, the sweep, a page and a picture, in one call."""
    files, options = reports(tmp_path, "found", "json", "markdown", "png")
    given = ("--rung", "split", "--seq", 40, "--dtype", "fp16,fp32", "--splits", "1,3", "--sweep", "--vary", "--quick")
    run(*given, *TINY[2:], *options)
    document = json.loads(files["json"].read_text())
    assert [found["problem"]["dtype"] for found in document["results"]] == ["float16", "float32"]
    for found in document["results"]:
        assert [name for name in found["counts"] if name.startswith("split")] == ["split 1", "split 3"]
        for name in ("split 1", "split 3"):
            counts, cost = found["counts"][name], found["costs"][name]
            assert counts["loaded"] + counts["stored"] == cost["l2_bytes"] and counts["flops"] == cost["flops"]
        assert found["counts"]["split 3"]["stored"] > found["counts"]["split 1"]["stored"]
    assert [each["problem"]["dtype"] for each in document["sweeps"]] == ["float16", "float32"]
    assert all(len(each["cells"]) > 5 for each in document["sweeps"]), (
        "tiles of the sweep, and neighbours of the rung's own"
    )
    page = files["markdown"].read_text()
    assert "| split 3 |" in page and "**split, float16: kB by tile, [least]**" in page
    assert document["command"] in page and document["setting"]["date"] in page
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "given", [("--rung", "split", "--queries", 0, "--sweep", "--vary"), ("--rung", "profile", "--sweep", "--quick")]
)
def test_tables_fit_80_columns(given):
    """What 80 columns show is what 300 show: nothing is folded or cut."""
    shown = [
        [line.rstrip() for line in run(*given, *TINY, COLUMNS=str(columns)).output.splitlines()]
        for columns in (80, 300)
    ]
    assert shown[0] == shown[1]
    assert max(map(len, shown[0][1:])) <= 80  # the first line says where kernels run


def test_large_figures_fit_80_columns(capsys):
    """A GPU's tables with the widest figures that they have to hold: five lengths, seconds, five-digit counts."""
    device = device_named("h200")
    p = AttentionProblem(1, 8192, 8192, 16, 16, 128, 128)
    costs = {name: each.cost(p) for name, each in RUNGS.items()}
    times = {"naive": 1234.567, "profile": 999.9, "flash": 0.001, "torch math": 55.5, "torch SDPA": 888.888}
    result = Result(p, profile.table(times, costs, p, device), costs=costs)
    result.verdicts = {name: Comparison(1.5e-11, 2.5e-11, 1.1e-11, 2.2e-11, True) for name in times}
    cells = {str(tile): 1234.567 for tile in Tile(128, 128, 16, 4).around()}
    cells["128 x 256, 16 warps, 4 stages"] = "OutOfResources: shared memory"
    swept = [Swept(replace(p, seq_k=n), "ms", cells) for n in (512, 1024, 2048, 4096, 8192)]
    parts = parts_of("flash", [result], swept, True)
    shown = []
    for width in (80, 300):
        show(Console(width=width), [one for one in parts if "needs" not in getattr(one, "text", "")])
        shown.append([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    assert shown[0] == shown[1] and any("[1235]" in line for line in shown[0])
    tables = [line for line in shown[0] if "at least" not in line]
    assert max(map(len, tables)) <= 80
    assert any(line.startswith("128 x 256, 16 warps, 4 stages: OutOfResources") for line in shown[0])


def test_one_query_is_the_split_rungs_default(tmp_path):
    result = run("--rung", "split", "--seq", "40", *TINY[2:])
    assert "1 queries, 40 keys" in result.output


def test_torch_has_the_same_mask(tmp_path):
    """Fewer queries than keys, grouped heads, causal at the bottom right: torch's rows are judged as all others."""
    path = tmp_path / "few.json"
    given = ("--queries 5 --seq 24 --causal --heads 4 --kv-heads 2 --dim 16 --dtype fp32,bf16",)
    run("--rung", "naive", *given, "--json", path)
    for found in json.loads(path.read_text())["results"]:
        assert all(found["verdicts"][name]["ok"] for name in ("torch math", "torch SDPA"))


def test_an_own_kernel_that_is_right(tmp_path):
    result = new(tmp_path, RIGHT, "--causal")
    assert any(line.startswith("my_kernel.py") and line.rstrip().endswith("ok") for line in result.output.splitlines())


def test_an_own_kernel_that_is_wrong(tmp_path):
    result = new(tmp_path, RIGHT.replace("** 0.5", "** 0.4"), code=1)
    assert "my_kernel.py is WRONG: max error" in result.output and "all agree" not in result.output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (RIGHT.replace("q @ k.tr", "q @ nothing.tr"), "my_kernel.py:6: NameError: name 'nothing' is not defined"),
        (RIGHT.replace("causal:", "causal"), "my_kernel.py:7: SyntaxError: "),
        ("def attention(q, k, v): return q", "TypeError: attention() got an unexpected keyword argument 'causal'"),
        ("import triton\n1 / 0\n", "my_kernel.py:2: ZeroDivisionError: division by zero"),
        (KERNEL, "my_kernel.py:10: NameError: name 'missing' is not defined"),
    ],
    ids=["call", "syntax", "signature", "import", "kernel"],
)
def test_errors_show_the_line_of_the_students_file(tmp_path, text, line):
    result = new(tmp_path, text, code=1)
    assert line in result.output and "Traceback" not in result.output


def test_quick_is_the_shortest_length(tmp_path):
    result = run("--rung", "naive", *TINY[2:], "--seq", "24,16", "--quick", "--json", tmp_path / "quick.json")
    (only,) = json.loads((tmp_path / "quick.json").read_text())["results"]
    assert "N=16" in result.output and "N=24" not in result.output and only


def test_refusals(tmp_path):
    refused(
        run,
        ("--rung fast", "rung must be one of naive, profile, paged, flash, split, got 'fast'"),
        ("--rung flash --seq 1024,x", "--seq must be integers of at least 1, comma-separated, got '1024,x'"),
        ("--rung flash --queries 9 --seq 8 --causal", "--queries must be at most --seq under --causal"),
        ("--rung flash --heads 3 --kv-heads 2", "kv_heads must divide heads"),
        ("--rung flash --dtype fp16,fp4", "dtype must be bf16, fp16 or fp32 (or their full names), got 'fp4'"),
        ("--rung flash --splits 2", "--splits needs --rung split, got --rung flash"),
        ("--rung split --splits 2,x", "--splits must be integers of at least 1, comma-separated, got '2,x'"),
        ("--rung split --splits 65", "--splits must be integers from 1 to 64, comma-separated, got '65'"),
        (("--rung flash --markdown", tmp_path / "no" / "page.md"), "--markdown must be a file that can be written"),
        (("--new", tmp_path / "none.py"), "--new must be a Python file that defines attention(q, k, v, causal=False)"),
    )
    for text, message in (
        ("x = 1", "defines no function attention(q, k, v, causal=False)"),
        ("def attention(q, k, v, causal=False): return q.float()", "must return a tensor of q's dtype"),
        ("def attention(q, k, v, causal=False): return q[:, 1:]", "must return q's shape (1, 16, 1, 16)"),
    ):
        result = new(tmp_path, text, code=2)
        assert message in result.said


def test_what_a_table_says_of_measured_times():
    """Rates, speed-ups and shares of the bound from given times; naive's products are those of the FP32 pipe."""
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


def test_the_sweeps_table():
    """The least of each length in brackets, and why a cell is empty below."""
    a, b = str(Tile(16, 16)), str(Tile(32, 64))
    problems = [AttentionProblem(1, n, n, 2, 2, 32, 32) for n in (64, 128)]
    cells = ({a: 2.0, b: 1.0}, {a: "OutOfResources: shared memory", b: 30.0})
    swept = [Swept(p, "ms", each) for p, each in zip(problems, cells, strict=True)]
    title, table, why = parts_of("flash", [], swept, True)
    assert title.text == "flash, bfloat16: ms by tile, [least]"
    assert table.head == ("tile", "warps", "stages", "N=64", "N=128")
    assert table.rows == (("16 x 16", "4", "2", "2.000", "-"), ("32 x 64", "4", "2", "[1.000]", "[30.00]"))
    assert why.text == f"{a}: OutOfResources: shared memory"


def test_a_sweep_keeps_what_cannot_run():
    def refused():
        raise RuntimeError("out of shared memory")

    found = profile.sweep(
        {"fits": lambda: lambda: None, "too large": refused}, lambda calls: dict.fromkeys(calls, 2.0), str
    )
    assert found == {"fits": 2.0, "too large": "RuntimeError: out of shared memory"}


def test_a_setting_with_a_wrong_result_is_said_and_not_measured(monkeypatch):
    from tilefold.ladder import course, flash

    right = flash.attention
    monkeypatch.setattr(
        flash, "attention", lambda q, k, v, causal, tile: right(q, k, v, causal) * (1.1 if tile.block_m == 128 else 1)
    )
    p = AttentionProblem(1, 24, 24, 1, 1, 16, 16, dtype="float16")
    found = course.sweep(p, RUNGS["flash"], False, lambda case, what: None)
    assert not found.ok
    for name, cell in found.cells.items():
        assert cell.startswith("WrongError: max error") if name.startswith("128") else cell > 0


def test_a_row_that_finds_too_little_memory_is_left_out(monkeypatch):
    from tilefold.ladder import course, naive

    def full(*given, **options):
        raise torch.OutOfMemoryError("tried to allocate 64 GiB")

    monkeypatch.setattr(naive, "attention", full)
    p = AttentionProblem(1, 20, 20, 1, 1, 16, 16, dtype="float16")
    found = course.run(p, "naive", False, lambda case, what: None)
    assert found.ok and found.notes == {"naive": "too little memory: tried to allocate 64 GiB"}
    assert [line.name for line in found.lines] == ["torch math", "torch SDPA", "tilefold"]
