"""One product and what follows it: checked operands -> plan -> launches.  Batches and layouts are strides, nothing is copied."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import PlanError, ShapeError
from ...types import Constant
from .. import torch_cpu
from ..device import device_of, interpreting
from ..records import remember
from .operands import BIAS, TOO_LONG, Operands, boxable, major, operands
from .options import CODES

if TYPE_CHECKING:
    from ...plan.matrix.matmul import MatmulPlan

__all__ = [
    "Epilogue",
    "activation_gradient",
    "facts",
    "problem_of",
    "product",
]

FINISH = 16, 128  # rows and columns that a program of the second launches has


class Epilogue(NamedTuple):
    """What follows the product, and how it is made; part of a call's key.

    saved: also return what the activation is applied to; fold: sum over the batch as well; plan: a constant's name, or ""."""

    activation: str = "none"
    order: str = "grouped"
    tf32: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    saved: bool = False
    fold: bool = False
    plan: str = ""


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key; launch None: nothing to compute."""

    shape: tuple[int, ...]
    plan: "MatmulPlan | None" = None
    launch: Any = None
    scalars: tuple[Any, ...] = ()
    partial: tuple[int, ...] = ()  # shape of the sums of each share
    finish: Any = None
    finish_scalars: tuple[Any, ...] = ()
    hopper: Any = None  # boxes of the kernel for sm_90


_CACHE: dict[Any, Any] = {}


def facts(t: torch.Tensor | None) -> Any:
    """What of a tensor decides checks, plan and launch."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15 == 0)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    epilogue: Epilogue,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(activation(a b * scales + bias), what it is applied to or None) of checked tensors of 2 or 3 dimensions each."""
    key = facts(a), facts(b), facts(bias), facts(scale_a), facts(scale_b), epilogue
    p = _CACHE.get(key)
    if p is None:
        p = remember(_CACHE, key, _bind((a, b, bias, scale_a, scale_b), epilogue))
    out = torch.empty(p.shape, dtype=epilogue.out_dtype, device=a.device)
    pre = torch.empty(p.shape, dtype=epilogue.out_dtype, device=a.device) if epilogue.saved else None
    if p.launch is None:
        return out, pre
    target, kept, added = out, pre, bias
    if p.partial:
        target, kept, added = torch.empty(p.partial, dtype=torch.float32, device=a.device), None, None
    if p.hopper is not None:
        from .product_hopper import arguments

        p.launch(arguments(p.hopper, a, b, target, kept, added, (scale_a, scale_b), p.scalars))
    else:
        p.launch((a, b, target, kept, added, scale_a, scale_b, *p.scalars))
    if p.partial:
        p.finish((target, out, pre, bias, *p.finish_scalars))
    return out, pre


# ---------------------------------------------------------------- the first time


def problem_of(x: Operands, epilogue: Epilogue, scaled: bool) -> Any:
    """The plan's problem."""
    from ...plan.matrix.matmul import MatmulProblem

    m, n, k = x.sizes
    kind = "none" if x.bias is None else "columns" if x.bias[1] == 0 else "rows" if x.bias[2] == 0 else "full"
    return MatmulProblem(
        batch=x.batch,
        m=m,
        n=n,
        k=k,
        dtype=str(x.a.dtype).removeprefix("torch."),
        out_dtype=str(epilogue.out_dtype).removeprefix("torch."),
        a_major=major(x.a, "m", "k"),
        b_major=major(x.b, "k", "n"),
        a_shared=x.a.shape[0] == 1 and x.batch > 1,
        b_shared=x.b.shape[0] == 1 and x.batch > 1,
        fold=epilogue.fold and x.batch != 1,
        bias=kind,
        activation=epilogue.activation,
        saved=epilogue.saved,
        scaled=scaled,
        descriptors=boxable(x.a) and boxable(x.b),
        out_descriptors=n * epilogue.out_dtype.itemsize % 16 == 0 and m < TOO_LONG,
        tf32=epilogue.tf32 and x.a.dtype == torch.float32,
    )


