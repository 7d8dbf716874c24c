"""Gradients of what joins the scores: a bias, sinks, and the tensors that a score_mod reads (`attention_backward_loads`).

They follow from the rows' lse and delta, so they are made in the same way behind every kernel that makes dq, dk and dv."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..bound import Bound, Slot, attribute
from ..call import Call, window_of
from ..dense.attention_parts import kind_of, lengths_of, score_mods_of, sides_named
from ..device import interpreting
from .attention_backward_loads import LoadsBound, bind_loads, gradients_of_loads, no_gradients
from .backward_parts import ROWS, boxes, delta_bound, side_strides, slopes_of, tiled

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.problem import AttentionProblem

ROWS_AT_ONCE = 1024  # of a program of sinks
OF_BIAS = ("Q", "K", "V", "DOut", "Lse2", "Delta", "call", "DBias")
OF_STORED = ("Stored", "DBias")
OF_SINKS = ("Lse2", "Delta", "DSinks", "call")
"""What a call gives to the kernels."""
Made = tuple[dict[str, Any], dict[str, Any]]
"""Constants and values of portable kernels."""


class TermsBound(NamedTuple):
    """The launches: the rows' lse and delta, then a gradient each; None for what has none."""

    delta: Bound
    bias: Bound | None
    shares: int  # of the bias's sum
    sinks: Bound | None
    loads: LoadsBound | None
    batch: int  # sequences

    @classmethod
    def of(
        cls, problem: "AttentionProblem", plan: "AttentionBackwardPlan", tensors: tuple[torch.Tensor, ...], dout: torch.Tensor,
        call: Call, made: Made | None = None, loads: tuple[int, ...] = (),
    ) -> "TermsBound":  # fmt: skip
        """tensors: q, k, v, out.  plan: says how a bias and loads are made, which need `made`; loads: which of score_args have a
        gradient."""
        *sides, out = tensors
        n, strides = problem, side_strides(call.layout, o=out, d=dout)
        rows, sequences = (n.seq_q, n.batch) if call.packed is None else (out.shape[0], 1)
        wide = max(strides["stride_om"], strides["stride_dm"]) * ROWS >= 1 << 31
        return cls(
            delta_bound(n, rows * sequences, rows, wide, strides, out.device),
            _bias_bound(plan, (*sides, dout), made, call),
            plan.bias_shares,
            None if call.sinks is None else _bind_sinks(n, rows, call, out.device),
            bind_loads(plan, *made, out.device, call, loads) if made else None,
            n.batch,
        )

    def gradients(
        self, tensors: tuple[torch.Tensor, ...], call: Call, wanted: Sequence[bool], stored: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Of the bias, the sinks and the tensors of score_args, None where not wanted; tensors: q, k, v, dout, lse in base 2
        and delta; stored: dS, where the plan has it stored."""
        given = (stored,) if stored is not None else (*tensors, call)
        dbias = self._of_bias(given, call.bias) if wanted[0] and call.bias is not None else None
        dsinks = self._of_sinks(tensors, call, call.sinks) if wanted[1] and call.sinks is not None else None
        if self.loads is None:
            return dbias, dsinks, *no_gradients(call, wanted[2:])
        return dbias, dsinks, *gradients_of_loads(self.loads, tensors, call, wanted[2:])

    def _of_bias(self, given: tuple[Any, ...], bias: torch.Tensor) -> torch.Tensor:
        if self.bias is None:  # there are no keys
            return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
        dtype = bias.dtype if self.shares == 1 else torch.float32
        parts = torch.empty((self.shares, *bias.shape), dtype=dtype, device=bias.device)
        self.bias((*given, parts))
        return parts[0] if self.shares == 1 else parts.sum(0).to(bias.dtype)  # added in order

    def _of_sinks(self, tensors: tuple[torch.Tensor, ...], call: Call, sinks: torch.Tensor) -> torch.Tensor:
        lse2, delta = tensors[-2:]
        assert self.sinks is not None
        parts = torch.empty((self.batch, lse2.shape[-2]), dtype=torch.float32, device=lse2.device)
        self.sinks((lse2, delta, parts, call))
        return parts.sum(0).to(sinks.dtype)


def _bias_bound(plan: "AttentionBackwardPlan", tensors: tuple[torch.Tensor, ...], made: Made | None, call: Call) -> Any:
    """The launch of a bias's gradient, None if there is none; tensors: q, k, v, dout."""
    if plan.stores_ds:
        return _bind_stored(plan, call, tensors[0].device)
    return _bind_bias(plan, tensors, made, call) if made and plan.bias else None


def _bind_bias(plan: "AttentionBackwardPlan", tensors: tuple[torch.Tensor, ...], made: Made, call: Call) -> Any:
    """The launch that sums up the gradients of the scores at each entry, a share a program; tensors: q, k, v, dout."""
    from ...device import mods
    from ...kernels.backward.attention_backward_terms import attention_backward_bias

    q, k, v, dout = tensors
    _, after_bias = slopes_of(mods, float(call.softcap), call, plan.problem.dtype == "float32")
    at, exact = bool(call.softcap) + (call.alibi_slopes is not None), q.dtype == torch.float32

    def mods_of_call(given: Call) -> tuple[Any, ...]:
        return score_mods_of(mods, float(given.softcap), given, exact)

    values = {
        **made[1],
        "score_mods": Slot("call", lambda given: mods_of_call(given)[:at]),
        "bias": Slot("call", lambda given: (mods.held_bias, mods_of_call(given)[at][1])),
        "later_mods": Slot("call", lambda given: mods_of_call(given)[at + 1 :]),
        "slopes": after_bias,
        "bias_batch": plan.bias[0],
        "bias_heads": plan.bias[1],
    }
    rows = plan.bias[2] > 1
    boxed = rows and plan.kernel not in ("attention_backward", "attention_backward_short") and call.packed is None
    constants = {**made[0], "ROWS": rows, "BOX": boxed, "ROUND": interpreting()}
    if boxed:
        n, tile = plan.problem, plan.scores
        values |= boxes(call.layout, tile.block_m, Q=(q, n.block_qk), DOut=(dout, n.block_v))
        values |= boxes(call.layout, tile.block_n, K=(k, n.block_qk), V=(v, n.block_v))
    return tiled(attention_backward_bias, plan.scores, plan.grids[2], OF_BIAS, values, constants, q.device)


def _bind_stored(plan: "AttentionBackwardPlan", call: Call, device: torch.device) -> Any:
    """The launch that sums up dS that is stored."""
    from ...kernels.backward.attention_backward_terms import attention_backward_stored
    from ...plan.backward import attention_backward_reduce as rules
    from ...plan.backward import attention_backward_short as short

    n, window = plan.problem, window_of(call.window, call.causal)
    if plan.kernel == short.KERNEL:
        rows, pitch = short.ds_shape(n)
    else:
        rows, pitch = rules.ds_shape(n)
        rows //= n.batch * n.heads
    values = {
        **lengths_of(n),
        **sides_named(window),
        "batch": n.batch,
        "rows": rows,
        "pitch": pitch,
        "bias_batch": plan.bias[0],
        "bias_heads": plan.bias[1],
    }
    constants = {"KIND": kind_of(window), "ROUND": interpreting()}
    return tiled(attention_backward_stored, plan.scores, plan.grids[2], OF_STORED, values, constants, device)


def _bind_sinks(problem: "AttentionProblem", rows: int, call: Call, device: torch.device) -> Bound:
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
    return Bound.of(attention_backward_sinks, n.heads * n.batch, OF_SINKS, values, {"BLOCK_M": ROWS_AT_ONCE}, device)
