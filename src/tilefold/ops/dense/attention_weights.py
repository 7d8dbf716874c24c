"""The weights of an attention call written out, dropped ones negative: flash_attn's S_dmask.  For tests, not for training."""

import torch

from ...errors import Unsupported
from ..bound import Bound, Example, strides_named
from ..call import Call, scale_of, sizes_of, window_of
from ..device import interpreting
from ..operator import Operation
from ..source import Packed
from .attention_parts import head_strides, kind_of, option_values, sequence_strides

GIVEN = ("Q", "K", "Weights", "call")
"""What a call gives to the kernel."""


def attention_weights(q: torch.Tensor, k: torch.Tensor, call: Call, multiple: int = 128) -> torch.Tensor:
    """[batch, heads, seq_q, seq_k], both lengths rounded up to `multiple`, in q's dtype: exp(score - the row's largest score),
    negated (and at least the smallest normal number) where dropout dropped the weight, 0 where the query does not see the key.

    q, k: as for `attention`, layout "bshd", or packed: then lengths are the longest ones, indices those in the sequence.  Of the
    call: causal, window, scale, softcap, alibi_slopes, dropout.  Not differentiable."""
    return ATTENTION_WEIGHTS(q.detach(), k.detach(), call, multiple)  # type: ignore[no-any-return]


def _forward(q: torch.Tensor, k: torch.Tensor, call: Call, multiple: int) -> torch.Tensor:
    n = sizes_of(q, k, k, call)
    weights = torch.zeros(_shape(n, multiple), dtype=q.dtype, device=q.device)
    if 0 not in (n["batch"], n["heads"], n["seq_q"], n["seq_k"]):
        _bound(q, k, weights, call, n)((q, k, weights, call))
    return weights


def _fake(q: torch.Tensor, k: torch.Tensor, call: Call, multiple: int) -> torch.Tensor:
    return q.new_empty(_shape(sizes_of(q, k, k, call), multiple))


ATTENTION_WEIGHTS = Operation(
    "attention_weights", _forward, _fake, "attention_weights are not differentiable", parts=(Packed,)
)


def _shape(n: dict[str, int], multiple: int) -> tuple[int, int, int, int]:
    rounded = (-(-n[side] // multiple) * multiple for side in ("seq_q", "seq_k"))
    seq_q, seq_k = rounded
    return n["batch"], n["heads"], seq_q, seq_k


def _bound(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, call: Call, n: dict[str, int]) -> Bound:
    """The launch with its arguments."""
    from ...device import mods
    from ...kernels.dense.attention_weights import attention_weights as kernel
    from ...plan.problem import padded_head_dim

    block_m = block_n = 32 if q.dtype == torch.float32 or n["dim_qk"] > 128 else 64
    window = window_of(call.window, call.causal)
    constants = {
        "KIND": kind_of(window),
        "EMULATE": interpreting() and q.dtype == torch.bfloat16,
        "WIDE": head_strides(q, "bshd")[-2] * block_m >= 1 << 31,
        "DIM": n["dim_qk"],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": padded_head_dim(n["dim_qk"]),
    }
    programs = -(-n["seq_q"] // block_m) * n["heads"] * n["batch"]
    if programs >= 1 << 31:
        raise Unsupported(f"q has shape {tuple(q.shape)}: {programs} programs, a grid takes 2^31 - 1")
    scale = scale_of(call, n["dim_qk"])
    values = {
        **option_values(call, window, mods, float(call.softcap), q.dtype),
        "max_q": n["seq_q"],
        "max_k": n["seq_k"],
        "heads": n["heads"],
        "scale": scale,
        "group": n["heads"] // n["kv_heads"],
        "smallest": torch.finfo(q.dtype).tiny,
        **strides_named("q", sequence_strides(q, "bshd"), "bmh"),
        **strides_named("k", sequence_strides(k, "bshd"), "bnh"),
        **strides_named("w", weights.stride()[:3], "bhm"),
    }
    return Bound.of(kernel, programs, GIVEN, values, constants, q.device, num_stages=2)


def example_launch(dtype: str, dim: int) -> Example:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    q = torch.empty((2, 512, 8, dim), dtype=getattr(torch, dtype), device="meta")
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    call = Call(causal=True, dropout_p=0.1, dropout_seed=seed)
    n = sizes_of(q, q, q, call)
    weights = q.new_empty(_shape(n, 128))
    return _bound(q, q, weights, call, n).example((q, q, weights, call))
