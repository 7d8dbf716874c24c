"""The gradient of attention sinks.

It follows from the rows' lse and delta, so it is made in the same way behind every kernel that makes dq, dk and dv."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..bound import Bound, attribute
from ..call import Call
from .backward_parts import ROWS, delta_bound, side_strides

if TYPE_CHECKING:
    from ...plan.problem import AttentionProblem

ROWS_AT_ONCE = 1024  # of a program
GIVEN = ("Lse2", "Delta", "DSinks", "call")


def bind_sinks(problem: "AttentionProblem", rows: int, call: Call, device: torch.device) -> Bound:
    """The launch that sums up what the rows of each sequence and head give.  rows: of all sequences of a packed batch, else of
    each."""
    from ...kernels.backward.attention_backward_terms import attention_backward_sinks

    n, packed = problem, call.packed is not None
    assert call.sinks is not None
    values = {
        "Sinks": attribute("call", "sinks", call.sinks),
        "stride_sinks": call.sinks.stride(0),
        "CuQ": attribute("call", "source.cu_q", call.packed),
        "seq_q": n.seq_q,
        "heads": n.heads,
        "stride_lb": 0 if packed else n.heads * n.seq_q,
        "stride_lh": rows,
    }
    return Bound.of(attention_backward_sinks, n.heads * n.batch, GIVEN, values, {"BLOCK_M": ROWS_AT_ONCE}, device)


def gradient_of_sinks(sums: Bound, batch: int, lse2: torch.Tensor, delta: torch.Tensor, call: Call) -> torch.Tensor:
    """Like call.sinks.  sums: of `bind_sinks`; batch: sequences; lse2, delta: as the kernel of delta makes them."""
    assert call.sinks is not None
    parts = torch.empty((batch, lse2.shape[-2]), dtype=torch.float32, device=lse2.device)
    sums((lse2, delta, parts, call))
    return parts.sum(0).to(call.sinks.dtype)


class SinksBound(NamedTuple):
    """Where the kernels of dq, dk and dv make no delta that others can read."""

    delta: Bound
    sums: Bound
    batch: int  # sequences

    @classmethod
    def of(cls, problem: "AttentionProblem", out: torch.Tensor, dout: torch.Tensor, call: Call) -> "SinksBound":
        n, strides = problem, side_strides(call.layout, o=out, d=dout)
        rows, sequences = (n.seq_q, n.batch) if call.packed is None else (out.shape[0], 1)
        wide = max(strides["stride_om"], strides["stride_dm"]) * ROWS >= 1 << 31
        delta = delta_bound(n, rows * sequences, rows, wide, strides, out.device)
        return cls(delta, bind_sinks(n, rows, call, out.device), n.batch)

    def gradient(
        self, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
        self.delta((out, dout, lse, dlse, lse2, delta))
        return gradient_of_sinks(self.sums, self.batch, lse2, delta, call)
