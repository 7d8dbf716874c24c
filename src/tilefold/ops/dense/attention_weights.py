"""The weights of an attention call written out, dropped ones negative: flash_attn's S_dmask.  For tests, not for training."""

import math
from typing import Any

import torch

from ...errors import Unsupported
from ..call import UNBOUNDED, Call, Packed, sizes_of, window_of
from ..device import interpreting
from ..operator import Operator
from .attention_parts import dropout_of, head_strides, kind_of, mods_of

__all__ = ["attention_weights", "example_launch"]


def attention_weights(q: torch.Tensor, k: torch.Tensor, call: Call, multiple: int = 128) -> torch.Tensor:
    """[batch, heads, seq_q, seq_k], both lengths rounded up to `multiple`, in q's dtype: exp(score - the row's largest score),
    negated (and at least the smallest normal number) where dropout dropped the weight, 0 where the query does not see the key.

    q, k: as for `attention`, layout "bshd", or packed: then lengths are the longest ones, indices those in the sequence.  Of the
    call: causal, window, scale, softcap, alibi_slopes, dropout.  Not differentiable."""
    left, right = window_of(call.window, call.causal)
    cu_q, cu_k, max_q, max_k = call.packed or (None, None, 0, 0)
    found: torch.Tensor = _OPERATOR(q.detach(), k.detach(), call.alibi_slopes, call.dropout_seed, cu_q, cu_k, max_q, max_k, left,
                                    right, call.scale, float(call.softcap), float(call.dropout_p), multiple)  # fmt: skip
    return found


def _forward(
    q: torch.Tensor, k: torch.Tensor, alibi_slopes: torch.Tensor | None, dropout_seed: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, max_q: int, max_k: int, left: int, right: int, scale: float | None,
    softcap: float, dropout_p: float, multiple: int,
) -> torch.Tensor:  # fmt: skip
    call = _call(alibi_slopes, dropout_seed, cu_q, cu_k, max_q, max_k, left, right, scale, softcap, dropout_p)
    n = sizes_of(q, k, k, call)
    weights = torch.zeros(_shape(n, multiple), dtype=q.dtype, device=q.device)
    if 0 not in (n["batch"], n["heads"], n["seq_q"], n["seq_k"]):
        launch, args = _bound(q, k, weights, call, n)
        launch(args)
    return weights


def _fake(
    q: torch.Tensor, k: torch.Tensor, alibi_slopes: torch.Tensor | None, dropout_seed: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, max_q: int, max_k: int, left: int, right: int, scale: float | None,
    softcap: float, dropout_p: float, multiple: int,
) -> torch.Tensor:  # fmt: skip
    call = _call(alibi_slopes, dropout_seed, cu_q, cu_k, max_q, max_k, left, right, scale, softcap, dropout_p)
    return q.new_empty(_shape(sizes_of(q, k, k, call), multiple))


def _call(
    alibi_slopes: torch.Tensor | None, dropout_seed: torch.Tensor | None, cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None, max_q: int, max_k: int, left: int, right: int, scale: float | None, softcap: float,
    dropout_p: float,
) -> Call:  # fmt: skip
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, max_q, max_k)
    return Call(window=(left, right), scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, packed=packed,
                dropout_p=dropout_p, dropout_seed=dropout_seed)  # fmt: skip


def _shape(n: dict[str, int], multiple: int) -> tuple[int, int, int, int]:
    rounded = (-(-n[side] // multiple) * multiple for side in ("seq_q", "seq_k"))
    seq_q, seq_k = rounded
    return n["batch"], n["heads"], seq_q, seq_k


def _bound(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, call: Call, n: dict[str, int]) -> tuple[Any, Any]:
    """The launch and its arguments."""
    from ...device import mods
    from ...kernels.attention_weights import attention_weights as kernel
    from ...plan.problem import padded_head_dim
    from ..launch import Launch

    rows = [(0, *s) if len(s) == 2 else s for s in (head_strides(t, "bshd") for t in (q, k))]
    block_m = block_n = 32 if q.dtype == torch.float32 or n["dim_qk"] > 128 else 64
    window = window_of(call.window, call.causal)
    constants = {
        "KIND": kind_of(window),
        "EMULATE": interpreting() and q.dtype == torch.bfloat16,
        "WIDE": rows[0][1] * block_m >= 1 << 31,
        "DIM": n["dim_qk"],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": padded_head_dim(n["dim_qk"]),
    }
    programs = -(-n["seq_q"] // block_m) * n["heads"] * n["batch"]
    if programs >= 1 << 31:
        raise Unsupported(f"q has shape {tuple(q.shape)}: {programs} programs, a grid takes 2^31 - 1")
    scale = 1.0 / math.sqrt(n["dim_qk"]) if call.scale is None else float(call.scale)
    left, right = (UNBOUNDED if side < 0 else side for side in window)
    cu_q, cu_k = (None, None) if call.packed is None else call.packed[:2]
    score, _ = mods_of(mods, float(call.softcap), call, q.dtype == torch.float32)
    w = weights.stride()
    args = (q, k, weights, cu_q, cu_k, scale, n["seq_q"], n["seq_k"], n["heads"], n["heads"] // n["kv_heads"], left, right,
            torch.finfo(q.dtype).tiny, *rows[0], *rows[1], *w[:3], score, dropout_of(call))  # fmt: skip
    return Launch(kernel, (programs, 1, 1), constants, {"num_warps": 4, "num_stages": 2}, q.device.index or 0), args


def _none(ctx: Any, *args: Any) -> None:
    """Nothing is kept and nothing flows back."""


def _gradient(q: torch.Tensor) -> torch.Tensor:
    raise Unsupported("attention_weights are not differentiable")


_OPERATOR = Operator("attention_weights", _forward, _fake, _gradient, _gradient, _none, _none, lambda ctx, results: ())


def example_launch(dtype: str, dim: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    q = torch.empty((2, 512, 8, dim), dtype=getattr(torch, dtype), device="meta")
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    call = Call(causal=True, dropout_p=0.1, dropout_seed=seed)
    n = sizes_of(q, q, q, call)
    launch, args = _bound(q, q, q.new_empty(_shape(n, 128)), call, n)
    return launch.fn, args, launch.keywords
