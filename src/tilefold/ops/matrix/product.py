"""One product and what follows it: checked operands -> plan -> launches.  Batches and layouts are strides, nothing is copied."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import PlanError, ShapeError
from ...types import Constant
from ..bound import Bound, meta, strides_named
from ..device import device_of, interpreting
from ..numerics import ASKED, is_invariant
from ..records import recorded
from ..serve import function_at
from .operands import BIAS, GIVEN_TO_PRODUCTS, TOO_LONG, Operands, Scales, boxable, major, operands, values_of
from .options import CODES

if TYPE_CHECKING:
    from ...plan.matrix.matmul import MatmulPlan

FINISH = 16, 128  # rows and columns that a program of the second launches has


class Epilogue(NamedTuple):
    """What follows the product, and how it is made; part of a call's key.

    saved: also return what the activation is applied to; fold: sum over the batch as well; plan: a constant's name, or "".
    numerics: of ops.numerics; "": what the context says."""

    activation: str = "none"
    order: str = "grouped"
    tf32: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    saved: bool = False
    fold: bool = False
    plan: str = ""
    numerics: str = ""


class Prepared(NamedTuple):
    """All that follows from a call's key; bound None: nothing to compute."""

    shape: tuple[int, ...]
    bound: Bound | None = None
    partial: tuple[int, ...] = ()  # shape of the sums of each share
    finish: Bound | None = None  # which adds them up


def facts(t: torch.Tensor | None) -> Any:
    """What of a checked tensor decides plan and launch."""
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
    p = _bind((a, b, bias, scale_a, scale_b), epilogue)
    out = torch.empty(p.shape, dtype=epilogue.out_dtype, device=a.device)
    pre = torch.empty(p.shape, dtype=epilogue.out_dtype, device=a.device) if epilogue.saved else None
    if p.bound is None:
        return out, pre
    if p.finish is None:
        p.bound((a, b, out, pre, bias, scale_a, scale_b))
    else:
        part = torch.empty(p.partial, dtype=torch.float32, device=a.device)
        p.bound((a, b, part, None, None, scale_a, scale_b))
        p.finish((part, out, pre, bias))
    return out, pre


# ---------------------------------------------------------------- the first time


def problem_of(x: Operands, epilogue: Epilogue, scaled: bool) -> Any:
    """The plan's problem."""
    from ...plan.matrix.problem import MatmulProblem

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
    from ...plan.matrix.matmul import MatmulPlan, invariant_matmul, plan_matmul
    from ..hopper import disabled

    machine, fixed = device_of(device), is_invariant(epilogue.numerics)
    if fixed and not epilogue.plan:
        return invariant_matmul(problem, machine, epilogue.order, disabled())
    if not epilogue.plan:
        return plan_matmul(problem, machine, epilogue.order, disabled())
    plan = Constant(epilogue.plan).value
    if not isinstance(plan, MatmulPlan):
        raise PlanError(f"plan must be a MatmulPlan, got {type(plan).__name__}")
    plan.check(problem, machine, epilogue.order)
    if fixed:
        plan.require_invariant()
    return plan


@recorded("product", lambda tensors, epilogue: (*map(facts, tensors), epilogue, epilogue.numerics or ASKED[-1]))
def _bind(tensors: tuple[Any, ...], epilogue: Epilogue) -> Prepared:
    """The record of a call; tensors: those of `product`, in its order."""
    a, b, bias, scale_a, scale_b = tensors
    x = operands(a, b, bias, epilogue.fold)
    m, n, _ = x.sizes
    batched = not epilogue.fold and (a.dim() == 3 or b.dim() == 3)
    shape = (max(t.shape[0] for t in (a, b) if t.dim() == 3), a.shape[-2], b.shape[-1]) if batched else (m, n)
    if batched and any(t.dim() == 3 and not t.shape[0] for t in (a, b)):
        shape = (0, *shape[1:])
    options = epilogue.activation, epilogue.fold, is_invariant(epilogue.numerics)
    if (own := function_at("matmul", a.device, *options)) is not None:
        if epilogue.plan:
            title = device_of(a.device, "matmul").title
            raise PlanError(f"plan is for a GPU or the interpreter, the call is on {title}")
        return Prepared(shape, None if 0 in shape else own)
    problem = problem_of(x, epilogue, scale_a is not None or scale_b is not None)
    plan = _plan_of(problem, epilogue, a.device)
    if 0 in shape:
        return Prepared(shape)
    made = _bind_hopper(x, plan, epilogue, tensors) if plan.kernel == "matmul_hopper" else None
    if made is None:
        if plan.kernel == "matmul_hopper":  # it does not compile here
            from ...plan.matrix.matmul import invariant_matmul, plan_matmul

            made_anew = invariant_matmul if is_invariant(epilogue.numerics) else plan_matmul
            plan = made_anew(problem, device_of(a.device), epilogue.order, True)
        made = bind_portable(x, plan, (scale_a, scale_b), a.device)
    if plan.splits == 1:
        return Prepared(shape, made)
    return Prepared(shape, made, (plan.splits, problem.results, m, n), bind_finish(x, plan, a.device))


