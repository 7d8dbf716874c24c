"""Shared by the tests of matrix products: operands of any layout, calls beside the oracle, gradients."""

import torch

from cases import judge, rand
from tilefold import ops, reference

ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")


def matrix(*shape, dtype=torch.float32, device="cpu", turned=False, leaf=False):
    """Standard normal [.., rows, columns]; turned: with the columns of elements side by side."""
    made = (
        rand(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).mT
        if turned
        else rand(*shape, dtype=dtype, device=device)
    )
    return made.requires_grad_() if leaf else made


def plain_dtype(a, out_dtype):
    """In which plain PyTorch computes the same."""
    return out_dtype or (torch.bfloat16 if a.dtype == torch.float8_e4m3fn else a.dtype)


def check(a, b, *, plan=None, order="grouped", out_dtype=None, tf32=False, **options):
    """Hold matmul or bmm to the oracle; returns the result."""
    batched = a.dim() + b.dim() > 4
    own, oracle = (ops.bmm, reference.bmm) if batched else (ops.matmul, reference.matmul)
    got = own(a, b, plan=plan, order=order, out_dtype=out_dtype, tf32=tf32, **options)
    dtype = plain_dtype(a, out_dtype)
    assert got.dtype == dtype and got.is_contiguous()
    plain = oracle(a, b, dtype=a.dtype if a.dtype in (torch.float16, torch.bfloat16) else dtype, **options)
    judge(
        got, oracle(a, b, **options), plain.to(dtype), f"{tuple(a.shape)} @ {tuple(b.shape)} {a.dtype} {options.keys()}"
    )
    return got


def check_gradients(a, b, bias, dout=None, **options):
    """Hold the gradients of leaves a, b and bias to the oracle's."""
    batched = a.dim() + b.dim() > 4
    own, oracle = (ops.bmm, reference.bmm) if batched else (ops.matmul, reference.matmul)
    leaves = [t for t in (a, b, bias) if t is not None and t.requires_grad]
    got = own(a, b, bias=bias, **options)
    dout = rand(*got.shape, dtype=got.dtype, device=a.device) if dout is None else dout
    made = torch.autograd.grad(got, leaves, dout)
    exact = torch.autograd.grad(oracle(a, b, bias=bias, **options), leaves, dout.double())
    plain = torch.autograd.grad(oracle(a, b, bias=bias, dtype=a.dtype, **options), leaves, dout.to(a.dtype))
    for t, x, y, z in zip(leaves, made, exact, plain, strict=True):
        assert x.dtype == t.dtype and x.shape == t.shape
        judge(x, y.double(), z, f"gradient of {tuple(t.shape)} {options}")
    return made