def _plan_of(problem: Any, epilogue: Epilogue, device: torch.device) -> "MatmulPlan":
    from ...plan.matrix.matmul import MatmulPlan, plan_matmul
    from ..hopper import disabled

    machine = device_of(device)
    if not epilogue.plan:
        return plan_matmul(problem, machine, epilogue.order, disabled())
    plan = Constant(epilogue.plan).value
    if not isinstance(plan, MatmulPlan):
        raise PlanError(f"plan must be a MatmulPlan, got {type(plan).__name__}")
    plan.check(problem, machine, epilogue.order)
    return plan


def _bind(tensors: tuple[Any, ...], epilogue: Epilogue) -> Prepared:
    """The record of a call; tensors: those of `product`, in its order."""
    a, b, bias, scale_a, scale_b = tensors
    x = operands(a, b, bias, epilogue.fold)
    m, n, _ = x.sizes
    batched = not epilogue.fold and (a.dim() == 3 or b.dim() == 3)
    shape = (max(t.shape[0] for t in (a, b) if t.dim() == 3), a.shape[-2], b.shape[-1]) if batched else (m, n)
    if batched and any(t.dim() == 3 and not t.shape[0] for t in (a, b)):
        shape = (0, *shape[1:])
    if device_of(a.device, "matmul").backend == "cpu":
        if epilogue.plan:
            raise PlanError("plan is for a GPU or the interpreter, the call is on torch (CPU)")
        return Prepared(shape, launch=None if 0 in shape else functools.partial(_launch_on_cpu, epilogue))
    problem = problem_of(x, epilogue, scale_a is not None or scale_b is not None)
    plan = _plan_of(problem, epilogue, a.device)
    if 0 in shape:
        return Prepared(shape, plan)
    made = _bind_hopper(x, plan, epilogue, tensors) if plan.kernel == "matmul_hopper" else None
    if made is None:
        if plan.kernel == "matmul_hopper":  # it does not compile here
            from ...plan.matrix.matmul import plan_matmul

            plan = plan_matmul(problem, device_of(a.device), epilogue.order, True)
        made = bind_portable(x, plan, scale_a, scale_b, a.device)
    launch, scalars, hopper = made
    p = Prepared(shape, plan, launch, scalars, hopper=hopper)
    if plan.splits > 1:
        p.partial = (plan.splits, problem.results, m, n)
        p.finish, p.finish_scalars = bind_finish(x, plan, a.device)
    return p


def _launch_on_cpu(epilogue: Epilogue, given: tuple[Any, ...]) -> None:
    a, b, out, saved, bias, *scales = given
    torch_cpu.served("matmul")(a, b, out, saved, bias, *scales, epilogue.activation, epilogue.fold)


def _bind_hopper(x: Operands, plan: "MatmulPlan", epilogue: Epilogue, tensors: tuple[Any, ...]) -> Any:
    """None, after a warning, where this Triton does not compile the kernel, unless the caller's plan asks for it."""
    from ..hopper import bound_or_none
    from .product_hopper import arguments, bind

    def compile(made: Any) -> None:
        launch, scalars, boxes = made
        problem = plan.problem
        shape = (plan.splits, problem.results, problem.m, problem.n)
        out = torch.empty(shape, dtype=torch.float32 if plan.splits > 1 else epilogue.out_dtype, device="meta")
        added = bias if plan.splits == 1 else None
        launch.compile(arguments(boxes, a, b, out, out if pre else None, added, scales, scalars))

    a, b, bias, scales = *tensors[:3], tensors[3:]
    pre = epilogue.saved and plan.splits == 1
    if epilogue.plan:
        made = bind(x, plan, a.device, scales)
        compile(made)
        return made
    return bound_or_none("matrix product", lambda: bind(x, plan, a.device, scales), compile)


