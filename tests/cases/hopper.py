"""Shared by the GPU tests of the dense Gluon kernel for sm_90: calls under its plan, dense and packed, held to the oracle."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tilefold
from cases import WHERE, hopper_plan, hopper_unit, judge
from tilefold import reference


def held(q, k, v, changes=None, others: Sequence[Any] = (), twins: dict[str, Any] | None = None, unit: float = 1.0,
         **options: Any) -> torch.Tensor:  # fmt: skip
    """Hold the kernel to the oracle, and plans of other kernels too.  changes: of its plan; twins: Python versions of score_mod
    and mask_mod; unit: what their lse's roundings are roundings of."""
    plan = hopper_plan(tilefold.attention_plan(q, k, v, **options), **(changes or {}))
    python = {**options, **(twins or {})}
    oracle, plain = (reference.attention(q, k, v, dtype=d, **python) for d in (torch.float64, q.dtype))
    given = {name: (tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    for one in (*others, plan):
        out, lse = tilefold.attention(q, k, v, plan=one, return_lse=True, **options)
        note = f"{one.kernel} q {tuple(q.shape)} k {tuple(k.shape)} v {tuple(v.shape)} {q.dtype} {given} {changes}"
        judge(out, oracle[0], plain[0], f"out {note}")
        judge(lse, oracle[1], plain[1], f"lse {note}", unit - 1 + hopper_unit(one, **options))
    return out


def held_packed(tensors, where, changes=None, rows: slice = slice(None), twins: dict[str, Any] | None = None, unit: float = 1.0,
                **options: Any) -> None:  # fmt: skip
    """As held, for a packed batch.  where: offsets and longest sequences; rows: of the queries that are looked at."""
    named = dict(zip(WHERE, where, strict=True))
    plan = hopper_plan(tilefold.attention_plan(*tensors, **named, **options), **(changes or {}))
    out, lse = tilefold.attention_varlen(*tensors, *where, plan=plan, return_lse=True, **options)
    python = {**options, **(twins or {})}
    oracle, plain = (
        reference.attention_varlen(*tensors, *where, dtype=d, **python) for d in (torch.float64, out.dtype)
    )
    note = f"{[tuple(t.shape) for t in tensors]} {where} {sorted(options)} {changes}"
    judge(out[rows], oracle[0][rows], plain[0][rows], f"out {note}")
    judge(lse[:, rows], oracle[1][:, rows], plain[1][:, rows], f"lse {note}", unit - 1 + hopper_unit(plan, **options))


def nan_stays(run: Callable[[], torch.Tensor], *places: torch.Tensor) -> None:
    """NaN in these places is seen by row 100 of the first head, and by no other."""
    clean = run()
    for place in places:
        place.fill_(math.nan)
    out = run()
    assert out[0, 100, 0].isnan().all()
    out[0, 100, 0] = clean[0, 100, 0]
    assert torch.equal(out, clean)
