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


def tensor_core_sums(a, b):
    """a [M, K] b [N, K]^T in fp32 as sm_90 adds products of e4m3: 32 of them and the sum so far, cut 13 bits behind the exponent
    of the largest; after 128 columns fp32 takes over (DeepSeek-V3, arXiv:2412.19437, section 3.3.2, found 14 bits)."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for start in range(0, a.shape[1], 128):
        part = torch.zeros_like(total)
        for k in range(start, min(start + 128, a.shape[1]), 32):
            products = (
                a[:, None, k : min(k + 32, start + 128)].float() * b[None, :, k : min(k + 32, start + 128)].float()
            )
            unit = torch.exp2(torch.maximum(products.abs().amax(-1), part.abs()).clamp_min(1e-30).log2().floor() - 13)
            part = (torch.trunc(products / unit[..., None]).sum(-1) + torch.trunc(part / unit)) * unit
        total += part
    return total


def check(a, b, *, plan=None, order="grouped", out_dtype=None, tf32=False, **options):
    """Hold matmul or bmm to the oracle; returns the result."""
    batched = a.dim() + b.dim() > 4
    own, oracle = (ops.bmm, reference.bmm) if batched else (ops.matmul, reference.matmul)
    got = own(a, b, plan=plan, order=order, out_dtype=out_dtype, tf32=tf32, **options)
    dtype = plain_dtype(a, out_dtype)
    assert got.dtype == dtype and got.is_contiguous()
    if a.dtype == torch.float8_e4m3fn and a.is_cuda:
        plain = oracle(
            tensor_core_sums(a, b.t()), torch.eye(b.shape[1], device=b.device), dtype=torch.float32, **options
        )
    else:
        plain = oracle(a, b, dtype=a.dtype if a.dtype in (torch.float16, torch.bfloat16) else dtype, **options)
    judge(got, oracle(a, b, **options), plain, f"{tuple(a.shape)} @ {tuple(b.shape)} {a.dtype} {options.keys()}")
    return got


def check_gradients(a, b, bias, dout=None, **options):
    """Hold the gradients of leaves a, b and bias to the oracle's."""
    batched = a.dim() + b.dim() > 4
    own, oracle = (ops.bmm, reference.bmm) if batched else (ops.matmul, reference.matmul)
    leaves = [t for t in (a, b, bias) if t is not None and t.requires_grad]
    got = own(a, b, bias=bias, **options)
    dout = rand(*got.shape, dtype=got.dtype, device=a.device) if dout is None else dout
    made = torch.autograd.grad(got, leaves, dout)
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (a, b, bias)]
    sought = [t for t in wide if t is not None and t.requires_grad]
    exact, plain = (
        torch.autograd.grad(oracle(*wide[:2], bias=wide[2], dtype=d, **options), sought, dout.double())
        for d in (torch.float64, a.dtype)
    )
    for t, x, y, z in zip(leaves, made, exact, plain, strict=True):
        assert x.dtype == t.dtype and x.shape == t.shape
        judge(x, y, z, f"gradient of {tuple(t.shape)} {options}")
    return made