def bind_portable(
    x: Operands, plan: "MatmulPlan", scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, device: torch.device
) -> tuple[Any, tuple[Any, ...], None]:
    """The launch of kernels.matrix.matmul and its scalars."""
    from ...kernels.matrix.matmul import matmul
    from ..launch import Launch

    problem, tile = plan.problem, plan.tile
    m, n, k = x.sizes
    tiles = -(-m // tile.block_m), -(-n // tile.block_n), -(-k // tile.block_k)
    shared = plan.splits > 1
    a, b = x.a, x.b
    reach_a = (tile.block_m - 1) * a.stride(1) + (tile.block_k - 1) * a.stride(2)
    reach_b = (tile.block_k - 1) * b.stride(1) + (tile.block_n - 1) * b.stride(2)
    constants = {
        "EMULATE": interpreting(),
        "TF32": problem.tf32,
        "BIAS": BIAS["none" if shared else problem.bias],
        "ACTIVATION": 0 if shared else CODES[problem.activation],
        "FOLD": problem.fold,
        "WIDE": max(reach_a, reach_b) >= TOO_LONG,
        "EVEN_K": k % tile.block_k == 0,
        "GROUP": tile.group,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    scalars = (
        m, n, k, *tiles, x.batch if problem.fold else 1, plan.splits,
        0 if a.shape[0] == 1 else a.stride(0), *a.stride()[1:],
        0 if b.shape[0] == 1 else b.stride(0), *b.stride()[1:],
        m * n, n, problem.results * m * n,
        *((0, 0, 0) if x.bias is None else x.bias),
        *(0 if s is None or s.numel() == 1 else s.stride(0) for s in (scale_a, scale_b)),
    )  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Launch(matmul, plan.grid, constants, options, device.index or 0), scalars, None


def bind_finish(x: Operands, plan: "MatmulPlan", device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """The launch that adds the shares up, and its scalars."""
    from ...kernels.matrix.matmul import finish_splits
    from ..launch import Launch

    problem = plan.problem
    m, n, _ = x.sizes
    grid, tiles = _finish_grid(problem.results, m, n)
    constants = {
        "EMULATE": interpreting(),
        "BIAS": BIAS[problem.bias],
        "ACTIVATION": CODES[problem.activation],
        **_finish_tile(),
    }
    steps = (0, 0, 0) if x.bias is None else x.bias
    scalars = (m, n, *tiles, plan.splits, problem.results * m * n, m * n, n, m * n, n, *steps)
    return Launch(finish_splits, grid, constants, {"num_warps": 4}, device.index or 0), scalars


def _finish_tile() -> dict[str, int]:
    return {"BLOCK_M": FINISH[0], "BLOCK_N": FINISH[1]}


def _finish_grid(batch: int, m: int, n: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    from ...plan.limits import MAX_GRID

    tiles = -(-m // FINISH[0]), -(-n // FINISH[1])
    programs = tiles[0] * tiles[1] * batch
    if programs > MAX_GRID:
        raise ShapeError(f"{programs} tiles of the result are more than the {MAX_GRID} that one launch can make")
    return (programs, 1, 1), tiles


# ---------------------------------------------------------------- the activation's part of the gradient


def activation_gradient(dout: torch.Tensor, saved: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """dout * activation'(saved), in dtype; saved: contiguous, of dout's shape."""
    key = "gradient", facts(dout), facts(saved), activation, dtype
    found = _CACHE.get(key)
    if found is None:
        found = remember(_CACHE, key, bind_gradient(dout, activation))
    dz = torch.empty(dout.shape, dtype=dtype, device=dout.device)
    launch, scalars = found
    if launch is not None:
        launch((dout, saved, dz, *scalars))
    return dz


def bind_gradient(dout: torch.Tensor, activation: str) -> tuple[Any, tuple[Any, ...]]:
    """The launch of dout's product with the activation's slope, None for nothing to do, and its scalars."""
    if dout.device.type != "meta" and dout.numel() and device_of(dout.device, "activation_gradient").backend == "cpu":
        run = torch_cpu.served("activation_gradient")
        return lambda given: run(*given, activation), ()
    from ...kernels.matrix.matmul import activation_gradient as kernel
    from ..launch import Launch

    d = dout if dout.dim() == 3 else dout.unsqueeze(0)
    batch, m, n = d.shape
    if not d.numel():
        return None, ()
    grid, tiles = _finish_grid(batch, m, n)
    constants = {"EMULATE": interpreting(), "ACTIVATION": CODES[activation], **_finish_tile()}
    scalars = (m, n, *tiles, *d.stride(), m * n, n, m * n, n)
    return Launch(kernel, grid, constants, {"num_warps": 4}, dout.device.index or 0), scalars
