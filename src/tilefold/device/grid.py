"""Which rows a program makes: grids are one-dimensional, query tile fastest, then head, then batch.

Programs that run together then share the K and V of a head in the L2 cache.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def place_of_program(seq_q, heads, LAST_FIRST: tl.constexpr, BLOCK_M: tl.constexpr):
    """-> query tile (int32), batch, head (int64).  LAST_FIRST: the last tiles of a head, the longest under a causal mask, come
    first."""
    tiles = tl.cdiv(seq_q, BLOCK_M)
    pid = tl.program_id(0)
    i_bh = pid // tiles
    i_m = pid % tiles
    if LAST_FIRST:
        i_m = tiles - 1 - i_m
    return i_m, (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)


@triton.jit
def rows_of_sequence(Offsets, i_b, longest):
    """-> first row (int64) and length of sequence i_b: 0 and `longest`, or what int32 Offsets [B + 1] of a packed batch say."""
    if Offsets is None:
        return tl.zeros([], tl.int64), longest
    else:
        first = tl.load(Offsets + i_b)
        return first.to(tl.int64), tl.load(Offsets + i_b + 1) - first


@triton.jit
def let_next_kernel_start(EARLY: tl.constexpr):
    """EARLY (sm_90 and newer): the next kernel, if it was launched as a dependent one, may take its places from now on; it stays
    in `wait_for_previous_kernel` until this one is through (programmatic dependent launch: hides 1 us of launch)."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel(EARLY: tl.constexpr):
    """EARLY: until the kernel before this one is through and what it wrote can be read; nothing of its results before that."""
    if EARLY:
        gdc_wait()
