"""Kernels for sm_90, written in Gluon: tiles with explicit layouts, copies by the tensor memory accelerator, barriers, wgmma.

    gluon    the one file that imports Gluon and hides what its versions spell differently
    parts    what these kernels share: rings of buffers, the softmax step on accumulators, the store of a result

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
