"""Small kernels and their builders for the tests of ahead-of-time compilation; nothing here is ever launched."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def softcap(score, args):
    limit = args[0]
    return limit * (2 * tl.sigmoid(2 * score / limit) - 1)


@triton.jit
def add_bias(score, args):
    values = args[0]
    return score + tl.load(values + tl.arange(0, score.shape[1]))[None, :]


@triton.jit
def fold_attention(
    q_ptr, k_desc, v_desc, sinks_ptr, out_ptr, mods, mod_args, seq_k, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Flash attention forward over one head: q by pointers, K and V by descriptors, a tuple of score functions."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    q = tl.load(q_ptr + rows[:, None] * DIM + dims[None, :])
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        top += tl.load(sinks_ptr)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(0, seq_k, BLOCK_N):
        k = k_desc.load([start, 0])
        score = tl.dot(q, k.T) * scale
        for i in tl.static_range(len(mods)):
            score = mods[i](score, mod_args[i])
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        v = v_desc.load([start, 0])
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    tl.store(out_ptr + rows[:, None] * DIM + dims[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty))


@triton.jit
def copy_rows(source, target, count, BLOCK: tl.constexpr):
    """No matrix product anywhere."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < count), at < count)


@gluon.jit
def gluon_product(a_ptr, b_ptr, out_ptr, steps, ROWS: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr):
    """out[ROWS, COLUMNS] = sum over steps of a[ROWS, DEPTH] @ b[DEPTH, COLUMNS], by wgmma from shared memory."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    a_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], gl.bfloat16)
    b_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DEPTH, COLUMNS], gl.bfloat16)
    a_tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, DEPTH], a_shared)
    b_tile = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, COLUMNS], b_shared)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))[:, None]
    deep = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, load_layout))[None, :]
    b_row = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, load_layout))[:, None]
    b_column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, load_layout))[None, :]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, acc_layout)
    for step in range(steps):
        a_tile.store(gl.load(a_ptr + row * DEPTH + deep + step * ROWS * DEPTH))
        b_tile.store(gl.load(b_ptr + b_row * COLUMNS + b_column + step * DEPTH * COLUMNS))
        fence_async_shared()
        acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    out_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout))[:, None]
    out_column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, acc_layout))[None, :]
    gl.store(out_ptr + out_row * COLUMNS + out_column, acc)


def build_gluon() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A Gluon kernel for sm_90."""
    x = torch.empty(4096, dtype=torch.bfloat16)
    return gluon_product, (x, x, x.float(), 4), {"ROWS": 64, "DEPTH": 64, "COLUMNS": 64, "num_warps": 4}


def build_fold(
    dim: int = 64, block_m: int = 128, block_n: int = 64, mods: bool = True, dtype: str = "bfloat16", **options: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The fold with two score functions (a float and a tensor as their arguments) or none, without sinks."""
    x = torch.empty(512, dim, dtype=getattr(torch, dtype))
    box = TensorDescriptor.from_tensor(x, [block_n, dim])
    bias = torch.empty(block_n)
    chosen, chosen_args = ((softcap, add_bias), ((30.0,), (bias,))) if mods else ((), ())
    tile = {"DIM": dim, "BLOCK_M": block_m, "BLOCK_N": block_n}
    return fold_attention, (x, box, box, None, x, chosen, chosen_args, 512, 0.18), {**tile, **options}


def build_copy() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A kernel without tensor instructions."""
    x = torch.empty(512)
    return copy_rows, (x, x, 512), {"BLOCK": 256}


def build_plain() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Not a JIT function at all."""
    return build_copy, (), {}


def build_dead() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Takes its process with it, as a compiler's failed assertion does."""
    import os
    import sys

    print("the compiler fell over", file=sys.stderr, flush=True)
    os._exit(134)


def build_slow() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Never comes to an end by itself, as a compiler in an endless loop."""
    import time

    time.sleep(600)
    return build_copy()
