"""The plan of a 2-D convolution, forward and both gradients: method, tiles, splits, and why the others were not taken."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tilefold.errors import PlanError, Unsupported, ValueRangeError
from tilefold.plan.base import Shown
from tilefold.plan.device import Device
from tilefold.plan.limits import MAX_GRID
from tilefold.plan.matrix.conv_layout import FEW, copied, copied_bytes, copy_pays, padded

IMPLICIT, IM2COL, RELAYOUT, DIRECT = "implicit", "im2col", "relayout", "direct"
METHODS = (IMPLICIT, IM2COL, RELAYOUT)
PARTS = FORWARD, INPUT, WEIGHT = ("forward", "input", "weight")
NARROW = 4  # channels of several groups up to which tensor cores have nothing to do
WORKSPACE = 1 << 30  # bytes of columns that im2col writes at once
STEPS_PER_SPLIT = 8  # at least: a shorter sum costs more to add up than it saves
MAX_SPLITS = 256
LONG = 48  # steps: where SMs would idle, longer sums are split, shorter ones take smaller and deeper tiles
STEP_USE, COPY_USE = (
    0.85,
    0.8,
)  # that a program reaches of an SM's tensor cores, and the sum over splits of the DRAM's rate
SUM_S = 3e-6  # of one more kernel, and its wait
MOST_SHARES = 8
LARGEST_SECOND = 65535  # programs along the second axis of a grid
LARGEST_SIDE = 256  # of a tile


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """batch x channels x high x wide with weight [out_channels, channels / groups, taps_h, taps_w] -> out_high x out_wide.

    pad: zeros above and to the left (below and right follow from the size of the result).  x_last, y_last: whether the
    channels of the input, of the result, are contiguous.  tf32: of fp32, round factors to tf32.  wide64: offsets need 64 bits."""

    batch: int
    channels: int
    high: int
    wide: int
    out_channels: int
    taps: tuple[int, int]
    out: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "bfloat16"
    x_last: bool = True
    y_last: bool = True
    tf32: bool = False
    wide64: bool = False

    @property
    def reduced(self) -> int:
        """Input channels of a group."""
        return self.channels // self.groups

    @property
    def columns(self) -> int:
        """Output channels of a group."""
        return self.out_channels // self.groups

    @property
    def pixels(self) -> int:
        """Of the result, over the batch."""
        return self.batch * self.out[0] * self.out[1]

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def inside(self) -> bool:
        """Whether no tap of any output pixel leaves the input."""
        reach = (
            (o - 1) * s + d * (t - 1)
            for o, s, d, t in zip(self.out, self.stride, self.dilation, self.taps, strict=True)
        )
        return self.pad == (0, 0) and all(r < n for r, n in zip(reach, (self.high, self.wide), strict=True))

    @property
    def pointwise(self) -> bool:
        """A plain GEMM: one tap, every pixel."""
        return self.taps == (1, 1) and self.stride == (1, 1) and self.pad == (0, 0)

    @property
    def flops(self) -> int:
        """Of each of the three parts."""
        return 2 * self.pixels * self.out_channels * self.reduced * self.taps[0] * self.taps[1]

    @property
    def bytes(self) -> int:
        """Input, weight and result once each: the same for all three parts."""
        x = self.batch * self.channels * self.high * self.wide
        w = self.out_channels * self.reduced * self.taps[0] * self.taps[1]
        return (x + w + self.pixels * self.out_channels) * self.itemsize


@dataclass(frozen=True, slots=True)
class ConvTile:
    """One program: rows x columns of the result, `depth` of the reduction a step; splits: programs that share a reduction."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    splits: int = 1

    def __str__(self) -> str:
        split = "" if self.splits == 1 else f", {self.splits} splits"
        return f"{self.rows} x {self.columns} x {self.depth}, {self.num_warps} warps, {self.num_stages} stages{split}"

    def violation(self, least: int) -> str | None:
        """What is wrong with the tile of a kernel whose sides are at least `least`, as a sentence, or None."""
        for field in ConvTile.__slots__:
            if type(getattr(self, field)) is not int:
                return f"{field} must be an int, got {getattr(self, field)!r}"
        for field in ("rows", "columns", "depth"):
            value = getattr(self, field)
            if not least <= value <= LARGEST_SIDE or value & (value - 1):
                return f"{field} must be a power of two from {least} to {LARGEST_SIDE}, got {value}"
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            return f"num_warps must be a power of two from 1 to 32, got {self.num_warps}"
        for field, most in (("num_stages", 8), ("splits", LARGEST_SECOND)):
            if not 1 <= getattr(self, field) <= most:
                return f"{field} must be from 1 to {most}, got {getattr(self, field)}"
        return None


