"""Products of 8-bit weights and activations that are quantised on the way: checks, launches, the operator."""

from typing import TYPE_CHECKING, Any

import torch

from ...check import TensorSpec, bind
from ...errors import DtypeError, ShapeError
from ..bound import Bound, Example, meta
from ..cache.decode_counters import counters
from ..device import device_of, device_of_kernels, interpreting
from ..numerics import refuse_invariant
from ..operator import Operation
from ..records import recorded
from ..watch import refuse_at_once
from .eight_hopper import GIVEN

if TYPE_CHECKING:
    from ...plan.device import Device
    from ...plan.matrix.eight import EightPlan

KINDS = (torch.int8, torch.float8_e4m3fn)
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ROW = 16384  # numbers of a row that a program of quantise_rows holds


def matmul_w8a8(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x times the transpose of a weight in int8 or e4m3, with x rounded to the weight's dtype by a factor for each of its rows.

    Args:
        x: [..., K] fp16 or bf16, the last dimension contiguous; other leading dimensions than one are taken as one, by a copy if
            their strides do not allow it.
        weight: [N, K] int8 or float8_e4m3fn, the last dimension contiguous.
        weight_scale: fp32 [N], a factor a row, or [1]: the weight stands for weight * weight_scale.
        bias: [N] in x's dtype.

    Returns:
        [..., N] in x's dtype: ((codes of x) @ weight.T) * scale of x's row * weight_scale + bias.  A row's scale is its largest
        number in size / 127 (e4m3: / 448), 1 for a row of zeros; codes are x times the rounded inverse of the scale, to nearest
        even.  int8 is summed in int32 (exactly, for K up to 2^17), e4m3 in fp32.  The same bits every run.  No gradient passes.

    Raises:
        DtypeError, ShapeError, LayoutError, DeviceError, naming the argument; Unsupported for a gradient, or e4m3 before sm_89.
    """
    named = {"x": x, "weight": weight, "weight_scale": weight_scale, "bias": bias}
    refuse_at_once(named, "matmul_w8a8 passes none: call it under torch.no_grad()")
    made: torch.Tensor = EIGHT(x, weight, weight_scale, bias)
    return made


def check(x: Any, weight: Any, weight_scale: Any, bias: Any) -> tuple[int, int]:
    """Raise unless the arguments go together; N and K."""
    specs = (
        TensorSpec("weight", "N K", KINDS, contiguous_last=True),
        TensorSpec("weight_scale", "N|1", (torch.float32,)),
    )
    sizes = bind(specs, {"weight": weight, "weight_scale": weight_scale})
    n, k = sizes["N"], sizes["K"]
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() < 1 or x.shape[-1] != k or k < 1:
        raise ShapeError(f"x must be [..., K] with K = {k} like weight, and K at least 1, got {list(x.shape)}")
    names = " ".join([*(f"d{i}" for i in range(x.dim() - 1)), "K"])
    halves = (torch.float16, torch.bfloat16)
    bind((TensorSpec("x", names, halves, contiguous_last=True),), {"x": x}, beside=("weight", weight))
    spec = TensorSpec("bias", "N", halves, optional=True, same_dtype_as="x", contiguous_last=True)
    bind((spec,), {"x": x, "bias": bias}, known={"N": n}, beside=("x", x))
    return n, k


def _call(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype != torch.int8:  # whose sums are exact
        refuse_invariant("matmul_w8a8 in float8_e4m3fn", "how its sums are shared follows the rows")
    made: torch.Tensor = _bind(x, weight, weight_scale, bias)(x, weight, weight_scale, bias)
    return made


@recorded("eight")
def _bind(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """The function that makes calls like this one, after all checks."""
    n, k = check(x, weight, weight_scale, bias)
    device = device_of(x.device)
    flat = x.reshape(-1, k)
    m = flat.shape[0]
    if m == 0 or n == 0:
        return lambda x, *others: x.new_empty((*x.shape[:-1], n))
    return bind_plan(_plan_of(m, weight, device), x, weight, weight_scale, bias)


def _plan_of(m: int, weight: torch.Tensor, device: Any) -> "EightPlan":
    from ...plan.matrix.eight import EightProblem, plan_eight
    from ..hopper import disabled
    from .operands import boxable

    kind = str(weight.dtype).removeprefix("torch.")
    problem = EightProblem(m, weight.shape[0], weight.shape[1], kind, boxable(weight.unsqueeze(0)))
    return plan_eight(problem, device, disabled())


def bind_plan(
    plan: "EightPlan", x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    """The function that makes calls like this one by a plan; by the portable kernel where this Triton cannot compile another."""
    from ...plan.matrix.eight import PORTABLE, plan_eight

    p = plan.problem
    by_hand = interpreting() and weight.dtype != torch.int8
    row = -(-p.k // 16) * 16
    made = None
    if plan.kernel != PORTABLE:
        made = _multiply_hopper(plan, x, weight, weight_scale, bias, row)
        plan = plan if made else plan_eight(p, plan.device, True)
    multiply = made or _multiply(plan, weight, weight_scale, row)
    quantise = _quantise(x.reshape(-1, p.k), weight.dtype, by_hand, row, plan.device)
    total = plan.parts * p.m * p.n if plan.parts > 1 else 0
    counted = plan.items * (1 if plan.kernel == PORTABLE else plan.block_n // 64)
    of_sums = torch.int32 if weight.dtype == torch.int8 else torch.float32

    def run(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        codes = torch.empty((p.m, row), dtype=torch.uint8 if by_hand else w.dtype, device=x.device)
        scales = torch.empty(p.m, dtype=torch.float32, device=x.device)
        out = torch.empty((*x.shape[:-1], p.n), dtype=x.dtype, device=x.device)
        part = arrived = None
        if total:
            part, arrived = torch.empty(total, dtype=of_sums, device=x.device), counters(counted, x.device)
        flat = x if x.dim() == 2 else x.reshape(-1, p.k)
        # nothing may come between these two: the product relies on what the first has waited for
        quantise((flat, codes, scales))
        multiply((codes.view(w.dtype) if by_hand else codes, w, scales, s, bias, out, part, arrived))
        return out

    return run


def _quantise(flat: torch.Tensor, kind: torch.dtype, by_hand: bool, row: int, device: Any) -> Bound:
    """The launch that makes codes and scales of x [M, K]."""
    from ...device.encode import E4M3, E4M3_BY_HAND, INT8
    from ...kernels.matrix.quantise_rows import quantise_rows

    code = INT8 if kind == torch.int8 else E4M3_BY_HAND if by_hand else E4M3
    early = device.dependent_launches
    k = flat.shape[1]
    block = min(ROW, max(128, 1 << (k - 1).bit_length()))
    constants = {"CODE": code.value, "LARGEST": LARGEST[kind], "EARLY": early, "ONCE": k <= block, "BLOCK": block}
    warps = max(4, min(16, block // 512))
    given, values = ("X", "Codes", "Scales"), {"K": k, "stride_xm": flat.stride(0), "stride_cm": row}
    return Bound.of(quantise_rows, flat.shape[0], given, values, constants, flat.device, num_warps=warps)


def _multiply(plan: "EightPlan", weight: torch.Tensor, weight_scale: torch.Tensor, row: int) -> Bound:
    """The launch of the portable product."""
    from ...kernels.matrix.matmul_eight import matmul_eight

    p, early = plan.problem, plan.device.dependent_launches
    constants = {
        "SPLIT": plan.parts > 1,
        "EVEN": p.k % plan.block_k == 0,
        "EARLY": early,
        "EMULATE": interpreting(),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "STAGES": plan.stages,
    }
    values = {
        "M": p.m,
        "N": p.n,
        "K": p.k,
        "each": plan.each,
        "group": plan.group,
        "stride_am": row,
        "stride_bn": weight.stride(0),
        "stride_sb": 0 if weight_scale.shape[0] == 1 else weight_scale.stride(0),
        "stride_om": p.n,
    }
    grid, options = (plan.items, plan.parts, 1), {"num_warps": plan.num_warps, "num_stages": plan.stages}
    return Bound.of(matmul_eight, grid, GIVEN, values, constants, weight.device, **options)


def _multiply_hopper(
    plan: "EightPlan", x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any, row: int
) -> Bound | None:
    """The same of a kernel for sm_90; None, after a warning, where this Triton does not compile it."""
    from ..hopper import bound_or_none
    from .eight_hopper import bind

    p = plan.problem
    codes = meta(p.m, row, dtype=weight.dtype)

    def compile(bound: Bound) -> None:
        bound.compile((codes, weight, meta(p.m), scale, bias, meta(p.m, p.n, dtype=x.dtype), *_meta_parts(plan)))

    return bound_or_none(
        "8-bit matrix product", lambda: bind(plan, codes[:, : p.k], weight, scale, bias, x.dtype), compile
    )


def _meta_parts(plan: "EightPlan") -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sums and counters of splits as examples."""
    if plan.parts == 1:
        return None, None
    return meta(1, dtype=torch.int32 if plan.problem.kind == "int8" else torch.float32), meta(1, dtype=torch.int32)


def matmul_w8a8_plan(x: torch.Tensor, weight: torch.Tensor, *, device: "str | Device | None" = None) -> "EightPlan":
    """The plan of `matmul_w8a8(x, weight, ...)`: print it.  device: plans as on another one, as of `attention_plan`."""
    return _plan_of(x.numel() // weight.shape[1], weight, device_of_kernels(device, x.device))


def example_launch(plan: "EightPlan", part: str = "product", dtype: str = "bfloat16", biased: bool = False) -> Example:
    """(kernel, args, kwargs) of one launch of a planned call on tensors without memory: to compile ahead of time.

    part: "product", or "quantise", what makes x's codes."""
    from ...plan.matrix.eight import PORTABLE

    p, row = plan.problem, -(-plan.problem.k // 16) * 16
    kind = getattr(torch, p.kind)
    x, weight = meta(p.m, p.k, dtype=getattr(torch, dtype)), meta(p.n, p.k, dtype=kind)
    codes, scales, scale = meta(p.m, row, dtype=kind), meta(p.m), meta(p.n)
    if part == "quantise":
        return _quantise(x, kind, False, row, plan.device).example((x, codes, scales))
    bias = x.new_empty(p.n) if biased else None
    if plan.kernel == PORTABLE:
        bound = _multiply(plan, weight, scale, row)
    else:
        from .eight_hopper import bind

        bound = bind(plan, codes[:, : p.k], weight, scale, bias, x.dtype)
    return bound.example((codes, weight, scales, scale, bias, x.new_empty(p.m, p.n), *_meta_parts(plan)))


def _fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


EIGHT = Operation("matmul_w8a8", _call, _fake, "matmul_w8a8 passes no gradient", before=check)
