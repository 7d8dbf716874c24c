"""Forward attention: check, plan, allocate, launch.

A call's shapes, strides, dtypes and options make a key; everything that follows from them (checks, problem, plan, grid,
scalars) is worked out once, kept as a `Prepared` record and reused, so that a repeated call only allocates and launches.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..check import FLOATS, TensorSpec, bind, check_number
from ..errors import DeviceError, DtypeError, ShapeError, Unsupported, ValueRangeError
from ..types import Constant, Layout, ModArgs, ModFunction, Window
from .device import device_of, interpreting

if TYPE_CHECKING:  # imported where they are needed: `import tilefold` stays light
    from ..plan import AttentionPlan, AttentionProblem
    from .launch import Box

__all__ = ["Call", "Packed", "Prepared", "example_launch", "forward", "prepare", "shapes_of"]

MAX_HEAD_DIM = 256
UNBOUNDED = 1 << 30  # a window side that never cuts; sums with positions stay inside int32
CACHE_LIMIT = 4096

_OPTIONS = (
    TensorSpec("alibi_slopes", "heads / batch heads", (torch.float32,), optional=True),
    TensorSpec("bias", "batch|1 heads|1 seq_q|1 seq_k", FLOATS, optional=True),
    TensorSpec("mask", "batch|1 heads|1 seq_q|1 seq_k", (torch.bool,), optional=True),
    TensorSpec("sinks", "heads", FLOATS, optional=True),
)


def _qkv(*dims: str) -> tuple[TensorSpec, ...]:
    last = {"same_dtype_as": "q", "contiguous_last": True}
    return (
        TensorSpec("q", dims[0], FLOATS, contiguous_last=True),
        TensorSpec("k", dims[1], FLOATS, **last),  # type: ignore[arg-type]
        TensorSpec("v", dims[2], FLOATS, **last),  # type: ignore[arg-type]
    )


SPECS = {
    "bshd": _qkv("batch seq_q heads dim_qk", "batch seq_k kv_heads dim_qk", "batch seq_k kv_heads dim_v") + _OPTIONS,
    "bhsd": _qkv("batch heads seq_q dim_qk", "batch kv_heads seq_k dim_qk", "batch kv_heads seq_k dim_v") + _OPTIONS,
    "varlen": (
        *_qkv("total_q heads dim_qk", "total_k kv_heads dim_qk", "total_k kv_heads dim_v"),
        TensorSpec("cu_seqlens_q", "offsets", (torch.int32,), contiguous_last=True),
        TensorSpec("cu_seqlens_k", "offsets", (torch.int32,), contiguous_last=True),
    ),
}


class Packed(NamedTuple):
    """Where the sequences of a varlen call lie: int32 offsets [batch + 1] and the longest lengths."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int


