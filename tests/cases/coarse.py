"""Shared by the tests of the coarse and fuse stages: inputs, the oracle's verdict forward and backward, poisoned padding."""

from typing import Any

import torch

from cases import judge, rand
from tilefold import reference, sparse

NAMES = ("q", "k", "v", "weight_k", "weight_v")


def sized(*sizes: Any, device="cpu") -> torch.Tensor:
    """int32 sizes of blocks."""
    return torch.tensor(sizes if len(sizes) > 1 else sizes[0], dtype=torch.int32, device=device)


def weights(kind: str, heads: int | None, seq: int, block: int, dtype=torch.float32, device="cpu"):
    """(weight_k, weight_v) near the mean, per head or shared."""
    shape = (-(-seq // block), seq) if kind == "dense" else (block,)
    shape = shape if heads is None else (heads, *shape)
    scale = seq if kind == "dense" else block
    return [((1 + rand(*shape)) / scale).to(device=device, dtype=dtype) for _ in range(2)]


def padding(seq: int, block: int, sizes: torch.Tensor) -> torch.Tensor:
    """bool [seq]: tokens past the sizes [blocks] of their blocks."""
    token = torch.arange(seq, device=sizes.device)
    return token % block >= sizes.long()[token // block]


def run(stage, inputs, options, dtype=None):
    """The results of a stage and the gradients of its inputs, given random gradients of out and lse (the same for all dtypes)."""
    leaves = [None if t is None else (t if dtype is None else t.double()).detach().requires_grad_() for t in inputs]
    named = dict(zip(NAMES[3:], leaves[3:], strict=False))
    result = stage(*leaves[:3], **named, **options, return_lse=True, **({} if dtype is None else {"dtype": dtype}))
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(result.out.shape, generator=generator).to(inputs[0]).to(result.out.dtype)
    dlse = torch.randn(result.lse.shape, generator=generator).to(result.lse)
    lse = torch.where(result.lse.isfinite(), result.lse, 0.0)
    loss = (result.out * dout).sum() + (lse * dlse).sum()
    used = [t for t in leaves if t is not None]
    return result, torch.autograd.grad(loss, used)


def held(q, k, v, weight_k=None, weight_v=None, gradients=True, **options):
    """Hold `sparse.coarse` to its oracle: out, scores, lse, and the gradients of everything."""
    inputs = (q, k, v, weight_k, weight_v)
    got, got_gradients = run(sparse.coarse, inputs, options)
    want, want_gradients = run(reference.coarse, inputs, options, torch.float64)
    plain, plain_gradients = run(reference.coarse, inputs, options, q.dtype)
    note = f"q {tuple(q.shape)} k {tuple(k.shape)} {q.dtype} {sorted(options.items(), key=str)}"
    assert (got.out.dtype, got.scores.dtype, got.lse.dtype) == (q.dtype, torch.float32, torch.float32)
    assert not got.scores.requires_grad
    judge(got.out, want.out, plain.out, f"out {note}")
    judge(got.scores, want.scores, plain.scores, f"scores {note}")
    judge(got.lse, want.lse, plain.lse, f"lse {note}")
    if gradients:
        names = [name for name, t in zip(NAMES, inputs, strict=True) if t is not None]
        for name, a, b, c in zip(names, got_gradients, want_gradients, plain_gradients, strict=True):
            assert a.dtype == dict(zip(NAMES, inputs, strict=True))[name].dtype
            judge(a, b, c, f"gradient of {name} {note}")
    return got, got_gradients