@dataclass(frozen=True, slots=True)
class ConvPlan(Shown):
    """The decision; `print` it.  method: "implicit" (reads x as it lies), "relayout" (implicit, after channels-first tensors were
    copied to channels-last), "im2col" or "direct" (no tensor cores; narrow groups), of the forward pass: the gradients are
    implicit, relaid or direct.  reason, rejected: why, and the methods not taken with why not."""

    problem: ConvProblem
    device: Device
    method: str
    forward: ConvTile
    input: ConvTile
    weight: ConvTile
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, DIRECT):
            raise PlanError(f"plan field method must be one of {', '.join((*METHODS, DIRECT))}, got {self.method!r}")
        least = 1 if self.method == DIRECT else 16
        for name in PARTS:
            if fault := self.tile(name).violation(least):
                raise PlanError(f"plan field {name}: {fault}")

    def tile(self, part: str) -> ConvTile:
        """The tile of "forward", "input" (gradient) or "weight" (gradient); PlanError for another part."""
        if part not in PARTS:
            raise PlanError(f"part must be one of {', '.join(map(repr, PARTS))}, got {part!r}")
        return {FORWARD: self.forward, INPUT: self.input, WEIGHT: self.weight}[part]

    def splits(self, part: str) -> int:
        """Splits of a part, none of which is empty: at most the tile's."""
        n, tile = self.problem, self.tile(part)
        if part == WEIGHT:
            steps = -(-n.pixels // (tile.rows if self.method == DIRECT else tile.depth))
        elif part == INPUT and n.stride != (1, 1):
            return 1
        else:
            channels, taps = n.columns if part == INPUT else n.reduced, n.taps[0] * n.taps[1]
            if part == FORWARD and self.method == RELAYOUT:
                channels = padded(n) // n.groups
            one_axis = self.method == IM2COL or (channels < FEW and taps > 1)
            steps = -(-channels * taps // tile.depth) if one_axis else -(-channels // tile.depth) * taps
        return -(-steps // -(-steps // tile.splits))

    def with_tile(self, part: str, **changes: int) -> "ConvPlan":
        """The same plan with another tile for one part."""
        return replace(self, **{part: replace(self.tile(part), **changes)})  # type: ignore[arg-type]

    @property
    def images_at_once(self) -> int:
        """Images whose columns im2col writes at once."""
        n = self.problem
        row = n.channels * n.taps[0] * n.taps[1] * n.itemsize
        return max(1, min(n.batch, WORKSPACE // max(1, row * n.out[0] * n.out[1])))

    @property
    def bytes(self) -> int:
        """To and from DRAM in the forward pass: im2col writes and reads the columns, too, relayout a copy of x."""
        n = self.problem
        columns = n.pixels * n.channels * n.taps[0] * n.taps[1] * n.itemsize
        return n.bytes + (2 * columns if self.method == IM2COL else 0) + 2 * self.copy_bytes

    @property
    def copy_bytes(self) -> int:
        """Of memory that the forward pass takes for a channels-last copy of x."""
        n = self.problem
        return copied_bytes(n, "x") if self.copies_x else 0

    @property
    def copies_x(self) -> bool:
        """Whether the forward pass copies x: in a layout, or with a number of channels, that is read faster."""
        n = self.problem
        changes = "x" in copied(n)
        return (self.method == RELAYOUT and (changes or padded(n) != n.channels)) or (self.method == IM2COL and changes)

    @property
    def copies_in_gradients(self) -> tuple[str, ...]:
        """Which of "x" and "dy" the gradients' kernels read from channels-last copies."""
        allowed = self.method == RELAYOUT or (self.method == IM2COL and copy_pays(self.problem, self.device)[0])
        return copied(self.problem) if allowed else ()

    @property
    def relaid(self) -> "ConvPlan":
        """What the forward pass does with the copy of x."""
        n, last = self.problem, "x" in copied(self.problem)
        channels = padded(n) if self.method == RELAYOUT else n.channels
        wide = n.wide64 or n.batch * (channels + 64) * n.high * n.wide >= 2**31
        made = replace(n, channels=channels, x_last=n.x_last or last, wide64=wide)
        return replace(self, problem=made, method=IMPLICIT if self.method == RELAYOUT else self.method)

    @property
    def bound_s(self) -> float:
        """The longer of the arithmetic and the traffic, at the device's roofs."""
        rate = self.device.matmul_rate("tf32" if self.problem.tf32 else self.problem.dtype)
        return max(self.problem.flops / rate, self.bytes / self.device.dram_rate)

    def __str__(self) -> str:
        n = self.problem
        others = "".join(f"\n  not {name}: {why}" for name, why in self.rejected)
        memory = f"{self.copy_bytes / 1e6:.2f} MB for a channels-last copy of x"
        copies = f"\n  takes     {memory}, freed when the call returns" if self.copies_x else ""
        return (
            f"Convolution plan for {self.device.title}: {self.method} ({self.reason})\n"
            f"  problem   {n.batch} x {n.channels} x {n.high} x {n.wide} -> {n.out_channels} x {n.out[0]} x {n.out[1]}, "
            f"{n.taps[0]} x {n.taps[1]} taps, stride {n.stride}, {n.groups} groups, {n.dtype}\n"
            f"  forward   {self.forward}\n  dx        {self.input}\n  dweight   {self.weight}\n"
            f"  {n.flops / 1e9:.2f} GFLOP, {self.bytes / 1e6:.2f} MB, at least {self.bound_s * 1e6:.1f} us{copies}{others}"
        )


def method_named(method: str) -> str:
    """The method that a name asks for: "direct" is what others call the implicit one.  ValueRangeError for an unknown name."""
    if method not in ("auto", *METHODS, DIRECT):
        raise ValueRangeError(
            f"method must be one of 'auto', {', '.join(map(repr, (*METHODS, DIRECT)))}, got {method!r}"
        )
    return IMPLICIT if method == DIRECT else method


@lru_cache(maxsize=4096)
def plan_conv(problem: ConvProblem, device: Device, method: str = "auto") -> ConvPlan:
    """The plan: pure, the same every time.  ValueRangeError for an unknown method, Unsupported for too large a grid."""
    method = method_named(method)
    chosen, reason, rejected = _method(problem, method, device)
    if chosen == DIRECT:
        tile = ConvTile(32, 32, 1, 4, 1) if device.backend == "interpreter" else ConvTile(32, 64, 1, 4, 1)
        forward = backward = tile
        weight = replace(tile, splits=_pixel_splits(problem, device, tile))
    else:
        forward, backward = _tile(problem, device, FORWARD), _tile(problem, device, INPUT)
        weight = _tile(problem, device, WEIGHT)
    plan = ConvPlan(problem, device, chosen, forward, backward, weight, reason, rejected)
    if (chosen, method) == (IMPLICIT, "auto") and plan.splits(FORWARD) > 1:
        plan = replace(plan, reason=f"{reason}, and the sums of {plan.splits(FORWARD)} splits")
    if problem.pixels // forward.rows * -(-problem.out_channels // forward.columns) > MAX_GRID:
        raise Unsupported(f"{problem.pixels} pixels of the result are more than one launch can make")
    if chosen != DIRECT and problem.groups * problem.stride[0] * problem.stride[1] > LARGEST_SECOND:
        raise Unsupported(f"{problem.groups} groups with stride {problem.stride} are more than one launch can make")
    return plan


def _method(n: ConvProblem, method: str, device: Device) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """-> method, reason, rejected."""
    if method == IM2COL:
        return IM2COL, "asked for", ()
    if n.groups > 1 and min(n.reduced, n.columns) <= NARROW:
        why = f"groups of {n.reduced} and {n.columns} channels leave tensor cores nothing to do"
        return DIRECT, why, tuple((name, why) for name in METHODS)
    if method in (IMPLICIT, RELAYOUT):
        return method, "asked for", ()
    more = 2 * n.pixels * n.channels * n.taps[0] * n.taps[1] * n.itemsize
    why = f"writes and reads {more / 1e6:.1f} MB of columns beside {n.bytes / 1e6:.1f} MB"
    if n.pointwise:
        why = "its columns would be a copy of the input"
    pays, layout = copy_pays(n, device)
    if pays:
        read = "dy" if copied(n) == ("dy",) and padded(n) == n.channels else "x"
        return RELAYOUT, layout, ((IMPLICIT, f"{read} would be read element by element"), (IM2COL, why))
    return IMPLICIT, "what is moved is input, weight and result", ((IM2COL, why), (RELAYOUT, layout))


def _shape(n: ConvProblem, part: str) -> tuple[int, int, int, int]:
    """Of the part's GEMMs: rows, columns, reduction, how many of them there are."""
    taps = n.taps[0] * n.taps[1]
    if part == FORWARD:
        return n.pixels, n.columns, n.reduced * taps, n.groups
    if part == WEIGHT:
        if n.reduced < FEW:
            return n.columns, n.reduced * taps, n.pixels, n.groups
        return n.columns, n.reduced, n.pixels, n.groups * taps
    phases = n.stride[0] * n.stride[1]
    return (
        n.batch * -(-n.high // n.stride[0]) * -(-n.wide // n.stride[1]),
        n.reduced,
        n.columns * taps // phases,
        n.groups * phases,
    )


def _tile(n: ConvProblem, device: Device, part: str) -> ConvTile:
    """The largest tile that its columns fill; where its programs are too few, two splits or a smaller tile."""
    rows, columns, depth, many = _shape(n, part)
    few = (n.columns if part == INPUT else n.reduced) < FEW and part != WEIGHT
    if device.backend == "interpreter":
        tile = ConvTile(64, 32, 32, 4, 1)  # it pays by the operation, not by the element
    elif n.dtype == "float32" and not n.tf32:
        tile = ConvTile(64, 32 if columns <= 32 else 64, 16, 4, 2)
    else:
        tile = _tensor_tile(n, device, columns, few)
    if part == WEIGHT and tile.rows > 64 and rows <= 64:
        tile = replace(tile, rows=64, num_warps=4)
    if part == WEIGHT and n.reduced < FEW and n.taps != (1, 1) and device.backend != "interpreter":
        tile = ConvTile(64, min(64, tile.columns), min(32, tile.depth), 4, 2)  # an address and a mask an element
    programs = -(-rows // tile.rows) * -(-columns // tile.columns) * many
    if part == INPUT and n.stride != (1, 1):
        return tile
    steps = -(-depth // tile.depth)
    if part == WEIGHT:
        return replace(tile, splits=_splits(programs, steps, device))
    if device.backend == "interpreter" or steps < 2 * STEPS_PER_SPLIT:
        return tile
    if steps >= LONG:
        return replace(tile, splits=_shares(n, device, tile, programs, steps, rows * columns * many))
    if programs > 0.7 * device.sms:
        return tile
    if device.generation >= 90 and n.itemsize == 2 and columns >= 128:
        return ConvTile(64, 128, 128, 4, 3)
    return replace(tile, splits=2)


def _shares(n: ConvProblem, device: Device, tile: ConvTile, programs: int, steps: int, results: int) -> int:
    """Of a long reduction: the splits that end first by waves of programs over the SMs, with the sum over them, which is read and
    written in fp32; a twentieth must be won.  Measured: 512 @7 of one, two, three splits 34.5, 23.2, 32.5 us; this gives 31,
    23, 29."""
    rate = device.matmul_rate("tf32" if n.tf32 else n.dtype) / device.sms
    step_s = 2 * tile.rows * tile.columns * tile.depth / (STEP_USE * rate)

    def seconds(splits: int) -> float:
        summed = SUM_S + 2 * splits * results * 4 / (COPY_USE * device.dram_rate) if splits > 1 else 0.0
        return -(-programs * splits // device.sms) * -(-steps // splits) * step_s + summed

    best = min(range(1, min(MOST_SHARES, steps // STEPS_PER_SPLIT) + 1), key=seconds)
    return best if seconds(best) < 0.95 * seconds(1) else 1


def _tensor_tile(n: ConvProblem, device: Device, columns: int, few: bool) -> ConvTile:
    """The tile of a kernel on tensor cores; few: taps and channels are one axis."""
    half = n.itemsize == 2
    deep = 32 if few or not half else 64
    if columns <= 32:
        return ConvTile(128, 32 if columns > 16 else 16, deep, 4, 3)
    if few and device.generation >= 90:
        return ConvTile(
            64, min(64, 1 << (columns - 1).bit_length()), deep, 4, 4
        )  # measured: 245 us where 128 rows took 271
    if columns <= 64:
        return ConvTile(128, 64, deep, 4, 3)
    if device.generation >= 90:
        return ConvTile(128, 128, deep, 8, 3)
    return ConvTile(128, 128, 32, 8, 3 if device.backend == "cuda" else 2)


def _splits(programs: int, steps: int, device: Device) -> int:
    """Of a weight's gradient: fewest that come near the best use of the SMs, two programs on each."""
    if device.backend == "interpreter":  # two, so that short tests see the sum
        return min(2, max(1, steps))
    slots = 2 * device.sms
    most = max(1, min(MAX_SPLITS, steps // STEPS_PER_SPLIT))
    if programs >= slots:
        return 1

    def use(splits: int) -> float:
        waves = programs * splits / slots
        return waves / math.ceil(waves)

    best = max(use(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if use(s) >= 0.9 * best)


def _pixel_splits(n: ConvProblem, device: Device, tile: ConvTile) -> int:
    """Of the direct weight gradient: a program has a block of channels and one tap."""
    programs = -(-n.out_channels // tile.columns) * n.reduced * n.taps[0] * n.taps[1]
    return _splits(programs, -(-n.pixels // tile.rows), device)