class Call(NamedTuple):
    """The keyword arguments of `attention`, as given."""

    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    softcap: float = 0.0
    layout: Layout = "bshd"
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    score_mod: ModFunction | Constant | None = None
    score_args: ModArgs = ()
    mask_mod: ModFunction | Constant | None = None
    mask_args: ModArgs = ()
    packed: Packed | None = None
    plan: "AttentionPlan | Constant | None" = None


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key: the plan, output shapes, and the launch with its run-time scalars."""

    plan: "AttentionPlan | None"  # None: nothing to compute
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scalars: tuple[Any, ...] = ()
    strides: tuple[int, ...] = ()
    softcap: float = 0.0
    boxes: "tuple[Box, ...]" = ()
    aligned: bool = True
    launcher: Any = None
    device: int = -1
    keep: tuple[Any, ...] = field(default=())  # objects whose id is part of the key


_CACHE: dict[Any, Prepared] = {}


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of dense or varlen attention; see `tilefold.attention`."""
    prepared = prepare(q, k, v, call)
    out = torch.empty(prepared.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(prepared.lse_shape, dtype=torch.float32, device=q.device)
    if prepared.plan is not None:
        prepared.launcher(_arguments(prepared, q, k, v, out, lse, call), prepared.device, prepared.aligned)
    return out, lse


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared:
    """The cached record of this call's shapes and options; checks everything the first time they are seen."""
    try:
        key = _key(q, k, v, call)
        found = _CACHE.get(key)
    except (AttributeError, TypeError):  # not a tensor, or not hashable: the checks will say which argument
        return _prepare(q, k, v, call)
    if found is None:
        found = _prepare(q, k, v, call)
        if len(_CACHE) >= CACHE_LIMIT:
            _CACHE.clear()
        _CACHE[key] = found
    return found


# ---------------------------------------------------------------- the key


def _key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Any:
    """Everything that a Prepared record depends on."""
    # The types too: 1 == True == 1.0, but causal=1 is refused.
    plain = (_facts(q), _facts(k), _facts(v), call[:5], type(call[0]), type(call[1]), type(call[2]), type(call[3]))
    if _is_plain(call):
        return plain
    return (
        plain,
        tuple(None if t is None else _facts(t) for t in call[5:9]),
        (id(call.score_mod), _facts_of_args(call.score_args), id(call.mask_mod), _facts_of_args(call.mask_args)),
        None if call.packed is None else (_facts(call.packed[0]), _facts(call.packed[1]), call.packed[2:]),
        id(call.plan),
    )


def _is_plain(call: Call) -> bool:
    """No tensor but q, k and v, no hooks, no plan: the short key will do."""
    return call[5:] == (None, None, None, None, None, (), None, (), None, None)


def _facts(t: torch.Tensor) -> Any:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15 == 0


def _facts_of_args(args: ModArgs) -> Any:
    """Integers decide a compilation (1 and multiples of 16 are special), floats do not."""
    return tuple(
        _facts(a) if isinstance(a, torch.Tensor) else (type(a), a if isinstance(a, int) else None) for a in args
    )


# ---------------------------------------------------------------- the first time


def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Prepared:
    from ..plan import AttentionPlan, plan_attention

    sizes = _sizes(q, k, v, call)
    window = _window(call.window, call.causal)
    scale = (
        1.0 / math.sqrt(max(1, sizes["dim_qk"])) if call.scale is None else check_number("scale", call.scale, above=0.0)
    )
    softcap = check_number("softcap", call.softcap, low=0.0)
    _check_mods(call, q.device)
    if call.plan is not None and not isinstance(call.plan, AttentionPlan):
        raise DtypeError(f"plan must be an AttentionPlan or None, got {type(call.plan).__name__}")
    out_shape, lse_shape = _shapes(call, sizes)
    device = device_of(q.device)
    if 0 in (*lse_shape, sizes["batch"], sizes["seq_q"]):
        return Prepared(None, out_shape, lse_shape, keep=(call.score_mod, call.mask_mod, call.plan))
    problem = _problem(q, k, v, call, sizes, window)
    if call.plan is None:
        plan = plan_attention(problem, device)
    else:
        plan = call.plan
        plan.check(problem, device)
    return _bind(q, k, v, call, sizes, window, scale, softcap, plan, out_shape, lse_shape)


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, int]:
    """Check every tensor; the sizes of all named dimensions."""
    tensors = {"q": q, "k": k, "v": v, **call._asdict()}
    if call.packed is None:
        if call.layout not in ("bshd", "bhsd"):
            raise ValueRangeError(f"layout must be 'bshd' or 'bhsd', got {call.layout!r}")
        sizes = bind(SPECS[call.layout], tensors)
    else:
        tensors |= {"cu_seqlens_q": call.packed.cu_q, "cu_seqlens_k": call.packed.cu_k}
        for name, value in (("max_seqlen_q", call.packed.max_q), ("max_seqlen_k", call.packed.max_k)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise DtypeError(f"{name} must be an int, got {type(value).__name__}")
            check_number(name, value, low=0)
        sizes = bind(SPECS["varlen"], tensors)
        if sizes["offsets"] < 1:
            raise ShapeError("cu_seqlens_q is empty, expected [batch + 1] offsets")
        sizes |= {"batch": sizes["offsets"] - 1, "seq_q": call.packed.max_q, "seq_k": call.packed.max_k}
        bind(_OPTIONS, tensors, known=sizes, beside=("q", q))
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ShapeError(
            f"q has {heads} heads and k has {kv_heads}: the heads of q must be a multiple of those of k and v"
        )
    for name, dim in (("q and k", sizes["dim_qk"]), ("v", sizes["dim_v"])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise Unsupported(f"{name} have head dim {dim}; accepted: 1 to {MAX_HEAD_DIM}")
    return sizes


def shapes_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse, after the checks that need no device."""
    _window(call.window, call.causal)
    return _shapes(call, _sizes(q, k, v, call))


def _shapes(call: Call, sizes: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    heads, seq_q = sizes["heads"], sizes["seq_q"]
    if call.packed is not None:
        return (sizes["total_q"], heads, sizes["dim_v"]), (heads, sizes["total_q"])
    rows = (seq_q, heads) if call.layout == "bshd" else (heads, seq_q)
    return (sizes["batch"], *rows, sizes["dim_v"]), (sizes["batch"], heads, seq_q)


def _window(window: Window | None, causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for unbounded; causal bounds the right at 0."""
    if not isinstance(causal, bool):
        raise DtypeError(f"causal must be a bool, got {causal!r}")
    if window is None:
        left = right = -1
    else:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise DtypeError(f"window must be None or a pair (left, right), got {window!r}")
        left, right = (-1 if side is None else side for side in window)
        for side in (left, right):
            if isinstance(side, bool) or not isinstance(side, int):
                raise DtypeError(f"window must hold integers or None, got {window!r}")
            if side < -1:
                raise ValueRangeError(f"window sides must be at least 0 (or -1 or None for unbounded), got {window!r}")
    return (left, 0) if causal else (left, right)


def _check_mods(call: Call, device: torch.device) -> None:
    for name, fn, args in (
        ("score", call.score_mod, call.score_args),
        ("mask", call.mask_mod, call.mask_args),
    ):
        if not isinstance(args, tuple):
            raise DtypeError(f"{name}_args must be a tuple, got {type(args).__name__}")
        for i, arg in enumerate(args):
            if not isinstance(arg, (torch.Tensor, int, float)):
                raise DtypeError(f"{name}_args[{i}] must be a tensor, an int or a float, got {type(arg).__name__}")
            if isinstance(arg, torch.Tensor) and arg.device != device:
                raise DeviceError(f"{name}_args[{i}] is on {arg.device}, but q is on {device}")
        if fn is None:
            if args:
                raise ValueRangeError(f"{name}_args were given without {name}_mod")
            continue
        if len(getattr(fn, "arg_names", ())) != 6:
            raise DtypeError(
                f"{name}_mod must be a @triton.jit function of (score, batch, head, q_index, kv_index, args), got {fn!r}"
            )


def _problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], window: tuple[int, int]
) -> "AttentionProblem":
    from ..plan import AttentionProblem

    score = [n for n, used in (("softcap", call.softcap > 0), ("alibi", call.alibi_slopes is not None),
                               ("bias", call.bias is not None), ("user", call.score_mod is not None)) if used]  # fmt: skip
    masks = [n for n, used in (("mask", call.mask is not None), ("user", call.mask_mod is not None)) if used]
    return AttentionProblem(
        **{name: sizes[name] for name in ("batch", "seq_q", "seq_k", "heads", "kv_heads", "dim_qk", "dim_v")},
        dtype=str(q.dtype).removeprefix("torch."),
        causal=window == (-1, 0),
        window=(-1, -1) if window == (-1, 0) else window,
        varlen=call.packed is not None,
        score_mods=tuple(score),
        mask_mods=tuple(masks),
        sinks=call.sinks is not None,
        descriptors=call.packed is None and _boxable(k, sizes) and _boxable(v, sizes),
    )


