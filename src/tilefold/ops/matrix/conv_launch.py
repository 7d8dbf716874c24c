"""The launches of a convolution: from a plan to kernels, grids and arguments, for the forward pass and both gradients."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...plan.matrix.conv import DIRECT, IM2COL, IMPLICIT, ConvPlan, ConvProblem, ConvTile
from ...plan.matrix.conv_layout import FEW
from ..bound import Bound
from ..device import interpreting
from .conv_layout import bind_copy, bind_pack, channels_run, last_strides, order, pixels_nearer, pixels_run, width_of
from .options import CODES

FEW_SPLITS = 8  # up to which a program of the sum has at least 16 pixels, to store them side by side
Numbers = tuple[int, ...]
Run = Callable[[tuple[Any, ...]], None]


class Call(NamedTuple):
    """What beside the tensors decides a call; pad: above and to the left; out: height and width of the result; settings: of a
    plan that the caller gave, or empty."""

    stride: Numbers
    pad: Numbers
    out: Numbers
    dilation: Numbers
    groups: int
    method: str
    activation: str
    tf32: bool
    keep: bool
    settings: Numbers


def rounded(n: int, multiple: int) -> int:
    """n, rounded up to a multiple."""
    return -(-n // multiple) * multiple


def precision(n: ConvProblem) -> str:
    """Of products of fp32 factors, as tl.dot names it."""
    return "tf32" if n.tf32 else "ieee"


def emulate(n: ConvProblem) -> bool:
    """Whether kernels compute in fp32 and round by hand: bf16 arithmetic is wrong in Triton's interpreter."""
    return interpreting() and n.dtype == "bfloat16"


def options(tile: ConvTile) -> dict[str, int]:
    """A tile's launch options."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def axis_numbers(n: ConvProblem, transposed: bool) -> Numbers:
    """taps, strides, pads, dilations, inverses and common divisors of both axes, phases of the second."""
    common = [math.gcd(s, d) for s, d in zip(n.stride, n.dilation, strict=True)]
    inverse = [pow(d // g, -1, s // g) if s > g else 0 for s, d, g in zip(n.stride, n.dilation, common, strict=True)]
    phases = n.stride[1] if transposed else 1
    return (*n.taps, *n.stride, *n.pad, *n.dilation, *inverse, *common, phases)


def flat(high: int, wide: int, *strides: Numbers) -> bool:
    """Whether lines follow one another at a pixel's distance in all of them."""
    return all(s[2] == wide * s[3] or high == 1 for s in strides)


def even(batch: int, high: int, wide: int, strides: Numbers) -> bool:
    """Whether all pixels of all images follow one another at the same distance."""
    return (
        flat(high, wide, strides) and (wide > 1 or high == 1) and (batch == 1 or strides[0] == high * wide * strides[3])
    )


class Sides(NamedTuple):
    """What the kernels that make a result, or TRANSPOSED the input's gradient, are told of both: source and target (height,
    width), channels of a group that are summed and made, phases of the target's pixels along both axes, the target's height and
    width in one phase, the weight's strides by (summed, made, line, column)."""

    source: tuple[int, int]
    target: tuple[int, int]
    reduced: int
    columns: int
    phases: tuple[int, int]
    places: tuple[int, int]
    weight: Numbers


