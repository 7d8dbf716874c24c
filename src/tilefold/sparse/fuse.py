"""The fuse stage: two finished branches, each times its gate."""

import torch

from ..errors import Unsupported
from ..ops.sparse.fuse import FUSE, forward
from ..ops.sparse.project import check_layout
from ..types import Layout


def fuse(
    coarse: torch.Tensor | None,
    fine: torch.Tensor | None,
    gate_coarse: torch.Tensor | None = None,
    gate_fine: torch.Tensor | None = None,
    *,
    layout: Layout = "bshd",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """gate_coarse * coarse + gate_fine * fine.

    A gate is a model's choice to mix two finished outputs; merging two partial results of one softmax is something else.

    Args:
        coarse, fine: the branches, [batch, seq, heads, dim] fp16, bf16 or fp32 of one dtype, dim 1 to 256, any strides with a
            contiguous last dimension.  One may be None: there is no such branch.
        gate_coarse, gate_fine: fp16, bf16 or fp32, any strides, None: 1.  [heads]; [batch, seq, heads], in the order of the
            branches; or [batch or 1, seq or 1, heads or 1, dim or 1].  A gate without its branch is refused.
        layout: "bshd" as above, or "bhsd" for branches, out and gates with the heads before the sequence.
        out: where to write the result, of the branches' shape and dtype; may be one of the branches.  Without gradients only.

    Returns:
        out, in the branches' dtype: computed in fp32 and rounded once.  Differentiable once, in branches and gates; sums over
        what a gate is broadcast along are fp32 and the same bits every run.  Such a gate costs 4 bytes a row of scratch in the
        backward pass, 4 bytes an element if it has channels.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError: naming the argument.  Unsupported: out was given and
        a gradient is asked for, or under torch.compile.

    Source: gates per branch: NSA (Yuan et al. 2025, arXiv:2502.11089, section 3.2); VSA (Zhang et al. 2025, arXiv:2505.13389).
    """
    check_layout(layout)
    if out is None:
        result: torch.Tensor = FUSE(coarse, fine, gate_coarse, gate_fine, layout)
        return result
    if torch.compiler.is_compiling():
        raise Unsupported("out was given under torch.compile: leave it out, the compiler reuses memory by itself")
    given = (coarse, fine, gate_coarse, gate_fine, out)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in given):
        raise Unsupported("out was given and an input requires a gradient: leave it out, or call under torch.no_grad()")
    return forward(coarse, fine, gate_coarse, gate_fine, layout, out)
