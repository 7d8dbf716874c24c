"""V transposed for products of bytes, whose right operand has to have the keys together; once a call, in plain Triton.

The keys of each 16 change places, so that weights can be multiplied as they lie in registers: an accumulator of wgmma gives
thread t of a quad the keys 2t, 2t + 1, 8 + 2t and 8 + 2t + 1, its operand of bytes wants places 4t to 4t + 3.
"""

import triton
import triton.language as tl

__all__ = ["transpose_values"]


@triton.jit(do_not_specialize=["seq_k", "heads", "blocks"])
def transpose_values(V, Out, seq_k, heads, blocks, places, stride_b, stride_n, stride_h, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                     BLOCK_N: tl.constexpr):  # fmt: skip
    """V [B, N, H, DIM] bytes by strides -> Out [B, H, DIM, places] bytes, contiguous; places: at least N, a multiple of 16.

    Place p = 16 g + 4 t + 2 c + e holds key 16 g + 8 c + 2 t + e (t 0 to 3, c and e 0 or 1), 0 where there is no such key.
    Grid (B * H * blocks,), blocks = ceil(places / BLOCK_N)."""
    item = tl.program_id(0).to(tl.int64)
    row = item // blocks
    i_b, i_h = row // heads, row % heads
    place = (item - row * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = place - place % 16 + (place // 2) % 2 * 8 + (place // 4) % 4 * 2 + place % 2
    o_d = tl.arange(0, BLOCK_D)
    p_v = V + i_b * stride_b + i_h * stride_h + key[:, None] * stride_n + o_d[None, :]
    b_v = tl.load(p_v, mask=(key[:, None] < seq_k) & (o_d[None, :] < DIM), other=0)
    p_out = Out + (row * DIM + o_d[:, None]) * places + place[None, :]
    tl.store(p_out, tl.trans(b_v), mask=(o_d[:, None] < DIM) & (place[None, :] < places))
