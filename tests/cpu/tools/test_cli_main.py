"""The command line as a whole: help, exit codes, missing packages, `tilefold doctor`; a GPU's figures fit 80 columns."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from rich.measure import Measurement

import tilefold
from cases.bench import RIGHT, rows, shown
from cases.cli import WIDTH, command, widths
from tilefold.bench.attention import report
from tilefold.bench.attention.cases import SPARSE, Case
from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.page import columns_that_fit
from tilefold.bench.run import Cell
from tilefold.bench.timers import Timing
from tilefold.cli import doctor
from tilefold.cli.app import app
from tilefold.cli.runtime import table_of
from tilefold.ops import environment

COMMANDS = ("demo", "check", "bench", "explain", "kv-memory", "ladder", "roofline", "doctor", "video")


run = command(columns=100, TERM="dumb")


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_help_lists_every_command_and_the_exit_codes():
    result = run("--help")
    for name in COMMANDS:
        assert f" {name} " in result.output
    assert "Exit codes: 0 ok, 1 a check failed, 2 wrong usage" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    for flag in ("--help", "-h"):
        result = run(command, flag)
        assert f"tilefold {command}" in result.output.split("Examples")[1]
        assert max(map(len, result.output.splitlines())) <= 100


def test_every_command_that_measures_has_quick():
    """And no other: they read, explain or draw what is there; a suite is quick by its name."""
    tree = typer.main.get_command(app).commands
    leaves = {name: each for name, each in tree.items() if not hasattr(each, "commands")}
    for group in ("bench", "profile"):
        leaves |= {f"{group} {name}": each for name, each in tree[group].commands.items()}
    without = {name for name, each in leaves.items() if "--quick" not in {o for p in each.params for o in p.opts}}
    assert without == {
        "bench peers", "bench suite", "doctor", "explain", "kv-memory", "profile import",
        "profile script", "roofline",
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["fly"], ["explain"], ["check", "--slow"], ["bench"], ["explain", "--heads", "x"]]
)
def test_wrong_usage_is_exit_code_2_without_a_traceback(arguments):
    result = run(*arguments, code=2)
    assert "Traceback" not in result.output
    assert "Usage: tilefold" in result.output


def test_version():
    assert run("--version").output == f"tilefold {tilefold.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_packages_are_named_with_how_to_install_them(missing):
    done = python(f"import sys; sys.modules[{missing!r}] = None; from tilefold.cli import main; main()")
    assert done.returncode == 2
    assert f"needs the Python package '{missing}'" in done.stderr
    assert "pip install 'tilefold[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_python_m_tilefold_is_the_command():
    done = subprocess.run([sys.executable, "-m", "tilefold", "--version"], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("tilefold 0.")


def test_explain_imports_no_triton():
    code = (
        "import sys; from tilefold.cli import main; sys.argv = 'tilefold explain --heads 8 --q 64 --dim 64'.split()\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\nassert 'triton' not in sys.modules"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_demo_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "tilefold.cli.demo", None)
    result = run("demo", code=2)
    assert "pip install 'tilefold[demo]'" in result.output


@pytest.mark.parametrize("code", [0, 1])
def test_the_demo_gets_its_options_and_gives_the_exit_code(monkeypatch, code):
    seen = []

    def run_demo(options, console):
        seen.append(options)
        return types.SimpleNamespace(ok=not code)

    fake = types.SimpleNamespace(DemoOptions=lambda *fields: fields, run_demo=run_demo)
    monkeypatch.setitem(sys.modules, "tilefold.cli.demo", fake)
    run("demo", "--quick", "--out", "x", "--layer", "2", "--head", "3", "--sentence", "4", code=code)
    assert seen[0][:2] == (Path("x"), True)
    assert seen[0][3:] == (2, 3, 4)


def test_an_interpreter_that_is_forbidden_is_an_error_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    result = run("check", "--quick", code=2)
    assert "error: there is no GPU here and TRITON_INTERPRET=0" in result.output


@pytest.mark.interpreter
def test_the_interpreter_is_switched_on_and_said_so():
    code = (
        "import os, sys; os.environ.pop('TRITON_INTERPRET', None)\n"
        "from tilefold.cli.runtime import prepare_runtime\n"
        "print(prepare_runtime().note, os.environ['TRITON_INTERPRET'], 'triton' in sys.modules)"
    )
    done = python(code)
    assert done.stdout.startswith("No GPU here: kernels run on the CPU in Triton's interpreter"), done.stderr
    assert done.stdout.endswith("1 False\n")


# ---------------------------------------------------------------- doctor


run_doctor = command("doctor")


def test_it_names_versions_and_support():
    result = run_doctor()
    texts = ("machine", "libraries", "runs here", "extras", torch.__version__, "interpreter on the CPU", "AMD GPUs")
    assert all(text in result.output for text in texts), result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_json_has_the_same_findings():
    document = json.loads(run_doctor("--json").output)
    assert document["usable"] is True
    assert [each["what"] for each in document["findings"]] == [each.what for each in doctor.findings()]
    assert {each["state"] for each in document["findings"]} <= {"yes", "no", ""}


@pytest.mark.parametrize(
    ("versions", "fault"),
    [
        ({"triton": "3.6.0", "numpy": "2.3.5"}, None),
        ({"triton": "3.6.0", "numpy": "2.4.0"}, "numpy 2.4.0 breaks the interpreter of triton 3.6.0"),
        ({"triton": "3.9.0", "numpy": "2.5.2"}, None),
        ({"triton": "3.6.0", "numpy": None}, "numpy is not installed"),
        ({"torch": "2.8.1", "triton": "3.6.0", "numpy": "2.3.5"}, "torch 2.8.1 is too old; 2.9 or newer is needed"),
        ({"triton": "3.4.1", "numpy": "2.3.5"}, "triton 3.4.1 is too old; 3.6 or newer is needed"),
    ],
)
def test_what_the_interpreter_needs(monkeypatch, versions, fault):
    monkeypatch.setattr(environment, "installed", versions.get)
    found = environment.interpreter_fault()
    assert (found is None) if fault is None else found.startswith(fault)


def test_exit_code_1_where_nothing_can_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment, "installed", {"triton": "3.6.0", "numpy": "2.4.1"}.get)
    result = run_doctor(code=1)
    assert "tilefold cannot run here: numpy 2.4.1 breaks" in result.output
    assert json.loads(run_doctor("--json", code=1).output)["usable"] is False


@pytest.mark.parametrize(
    ("capability", "portable", "boxes"),
    [((7, 5), "no", "no"), ((8, 0), "yes", "no"), ((9, 0), "yes", "yes"), ((12, 0), "yes", "yes")],
)
def test_support_follows_the_compute_capability(monkeypatch, capability, portable, boxes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    states = {each.what: each.state for each in doctor.support()}
    assert states["portable kernels on a GPU"] == portable
    assert states["descriptor (TMA) loads"] == boxes


@pytest.mark.parametrize(
    ("version", "number"), [("3.6.0", (3, 6, 0)), ("2.11.0+cu130", (2, 11, 0)), ("3.6.0rc1", (3, 6, 1)), (None, ())]
)
def test_version_numbers(version, number):
    assert environment.number(version)[:2] == number[:2]


# ---------------------------------------------------------------- widths of tables


def fit(seen):
    """Many tables, none too wide."""
    return len(seen) > 4 and not [one for one in seen if one[1] > WIDTH]


@pytest.mark.parametrize("replayed", [False, True])
def test_a_sparse_table_of_a_gpu_fits(replayed):
    """All peers, the longest lists, every column that can be measured."""
    cells = []
    for problem, pattern in SPARSE["full"]:
        case = Case("sparse", problem, pattern)
        for name in IMPLEMENTATIONS:
            time = Timing(12.345, 12.123, 13.456, 5, "events")
            graph = time if replayed else None
            cells.append(Cell(case, name, "ok", "", RIGHT, time, graph, scratch=1234567890))
    found = rows(cells)
    with widths() as seen:
        shown(*report.sheets_of(found), *report.detail_tables(found, WIDTH), width=WIDTH)
    assert fit(seen)


def test_a_wide_table_is_cut_between_columns():
    head = ("case", "kind", *(f"column {n}" for n in range(9)))
    lines = [("a", "first", *(str(10**n) for n in range(9))), ("the longest name", "second", *("1.25x",) * 9)]
    wide = Console(width=200)
    assert [len(at) for at in columns_that_fit(head, lines, 40, 2)] == [3, 3, 3, 3, 3, 3, 3, 3, 3]
    cut = columns_that_fit(head, lines, 60, 2)
    assert [i for at in cut for i in at[2:]] == list(range(2, len(head))) and all(at[:2] == (0, 1) for at in cut)
    for at in cut:
        table = table_of([head[i] for i in at], [[line[i] for i in at] for line in lines], 2)
        assert Measurement.get(wide, wide.options, table).maximum <= 60
    assert len(columns_that_fit(head, lines, 200, 2)) == 1
    assert len(columns_that_fit(head[:2], [line[:2] for line in lines], 10, 2)) == 1  # nothing to cut
