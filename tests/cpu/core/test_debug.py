"""Kernels under watch: planted faults are found, with the program to blame; shapes, types and refusals in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

import debug_cases
import tilefold
from debug_cases import BLOCK, N, scale_rows
from tilefold import debug, reference
from tilefold.aot import newest_triton
from tilefold.aot.jobs import NEWEST_VARIABLE
from tilefold.errors import ValueRangeError

HERE = Path(__file__).parent
pytestmark = pytest.mark.interpreter


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
def test_planted_nothing(dtype, padded):
    report = watched("", dtype=dtype, padded=padded)
    assert report.ok and report.programs == 9 and report.outputs[0][0] == "out" and "no fault" in str(report)
    report.raise_if_wrong()


def test_planted_off_by_one_mask():
    """The last element of each row is left out; the program that had it masked off is named."""
    report = watched("short")
    assert found(report, "unwritten") == ((0, 69), (0, 2), 3)
    assert "program (0, 2) addressed it with the mask off" in str(report)
    with pytest.raises(debug.KernelFault, match="no program wrote out"):
        report.raise_if_wrong()


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


def test_planted_forgotten_tail():
    report = watched("", grid=(3, N // BLOCK))
    assert found(report, "unwritten") == ((0, 64), (0, 1), 18)
    assert "the last one written before it is [0, 63] by program (0, 1)" in str(report)
    assert report.programs == 6 and len(report.faults) == 1


def test_planted_two_writers():
    """All rows are written to row 0: the second program of a column is the first that disagrees."""
    report = watched("race")
    assert found(report, "race") == ((0, 0), (1, 0), 2 * N)
    assert "program (1, 0) wrote " in str(report) and "where program (0, 0) had written" in str(report)
    assert found(report, "unwritten")[0] == (1, 0)
    assert found(report, "mismatch")[:2] == ((0, 0), (2, 0))
    assert found(watched("lanes"), "race")[:2] == ((0, 0), (0, 0))


def test_planted_wrong_values():
    report = watched("wrong")
    assert found(report, "mismatch") == ((2, 33), (2, 1), 37)
    assert "program (2, 1) wrote it; 37 of 210 elements differ (WRONG: max error" in str(report)
    assert found(watched("nan"), "mismatch") == ((1, 40), (1, 1), 1)
    assert found(watched("nan", atol=100.0), "mismatch") == ((1, 40), (1, 1), 1)
    assert watched("wrong", atol=1.5).ok and not watched("wrong", atol=0.5, rtol=1e-3).ok


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


def test_planted_exception():
    report = watched("raise")
    (fault,) = report.faults
    assert (fault.kind, fault.program) == ("raised", (2, 0))
    assert "program (2, 0) ended with AssertionError: no row 2" in fault.text


def test_planted_write_behind_the_interpreter():
    report = debug.check_kernel(
        debug_cases.goes_behind, (1,), {"out": torch.empty(())}, lambda: torch.tensor(1.0), ("out",)
    )
    (fault,) = report.faults
    assert fault.kind == "guard" and "-1 bytes from its first element" in fault.text


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
    report = debug.check_kernel(debug_cases.count_and_fill, (3,), args, right, outputs, in_place=("total",))
    assert report.ok, str(report)
    assert args["total"] == 7
    poisoned = debug.check_kernel(debug_cases.count_and_fill, lambda meta: (3,), args, right, outputs)
    assert found(poisoned, "mismatch") == ((0,), (2,), 1)


def test_planted_nothing_in_a_counter():
    """A plain store over what others added atomically: whoever knows that it is the last may do that."""
    args = {"counter": torch.zeros(1, dtype=torch.int32), "LAST": 2}
    right = {"reference": lambda counter: counter, "outputs": ("counter",), "in_place": ("counter",)}
    assert debug.check_kernel(debug_cases.arrive, (3,), args, **right).ok
    assert found(debug.check_kernel(debug_cases.arrive, (2,), args, **right), "mismatch") == ((0,), (1,), 1)
    assert not interpreter.interpreter_builder.options.debug and "create_masked_store" not in vars(
        interpreter.interpreter_builder
    )


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
        report = debug.check_kernel(debug_cases.negate, (programs,), args, lambda x: -x, ("out",))
        assert report.ok and report.programs == programs, str(report)
    kept = {"x": torch.ones(20), "out": -torch.ones(20), "n": 20}
    assert debug.check_kernel(debug_cases.negate, (1,), kept, lambda x: -x, ("out",), in_place=("out",)).ok
    kept["out"][18] = 3.0
    report = debug.check_kernel(debug_cases.negate, (1,), kept, lambda x: -x, ("out",), in_place=("out",))
    assert found(report, "mismatch") == ((18,), None, 1) and "is 3.0, wanted -1.0; no program wrote it" in str(report)


def test_newest_interpreter():
    """The planted faults again, under the newest Triton."""
    folder = newest_triton()
    if folder is None or str(folder) in triton.__file__:
        pytest.skip(f"no second Triton here: run scripts/fetch_triton.py or set {NEWEST_VARIABLE}")
    own = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parents[2] / "src")]),
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, "-m", "pytest", str(HERE / "test_debug.py"), "-qk", "planted or test_when or print"]
    command += ["-p", "no:xdist"]
    ran = subprocess.run(command, env=own, capture_output=True, text=True, cwd=HERE.parents[2])
    assert ran.returncode == 0, ran.stdout[-3000:]


# ---------------------------------------------------------------- the interpreter that the tests patch


@triton.jit
def pairs(Out, strides, SIZE: tl.constexpr):
    block = tl.zeros((SIZE, 2 * SIZE), tl.float32)
    other = tl.zeros((SIZE, SIZE), tl.float32)
    tl.static_assert(block.shape[1] == 2 * SIZE)
    tl.static_assert(other.shape[1] == SIZE)
    tl.static_assert(block.type.element_ty == tl.float32)
    (a, b), c = strides
    tl.store(Out + tl.arange(0, 2 * SIZE), tl.sum(block, 0) + a + b * c)


def test_shapes_and_tuples():
    """Tuples within tuples, two sizes of one element type, a size twice."""
    for size in (4, 8, 4):
        out = torch.zeros(2 * size)
        pairs[(1,)](out, ((1, 2), 3), size)
        assert out.tolist() == [7.0] * (2 * size)


def test_a_size_that_is_no_power_of_two_is_refused():
    with pytest.raises(InterpreterError, match="power of 2"):
        pairs[(1,)](torch.zeros(6), ((1, 2), 3), 3)


@triton.jit
def mixed(Out, Bytes, Longs, n, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    small = tl.load(Bytes + at)
    wide = tl.load(Longs + at)
    tile = small[:, None] * wide[None, :] + n
    tile = tile * scale - 1
    tl.store(Out + at[:, None] * SIZE + at[None, :], tile.to(tl.float32) / 3 + (0.5 + at)[None, :])


def test_operands_of_other_types_and_shapes():
    """Casts, splats and broadcasts are found once for a pair of types: other values of them, other types and other numbers."""
    for turn in range(3):
        for dtype in (torch.int8, torch.float16, torch.bfloat16):
            for n, scale in ((3, 2), (-70000, 0.25), (2**33, 2), (0, float("nan"))):
                small, wide = (torch.arange(8) - 3 + turn).to(dtype), torch.arange(8) * 1000
                out = torch.empty(8, 8)
                mixed[(1,)](out, small, wide, n, scale, 8)
                tile = (small[:, None] * wide[None, :] + n) * scale - 1
                wanted = tile.float() / 3 + (0.5 + torch.arange(8))
                assert torch.allclose(out, wanted, rtol=1e-2 if dtype.is_floating_point else 1e-6, equal_nan=True)


@triton.jit
def wrong(Out, SIZE: tl.constexpr):
    tl.store(Out + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))


def test_shapes_that_do_not_fit_are_refused_each_time():
    for _ in range(2):
        with pytest.raises(InterpreterError, match="incompatible dimensions"):
            wrong[(1,)](torch.zeros(4), 4)


@triton.jit
def counted(Out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    total = at * 0 + 1
    for i in range(3):
        total += 1
        one = total * 1
        one += i
        total = one + 1
    tl.store(Out + at, total)


def test_a_number_that_is_a_tensor_once_keeps_its_value():
    for _ in range(2):
        out = torch.zeros(4, dtype=torch.int32)
        counted[(1,)](out, 4)
        assert out.tolist() == [1 + 3 * 2 + 3] * 4
