"""The command line as a whole: help, exit codes, errors without tracebacks, what it says when its packages are missing."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer

import tilefold
from cases.cli import command
from tilefold.cli.app import app

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
        "bench compare", "bench peers", "bench suite", "doctor", "explain", "kv-memory", "profile import",
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
