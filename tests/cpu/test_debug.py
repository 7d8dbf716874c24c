"""tilefold.debug: conditions, printing and stopping inside kernels; planted faults are found, with the program to blame."""

import ctypes
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import debug_cases
import tilefold
from tilefold import debug, reference
from tilefold.aot import Job, newest_triton, run_jobs
from tilefold.aot.cache import CACHE_VARIABLE
from tilefold.aot.jobs import NEWEST_VARIABLE
from tilefold.errors import (
    DeviceError,
    DtypeError,
    LayoutError,
    ShapeError,
    TilefoldError,
    Unsupported,
    ValueRangeError,
)

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "concepts" / "debugging.md"
interpreted = pytest.mark.interpreter
N, BLOCK = 70, 32  # 3 programs, the last one with 6 elements


# What the text means


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


# Inside kernels


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
                run_jobs(jobs, triton=folder, import_from=[HERE.parent]),
                strict=True,
            )
        )


def test_compiled(compiled):
    """Printing is under its conditions: ten calls for two rounds of three values and two, none for a condition that is False."""
    assert not compiled["ask"].error and not compiled["say"].error
    assert compiled["say"].report.ptx["call.uni"] == 10
    assert compiled["ask"].report.ptx.get("call.uni", 0) == 0


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


# Kernels under watch: faults are planted by FAULT


