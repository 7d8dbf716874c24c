"""What `tilefold bench move` measures: sums and transposes, whose time is that of the bytes they move."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from tilefold.bench.choice import of_size
from tilefold.bench.family import Family, Judge, Peer, by_name, each
from tilefold.bench.matrix.product import BYTES, WholeJudge, ours
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
        parts = [self.op, *([f"m{self.m}"] if self.m else []), f"n{self.n}"]
        parts += [
            part
            for part, usual in ((self.lies, "rows"), (self.method, "auto"), (self.dtype, "bfloat16"))
            if part != usual
        ]
        return "_".join(parts)

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


@dataclass(frozen=True)
class MoveInputs:
    case: MoveCase
    x: Tensor
    y: Tensor | None


def move_inputs(case: MoveCase, device: str, seed: int = 0) -> MoveInputs:
    """Standard-normal numbers (of uint8: all 256), the same for a seed and device; y of a sum."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def some() -> Tensor:
        shape = (*case.shape[:-1], case.n + BESIDE) if case.lies == "apart" else case.shape
        if dtype == torch.uint8:
            return torch.randint(0, 256, shape, generator=generator, device=device, dtype=dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    x = some()[..., : case.n]
    if case.op == "transpose":
        return MoveInputs(case, x, None)
    y = some()
    return MoveInputs(case, x, y.t() if case.lies == "turned" else y[..., -case.n :])


@dataclass(frozen=True)
class ExactJudge:
    """A result that has to be `want`, bit for bit, and lie row by row."""

    want: Tensor

    def verdict(self, out: Tensor) -> Comparison:
        same = out.shape == self.want.shape and out.is_contiguous() and torch.equal(out, self.want)
        error = float((out.double() - self.want.double()).abs().max()) if out.shape == self.want.shape else float("inf")
        return Comparison(error, 0.0, error, 0.0, same, finite=bool(out.isfinite().all()))


def move_judge(inputs: MoveInputs) -> Judge:
    x, y = inputs.x, inputs.y
    if y is None:
        return ExactJudge(x.t().contiguous())

    def compute(dtype: torch.dtype) -> Tensor:
        return x.to(dtype) + y.to(dtype)

    return WholeJudge(compute, x.dtype)


def by_tilefold(inputs: MoveInputs) -> Callable[[], Tensor]:
    """The public functions as a user calls them."""
    case, x, y = inputs.case, inputs.x, inputs.y
    function = ours(case.op)
    return (lambda: function(x, method=case.method)) if y is None else (lambda: function(x, y))


def by_torch(inputs: MoveInputs) -> Callable[[], Tensor]:
    x, y = inputs.x, inputs.y
    return (lambda: x.t().contiguous()) if y is None else (lambda: x + y)


def move_cases(size: str = "full") -> tuple[MoveCase, ...]:
    """The cases of a size: "full", "quick" or "tiny".  ValueRangeError for another one."""
    add, turn = MoveCase("add", 8192, 8192), MoveCase("transpose", 8192, 8192)
    full = (
        MoveCase("add", 0, 1 << 26),
        add,
        replace(add, lies="apart"),
        replace(add, lies="turned"),
        *(replace(add, lies=lies, dtype="float32") for lies in LIES),
        turn,
        *(replace(turn, method=method) for method in METHODS[1:]),
        *(replace(turn, dtype=dtype) for dtype in ("uint8", "float32")),
        replace(turn, m=4096, n=4096, dtype="float64"),
        replace(turn, m=1024, n=65536),
        replace(turn, lies="apart"),
    )
    tiny = (
        MoveCase("add", 0, 1000),
        MoveCase("add", 33, 70, "apart", dtype="float16"),
        MoveCase("add", 40, 40, "turned", dtype="float32"),
        MoveCase("transpose", 33, 70),
        MoveCase("transpose", 33, 70, "apart", "strides", "float32"),
        MoveCase("transpose", 17, 40, method="registers", dtype="uint8"),
    )
    return of_size(size, {"full": full, "quick": (add, replace(add, lies="turned"), turn), "tiny": tiny})


MOVE = Family(
    name="move",
    cases=move_cases,
    inputs=move_inputs,
    judge=move_judge,
    peers=by_name(
        Peer("tilefold", "tilefold", "ops.add, ops.transpose", "tilefold", each(by_tilefold)),
        Peer("torch", "torch", "x + y, x.t().contiguous()", "torch", each(by_torch)),
    ),
    defaults={"cuda": ("torch",), "cpu": ("torch",)},
    record=asdict,
    rotating="inputs",
)