def _boxable(t: torch.Tensor, sizes: dict[str, int]) -> bool:
    """Can the copy engine read t?  16-byte base and strides, no broadcast dimension, nothing empty."""
    step = 16 // t.element_size()
    outer = [(n, s) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    return (
        t.numel() > 0
        and t.data_ptr() % 16 == 0
        and all(s > 0 and s % step == 0 and s * t.element_size() < 1 << 40 for _, s in outer)
    )


# ---------------------------------------------------------------- binding a plan to a call


def _bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    sizes: dict[str, int],
    window: tuple[int, int],
    scale: float,
    softcap: float,
    plan: "AttentionPlan",
    out_shape: tuple[int, ...],
    lse_shape: tuple[int, ...],
) -> Prepared:
    """Kernel, grid, run-time scalars and compile-time constants of this call under this plan."""
    from ..device import ranges
    from ..kernels import attention_forward as kernels
    from .launch import Launcher

    left, right = (UNBOUNDED if side < 0 else side for side in window)
    if window == (-1, -1):
        kind = ranges.FULL
    elif window == (-1, 0):
        kind = ranges.CAUSAL
    else:
        kind = ranges.WINDOW
    heads, group = sizes["heads"], sizes["heads"] // sizes["kv_heads"]
    lengths = (sizes["seq_q"], sizes["total_q"]) if plan.problem.varlen else (sizes["seq_q"], sizes["seq_k"])
    q_strides, k_strides, v_strides = (_row_strides(t, call.layout) for t in (q, k, v))
    out_strides = _row_strides(torch.empty(out_shape, device="meta"), call.layout)
    box = plan.kernel == "attention_forward_box"
    sides = ((k, plan.block_qk), (v, plan.block_v)) if box else ()
    boxes = tuple(_box(t, call.layout, sizes, plan.block_n, block_d) for t, block_d in sides)
    constants = {
        "KIND": kind.value,
        "EMULATE": interpreting() and q.dtype == torch.bfloat16,
        "WIDE": max(q_strides) * plan.block_m >= 1 << 31,
        "DIM_QK": sizes["dim_qk"],
        "DIM_V": sizes["dim_v"],
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_QK": plan.block_qk,
        "BLOCK_V": plan.block_v,
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    if plan.maxnreg is not None:
        options["maxnreg"] = plan.maxnreg
    return Prepared(
        plan=plan,
        out_shape=out_shape,
        lse_shape=lse_shape,
        scalars=(scale, *lengths, heads, group, left, right),
        strides=q_strides + (() if box else k_strides + v_strides) + out_strides,
        softcap=softcap,
        boxes=boxes,
        aligned=all(t.data_ptr() % 16 == 0 for t in _tensors(q, k, v, call)),
        launcher=Launcher(getattr(kernels, plan.kernel), plan.grid, constants, options),
        device=q.device.index if q.device.type == "cuda" else -1,
        keep=(call.score_mod, call.mask_mod, call.plan),
    )


def _row_strides(t: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """(batch, row, head), or (row, head) of a packed tensor."""
    if t.dim() == 3:
        return t.stride(0), t.stride(1)
    return (t.stride(0), t.stride(1), t.stride(2)) if layout == "bshd" else (t.stride(0), t.stride(2), t.stride(1))


def _box(t: torch.Tensor, layout: Layout, sizes: dict[str, int], rows: int, block_d: int) -> "Box":
    """The descriptor of [B, Hkv, Sk, D]; the stride of a dimension of size 1 means nothing and may be invalid: use one row's."""
    from .launch import Box

    stride_b, stride_n, stride_h = _row_strides(t, layout)
    shape = [sizes["batch"], sizes["kv_heads"], sizes["seq_k"], t.shape[-1]]
    step = 16 // t.element_size()
    row = -(-t.shape[-1] // step) * step
    strides = [row if n == 1 else s for n, s in zip(shape, (stride_b, stride_h, stride_n), strict=False)]
    return Box(t, shape, [*strides, 1], [1, 1, rows, block_d])


# ---------------------------------------------------------------- every time


def _arguments(
    p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: Call
) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order."""
    kk: Any = k
    vv: Any = v
    if p.boxes:
        kk, vv = p.boxes[0].over(k), p.boxes[1].over(v)
    tensors: tuple[Any, ...] = (q, kk, vv, out, lse, call.sinks)
    score: tuple[Any, ...] = ()
    masks: tuple[Any, ...] = ()
    if p.softcap or not _is_plain(call):
        score, masks = _mods(p.softcap, call, q.dtype == torch.float32)
        if call.packed is not None:
            tensors += call.packed[:2]
    return (*tensors, *p.scalars, *p.strides, score, masks)


def _mods(softcap: float, call: Call, exact: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Score mods in the order applied, and mask mods; exact: the inputs are fp32."""
    from ..device import mods

    score: list[Any] = []
    masks: list[Any] = []
    if softcap:
        score.append((mods.softcap_exact if exact else mods.softcap, (softcap,)))
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes
        score.append((mods.alibi, (slopes, slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1))))
    if call.bias is not None:
        score.append((mods.bias, (call.bias, *_broadcast_strides(call.bias))))
    if call.score_mod is not None:
        score.append((call.score_mod, call.score_args))
    if call.mask is not None:
        masks.append((mods.keep, (call.mask.view(torch.uint8), *_broadcast_strides(call.mask))))
    if call.mask_mod is not None:
        masks.append((call.mask_mod, call.mask_args))
    return tuple(score), tuple(masks)


def _tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """Every tensor that the kernel reads."""
    found = [q, k, v, *call[5:9], *call.score_args, *call.mask_args, *(call.packed or ())]
    return [t for t in found if isinstance(t, torch.Tensor)]


def _broadcast_strides(t: torch.Tensor) -> tuple[int, ...]:
    return tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))


