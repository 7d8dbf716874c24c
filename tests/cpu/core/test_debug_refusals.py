"""What check_kernel and check_tensors refuse, and what they accept."""

from pathlib import Path

import pytest
import torch
import triton

from cases.refusals import refuses
from debug_cases import BLOCK, N, scale_rows
from tilefold import debug, errors
from tilefold.errors import DeviceError, DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError

HERE = Path(__file__).parent
interpreted = pytest.mark.interpreter


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
    args = {"x": x, "out": x, "work": None, "rows": 3, **dict.fromkeys(("columns", "stride_x", "stride_out"), N)}
    args |= {"FAULT": "", "BLOCK": 32}

    def check(**changed):
        debug.check_kernel(scale_rows, (3, 3), {**args, **changed}, lambda x: x, ("out",))

    refuses(LayoutError, "out is written and shares memory with x", check)
    refuses(LayoutError, "out is written, but elements of it share memory", check, out=torch.empty(1, N).expand(3, N))
    refuses(ValueRangeError, "args names 'BLOK', but scale_rows takes x, out", check, BLOK=1)
    refuses(ValueRangeError, "args lacks 'out'", debug.check_kernel, scale_rows, (3, 3), (x,), lambda x: x, ("out",))
    with pytest.raises(ValueRangeError, match="args has 10 values, scale_rows takes 9"):
        debug.check_kernel(scale_rows, (3, 3), (x,) * 10, lambda x: x, ("out",))
    tuned = triton.autotune([triton.Config({"BLOCK": 32})], key=[])(scale_rows)
    refuses(Unsupported, "kernel is autotuned", debug.check_kernel, tuned, (3, 3), args, lambda x: x, ("out",))


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
            {"out": torch.empty(64).as_strided((2, 3), (2, 1))},
            {"outputs": ("out",), "contiguous": False},
            LayoutError,
            "out is written, but elements of it share memory",
        ),
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
    refuses(errors.TilefoldError, "tensor 1 has strides", debug.check_tensors, WIDE, WIDE.t(), device="cpu")