@triton.jit
def scale_rows(x, out, work, rows, columns, stride_x, stride_out, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """out[r, c] = 2 x[r, c], a program for each row and block of columns; work [rows] int32 takes 5."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    if FAULT == "short":
        mask = at < columns - 1
    if FAULT == "long":
        mask = at <= columns
    value = tl.load(x + row * stride_x + at, (at < columns) | (FAULT == "load")).to(tl.float32) * 2
    if FAULT == "wrong":
        value = tl.where((row == 2) & (at >= 33), value + 1, value)
    if FAULT == "nan":
        value = tl.where((row == 1) & (at == 40), float("nan"), value)
    if FAULT == "input":
        tl.store(x + row * stride_x + at, value, mask)
    if FAULT == "race":
        tl.store(out + at, value, mask)
    elif FAULT == "lanes":
        tl.store(out + row * stride_out + at // 2, value, mask)
    elif FAULT == "far":
        tl.store(out + row * stride_out + at + (1 << 40), value, mask)
    elif FAULT == "below":
        tl.store(out + row * stride_out + at - 3, value, mask)
    else:
        tl.store(out + row * stride_out + at, value, mask)
    if FAULT == "raise":
        tl.device_assert(row < 2, "no row 2")
    tl.store(work + row, 5)


def watched(fault, grid=None, dtype=torch.float32, padded=False, **options):
    """The report on scale_rows over x [3, 70]."""
    x = torch.randn(3, N).to(dtype)
    out = torch.empty(3, N + 10 * padded, dtype=dtype)[:, :N]
    work = torch.empty(3, dtype=torch.int32)
    args = (x, out, work, 3, N, x.stride(0), out.stride(0), fault, BLOCK)
    before = x.clone()
    report = debug.check_kernel(
        scale_rows, grid or (3, triton.cdiv(N, BLOCK)), args, lambda x: {"out": x * 2}, ("out", "work"), **options
    )
    assert torch.equal(x, before)
    return report


def found(report, kind):
    """(index, program, count) of the one fault of a kind."""
    (fault,) = (fault for fault in report.faults if fault.kind == kind)
    return fault.index, fault.program, fault.count


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_planted_nothing(dtype, padded):
    report = watched("", dtype=dtype, padded=padded)
    assert report.ok and report.programs == 9 and report.outputs[0][0] == "out" and "no fault" in str(report)
    report.raise_if_wrong()


@interpreted
def test_planted_off_by_one_mask():
    """The last element of each row is left out; the program that had it masked off is named."""
    report = watched("short")
    assert found(report, "unwritten") == ((0, 69), (0, 2), 3)
    assert "program (0, 2) addressed it with the mask off" in str(report)
    with pytest.raises(debug.KernelFault, match="no program wrote out"):
        report.raise_if_wrong()


@interpreted
def test_planted_store_past_the_end():
    """One element past each row: into the next row (a race), from the last one into nobody's memory, or into the padding."""
    report = watched("long")
    assert found(report, "store") == (None, (2, 2), 1)
    assert "program (2, 2) stored to out [3, 70] outside of it, 1 behind the last element" in str(report)
    assert found(report, "race") == ((1, 0), (1, 0), 2)  # the row's own program comes second
    assert "where program (0, 2) had written 0.0" in str(report)
    padded = watched("long", padded=True)
    assert found(padded, "store") == (None, (0, 2), 3)
    assert "program (0, 2) stored between the rows of out" in str(padded)


@interpreted
def test_planted_forgotten_tail():
    report = watched("", grid=(3, N // BLOCK))
    assert found(report, "unwritten") == ((0, 64), (0, 1), 18)
    assert "the last one written before it is [0, 63] by program (0, 1)" in str(report)
    assert report.programs == 6 and len(report.faults) == 1


@interpreted
def test_planted_two_writers():
    """All rows are written to row 0: the second program of a column is the first that disagrees."""
    report = watched("race")
    assert found(report, "race") == ((0, 0), (1, 0), 2 * N)
    assert "program (1, 0) wrote " in str(report) and "where program (0, 0) had written" in str(report)
    assert found(report, "unwritten")[0] == (1, 0)
    assert found(report, "mismatch")[:2] == ((0, 0), (2, 0))
    assert found(watched("lanes"), "race")[:2] == ((0, 0), (0, 0))


@interpreted
def test_planted_wrong_values():
    report = watched("wrong")
    assert found(report, "mismatch") == ((2, 33), (2, 1), 37)
    assert "program (2, 1) wrote it; 37 of 210 elements differ (WRONG: max error" in str(report)
    assert found(watched("nan"), "mismatch") == ((1, 40), (1, 1), 1)
    assert found(watched("nan", atol=100.0), "mismatch") == ((1, 40), (1, 1), 1)
    assert watched("wrong", atol=1.5).ok and not watched("wrong", atol=0.5, rtol=1e-3).ok


@interpreted
def test_planted_accesses_astray():
    """Where a store or a load would leave the process's memory it is not made, and the process lives on."""
    assert found(watched("load"), "load") == (None, (2, 2), 26)
    assert found(watched("far"), "store") == (None, (0, 0), 210)
    assert "far from every tensor" in str(watched("far"))
    below = watched("below")
    assert found(below, "store") == (None, (0, 0), 3) and "1 before the first element and at 2 places more" in str(
        below
    )
    assert found(watched("input"), "input") == ((0, 0), (0, 0), 210)


@interpreted
def test_planted_exception():
    report = watched("raise")
    (fault,) = report.faults
    assert (fault.kind, fault.program) == ("raised", (2, 0))
    assert "program (2, 0) ended with AssertionError: no row 2" in fault.text


def scribble(pointer):
    """A write that the interpreter does not make."""
    ctypes.memset(int(pointer.handle.data[0]) - 1, 0, 1)


@triton.jit
def goes_behind(out):
    scribble(out)
    tl.store(out, 1.0)


@interpreted
def test_planted_write_behind_the_interpreter():
    report = debug.check_kernel(goes_behind, (1,), {"out": torch.empty(())}, lambda: torch.tensor(1.0), ("out",))
    (fault,) = report.faults
    assert fault.kind == "guard" and "-1 bytes from its first element" in fault.text


@triton.jit
def count_and_fill(x, total, wide, mask, n, BLOCK: tl.constexpr):
    """total[0] += sum(x) in any order; wide, 4 bytes an element, is written by halves; mask = x > 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x[0] + at, at < n, other=0)
    tl.atomic_add(total, tl.sum(value, 0))
    halves = wide.to(tl.pointer_type(tl.int16))
    tl.store(halves + 2 * at, value.to(tl.int16), at < n)
    tl.store(halves + 2 * at + 1, tl.zeros([BLOCK], tl.int16), at < n)
    tl.store(mask + at, value > 0, at < n)


@interpreted
def test_planted_nothing_in_atomics_casts_and_tuples():
    x = torch.randint(-5, 5, (N,), dtype=torch.int32).abs()
    args = {
        "x": (x,),
        "total": torch.full((1,), 7, dtype=torch.int32),
        "wide": torch.empty(N, dtype=torch.int32),
        "mask": torch.empty(N, dtype=torch.bool),
        "n": N,
        "BLOCK": BLOCK,
        "num_warps": 2,
    }

    def right(x, total):
        return (total + x[0].sum()).int(), x[0], x[0] > 0

    outputs = ("total", "wide", "mask")
    report = debug.check_kernel(count_and_fill, (3,), args, right, outputs, in_place=("total",))
    assert report.ok, str(report)
    assert args["total"] == 7
    poisoned = debug.check_kernel(count_and_fill, lambda meta: (3,), args, right, outputs)
    assert found(poisoned, "mismatch") == ((0,), (2,), 1)


@interpreted
def test_planted_fault_under_the_decorator():
    @debug.checked(reference=lambda x, y: x + y, outputs=("out",))
    @triton.jit
    def add(x, y, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

    x, y, out = torch.randn(N), torch.randn(N), torch.zeros(N)
    with pytest.raises(debug.KernelFault, match=r"no program wrote out\[64\]") as caught:
        add[(2,)](x, y, out, N, BLOCK=BLOCK)
    assert not out.any() and caught.value.report is add.report
    add[(3,)](x, y, out, n=N, BLOCK=BLOCK)
    assert torch.equal(out, x + y) and add.report.ok
    with pytest.raises(ValueRangeError, match="n is given twice"):
        add[(3,)](x, y, out, N, n=N, BLOCK=BLOCK)


@interpreted
def test_planted_nothing_in_attention(monkeypatch):
    """The library's own forward kernel, as `attention` launches it: strides, tuples of functions, ragged lengths."""
    launches = []
    monkeypatch.setattr(
        type(scale_rows), "run", lambda kernel, *args, grid, **named: launches.append((kernel, grid, args, named))
    )
    q, k, v = torch.randn(2, 37, 4, 40), torch.randn(2, 53, 2, 40), torch.randn(2, 53, 2, 24)
    tilefold.attention(q, k, v, causal=True)
    monkeypatch.undo()
    ((kernel, grid, args, named),) = launches
    args = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
    args = {name: value for name, value in args.items() if name in kernel.arg_names}

    def right(Q, K, V):
        return reference.attention(Q, K, V, causal=True, dtype=Q.dtype)[0], None

    report = debug.check_kernel(kernel, grid, args, right, ("Out", "Lse"))
    assert report.ok, str(report)
    assert report.kernel == "attention_forward" and [name for name, _ in report.outputs] == ["Out"]


@triton.heuristics({"BLOCK": lambda args: 16})
@triton.jit
def negate(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, (-tl.load(x + at, at < n).to(tl.float32)).to(out.dtype.element_ty), at < n)


@interpreted
def test_planted_nothing_in_odd_tensors():
    """Under heuristics: no element, one without dimensions, float8, a tensor with gradient; in place nothing need be written."""
    for x in (
        torch.empty(0, 3),
        torch.tensor(2.0),
        torch.randn(20).to(torch.float8_e4m3fn),
        torch.randn(9, requires_grad=True),
    ):
        programs = triton.cdiv(x.numel(), 16)
        args = {"x": x, "out": torch.empty_like(x), "n": x.numel()}
        report = debug.check_kernel(negate, (programs,), args, lambda x: -x, ("out",))
        assert report.ok and report.programs == programs, str(report)
    kept = {"x": torch.ones(20), "out": -torch.ones(20), "n": 20}
    assert debug.check_kernel(negate, (1,), kept, lambda x: -x, ("out",), in_place=("out",)).ok
    kept["out"][18] = 3.0
    report = debug.check_kernel(negate, (1,), kept, lambda x: -x, ("out",), in_place=("out",))
    assert found(report, "mismatch") == ((18,), None, 1) and "is 3.0, wanted -1.0; no program wrote it" in str(report)


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
fails(DeviceError, "x is on the CPU, where kernels run with TRITON_INTERPRET=1 only", lambda: debug.check_tensors(x=torch.zeros(1)))
fails(Unsupported, "inside kernels only", lambda: debug.when("0"))
"""


def test_where_kernels_are_compiled():
    """Nothing is watched there, and nothing pretends to be."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=own, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@interpreted
def test_newest_interpreter():
    """The planted faults again, under the newest Triton."""
    folder = newest_triton()
    if folder is None or str(folder) in triton.__file__:
        pytest.skip(f"no second Triton here: run scripts/fetch_triton.py or set {NEWEST_VARIABLE}")
    own = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parents[1] / "src")]),
        "TRITON_INTERPRET": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(HERE / "test_debug.py"),
        "-qk",
        "planted or test_when or print",
        "-p",
        "no:xdist",
    ]
    ran = subprocess.run(command, env=own, capture_output=True, text=True, cwd=HERE.parents[1])
    assert ran.returncode == 0, ran.stdout[-3000:]


