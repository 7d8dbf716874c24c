"""2-D convolution: check, plan, launch, and the operator with its gradients."""

from typing import Any

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import DtypeError, PlanError, ShapeError, ValueRangeError
from ...plan.device import Device
from ...plan.matrix.conv import METHODS, PARTS, ConvPlan, ConvProblem, ConvTile, method_named, plan_conv
from ..bound import Example
from ..call import check_integer
from ..device import device_of, device_of_kernels
from ..operator import Gradient, Operation
from ..records import recorded
from ..watch import wants_gradient
from .conv_launch import Call, Numbers, bind_forward, bind_input, bind_weight
from .conv_layout import (
    bind_copy,
    dense,
    gradient_of,
    last_strides,
    lies_channels_last,
    pixels_nearer,
    result_last,
    strides_of,
)
from .options import NAMES, check_activation, check_tf32


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    *,
    method: str = "auto",
    activation: str | None = None,
    tf32: bool = False,
    plan: ConvPlan | None = None,
) -> torch.Tensor:
    """activation(conv(x, weight) + bias), a cross-correlation as torch's, with fp32 sums.

    x [N, C, H, W] or [C, H, W], weight [K, C / groups, R, S], bias [K]; fp16, bf16 or fp32, all the same; any strides (a weight
    with taps inside channels is repacked once a call).  The result [N, K, Ho, Wo] is channels-last where x or
    weight is, as torch's.  padding: zeros on every side, or "valid" (none), or "same" (the size of x; stride 1 only).
    method: "implicit" or "direct" (x is read as it lies, no copy of it is made), "relayout" (channels-first tensors are first
    copied to channels-last, and so are the gradients'), "im2col" (columns, then a GEMM), "auto": the plan's choice of implicit
    and relayout, by time; groups of few channels take a kernel without tensor cores.
    activation: None, "relu", "silu", "gelu", "gelu_tanh".  tf32: of fp32, round factors to tf32.
    plan: of `conv_plan`, followed exactly; it was made for this problem, this device and, if given, this method.
    First derivatives of x, weight and bias.  The same bits in every run.
    Raises ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, PlanError, Unsupported.
    """
    batched = x[None] if isinstance(x, torch.Tensor) and x.dim() == 3 else x
    call = _call(batched, weight, bias, stride, padding, dilation, groups, method, activation, tf32, plan)
    keep = call.activation in NAMES[2:] and torch.is_grad_enabled() and wants_gradient((x, weight, bias))
    out, _ = CONV(batched, weight, bias, call._replace(keep=keep))
    return out[0] if x.dim() == 3 else out  # type: ignore[no-any-return]


def conv_plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    *,
    method: str = "auto",
    tf32: bool = False,
    device: str | Device | None = None,
) -> ConvPlan:
    """The plan that conv2d makes for this call: print it, or change a tile and pass it as plan=.  device: plans as on another
    one, as of `attention_plan`."""
    batched = x[None] if isinstance(x, torch.Tensor) and x.dim() == 3 else x
    call = _call(batched, weight, None, stride, padding, dilation, groups, method, None, tf32, None)
    return plan_conv(problem_of(batched, weight, call), device_of_kernels(device, x.device), method)


# ---------------------------------------------------------------- checks


def _call(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any, method: Any,
          activation: Any, tf32: Any, plan: ConvPlan | None) -> Call:  # fmt: skip
    """Every check, and the arguments in one form."""
    steps, dilations = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    check_integer("groups", groups)
    if groups < 1:
        raise ValueRangeError(f"groups must be at least 1, got {groups}")
    check_activation(activation)
    method = method_named(method)
    if plan is not None and not isinstance(plan, ConvPlan):
        raise DtypeError(f"plan must be a ConvPlan or None, got {type(plan).__name__}")
    _check_tensors(x, weight, bias, groups)
    check_tf32("x", x, tf32)
    reach = [d * (t - 1) for d, t in zip(dilations, weight.shape[2:], strict=True)]
    before, both = _padding(padding, steps, reach)
    out = [(n + p - r - 1) // s + 1 for n, p, r, s in zip(x.shape[2:], both, reach, steps, strict=True)]
    if min(out) < 1:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}: with padding {padding!r} it is smaller than the filter, which spans "
            f"{reach[0] + 1} x {reach[1] + 1}"
        )
    call = Call(steps, before, tuple(out), dilations, groups, method, activation or "none", tf32, False, ())
    return call if plan is None else call._replace(settings=_settings(plan, x, weight, call))


def _settings(plan: ConvPlan, x: torch.Tensor, weight: torch.Tensor, call: Call) -> Numbers:
    """Those of a caller's plan; PlanError unless it is one for this call."""
    if plan.problem != problem_of(x, weight, call):
        raise PlanError(f"plan is for another problem: {plan.problem}, this call is {problem_of(x, weight, call)}")
    if call.method != "auto" and plan.method not in (call.method, "direct"):
        raise PlanError(f"plan has method {plan.method!r}, this call asks for method={call.method!r}")
    if not torch.compiler.is_compiling() and not x.is_meta and plan.device != device_of(x.device):
        raise PlanError(f"plan is for {plan.device.name}, this call is on {device_of(x.device).name}")
    return settings_of(plan)


