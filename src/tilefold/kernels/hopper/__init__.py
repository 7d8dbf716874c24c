"""Kernels for sm_90, written in Gluon: tiles with explicit layouts, copies by the tensor memory accelerator, barriers, wgmma.

    attention_forward, attention_fp8, sparse_forward      forward: dense and packed, in e4m3, by lists of blocks
    attention_backward, _wide, _packed, _reduce, sparse_backward      backward; _wide is of head dim 256, _reduce adds in memory
    matmul, matmul_eight, matmul_eight_rows, lowbit_matmul, lowbit_rows      products, of 16, 8 and fewer bits

    gluon    the one file that imports Gluon and hides what its versions spell differently
    parts    what these kernels share: the order of work, a list's entries, columns and sums of accumulators, stores
    structs  aggregates whose constructor is made of their fields
    config, scheduler, pipeline, mask, softmax, score_mods, block_list, epilogue, ping_pong
             the aggregates of the forward kernels, which carry values, buffers, barriers and constants by name
    products, fp8_parts   wgmma over head dims of any width; what e4m3 adds to it
    producer, consumer    what the warps of the dense and the e4m3 kernel do with all these
    backward_config, _scheduler, _pipeline, _mask, _epilogue, ds_ring, recompute
             the aggregates of the backward kernels that keep dS; with backward_producer and backward_consumer
    backward_lists      those of sparse_backward
    reduce_scheduler, reduce_pipeline, dq_sums      those of attention_backward_reduce

`available` says whether they can be used; if not, the portable kernels serve.  Gluon does not run in the interpreter.
"""

import functools

__all__ = ["available", "refusal"]


@functools.cache
def refusal() -> str | None:
    """Why Gluon kernels cannot be used with the installed Triton, as a sentence, or None if they can."""
    try:
        from . import gluon  # noqa: F401
    except (ImportError, AttributeError) as problem:
        import triton

        return f"Triton {triton.__version__} does not offer what Gluon kernels need ({problem})"
    return None


def available() -> bool:
    """Whether the installed Triton offers what these kernels need."""
    return refusal() is None
