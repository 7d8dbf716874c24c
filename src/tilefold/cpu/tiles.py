"""A call cut into what is folded at once, by a `Cut` of the plan."""

from collections.abc import Iterator

import torch

from ..plan.torch_cpu import Cut


def chunks(batch: int, kv_heads: int, cut: Cut) -> Iterator[tuple[slice, slice]]:
    """(sequences, heads of K and V) that are folded at once, one after the other."""
    for b in spans(0, batch, cut.sequences):
        for h in spans(0, kv_heads, cut.heads):
            yield b, h


def spans(lo: int, hi: int, step: int) -> Iterator[slice]:
    """lo to hi in parts of `step`."""
    for begin in range(lo, hi, step):
        yield slice(begin, min(begin + step, hi))


def rows_of(t: torch.Tensor) -> torch.Tensor:
    """[sequences, heads, .., dim] as a contiguous fp32 [sequences * heads, rows, dim]: what is no such view is copied."""
    return t.float().reshape(t.shape[0] * t.shape[1], -1, t.shape[-1]).contiguous()


def heads_first(t: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, heads, seq, dim]."""
    return t.transpose(1, 2) if layout == "bshd" else t


def delta_of(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, layout: str) -> torch.Tensor:
    """The row sums of dout * out, less the gradient of lse, and of its shape; a packed out has the layout "bshd"."""
    delta = (dout.float() * out.float()).sum(-1)
    delta = delta.transpose(-1, -2) if layout == "bshd" else delta
    return delta if dlse is None else delta - dlse