# ---------------------------------------------------------------- without a GPU


def example_launch(problem: "AttentionProblem", plan: "AttentionPlan") -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a call that has this problem and plan, on tensors without memory: to compile ahead of time."""
    from ..device import mods

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    n = problem
    dtype = getattr(torch, n.dtype)
    rows_q, rows_k = (
        ((n.seq_q * n.batch,), (n.seq_k * n.batch,)) if n.varlen else ((n.batch, n.seq_q), (n.batch, n.seq_k))
    )
    q = tensor(*rows_q, n.heads, n.dim_qk, dtype=dtype)
    k, v = (tensor(*rows_k, n.kv_heads, d, dtype=dtype) for d in (n.dim_qk, n.dim_v))
    offsets = tensor(n.batch + 1, dtype=torch.int32)
    call = Call(
        causal=n.causal,
        window=n.window,
        softcap=30.0 if "softcap" in n.score_mods else 0.0,
        alibi_slopes=tensor(n.heads) if "alibi" in n.score_mods else None,
        bias=tensor(n.batch, 1, n.seq_q, n.seq_k, dtype=dtype) if "bias" in n.score_mods else None,
        mask=tensor(n.batch, 1, n.seq_q, n.seq_k, dtype=torch.bool) if "mask" in n.mask_mods else None,
        sinks=tensor(n.heads) if n.sinks else None,
        score_mod=mods.softcap if "user" in n.score_mods else None,
        score_args=(30.0,) if "user" in n.score_mods else (),
        mask_mod=mods.window if "user" in n.mask_mods else None,
        mask_args=(64, 64) if "user" in n.mask_mods else (),
        packed=Packed(offsets, offsets, n.seq_q, n.seq_k) if n.varlen else None,
        plan=plan,
    )
    sizes = _sizes(q, k, v, call)
    shapes = _shapes(call, sizes)
    prepared = _bind(q, k, v, call, sizes, _window(n.window, n.causal), 1.0, call.softcap, plan, *shapes)
    out, lse = tensor(*shapes[0], dtype=dtype), tensor(*shapes[1])
    args = _arguments(prepared, q, k, v, out, lse, call)
    return prepared.launcher.fn, args, prepared.launcher.keywords
