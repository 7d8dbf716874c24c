"""Kernels for sm_90, written in Gluon: tiles with explicit layouts, copies by the tensor memory accelerator, barriers, wgmma.

    attention_forward, attention_fp8, sparse_forward      forward: dense and packed, in e4m3, by lists of blocks
    attention_backward, attention_backward_wide, attention_backward_packed, sparse_backward
             backward, dS kept; of head dims above 128, of packed sequences, by lists of blocks
    attention_backward_reduce      backward, dq added in memory
    matmul, matmul_eight, matmul_eight_rows, lowbit_matmul, lowbit_rows      products, of 16, 8 and fewer bits

    gluon    the one file that imports Gluon and hides what its versions spell differently
    parts    what these kernels share: the order of work, a list's entries, columns and sums of accumulators, stores
    structs  aggregates whose constructor is made of their fields
    config, scheduler, pipeline, mask, softmax, score_mods, block_list, epilogue, ping_pong
             the aggregates of the forward kernels, which carry values, buffers, barriers and constants by name
    products, fp8_parts   wgmma over head dims of any width; what e4m3 adds to it
    chunks   numerics="invariant": chunks of keys, merged in their order
    producer, consumer    what the warps of the dense and the e4m3 kernel do with all these
    backward_config, backward_scheduler, backward_pipeline, backward_mask, backward_epilogue, ds_ring, recompute
             the aggregates of the backward kernels that keep dS; with backward_producer, backward_consumer and
             backward_wide_consumer, the two of head dims above 128
    backward_lists      those of sparse_backward
    reduce_scheduler, reduce_pipeline, dq_sums, group_sums, stored_ds, tails, backward_mods
             those of attention_backward_reduce: sums of dq, of grouped heads; dS for a bias; ends of packed sequences; changes
             of scores
    ring, matmul_scheduler, matmul_epilogue, split_k, lowbit_parts      those of matrix products, and weights of few bits

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
