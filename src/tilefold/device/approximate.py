"""Functions by one instruction of NVIDIA's GPUs, for a `score_mod`: faster than Triton's own, and less exact."""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from .mods import softcap

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tanh(x):
    """tanh(x) of fp32, any shape: tanh.approx.f32, right to 2^-11 of its size (PTX ISA, tanh).  In the interpreter and on AMD's
    GPUs by arithmetic, right to 3e-7.  A score_mod that calls it is differentiated by 1 - tanh(x)^2."""
    if INTERPRETED or is_hip():
        return softcap(x, 0, 0, 0, 0, (1.0,))
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