# What is refused before anything runs


@interpreted
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"outputs": ("put",)}, ValueRangeError, "outputs names 'put', accepted: x, out, work"),
        ({"outputs": "out"}, DtypeError, "must be tuples of names"),
        ({"outputs": ()}, ValueRangeError, "outputs is empty"),
        ({"in_place": ("x",)}, ValueRangeError, "in_place names 'x', accepted: out"),
        ({"reference": lambda z: z}, ValueRangeError, "reference takes 'z', which is no argument"),
        ({"reference": lambda x: x[0]}, ShapeError, r"shape \(70,\) for out"),
        ({"reference": lambda x: (x, x)}, ShapeError, "one tensor for each of 1 outputs"),
        ({"reference": lambda x: {"o": x}}, ValueRangeError, "returned 'o', but the outputs are out"),
        ({"reference": lambda x: 1.0}, ShapeError, "got float"),
        ({"atol": -1.0}, ValueRangeError, "atol must be at least 0"),
        ({"kernel": len}, DtypeError, "kernel must be a @triton.jit function"),
    ],
)
def test_check_kernel_refuses(change, error, says):
    x, out, work = torch.randn(3, N), torch.empty(3, N), torch.empty(3, dtype=torch.int32)
    given = {
        "kernel": scale_rows,
        "grid": (3, 3),
        "args": (x, out, work, 3, N, N, N, "", BLOCK),
        "reference": lambda x: x * 2,
        "outputs": ("out",),
    }
    with pytest.raises(error, match=says):
        debug.check_kernel(**{**given, **change})


