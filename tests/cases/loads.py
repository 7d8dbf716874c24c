"""score_mods that load from learned tensors, their twins in torch, and kernels of one to compile ahead of time."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def by_head(score, batch, head, q_index, kv_index, args):
    """args = (factors [H],)."""
    return score * tl.load(args[0] + head)


def by_head_twin(score, batch, head, q_index, kv_index, args):
    return score * args[0][head]


@triton.jit
def bucket_of(distance, BUCKETS: tl.constexpr):
    """Half of the buckets a distance each, the rest ever longer (as T5 does for one direction, arXiv:1910.10683)."""
    near = BUCKETS // 2
    far = near + (tl.log2(tl.maximum(distance, 1).to(tl.float32) / near) * 2.0).to(tl.int32)
    return tl.where(distance < near, distance, tl.minimum(far, BUCKETS - 1))


@triton.jit
def bucketed(score, batch, head, q_index, kv_index, args):
    """args = (table [8, H], its row stride)."""
    table, stride, seq_q, seq_k = args
    bucket = bucket_of(tl.abs(q_index + (seq_k - seq_q) - kv_index), 8)
    return score + tl.load(table + bucket * stride + head)


def bucketed_twin(score, batch, head, q_index, kv_index, args):
    table, _, seq_q, seq_k = args
    distance = (q_index + (seq_k - seq_q) - kv_index).abs()
    far = 4 + (torch.log2(distance.clamp(min=1).float() / 4) * 2.0).int()
    bucket = torch.where(distance < 4, distance, far.clamp(max=7))
    return score + table[bucket.expand(score.shape), head.expand(score.shape)]


@triton.jit
def by_index(score, batch, head, q_index, kv_index, args):
    """args = (bias [H, Sq, Sk], its strides)."""
    bias, stride_h, stride_q, stride_k, seq_q, seq_k = args
    return score + tl.load(bias + head * stride_h + q_index * stride_q + kv_index * stride_k)


def by_index_twin(score, batch, head, q_index, kv_index, args):
    shape = score.shape
    return score + args[0][head.expand(shape), q_index.expand(shape), kv_index.expand(shape)]


@triton.jit
def tempered(score, batch, head, q_index, kv_index, args):
    """args = (a number,)."""
    return score / (0.5 + tl.exp(tl.load(args[0]).to(tl.float32)))


def tempered_twin(score, batch, head, q_index, kv_index, args):
    return score / (0.5 + args[0].exp())


@triton.jit
def mixed(score, batch, head, q_index, kv_index, args):
    """Two tensors, one of them loaded from twice, where there is an entry, beside one that has no gradient:
    args = (factors [H], rows [longest], numbers of columns [longest], entries of rows)."""
    factors, rows, columns, entries = args[0], args[1], args[2], args[3]
    column = tl.load(columns + kv_index)
    of_keys = tl.load(rows + column, mask=column < entries, other=0.0).to(tl.float32)
    x = score * tl.load(factors + head)
    x += tl.load(rows + q_index, mask=q_index < entries, other=0.25).to(tl.float32) * of_keys
    if entries > 3:
        x = tl.where(q_index > kv_index, 2.0 * x, x)
    return x + of_keys


def mixed_twin(score, batch, head, q_index, kv_index, args):
    factors, rows, columns, entries = args[:4]

    def at(index, other):
        padded = torch.cat([rows[:entries], torch.full((1,), other, dtype=rows.dtype, device=rows.device)])
        return padded[index.clamp(max=entries)]

    of_keys = at(columns[kv_index].long(), 0.0)
    x = score * factors[head] + at(q_index, 0.25) * of_keys
    if entries > 3:
        x = torch.where(q_index > kv_index, 2.0 * x, x)
    return x + of_keys


def build(problem: Any, plan: Any, backward_plan: Any, which: str) -> Any:
    """(kernel, args, kwargs) of a pass over the loads of two tensors: "measure" or "add"."""
    from tilefold.ops.backward import attention_backward
    from tilefold.ops.dense import attention

    (q, k, v), call, _, out, lse = attention.example_call(problem, plan)
    rows, columns = (torch.empty(problem.seq_q, dtype=kind, device="meta") for kind in (torch.float32, torch.int32))
    tensors = torch.empty(problem.heads, dtype=q.dtype, device="meta"), rows
    call = call._replace(score_mod=mixed, score_grad=None, score_args=(*tensors, columns, problem.seq_k))
    sides = q, k, v, out
    made = attention_backward._portable_parts(1.0, sides, out, call, backward_plan)
    loads = attention_backward.TermsBound.of(problem, backward_plan, sides, out, call, made, (0, 1)).loads
    facts = torch.empty(2, dtype=torch.float64, device="meta")
    sums = torch.empty(4, dtype=torch.float32 if backward_plan.load_passes == 1 else torch.int64, device="meta")
    sites = tuple((each.function, tensors[each.arg], facts, sums) for each in loads.loads)
    return getattr(loads, which).example((q, k, v, out, lse, lse, lse, sites, call))