def _check_tensors(x: Any, weight: Any, bias: Any, groups: int) -> None:
    specs = (
        TensorSpec("x", "batch channels high wide", FLOATS),
        TensorSpec("weight", "out_channels group_channels taps_h taps_w", FLOATS, same_dtype_as="x"),
        TensorSpec("bias", "out_channels", FLOATS, optional=True, same_dtype_as="x"),
    )
    n = bind(specs, {"x": x, "weight": weight, "bias": bias})
    for name, size in (("group_channels", 1), ("taps_h", 1), ("taps_w", 1), ("out_channels", 1)):
        if n[name] < size:
            raise ShapeError(f"weight has shape {tuple(weight.shape)}: {name} must be at least 1")
    if n["channels"] != n["group_channels"] * groups:
        raise ShapeError(
            f"x has {n['channels']} channels, but weight has {n['group_channels']} for each of {groups} groups"
        )
    if n["out_channels"] % groups:
        raise ShapeError(f"weight has {n['out_channels']} output channels, not a multiple of {groups} groups")


def _pair(name: str, value: Any, least: int) -> tuple[int, int]:
    both = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(both) != 2:
        raise DtypeError(f"{name} must be an int or a pair of them, got {value!r}")
    for one in both:
        check_integer(name, one)
        if one < least:
            raise ValueRangeError(f"{name} must be at least {least}, got {value!r}")
    return both