@interpreted
def test_check_kernel_refuses_arguments():
    x = torch.randn(3, N)
    args = {
        "x": x,
        "out": x,
        "work": None,
        "rows": 3,
        "columns": N,
        "stride_x": N,
        "stride_out": N,
        "FAULT": "",
        "BLOCK": 32,
    }

    def check(**changed):
        debug.check_kernel(scale_rows, (3, 3), {**args, **changed}, lambda x: x, ("out",))

    with pytest.raises(LayoutError, match="out is written and shares memory with x"):
        check()
    with pytest.raises(LayoutError, match="out is written, but elements of it share memory"):
        check(out=torch.empty(1, N).expand(3, N))
    with pytest.raises(ValueRangeError, match="args names 'BLOK', but scale_rows takes x, out"):
        check(BLOK=1)
    with pytest.raises(ValueRangeError, match="args lacks 'out'"):
        debug.check_kernel(scale_rows, (3, 3), (x,), lambda x: x, ("out",))
    with pytest.raises(ValueRangeError, match="args has 10 values, scale_rows takes 9"):
        debug.check_kernel(scale_rows, (3, 3), (x,) * 10, lambda x: x, ("out",))
    tuned = triton.autotune([triton.Config({"BLOCK": 32})], key=[])(scale_rows)
    with pytest.raises(Unsupported, match="kernel is autotuned"):
        debug.check_kernel(tuned, (3, 3), args, lambda x: x, ("out",))


