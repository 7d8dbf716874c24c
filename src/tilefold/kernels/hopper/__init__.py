"""Kernels for sm_90, written in Gluon: tiles with explicit layouts, copies by the tensor memory accelerator, barriers, wgmma.

    gluon    the one file that imports Gluon and hides what its versions spell differently
    parts    what these kernels share: the order of work, a list's entries, columns and sums of accumulators, stores
    config, scheduler, pipeline, mask, softmax, score_mods, block_list, epilogue, ping_pong
             the nouns of the forward kernels, aggregates that carry values, buffers, barriers and constants by name
    producer, consumer    what the warps of the dense and the e4m3 kernel do with them

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
