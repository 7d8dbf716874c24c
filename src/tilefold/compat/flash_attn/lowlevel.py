"""flash_attn's private forward and backward functions, which ring attention, context parallelism and diffusers call.

They do not take part in autograd.  rng_state is [2] int64: the seed of the dropout mask, and 0.
"""

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import Unsupported
from ...ops.cache.cached import attention_cached
from ...ops.call import Call
from ...ops.dense.attention_weights import attention_weights
from ...ops.dense.library import ATTENTION
from ...ops.faults import asked
from ...ops.source import Cache
from .arguments import (
    check_tensor,
    checked_call,
    contiguous_last,
    flash_call,
    flash_errors,
    flash_lse,
    host_int,
    packed_of,
    tilefold_lse,
)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@flash_errors()
def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None, return_softmax: bool,
) -> Results:  # fmt: skip
    """(out, lse, S_dmask, rng_state) of flash_attn_func, without autograd."""
    q, k, v = contiguous_last(q, k, v)
    check_tensor("q", q)
    window = window_size_left, window_size_right
    call = flash_call(q, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    return _results(q, k, v, call, return_softmax)


@flash_errors()
def _flash_attn_varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False, block_table: torch.Tensor | None = None, leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None, zero_tensors: bool = False, *, num_splits: int = 0,
) -> Results:  # fmt: skip
    """(out, lse, S_dmask, rng_state) of flash_attn_varlen_func, without autograd.  zero_tensors: rows of no sequence are 0.
    num_splits: 0 or 1, as in flash-attention."""
    if host_int("num_splits", num_splits) not in (0, 1):
        raise Unsupported(
            f"num_splits > 1 is not supported here, got {num_splits}: use flash_attn_varlen_func(num_splits=...)"
        )
    q, k, v = contiguous_last(q, k, v)
    packed = packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_tensor("q", q)
    window = window_size_left, window_size_right
    call = flash_call(q, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, packed)
    if block_table is None and leftpad_k is None and seqused_k is None:
        found = _results(q, k, v, checked_call(q, k, call, "flash_attn_varlen_func"), return_softmax)
    else:
        if return_softmax and dropout_p:
            raise Unsupported(
                "return_softmax with dropout_p and block_table, seqused_k or leftpad_k: S_dmask is not made there"
            )
        cache = Cache(seqused_k, leftpad_k, None, contiguous_last(block_table)[0], *packed)
        with torch.no_grad():
            out, lse = attention_cached(q, k, v, call._replace(source=cache), asked(None, "flash_attn_varlen_func"))
        found = out, flash_lse(lse), q.new_empty(0), _state(call, q)
    if zero_tensors:
        outside = torch.arange(q.shape[0], device=q.device) >= cu_seqlens_q[-1]
        found[0].masked_fill_(outside[:, None, None], 0)
    return found


def _results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, return_softmax: bool) -> Results:
    with torch.no_grad():
        out, lse = ATTENTION.dispatched(q, k, v, call)
        weights = attention_weights(q, k, call) if return_softmax and call.dropout_p else q.new_empty(0)
    return out, flash_lse(lse), weights, _state(call, q)


def _state(call: Call, q: torch.Tensor) -> torch.Tensor:
    nothing = torch.zeros(2, dtype=torch.int64, device=q.device)
    return nothing if call.dropout_seed is None else torch.cat((call.dropout_seed, nothing[1:]))


@flash_errors()
def _flash_attn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None,
    deterministic: bool, rng_state: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write the gradients of q, k and v into dq, dk and dv, where these are given; returns sum(out * dout) of each row, fp32
    [batch, heads, seqlen_q]."""
    check_tensor("q", q, (4,), "[batch, seqlen_q, heads, head dim]")
    window = window_size_left, window_size_right
    call = flash_call(q, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, seeded=False)
    _gradients((dout, q, k, v, out, softmax_lse), (dq, dk, dv), call, rng_state)
    return (out.float() * dout.float()).sum(-1).transpose(1, 2).contiguous()


@flash_errors()
def _flash_attn_varlen_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor,
    dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None,
    deterministic: bool, rng_state: torch.Tensor | None = None, zero_tensors: bool = False,
) -> torch.Tensor:  # fmt: skip
    """_flash_attn_backward of packed sequences; rows of no sequence get 0 either way.  Returns [heads, total_q]."""
    packed = packed_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_tensor("q", q, (3,), "[total_q, heads, head dim]")
    window = window_size_left, window_size_right
    call = flash_call(q, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, packed, seeded=False)
    call = checked_call(q, k, call, "flash_attn_varlen_func")
    _gradients((dout, q, k, v, out, softmax_lse), (dq, dk, dv), call, rng_state)
    return (out.float() * dout.float()).sum(-1).transpose(0, 1).contiguous()


def _gradients(
    saved: tuple[torch.Tensor, ...], given: tuple[torch.Tensor | None, ...], call: Call, rng_state: torch.Tensor | None
) -> None:
    if call.dropout_p and rng_state is None:
        raise Unsupported(
            "rng_state must be given with dropout_p: it is the mask's seed, which the forward pass returned"
        )
    # What the forward pass left, and where gradients go, have the shapes that belong to q, k and v: kernels rely on it.
    packed = call.packed is not None
    queries, keys = ("total_q", "total_k") if packed else ("batch seq_q", "batch seq_k")
    inputs = {"q": f"{queries} heads dim_qk", "k": f"{keys} kv_heads dim_qk", "v": f"{keys} kv_heads dim_v"}
    outputs = dict.fromkeys(("out", "dout"), f"{queries} heads dim_v")
    specs = (
        *(TensorSpec(name, dims, FLOATS, same_dtype_as="q") for name, dims in (inputs | outputs).items()),
        TensorSpec("softmax_lse", "heads total_q" if packed else "batch heads seq_q", (torch.float32,)),
        *(TensorSpec(f"d{name}", dims, FLOATS, optional=True, same_dtype_as="q") for name, dims in inputs.items()),
        TensorSpec("rng_state", "numbers", (torch.int64,), optional=True),
    )
    names = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "rng_state")
    bind(specs, dict(zip(names, (*saved, *given, rng_state), strict=True)))
    seed = rng_state[:1] if call.dropout_p and rng_state is not None else None
    dout, q, k, v, out, lse = contiguous_last(*saved)
    with torch.no_grad():
        wanted, results = (True, True, True, False, False), (out, tilefold_lse(lse))
        grads = ATTENTION.gradients(wanted, (dout, None), results, q, k, v, call._replace(dropout_seed=seed))
        for target, grad in zip(given, grads[:3], strict=True):
            if target is not None:
                target.copy_(grad)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