def _bind_hopper(x: Operands, plan: "MatmulPlan", epilogue: Epilogue, tensors: tuple[Any, ...]) -> Bound | None:
    """None, after a warning, where this Triton does not compile the kernel, unless the caller's plan asks for it."""
    from ..hopper import bound_or_none
    from .product_hopper import bind

    a, b, bias, *scales = tensors
    alone = plan.splits == 1

    def compile(bound: Bound) -> None:
        problem = plan.problem
        kind = epilogue.out_dtype if alone else torch.float32
        out = meta(plan.splits, problem.results, problem.m, problem.n, dtype=kind)
        bound.compile((a, b, out, out if epilogue.saved and alone else None, bias if alone else None, *scales))

    if epilogue.plan:
        made = bind(x, plan, a.device, (scales[0], scales[1]))
        compile(made)
        return made
    return bound_or_none("matrix product", lambda: bind(x, plan, a.device, (scales[0], scales[1])), compile)


def bind_portable(x: Operands, plan: "MatmulPlan", scales: Scales, device: torch.device) -> Bound:
    """The launch of kernels.matrix.matmul."""
    from ...kernels.matrix.matmul import matmul

    problem, tile = plan.problem, plan.tile
    m, n, k = x.sizes
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
    values = {
        **values_of(x, plan, scales, (-(-m // tile.block_m), -(-n // tile.block_n))),
        "tiles_k": -(-k // tile.block_k),
        "folds": x.batch if problem.fold else 1,
        **strides_named("a", (0 if a.shape[0] == 1 else a.stride(0), *a.stride()[1:]), "bmk"),
        **strides_named("b", (0 if b.shape[0] == 1 else b.stride(0), *b.stride()[1:]), "bkn"),
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Bound.of(matmul, plan.grid, GIVEN_TO_PRODUCTS, values, constants, device, **options)


def bind_finish(x: Operands, plan: "MatmulPlan", device: torch.device) -> Bound:
    """The launch that adds the shares up."""
    from ...kernels.matrix.matmul import finish_splits

    problem = plan.problem
    m, n, _ = x.sizes
    programs, tiles = _finish_grid(problem.results, m, n)
    constants = {
        "EMULATE": interpreting(),
        "BIAS": BIAS[problem.bias],
        "ACTIVATION": CODES[problem.activation],
        **_finish_tile(),
    }
    parts = strides_named("p", (problem.results * m * n, m * n, n), "sbm")
    values = {**values_of(x, plan, (None, None), tiles), **parts}
    return Bound.of(finish_splits, programs, ("Part", "Out", "Pre", "Bias"), values, constants, device)


def _finish_tile() -> dict[str, int]:
    return {"BLOCK_M": FINISH[0], "BLOCK_N": FINISH[1]}


def _finish_grid(batch: int, m: int, n: int) -> tuple[int, tuple[int, int]]:
    from ...plan.limits import MAX_GRID

    tiles = -(-m // FINISH[0]), -(-n // FINISH[1])
    programs = tiles[0] * tiles[1] * batch
    if programs > MAX_GRID:
        raise ShapeError(f"{programs} tiles of the result are more than the {MAX_GRID} that one launch can make")
    return programs, tiles


# ---------------------------------------------------------------- the activation's part of the gradient


def activation_gradient(dout: torch.Tensor, saved: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """dout * activation'(saved), in dtype; saved: contiguous, of dout's shape."""
    bound = _gradient_launch(dout, saved, activation, dtype)
    dz = torch.empty(dout.shape, dtype=dtype, device=dout.device)
    if bound is not None:
        bound((dout, saved, dz))
    return dz


@recorded("activation gradient", lambda dout, saved, *others: (facts(dout), facts(saved), *others))
def _gradient_launch(dout: torch.Tensor, saved: torch.Tensor, activation: str, dtype: torch.dtype) -> Bound | None:
    own = function_at("activation_gradient", dout.device, activation) if dout.numel() else None
    return own or bind_gradient(dout, activation)


def bind_gradient(dout: torch.Tensor, activation: str) -> Bound | None:
    """The launch of dout's product with the activation's slope, None for nothing to do."""
    d = dout if dout.dim() == 3 else dout.unsqueeze(0)
    batch, m, n = d.shape
    if not d.numel():
        return None
    from ...kernels.matrix.matmul import activation_gradient as kernel

    programs, tiles = _finish_grid(batch, m, n)
    constants = {"EMULATE": interpreting(), "ACTIVATION": CODES[activation], **_finish_tile()}
    values = {
        "m": m,
        "n": n,
        "tiles_m": tiles[0],
        "tiles_n": tiles[1],
        **strides_named("d", d.stride(), "bmn"),
        **strides_named("s", (m * n, n), "bm"),
        **strides_named("z", (m * n, n), "bm"),
    }
    return Bound.of(kernel, programs, ("Dout", "Saved", "Dz"), values, constants, dout.device)
