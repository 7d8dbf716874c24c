"""What `tilefold bench move` measures: sums and transposes, whose time is that of the bytes they move."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilefold import ops
from tilefold.bench.family import Judge, normal_numbers
from tilefold.bench.matrix.product import BYTES, Call, Operands, WholeJudge, name_of, torch_family, unusual
from tilefold.reference import Comparison

ITEMS = {**BYTES, "uint8": 1, "float64": 8}
METHODS = ("auto", "registers", "strides", "descriptors")
LIES = ("rows", "apart", "turned")
BESIDE = 8  # columns that rows which lie apart have between them


@dataclass(frozen=True, slots=True)
class MoveCase:
    """op: "add", x + y of [m, n] (m 0: of [n]), or "transpose" of x [m, n].

    lies: "rows" (contiguous), "apart" (rows of a wider matrix: x[:, :-8], and y[:, 8:]), "turned" (add: y is the transpose of a
    contiguous matrix; m is n).  method: of `ops.transpose`."""

    op: str
    m: int
    n: int
    lies: str = "rows"
    method: str = "auto"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as "add_m8192_n8192", "transpose_m8192_n8192_registers_float32"."""
        rest = unusual(self.lies, "rows"), unusual(self.method, "auto"), unusual(self.dtype, "bfloat16")
        return name_of(self.op, unusual(self.m, 0, "m"), f"n{self.n}", *rest)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.m, self.n) if self.m else (self.n,)

    @property
    def bytes(self) -> int:
        """Every number read once and written once."""
        return (3 if self.op == "add" else 2) * (self.m or 1) * self.n * ITEMS[self.dtype]

    @property
    def flops(self) -> int:
        """A sum's additions; a transpose computes nothing."""
        return (self.m or 1) * self.n if self.op == "add" else 0


def move_inputs(case: MoveCase, device: str, seed: int = 0) -> Operands:
    """Standard-normal numbers (of uint8: all 256), the same for a seed and device; y of a sum."""
    normal, shape = normal_numbers(device, seed, case.dtype), case.shape
    if case.lies == "apart":
        shape = (*shape[:-1], case.n + BESIDE)
    x = normal(*shape)[..., : case.n]
    if case.op == "transpose":
        return Operands(case, x)
    y = normal(*shape)
    return Operands(case, x, y.t() if case.lies == "turned" else y[..., -case.n :])


@dataclass(frozen=True)
class ExactJudge:
    """A result that has to be `want`, bit for bit, and lie row by row."""

    want: Tensor

    def verdict(self, out: Tensor) -> Comparison:
        same = out.shape == self.want.shape and out.is_contiguous() and torch.equal(out, self.want)
        error = float((out.double() - self.want.double()).abs().max()) if out.shape == self.want.shape else float("inf")
        return Comparison(error, 0.0, error, 0.0, same, finite=bool(out.isfinite().all()))


def move_judge(i: Operands) -> Judge:
    if i.y is None:
        return ExactJudge(by_torch(i)())
    return WholeJudge(lambda dtype: by_torch(i.to(dtype))(), i.x.dtype)


def by_tilefold(i: Operands) -> Call:
    """The public functions as a user calls them."""
    transpose, add = ops.transpose, ops.add
    return (lambda: transpose(i.x, method=i.case.method)) if i.y is None else (lambda: add(i.x, i.y))


def by_torch(i: Operands) -> Call:
    return (lambda: i.x.t().contiguous()) if i.y is None else (lambda: i.x + i.y)


ADD, TURN = MoveCase("add", 8192, 8192), MoveCase("transpose", 8192, 8192)
CASES = {
    "full": (
        MoveCase("add", 0, 1 << 26),
        ADD,
        replace(ADD, lies="apart"),
        replace(ADD, lies="turned"),
        *(replace(ADD, lies=lies, dtype="float32") for lies in LIES),
        TURN,
        *(replace(TURN, method=method) for method in METHODS[1:]),
        *(replace(TURN, dtype=dtype) for dtype in ("uint8", "float32")),
        replace(TURN, m=4096, n=4096, dtype="float64"),
        replace(TURN, m=1024, n=65536),
        replace(TURN, lies="apart"),
    ),
    "quick": (ADD, replace(ADD, lies="turned"), TURN),
    "tiny": (
        MoveCase("add", 0, 1000),
        MoveCase("add", 33, 70, "apart", dtype="float16"),
        MoveCase("add", 40, 40, "turned", dtype="float32"),
        MoveCase("transpose", 33, 70),
        MoveCase("transpose", 33, 70, "apart", "strides", "float32"),
        MoveCase("transpose", 17, 40, method="registers", dtype="uint8"),
    ),
}
WHAT = ("ops.add, ops.transpose", "x + y, x.t().contiguous()")
MOVE = torch_family("move", CASES, move_inputs, (by_tilefold, by_torch), WHAT, move_judge, rotating="inputs")
