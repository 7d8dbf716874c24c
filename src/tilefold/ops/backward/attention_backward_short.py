"""Binding of the kernel that makes every gradient of a KV head of a short sequence in one program."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..bound import Bound
from ..call import Call
from .backward_parts import tiled

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan

GIVEN = ("Q", "K", "V", "Out", "DOut", "Lse", "DLse", "call", "Stored", "DQ", "DK", "DV")
"""What a call gives to the kernel."""


class ShortBound(NamedTuple):
    """The launch of a backward pass."""

    plan: Any
    main: Bound
    shapes: tuple[tuple[int, ...], ...]  # of dq, dk and dv
    stored: tuple[int, ...] | None  # the shape of dS that is stored

    def run(
        self,
        tensors: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        call: Call,
    ) -> tuple[torch.Tensor, ...]:
        """(dq, dk, dv), contiguous, and dS if it is stored; tensors: q, k, v, out; dlse like lse or None."""
        made, stored = self.scratch(dout)
        self.main((*tensors, dout, lse, dlse, call, stored, *made))
        return made if stored is None else (*made, stored)

    def scratch(self, like: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """New dq, dk and dv; and room for dS or None."""
        made = tuple([like.new_empty(shape) for shape in self.shapes])
        return made, None if self.stored is None else like.new_empty(self.stored)

    def of_lengths(self, tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, call: Call) -> None:
        """No other lengths have this launch."""


def bind_short(
    plan: "AttentionBackwardPlan", tensors: tuple[torch.Tensor, ...], made: tuple[dict[str, Any], dict[str, Any]]
) -> ShortBound:
    """The launch of this plan; tensors: q, k, v, out; made: constants and values of the portable kernels."""
    from ...kernels.backward.attention_backward_short import attention_backward_short
    from ...plan.backward import attention_backward_short as rules

    n, (constants, values), (q, k, v, _) = plan.problem, made, tensors
    keys, pitch = rules.ds_shape(n)
    shape = (n.batch * n.heads, keys, pitch) if plan.stores_ds else None
    own = {"pitch": pitch, "stride_sh": keys * pitch}
    one = {**constants, "ALONE": n.group == 1, "SLICES": rules.slices_of(n, plan.keys)}
    main = tiled(attention_backward_short, plan.keys, plan.grids[0], GIVEN, values | own, one, q.device)
    return ShortBound(plan, main, (q.shape, k.shape, v.shape), shape)
