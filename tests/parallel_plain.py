"""Attention of a part of the keys in plain torch, any dtype: what context parallelism runs on in most tests."""

import math

import torch

from tilefold import parallel as tp
from tilefold import reference
from tilefold.ops.call import window_of


def plain_forward(q, k, v, call):
    options = {"window": window_of(call.window, call.causal), "scale": call.scale, "softcap": call.softcap}
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if call.packed is None:
        out, lse = reference.attention(q, k, v, **options)
    else:
        out, lse = reference.attention_varlen(q, k, v, *call.packed, **options)
    return out.to(q.dtype), lse.to(dtype)


def plain_backward(saved, dout, dlse, call, wanted):
    if call.packed is None:
        return _plain_dense(saved, dout, dlse, call)
    q, k, v, out, lse = saved
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    a, b = call.packed.cu_q.tolist(), call.packed.cu_k.tolist()
    for i in range(len(a) - 1):
        rows, cols = slice(a[i], a[i + 1]), slice(b[i], b[i + 1])
        part = [t[None] for t in (q[rows], k[cols], v[cols], out[rows], lse[:, rows])]
        found = _plain_dense(part, dout[None, rows], None if dlse is None else dlse[None, :, rows], call)
        for grad, one, where in zip(grads, found, (rows, cols, cols), strict=True):
            grad[where] += one[0]
    return grads


def _plain_dense(saved, dout, dlse, call):
    """From the lse over all keys, as the library's kernels."""
    q, k, v, out, lse = (t.transpose(1, 2) if t.dim() == 4 else t for t in saved)
    dout = dout.transpose(1, 2)
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if call.scale is None else call.scale
    s = torch.einsum("bhqd,bhkd->bhqk", q, wide_k) * scale
    slope = torch.ones_like(s)
    if call.softcap:
        slope = 1 - torch.tanh(s / call.softcap) ** 2
        s = call.softcap * torch.tanh(s / call.softcap)
    left, right = window_of(call.window, call.causal)
    n, m = s.shape[2:]
    at, key = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    keep = (key <= at + right if right >= 0 else key < m) & (key >= at - left if left >= 0 else key >= 0)
    p = torch.where(keep, torch.exp(s - lse[..., None].to(s.dtype)), 0.0)
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse)
    ds = p * (torch.einsum("bhqd,bhkd->bhqk", dout, wide_v) - delta[..., None]) * slope * scale
    ds, p = ds.to(q.dtype), p.to(q.dtype)
    dq = torch.einsum("bhqk,bhkd->bhqd", ds, wide_k)
    dk, dv = (torch.einsum("bhqk,bhqd->bhkd", a, b).unflatten(1, (-1, group)).sum(2) for a, b in ((ds, q), (p, dout)))
    return [t.transpose(1, 2) for t in (dq, dk, dv)]


PLAIN = tp.Kernels(plain_forward, plain_backward)


def noting(told):
    """PLAIN, whose backward calls put into `told` whether they are to be deterministic."""

    def backward(saved, dout, dlse, call, wanted):
        told.append(call.deterministic)
        return plain_backward(saved, dout, dlse, call, wanted)

    return tp.Kernels(plain_forward, backward)
