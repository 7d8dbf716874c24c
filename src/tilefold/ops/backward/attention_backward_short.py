"""Binding of the kernel that makes every gradient of a KV head of a short sequence in one program."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..bound import Bound, Slot
from ..call import Call
from .backward_parts import tiled
from .hopper_backward import SIDES, Scratch, gradients_of

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan

Tensors = tuple[torch.Tensor, ...]


class ShortBound(NamedTuple):
    """The launch of a backward pass."""

    plan: Any
    main: Bound
    buffers: tuple[Scratch, ...]  # dq, dk, dv, and dS if it is stored

    def run(
        self, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
    ) -> Tensors:
        """(dq, dk, dv), contiguous, and dS if it is stored; tensors: q, k, v, out; dlse like lse or None."""
        made = self.scratch(dout.device)
        self.main((*tensors, dout, lse, dlse, call, *made))
        return made

    def scratch(self, device: Any) -> Tensors:
        """New tensors for all of the buffers."""
        return tuple([one.made(device) for one in self.buffers])

    def of_lengths(self, tensors: Tensors, dout: torch.Tensor, call: Call) -> None:
        """No other lengths have this launch."""


def bind_short(
    plan: "AttentionBackwardPlan", tensors: Tensors, made: tuple[dict[str, Any], dict[str, Any]]
) -> ShortBound:
    """The launch of this plan; tensors: q, k, v, out; made: constants and values of the portable kernels."""
    from ...kernels.backward.attention_backward_short import attention_backward_short
    from ...plan.backward import attention_backward_short as rules

    n, (constants, values), q = plan.problem, made, tensors[0]
    keys, pitch = rules.ds_shape(n)
    room = (Scratch((n.batch * n.heads, keys, pitch), q.dtype),) if plan.stores_ds else ()
    given = (*SIDES, "DQ", "DK", "DV", *["Stored"] * len(room))
    own = {
        "Stored": Slot("Stored") if room else None,
        "pitch": pitch,
        "stride_sh": keys * pitch,
        "total_k": tensors[1].shape[0],
    }
    one = {**constants, "ALONE": n.group == 1, "SLICES": rules.slices_of(n, plan.keys)}
    main = tiled(attention_backward_short, plan.keys, plan.grids[0], given, values | own, one, q.device)
    return ShortBound(plan, main, (*gradients_of(tensors), *room))