# Tensors


def test_check_tensors_accepts(device):
    x = torch.empty(4, 8, device=device)
    debug.check_tensors(x, y=x[2:], z=torch.empty(0, 3, device=device))
    debug.check_tensors(x=x, y=x.t(), contiguous=False)
    both = torch.empty(4, 16, device=device)
    debug.check_tensors(x=both[:, ::2], out=both[:, 1::2], outputs=("out",), contiguous=False, aligned=4)
    debug.check_tensors(out=both.as_strided((2, 4, 8), (32, 8, 1)), x=both[2:].flatten()[:0], outputs=("out",))
    windows = torch.empty(64, device=device).as_strided((2, 3), (3, 2))  # 0 2 4, 3 5 7: between one another, but apart
    debug.check_tensors(out=windows, outputs=("out",), contiguous=False)


WIDE = torch.empty(8, 16)


@interpreted
@pytest.mark.parametrize(
    ("tensors", "options", "error", "says"),
    [
        ({"q": 3}, {}, DtypeError, "q must be a torch.Tensor, got int"),
        ({"q": WIDE.to(torch.complex64)}, {}, DtypeError, "q has dtype complex64, accepted: float16"),
        ({"q": WIDE, "k": WIDE}, {"dtypes": {"k": (torch.int8,)}}, DtypeError, "k has dtype float32, accepted: int8"),
        ({"q": WIDE}, {"dtypes": {"k": (torch.int8,)}}, ValueRangeError, "dtypes names 'k', but the tensors are q"),
        ({"q": WIDE.to_sparse()}, {}, LayoutError, "q must be a dense strided tensor"),
        ({"q": torch._neg_view(WIDE)}, {}, LayoutError, "q is a lazy negation"),
        ({"q": WIDE.to("meta")}, {}, DeviceError, "q is on the meta device"),
        ({"q": WIDE}, {"device": "cuda"}, DeviceError, "q is on cpu, accepted: cuda"),
        ({"q": WIDE.t()}, {}, LayoutError, r"q has strides \(1, 16\) for shape \(16, 8\), accepted: contiguous"),
        ({"q": WIDE.flatten()[1:]}, {}, LayoutError, "q starts 4 bytes behind a multiple of 16"),
        ({"q": WIDE}, {"aligned": -1}, ValueRangeError, "aligned must be a number of bytes"),
        ({"q": WIDE, "out": WIDE[4:]}, {"outputs": ("out",)}, LayoutError, "out is written and shares memory with q"),
        ({"q": WIDE}, {"outputs": ("o",)}, ValueRangeError, "outputs names 'o', but the tensors are q"),
        ({"q": WIDE}, {"outputs": "q"}, DtypeError, "outputs must be a tuple"),
        (
            {"out": torch.empty(64).unfold(0, 4, 2)},
            {"outputs": ("out",), "contiguous": False},
            LayoutError,
            "out is written, but elements of it share memory",
        ),
    ],
)
def test_check_tensors_refuses(tensors, options, error, says):
    with pytest.raises(error, match=says):
        debug.check_tensors(**tensors, **options)


def test_check_tensors_names_places():
    with pytest.raises(TilefoldError, match="tensor 1 has strides"):
        debug.check_tensors(WIDE, WIDE.t(), device="cpu")


@interpreted
@pytest.mark.no_poison
def test_the_guide_runs(capsys, tmp_path):
    """Its kernels come from files, as the interpreter rewrites their source; what it shows is what is printed."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = text.split("```python\n")[1:]
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "guide"}
    for place, block in enumerate(blocks):
        source, after = block.split("```", 1)
        path = tmp_path / f"example{place}.py"
        path.write_text(source)
        exec(compile(source, str(path), "exec"), names)
        shown = after.lstrip()
        if shown.startswith("```text\n"):
            assert capsys.readouterr().out == shown[len("```text\n") :].split("```")[0]
