"""Shared by the tests of e4m3 attention: quantised inputs, and the comparison with the oracle of what they stand for."""

import torch

import tilefold
from cases import judge
from tilefold import reference


def quantised(b, sq, sk, h, hk, d, dv=None, device="cpu", layout="bshd", mean=0.0, gain=1.0):
    """(q, k, v) in e4m3 and their factors by name; mean: of v, gain: of q."""
    shapes = (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d)
    q, k, v = (torch.randn(shape) for shape in shapes)
    made, factors = [], {}
    for name, t in (("q", q * gain), ("k", k), ("v", v + mean)):
        t = t.to(device)
        x, factor = tilefold.quantize_fp8(t.transpose(1, 2) if layout == "bhsd" else t, layout=layout)
        made.append(x)
        factors[f"{name}_descale"] = factor
    return made, factors


def check(q, k, v, factors, plan=None, **options):
    """Hold out and lse to the fp64 oracle of what the inputs mean.  Portable kernels compute in bfloat16."""
    out, lse = tilefold.attention(q, k, v, **factors, return_lse=True, plan=plan, **options)
    eight = (plan or tilefold.attention_plan(q, k, v, **factors, **options)).kernel == "attention_forward_fp8"
    kinds = torch.float64, q.dtype if eight else torch.bfloat16
    oracle, plain = (reference.attention_fp8(q, k, v, **factors, dtype=d, **options) for d in kinds)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    note = f"q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)} {options} {plan and plan.options}"
    judge(out, oracle[0], plain[0], f"out {note}")
    judge(lse, oracle[1], plain[1], f"lse {note}")
    return out, lse
