"""tilefold.debug inside kernels: conditions, printing and stopping, interpreted and compiled; the guide's examples."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import debug_cases
from tilefold import debug
from tilefold.aot import Job, newest_triton, run_jobs
from tilefold.aot.cache import CACHE_VARIABLE
from tilefold.aot.jobs import NEWEST_VARIABLE
from tilefold.errors import DtypeError, Unsupported, ValueRangeError

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "guides" / "debugging.md"
interpreted = pytest.mark.interpreter


@pytest.mark.parametrize(
    ("text", "yes", "no", "again"),
    [
        ("0", [(0,), (0, 5)], [(1,), (1, 0)], "=0"),
        (">1", [(2,), (9, 0, 0)], [(0,), (1,)], ">1"),
        ("=0,>2", [(0, 3)], [(0, 2), (1, 3), (0,)], "=0,>2"),
        ("!=3", [(0,), (4,)], [(3,)], "!=3"),
        ("<=4,*,<2", [(4, 7, 1)], [(5, 0, 0), (4, 0, 2)], "<=4,*,<2"),
        (", >= 2", [(5, 2)], [(5, 1)], "*,>=2"),
        ("==12", [(12,)], [(1,)], "=12"),
        ("", [(0,), (3, 3, 3)], [], "*"),
        ("*,*", [(1, 2)], [], "*"),
    ],
)
def test_conditions(text, yes, no, again):
    condition = debug.parse_condition(text)
    assert all(condition.holds(program) for program in yes)
    assert not any(condition.holds(program) for program in no)
    assert str(condition) == again and debug.parse_condition(again) == condition


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("0,>x", ValueRangeError, "axis 1 says '>x', accepted: a number from 0"),
        ("-1", ValueRangeError, "axis 0 says '-1'"),
        ("=>1", ValueRangeError, "axis 0 says '=>1'"),
        ("1 2", ValueRangeError, "axis 0 says '1 2'"),
        ("٣", ValueRangeError, "axis 0"),
        ("0,0,0,0", ValueRangeError, "4 grid axes, a grid has at most 3"),
        ("4294967296", ValueRangeError, "at most 2147483647"),
        (3, DtypeError, "must be a string like '0,>1', got 3 of type int"),
    ],
)
def test_conditions_refused(text, error, says):
    with pytest.raises(error, match=says.replace("(", r"\(").replace("*", r"\*")):
        debug.parse_condition(text)


def test_when(device):
    """The same on a GPU and in the interpreter, in a kernel and in a device function, and as the record says."""
    out = torch.zeros(32, dtype=torch.int32, device=device)
    debug_cases.ask[(4, 4)](out, ">=2,=3")
    for x in range(4):
        for y in range(4):
            bits = (x == 0 and y > 1) + 2 * (x != 2 and y <= 1 and 4 * x + y != 4) + 4
            assert out[4 * x + y] == bits + 8 * debug.parse_condition(">=2,=3").holds((x, y))
            assert out[16 + 4 * x + y] == 7 * (x == 1)


@interpreted
def test_print_if(capsys):
    source = torch.full((8,), 1.5, dtype=torch.bfloat16)
    source[5] = 200.0
    debug_cases.say[(2,)](source, torch.empty(4), 4)
    first = "program (0, 0, 0)\n  value [4] bf16 = [1.5 1.5 1.5 1.5]\n  value 1 = 0\n  step = 0\n"
    total = "  value 0 = 4\n  total [4] fp32 = [  3.  201.5   3.    3. ]\n"
    second = "program (0, 0, 0)\n  value [4] bf16 = [  1.5 200.    1.5   1.5]\n  value 1 = 1\n  step = 1\n"
    assert capsys.readouterr().out == first + second + "program (0, 0, 0)\n" + total + "program (1, 0, 0)\n" + total


@interpreted
def test_breakpoint_if(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("p out\nq\n"))
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Exception, match="BdbQuit"):
        debug_cases.stop[(3,)](out)
    said = capsys.readouterr().out
    assert "program (1, 0, 0) stops in stop, line" in said and f"array([{out.data_ptr()}]" in said


@interpreted
@pytest.mark.parametrize(
    ("kernel", "args", "says"),
    [
        (debug_cases.misspelt, (), "axis 1 says '>x'"),
        (debug_cases.on_tile, (8,), r"tile of shape \[8\], a scalar is needed"),
    ],
)
def test_refused_in_the_interpreter(kernel, args, says):
    with pytest.raises(Exception, match=says):
        kernel[(1,)](torch.zeros(1, dtype=torch.int32), *args)


@pytest.mark.parametrize("call", [debug.when, debug.print_if, debug.breakpoint_if])
def test_outside_of_kernels(call):
    with pytest.raises(Unsupported, match=f"{call.__name__} .* inside kernels only"):
        call("0")


one_process = pytest.mark.xdist_group("debug_compiled")  # it compiles for all


@pytest.fixture(scope="module", params=["installed", "newest"])
def compiled(request):
    folder = newest_triton() if request.param == "newest" else None
    if request.param == "newest" and folder is None:
        pytest.skip(f"no second Triton here: run scripts/fetch_triton.py or set {NEWEST_VARIABLE}")
    jobs = [Job("debug_cases:build", {"name": name}) for name in ("ask", "say", "stop", "misspelt", "on_tile")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, "off")  # Triton's key leaves out the code of builtins, which is what is tested
        return dict(
            zip(
                ("ask", "say", "stop", "misspelt", "on_tile"),
                run_jobs(jobs, triton=folder, import_from=[HERE.parents[1]]),
                strict=True,
            )
        )


@one_process
def test_compiled(compiled):
    """Printing is under its conditions: ten calls for two rounds of three values and two, none for a condition that is False."""
    assert not compiled["ask"].error and not compiled["say"].error
    assert compiled["say"].report.ptx["call.uni"] == 10
    assert compiled["ask"].report.ptx.get("call.uni", 0) == 0


@one_process
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("stop", "breakpoint_if works in Triton's interpreter only"),
        ("misspelt", "axis 1 says '>x', accepted: a number from 0"),
        ("on_tile", "tile of shape [8], a scalar is needed"),
    ],
)
def test_compiler_refuses(compiled, name, says):
    assert says in compiled[name].error


COMPILED = """
import torch, triton
from tilefold import debug
from tilefold.errors import DeviceError, Unsupported
import debug_cases