def sides_of(n: ConvProblem, w: Numbers, transposed: bool) -> Sides:
    """w: strides of the weight [K, C / groups, R, S]."""
    if not transposed:
        return Sides((n.high, n.wide), n.out, n.reduced, n.columns, (1, 1), n.out, (w[1], w[0], *w[2:]))
    places = -(-n.high // n.stride[0]), -(-n.wide // n.stride[1])
    return Sides(n.out, (n.high, n.wide), n.columns, n.reduced, n.stride, places, w)


def launch_gemm(n: ConvProblem, tile: ConvTile, splits: int, x: Numbers, w: Numbers, out: Numbers, transposed: bool,
                activation: str, index: int) -> Bound:  # fmt: skip
    """conv_implicit, forward or TRANSPOSED: x, out: strides of [N, C, H, W]; w: of the weight [K, C, R, S]."""
    from ...kernels.matrix.conv import conv_implicit

    sides = sides_of(n, w, transposed)
    source, (high, wide), reduced, columns, phases, (lines, line), w_strides = sides
    total = n.batch * lines * line
    if n.pointwise and flat(high, wide, x, out):
        lines, line = 1, high * wide
        if n.batch == 1 or (x[0] == line * x[3] and out[0] == line * out[3]):
            line = total
    sizes = (lines, line) if n.pointwise else (high, wide)  # of the result
    fold = reduced < FEW and n.taps != (1, 1)
    constants = {
        "TRANSPOSED": transposed,
        "FOLD": fold,
        "INSIDE": n.pointwise if transposed else n.inside,
        "EVEN_K": reduced % tile.depth == 0,
        "NEVER_EMPTY": phases == (1, 1),
        **_runs(n, sides, x, n.columns * w[0], out, fold),
        "ACTIVATION": CODES[activation],
        "PRECISION": precision(n),
        "EMULATE": emulate(n),
        "WIDE": n.wide64,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
    }
    grid = (-(-total // tile.rows) * -(-columns // tile.columns), n.groups * phases[0] * phases[1], splits)
    part = n.batch * high * wide * columns * n.groups if splits > 1 else 0
    scalars = (
        total, lines, line, *source, *sizes, *axis_numbers(n, transposed), n.groups, reduced, columns, order(x),
        w_strides, order(out), n.columns * w[0], part,
    )  # fmt: skip
    return Bound.of(conv_implicit, grid, 5, scalars, constants, index, **options(tile))


def _runs(n: ConvProblem, sides: Sides, x: Numbers, group: int, out: Numbers, fold: bool) -> dict[str, int]:
    """What lies side by side: of x and the weight channels if taps and channels are one axis, else pixels of x if no tap shifts
    them; of the result pixels, where the kernel makes all of them in their order.  group: the weight's stride by groups."""
    x_run = w_run = 1
    if fold and not pixels_nearer(x):
        x_run = channels_run(sides.reduced, (x[1], x[0], x[2], x[3]), n.itemsize)
        w_run = channels_run(sides.reduced, (*sides.weight, group), n.itemsize)
    elif not fold and n.pointwise and pixels_nearer(x):
        x_run = pixels_run(*sides.source, x, n.itemsize)
    whole = sides.phases == (1, 1) and pixels_nearer(out)
    out_run = pixels_run(*sides.target, out, n.itemsize) if whole else 1
    turned = {"X_PIXELS": x_run > 1 and not fold, "OUT_PIXELS": out_run > 1}
    return {**turned, "X_RUN": x_run, "W_RUN": w_run, "OUT_RUN": out_run}


def launch_direct(n: ConvProblem, tile: ConvTile, x: Numbers, w: Numbers, out: Numbers, transposed: bool, activation: str,
                  index: int) -> Bound:  # fmt: skip
    """conv_direct, as launch_gemm."""
    from ...kernels.matrix.conv_direct import conv_direct

    source, target, reduced, columns, phases, (lines, line), w_strides = sides_of(n, w, transposed)
    total = n.batch * lines * line
    constants: dict[str, Any] = {
        "TRANSPOSED": transposed,
        "ACTIVATION": CODES[activation],
        "EMULATE": emulate(n),
        "WIDE": n.wide64,
        "BLOCK_M": tile.columns if pixels_nearer(out) else tile.rows,
        "BLOCK_N": tile.rows if pixels_nearer(out) else tile.columns,
    }
    blocks = -(-total // constants["BLOCK_M"]) * -(-columns * n.groups // constants["BLOCK_N"])
    scalars = (
        total, lines, line, *source, *target, *axis_numbers(n, transposed), n.groups, reduced, columns, order(x),
        w_strides, order(out), n.columns * w[0],
    )  # fmt: skip
    grid = blocks, phases[0] * phases[1], 1
    return Bound.of(conv_direct, grid, 5, scalars, constants, index, **options(tile))


def launch_combine(shape: Numbers, splits: int, out: Numbers, n: ConvProblem, activation: str, index: int) -> Bound:
    """conv_combine: partial sums [splits, N, H, W, C] -> [N, C, H, W] by strides out."""
    from ...kernels.matrix.conv_direct import conv_combine

    images, channels, high, wide = shape
    total = images * high * wide
    block_n = min(64, 1 << (channels - 1).bit_length())
    at_once = min(1 << (splits - 1).bit_length(), 32)
    pixels = pixels_nearer(out) and splits <= FEW_SPLITS  # more of them: the sums' reading is what takes time
    if pixels:
        block_n = min(32, block_n)
    block_m = max(16 if pixels else 1, (256 if interpreting() else 2048) // (block_n * at_once))
    lines, line, strides = high, wide, order(out)
    one = (high * wide, 1, wide, 1)  # strides by channels, if the result is dense and channels are inside
    if channels > 1 and all(
        n == 1 or s == w * (1 if i == 1 else channels) for i, (n, s, w) in enumerate(zip(shape, out, one, strict=True))
    ):
        lines, line, strides = 1, total, (0, 0, channels, 1)  # rows of one matrix
    constants = {
        "RUN": pixels_run(high, wide, out, n.itemsize) if pixels else 1,
        "ACTIVATION": CODES[activation],
        "EMULATE": emulate(n),
        "WIDE": n.wide64 or total * channels >= 2**31,
        "SPLITS": at_once,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    scalars = (total, lines, line, channels, splits, total * channels, strides)
    programs = -(-total // block_m) * -(-channels // block_n)
    return Bound.of(conv_combine, programs, 4, scalars, constants, index)


def bind_result(plan: ConvPlan, tile: ConvTile, x: Numbers, w: Numbers, shape: Numbers, out: Numbers, activation: str,
                transposed: bool, index: int) -> Run:  # fmt: skip
    """-> run((x, weight, bias, out, pre)): one launch, or with splits two."""
    n = plan.problem
    if plan.method == DIRECT:
        return launch_direct(n, tile, x, w, out, transposed, activation, index)
    splits = plan.splits("input" if transposed else "forward")
    if splits == 1:
        return launch_gemm(n, tile, splits, x, w, out, transposed, activation, index)
    images, channels, high, wide = shape
    parts_strides = (high * wide * channels, 1, wide * channels, channels)
    gemm = launch_gemm(n, tile, splits, x, w, parts_strides, transposed, "none", index)
    combine = launch_combine(shape, splits, out, n, activation, index)

    def run(given: tuple[Any, ...]) -> None:
        x, weight, bias, out, pre = given
        parts = torch.empty((splits, images * high * wide * channels), dtype=torch.float32, device=x.device)
        gemm((x, weight, None, parts, None))
        combine((parts, bias, out, pre))

    return run


def bind_forward(plan: ConvPlan, x: Numbers, w: Numbers, out: Numbers, activation: str, index: int) -> Run:
    """-> run((x, weight, bias, out, pre)); x, w, out: strides.  Copies of x and of the weight are made in it, as planned."""
    n, width, copy_x = plan.problem, width_of(plan), None
    shape, given = (n.batch, n.out_channels, *n.out), (n.batch, n.channels, n.high, n.wide)
    pack, packed = bind_pack(plan, (n.out_channels, n.reduced, *n.taps), w, width, index)
    if plan.copies_x and (pixels_nearer(x) or width * n.groups != n.channels):
        copy_x = bind_copy(n, given, x, width * n.groups, plan.device, index)
        x, plan = last_strides(given, width * n.groups), plan.relaid
    if plan.method == IM2COL:
        made = bind_columns(plan, x, out, activation, index)
    else:
        made = bind_result(plan, plan.forward, x, packed, shape, out, activation, False, index)

    def run(given: tuple[Any, ...]) -> None:
        x, weight, *others = given
        made((x if copy_x is None else copy_x(x), pack(weight), *others))

    return run


def bind_columns(plan: ConvPlan, x: Numbers, out: Numbers, activation: str, index: int) -> Run:
    """im2col, then the columns' convolution with one tap, which is a plain GEMM: some images at a time."""
    from ...kernels.matrix.conv_direct import im2col

    n, tile = plan.problem, plan.forward
    depth = n.channels * n.taps[0] * n.taps[1]
    width, most = rounded(depth, 16), plan.images_at_once
    steps = {}
    for images in {most, n.batch % most or most}:
        total = images * n.out[0] * n.out[1]
        block_m, block_k = (64, 64) if interpreting() else (32, 128)
        constants = {"BLOCK_M": block_m, "BLOCK_K": block_k}
        grid = (-(-total // block_m), -(-width // block_k), 1)
        numbers = (
            total, *n.out, n.high, n.wide, *n.taps, *n.stride, *n.pad, *n.dilation, n.groups, n.reduced, order(x), width,
        )  # fmt: skip
        copy = Bound.of(im2col, grid, 2, numbers, constants, index)
        pixels = n.out[0] * n.out[1]
        one = ConvProblem(images, depth, *n.out, n.out_channels, (1, 1), n.out, groups=n.groups, dtype=n.dtype, tf32=n.tf32,
                          wide64=n.wide64 or total * width >= 2**31)  # fmt: skip
        strides = (pixels * width, 1, n.out[1] * width, width)
        row = depth // n.groups
        gemm = bind_result(
            ConvPlan(one, plan.device, IMPLICIT, tile, tile, tile, plan.reason), tile, strides, (row, 1, 0, 0),
            (images, n.out_channels, *n.out), out, activation, False, index,
        )  # fmt: skip
        steps[images] = copy, gemm, (total, width)

    def run(given: tuple[Any, ...]) -> None:
        x, weight, bias, out, pre = given
        taps_inside = weight.permute(0, 2, 3, 1).contiguous()  # [K, R, S, C / groups]: a copy if it is not packed so
        for first in range(0, n.batch, most):
            last = min(first + most, n.batch)
            copy, gemm, room = steps[last - first]
            columns = torch.empty(room, dtype=x.dtype, device=x.device)
            copy((x[first:last], columns))
            gemm((columns, taps_inside, bias, out[first:last], None if pre is None else pre[first:last]))

    return run


def bind_input(plan: ConvPlan, dy: Numbers, w: Numbers, dx: Numbers, index: int) -> Run:
    """-> run((dy, weight, dx)); w: strides of the weight."""
    n = plan.problem
    pack, packed = bind_pack(plan, (n.out_channels, n.reduced, *n.taps), w, n.reduced, index)
    shape = (n.batch, n.channels, n.high, n.wide)
    made = bind_result(plan, plan.input, dy, packed, shape, dx, "none", True, index)

    def run(given: tuple[Any, ...]) -> None:
        dy, weight, dx = given
        made((dy, pack(weight), None, dx, None))

    return run


def weight_launch(plan: ConvPlan, x: Numbers, dy: Numbers, dw: Numbers, index: int) -> Bound:
    """conv_weight, or conv_weight_direct: writes the splits' sums [splits, K, R, S, C / groups], or the gradient itself."""
    from ...kernels.matrix.conv_weight import conv_weight, conv_weight_direct

    n, tile = plan.problem, plan.weight
    taps, splits = n.taps[0] * n.taps[1], plan.splits("weight")
    split = splits > 1
    target = (n.reduced * taps, 1, n.taps[1] * n.reduced, n.reduced) if split else dw
    part = n.out_channels * n.reduced * taps if split else 0
    numbers: tuple[Any, ...] = (n.pixels, *n.out, n.high, n.wide, *n.taps, *n.stride, *n.pad, *n.dilation)
    numbers += (n.reduced, n.columns)
    ends: tuple[Any, ...] = (order(x), order(dy), order(target), part)
    constants: dict[str, Any] = {"EMULATE": emulate(n), "WIDE": n.wide64, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    if plan.method == DIRECT:
        grid = (-(-n.out_channels // tile.columns), taps * n.reduced, splits)
        numbers = (*numbers, n.out_channels, *ends)
        return Bound.of(conv_weight_direct, grid, 3, numbers, constants, index, **options(tile))
    fold = n.reduced < FEW and taps > 1
    cols = n.reduced * taps if fold else n.reduced
    grid = (-(-n.columns // tile.rows) * -(-cols // tile.columns), n.groups * (1 if fold else taps), splits)
    constants |= {"FOLD": fold, "INSIDE": n.inside}
    constants |= {"PRECISION": precision(n), "BLOCK_K": tile.depth}
    x_run = pixels_run(n.high, n.wide, x, n.itemsize) if n.pointwise and pixels_nearer(x) else 1
    constants["X_RUN"] = channels_run(n.reduced, (x[1], x[0], *x[2:]), n.itemsize) if fold else x_run
    constants["X_FLAT"] = n.pointwise and even(n.batch, n.high, n.wide, x)
    constants["Y_FLAT"] = even(n.batch, *n.out, dy)
    constants["Y_RUN"] = y_run = pixels_run(*n.out, dy, n.itemsize) if pixels_nearer(dy) else 1
    constants |= {"X_PIXELS": x_run > 1 and not fold, "Y_PIXELS": y_run > 1}
    return Bound.of(conv_weight, grid, 3, (*numbers, *ends), constants, index, **options(tile))


def bind_weight(plan: ConvPlan, x: Numbers, dy: Numbers, dw: Numbers, index: int) -> Run:
    """-> run((x, dy, dw)); dw: strides [K, C / groups, R, S]."""
    n, splits = plan.problem, plan.splits("weight")
    bound = weight_launch(plan, x, dy, dw, index)
    if splits == 1:
        return bound
    combine = launch_combine((n.out_channels, n.reduced, *n.taps), splits, dw, n, "none", index)
    part = n.out_channels * n.reduced * n.taps[0] * n.taps[1]

    def run(given: tuple[Any, ...]) -> None:
        x, dy, dw = given
        parts = torch.empty((splits, part), dtype=torch.float32, device=x.device)
        bound((x, dy, parts))
        combine((parts, None, dw, None))

    return run
