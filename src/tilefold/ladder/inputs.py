"""What every rung checks of its arguments, and the few numbers that a launch of any of them needs."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilefold.check import FLOATS, TensorSpec, bind
from tilefold.errors import DeviceError, DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.ops.device import device_of, interpreting
from tilefold.ops.watch import refuse_tangents, refuse_transforms
from tilefold.plan.device import Device
from tilefold.plan.problem import NARROW_HEAD_DIM, AttentionProblem, next_power_of_two

SPECS = (
    TensorSpec("q", "batch seq_q heads dim", FLOATS, contiguous_last=True),
    TensorSpec("k", "batch seq_k kv_heads dim", FLOATS, same_dtype_as="q", contiguous_last=True),
    TensorSpec("v", "batch seq_k kv_heads dim", FLOATS, same_dtype_as="q", contiguous_last=True),
    TensorSpec("bias", "batch|1 heads|1 seq_q|1 seq_k / heads|1 seq_q|1 seq_k / seq_q|1 seq_k", FLOATS, optional=True),
    TensorSpec("padding_mask", "batch|1 seq_k", (torch.bool,), optional=True),
    TensorSpec("lengths", "batch", (torch.int32,), optional=True),
)


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys that one program works on at a time; warps: of the program; stages: tiles in flight while it loads."""

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if type(size) is not int or size < 16 or size & (size - 1):
                raise ValueRangeError(f"tile.{name} must be a power of two of at least 16, got {size!r}")
        if self.warps not in (1, 2, 4, 8, 16) or self.stages not in range(1, 9):
            raise ValueRangeError(
                f"tile must have 1, 2, 4, 8 or 16 warps and 1 to 8 stages, got {self.warps!r} and {self.stages!r}"
            )

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n}, {self.warps} warps, {self.stages} stages"

    def around(self) -> "tuple[Tile, ...]":
        """This one, then those that differ from it in one number: half and twice the queries, the keys and the warps, up to 256,
        256 and 16; 1 to 4 stages."""
        sizes = {"block_m": (16, 256), "block_n": (16, 256), "warps": (1, 16)}
        found = [self]
        for name, (low, high) in sizes.items():
            own = getattr(self, name)
            found += [replace(self, **{name: size}) for size in (own // 2, own * 2) if low <= size <= high]
        found += [replace(self, stages=count) for count in range(1, 5) if count != self.stages]
        return tuple(found)


def problem_of(q: torch.Tensor, k: torch.Tensor, causal: bool) -> AttentionProblem:
    """The planner's value of these shapes."""
    batch, seq_q, heads, dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    return AttentionProblem(batch, seq_q, k.shape[1], heads, k.shape[2], dim, dim, dtype, causal)


def checked(q: Any, k: Any, v: Any, causal: bool, tile: Tile | None, **others: Any) -> AttentionProblem:
    """The problem, or one of errors.py that names the argument; others: bias, padding_mask, lengths as SPECS has them."""
    sizes = bind(SPECS, {"q": q, "k": k, "v": v, **others})
    if sizes["heads"] < 1 or sizes["kv_heads"] < 1 or sizes["heads"] % sizes["kv_heads"]:
        raise ShapeError(f"k has {sizes['kv_heads']} heads: q's must be a multiple of them, got {sizes['heads']}")
    if not 1 <= sizes["dim"] <= NARROW_HEAD_DIM:
        raise ShapeError(f"q has head dim {sizes['dim']}, accepted: 1 to {NARROW_HEAD_DIM}")
    if tile is not None and not isinstance(tile, Tile):
        raise DtypeError(f"tile must be a ladder.Tile or None, got {type(tile).__name__}")
    for name, one in {"q": q, "k": k, "v": v, **others}.items():
        if one is not None and one.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"{name} requires a gradient, but the ladder has none: use tilefold.attention")
    refuse_tangents({"q": q, "k": k, "v": v, **others})
    refuse_transforms("the ladder")
    if q.is_meta:
        raise DeviceError("q is on the meta device: the ladder's programs need values")
    device_of(q.device)
    return problem_of(q, k, causal)


def fitted(tile: Tile, p: AttentionProblem) -> Tile:
    """A tile meant for bf16 and head dims of 128, as small as the problem is; half for larger heads, a
    quarter for fp32, whose products keep their operands in registers."""
    cut = (4 if p.itemsize == 4 else 1) * (2 if p.block_qk > 128 else 1)
    m = max(16, min(tile.block_m // cut, next_power_of_two(p.seq_q)))
    n = max(16, min(tile.block_n // cut, next_power_of_two(p.seq_k)))
    return replace(tile, block_m=m, block_n=n, warps=min(tile.warps, 4) if m < 128 else tile.warps)


def emulated(t: torch.Tensor) -> bool:
    """bf16 arithmetic is wrong in Triton's interpreter: kernels compute in fp32 there and round by hand."""
    return interpreting() and t.dtype == torch.bfloat16


def strides(t: torch.Tensor) -> tuple[int, ...]:
    """Of all dimensions but the last, which is contiguous; 0 where a size is 1 and the stride means nothing."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def is_there(out: torch.Tensor, keys: int) -> bool:
    """Whether anything is to be computed; without keys every row is 0."""
    if out.numel() and not keys:
        out.zero_()
    return bool(out.numel() and keys)


def keys_read(
    p: AttentionProblem, block_m: int, block_n: int, group: int = 1, low: int = 0, high: int | None = None
) -> tuple[int, int]:
    """(keys, tiles) that the query tiles of one head read, of keys low to high: a tile of queries goes over key tiles from low on
    to the last key that one of its queries sees.  group: heads whose queries share a tile."""
    keys = tiles = 0
    high = p.seq_k if high is None else min(high, p.seq_k)
    for first in range(0, p.seq_q * group, block_m):
        last = (first + block_m - 1) // group
        end = min(high, last + 1 + p.seq_k - p.seq_q) if p.causal else high
        count = max(0, -(-(end - low) // block_n))
        tiles += count
        keys += min(count * block_n, p.seq_k - low) if count else 0
    return keys, tiles


def here() -> Device:
    """The record of the machine that kernels run on."""
    return device_of(torch.device("cpu" if interpreting() else "cuda"))