def fails(error, says, call):
    try:
        call()
    except error as problem:
        assert says in str(problem), problem
    else:
        raise AssertionError(says)

options = {"reference": lambda: None, "outputs": ("out",)}
for kernel in (debug_cases.ask, triton.heuristics({})(debug_cases.ask)):
    assert debug.checked(**options)(kernel) is kernel
    fails(Unsupported, "kernel is compiled", lambda: debug.check_kernel(kernel, (1,), (torch.zeros(1), "0"), **options))
fails(DeviceError, "x is on the CPU, where kernels run with", lambda: debug.check_tensors(x=torch.zeros(1)))
fails(Unsupported, "inside kernels only", lambda: debug.when("0"))
"""


def test_where_kernels_are_compiled():
    """Nothing is watched there, and nothing pretends to be."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[2] / "src"), str(HERE.parents[1])])
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=own, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@interpreted
@pytest.mark.no_poison
def test_the_guide_runs(capsys, tmp_path):
    """Its kernels come from files, as the interpreter rewrites their source; what it shows is what is printed."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = text.split("```python\n")[1:]
    assert len(blocks) == 5
    names: dict[str, object] = {"__name__": "guide"}
    for place, block in enumerate(blocks):
        source, after = block.split("```", 1)
        path = tmp_path / f"example{place}.py"
        path.write_text(source)
        exec(compile(source, str(path), "exec"), names)
        shown = after.lstrip()
        if shown.startswith("```text\n"):
            assert capsys.readouterr().out == shown[len("```text\n") :].split("```")[0]