def _padding(padding: Any, stride: Numbers, reach: list[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """-> zeros above and to the left; zeros of both sides."""
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueRangeError(f"padding must be integers, 'same' or 'valid', got {padding!r}")
        if padding == "valid":
            return (0, 0), (0, 0)
        if stride != (1, 1):
            raise ValueRangeError(f"padding 'same' needs stride 1, got {stride}")
        return (reach[0] // 2, reach[1] // 2), (reach[0], reach[1])
    top, left = _pair("padding", padding, 0)
    return (top, left), (2 * top, 2 * left)


def problem_of(x: torch.Tensor, weight: torch.Tensor, call: Call, dy: torch.Tensor | None = None) -> ConvProblem:
    """The plan's problem; dy: the result's gradient, which may lie otherwise, and more widely, than the result."""

    def span(shape: Any, strides: Any) -> int:
        return sum((n + 64) * abs(s) for n, s in zip(shape, strides, strict=True))

    last = result_last(x, weight) if dy is None else not pixels_nearer(strides_of(dy))
    result = x.shape[0] * weight.shape[0] * call.out[0] * call.out[1]
    read = (x, weight) if dy is None else (x, weight, dy)
    wide = max(result, x.numel(), *(span(t.shape, t.stride()) for t in read)) >= 2**31
    return ConvProblem(
        x.shape[0], x.shape[1], x.shape[2], x.shape[3], weight.shape[0], tuple(weight.shape[2:]), call.out, call.stride,  # type: ignore[arg-type]
        call.pad, call.dilation, call.groups, str(x.dtype).removeprefix("torch."), x.stride(1) == 1, last, call.tf32, wide,  # type: ignore[arg-type]
    )  # fmt: skip


def settings_of(plan: ConvPlan) -> Numbers:
    """A plan's choices as numbers, which pass through torch's dispatcher."""
    names = (*METHODS, "direct")
    tiles = (plan.tile(part) for part in PARTS)
    return (
        names.index(plan.method),
        *(v for t in tiles for v in (t.rows, t.columns, t.depth, t.num_warps, t.num_stages, t.splits)),
    )


def planned(problem: ConvProblem, call: Call, device: torch.device) -> ConvPlan:
    """The caller's plan, of call.settings, or the planner's."""
    if not call.settings:
        return plan_conv(problem, device_of(device), call.method)
    tiles = [ConvTile(*call.settings[i : i + 6]) for i in (1, 7, 13)]
    method = (*METHODS, "direct")[call.settings[0]]
    return ConvPlan(problem, device_of(device), method, tiles[0], tiles[1], tiles[2], "the caller's")


# ---------------------------------------------------------------- forward and backward


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the result, and what was there before the activation if call.keep, else an empty tensor."""
    run, last = _prepare(x, weight, bias, call)
    out = dense((x.shape[0], weight.shape[0], *call.out), last, x)
    pre = torch.empty_like(out) if call.keep else out.new_empty(0)
    if run is not None:
        run((x, weight, bias, out, pre if call.keep else None))
    return out, pre


@recorded("conv2d")
def _prepare(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call) -> tuple[Any, bool]:
    problem, last = problem_of(x, weight, call), result_last(x, weight)
    device = device_of(x.device)
    if x.shape[0] == 0:
        return None, last
    plan = planned(problem, call, x.device)
    out = strides_of(
        dense((x.shape[0], weight.shape[0], *call.out), last, torch.empty(0, dtype=x.dtype, device="meta"))
    )
    assert plan.device == device
    return bind_forward(plan, strides_of(x), strides_of(weight), out, call.activation, x.device.index or 0), last


def gradients(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor,
    call: Call,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Of x, weight and bias; saved: the result (relu) or what was there before the activation."""
    dy = slope(dout, saved, call.activation)
    dx = dw = None
    run_input, run_weight, copy_x, copy_dy = _prepare_backward(dy, x, weight, call, wanted)
    read = dy if copy_dy is None else copy_dy(dy)
    if wanted[0]:
        dx = gradient_of(x)
        if run_input is not None:
            run_input((read, weight, dx))
    if wanted[1]:
        dw = gradient_of(weight)
        if run_weight is None:
            dw.zero_()
        else:
            run_weight((x if copy_x is None else copy_x(x), read, dw))
    db = dy.sum((0, 2, 3), dtype=torch.float32).to(dy.dtype) if wanted[2] else None
    return dx, dw, db


def slope(dout: torch.Tensor, saved: torch.Tensor, activation: str) -> torch.Tensor:
    """The gradient before the activation."""
    aten = torch.ops.aten
    if activation == "none":
        return dout
    if activation == "relu":
        found: torch.Tensor = aten.threshold_backward(dout, saved, 0)
    elif activation == "silu":
        found = aten.silu_backward(dout, saved)
    else:
        found = aten.gelu_backward(dout, saved, approximate="tanh" if activation == "gelu_tanh" else "none")
    return found


@recorded("conv2d backward")
def _prepare_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: Call, wanted: tuple[bool, ...]
) -> tuple[Any, Any, Any, Any]:
    """-> run((dy, weight, dx)), run((x, dy, dw)), and copy(x), copy(dy) that come first; each may be None."""
    if x.shape[0] == 0:
        return None, None, None, None
    problem = problem_of(x, weight, call, dy)
    plan, index = planned(problem, call, x.device), x.device.index or 0
    meta = torch.empty(0, device="meta")
    dx = strides_of(dense(tuple(x.shape), lies_channels_last(x), meta))
    dw = strides_of(dense(tuple(weight.shape), lies_channels_last(weight), meta))

    def copied(name: str, t: torch.Tensor, needed: bool) -> tuple[Any, tuple[int, ...]]:
        lies, shape = strides_of(t), tuple(t.shape)
        if not needed or name not in plan.copies_in_gradients or not pixels_nearer(lies):
            return None, lies
        return bind_copy(problem, shape, lies, shape[1], plan.device, index), last_strides(shape)

    copy_x, strides_x = copied("x", x, wanted[1])
    copy_dy, strides_dy = copied("dy", dy, wanted[0] or wanted[1])
    run_input = bind_input(plan, strides_dy, strides_of(weight), dx, index) if wanted[0] else None
    run_weight = bind_weight(plan, strides_x, strides_dy, dw, index) if wanted[1] else None
    return run_input, run_weight, copy_x, copy_dy


# ---------------------------------------------------------------- the operator


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: Any, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    out = dense((x.shape[0], weight.shape[0], *call.out), result_last(x, weight), x)
    return out, torch.empty_like(out) if call.keep else out.new_empty(0)


def _gradients(args: tuple[Any, ...], results: Any, grads: tuple[Any, ...], wanted: tuple[bool, ...]) -> Any:
    x, weight, _, call = args
    return gradients(grads[0], x, weight, results[0 if call.activation == "relu" else 1], call, wanted)


def _unread(x: Any, weight: Any, bias: Any, call: Call) -> tuple[int, ...]:
    return (1,) if call.activation == "relu" else (0,)


GRADIENT = Gradient(("x", "weight", "bias"), _gradients, unread=_unread, still=(1,), fresh=gradient_of)
CONV = Operation("conv2d", forward, _fake, GRADIENT)


# ---------------------------------------------------------------- without a GPU


def example_launch(plan: ConvPlan, part: str, activation: str = "none") -> Example:
    """(kernel, args, kwargs) of the GEMM of one part of a plan, on tensors without memory: to compile ahead of time."""
    from .conv_launch import launch_gemm, weight_launch

    plan = plan.relaid if plan.method == "relayout" and part == "forward" else plan
    n = plan.problem
    meta = torch.empty(0, dtype=getattr(torch, n.dtype), device="meta")
    x = dense((n.batch, n.channels, n.high, n.wide), n.x_last, meta)
    y = dense((n.batch, n.out_channels, *n.out), n.y_last, meta)
    w = dense((n.out_channels, n.reduced, *n.taps), True, meta)
    a, b, c = map(strides_of, (x, y, w))
    tile = plan.tile(part)
    parts = torch.empty(1, device="meta") if plan.splits(part) > 1 else None
    if part == "weight":
        return weight_launch(plan, a, b, c, 0).example((x, y, w if parts is None else parts))
    source, target = (x, y) if part == "forward" else (y, x)
    given, packed, made = map(strides_of, (source, w, target))
    if parts is not None:
        made = last_strides(tuple(target.shape))
    bound = launch_gemm(n, tile, plan.splits(part), given, packed, made, part == "input", activation, 0)
    return bound.example((source, w, None, target if parts is None else parts, None))
