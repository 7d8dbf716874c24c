"""Calls of attention on the architecture `cpu`: from a `Call` to the tensors and numbers that `tilefold.cpu` takes.

The other operations of `cpu` are a branch of one line each where they are launched."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PlanError
from ..types import Rules
from .call import Call, Packed, window_of
from .places import check_inside

if TYPE_CHECKING:
    from ..plan.torch_cpu import Cut, TorchPlan

__all__ = [
    "Attention",
    "Cached",
    "Listed",
    "backward",
    "bind",
    "delta_of",
    "heads_first",
    "on_cpu",
    "planned",
    "served",
    "sparse_backward",
]

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def on_cpu(plan: Any) -> bool:
    """Whether a plan is one of `cpu`."""
    return plan is not None and plan.device.backend == "cpu"


def planned(operation: str, problem: Any, call: Any, given: Any = None) -> Any:
    """The `TorchPlan` of a call, or the given one if it is one for that.

    Unsupported, naming it, for an argument that `cpu` does not serve."""
    from ..plan.architecture import CPU
    from ..plan.capabilities import refuse_arguments
    from ..plan.torch_cpu import TorchPlan, plan_torch

    given_by = call._asdict()
    if operation in ("attention", "attention_backward") and isinstance(call.mask_mod, Rules):
        functions = (rule.function for rule in call.mask_mod.rules)
        given_by["mask_mod"] = next((one for one in functions if not isinstance(one, str)), None)
    refuse_arguments(operation, CPU, given_by)
    plan = plan_torch(operation, problem)
    if given is None:
        return plan
    if not isinstance(given, TorchPlan):
        raise PlanError(f"plan is for {given.device.title}, the call is on {plan.device.title}")
    given.check(problem, plan.device)
    return given


def served(operation: str) -> Any:
    """The function of an operation."""
    from ..plan.architecture import CPU
    from ..plan.capabilities import function_of

    return function_of(operation, CPU)


def bind(call: Call, plan: "TorchPlan", scale: float) -> "Attention":
    """What runs calls of this kind, as a `Bound` does."""
    assert plan.cut is not None
    return Attention(window_of(call.window, call.causal), scale, plan.cut)


class Attention:
    """Dense and packed attention, of what `dense.attention_parts.GIVEN` names."""

    def __init__(self, window: tuple[int, int], scale: float, cut: "Cut") -> None:
        self.window, self.scale, self.cut = window, scale, cut

    def __call__(self, given: tuple[Any, ...]) -> None:
        forward = served("attention")
        q, k, v, out, lse, call = given
        terms = terms_of(call, self.window, self.scale)
        if call.packed is None:
            forward(
                *(heads_first(t, call.layout) for t in (q, k, v)), terms, self.cut, heads_first(out, call.layout), lse
            )
            return
        for b, rows, keys in _sequences(call.packed, q.shape[0], k.shape[0]):
            own = terms.sequence(b, rows.stop - rows.start, keys.stop - keys.start)
            forward(_one(q, rows), _one(k, keys), _one(v, keys), own, self.cut, _one(out, rows), lse[None, :, rows])


def heads_first(t: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, heads, seq, dim]."""
    return t.transpose(1, 2) if layout == "bshd" else t


def _one(t: torch.Tensor, rows: slice) -> torch.Tensor:
    """Rows of a packed tensor [total, heads, dim] as one sequence, heads first."""
    return t[None, rows].transpose(1, 2)


def _sequences(packed: Packed, total_q: int, total_k: int) -> Iterator[tuple[int, slice, slice]]:
    """(number, queries, keys) of each sequence that has queries, after a look at the offsets, which costs nothing on the CPU."""
    check_inside(packed, total_q, total_k)
    cu_q, cu_k = packed.cu_q.tolist(), packed.cu_k.tolist()
    for b in range(len(cu_q) - 1):
        if cu_q[b] < cu_q[b + 1]:
            yield b, slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])


def terms_of(call: Call, window: tuple[int, int], scale: float) -> Any:
    """The options of a call as `cpu.terms.Terms`."""
    from ..cpu import rules
    from ..cpu.terms import Terms

    left, right = (None if side < 0 else side for side in window)
    slopes = call.alibi_slopes
    if slopes is not None and slopes.dim() == 1:
        slopes = slopes[None]
    seen = call.mask_mod.bound(rules, call.mask_args) if isinstance(call.mask_mod, Rules) else ()
    return Terms(scale, left, right, float(call.softcap), slopes, call.bias, call.mask, call.sinks, float(call.dropout_p),
                 call.dropout_seed, rules=seen)  # fmt: skip


def delta_of(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None, turned: bool) -> torch.Tensor:
    """The row sums of dout * out, less the gradient of lse, and of its shape; turned: in out rows come before heads."""
    delta = (dout.float() * out.float()).sum(-1)
    delta = delta.transpose(-1, -2) if turned else delta
    return delta if dlse is None else delta - dlse


def backward(
    saved: Saved,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: Call,
    bound: Attention,
    cut: "Cut",
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v, bias and sinks, None where not wanted; see `ops.backward.attention_backward.backward`."""
    from ..cpu.dense import Gradients

    run = served("attention_backward")
    q, k, v, out, lse = saved
    delta = delta_of(out, dout, dlse, call.packed is not None or call.layout == "bshd")
    terms = terms_of(call, bound.window, bound.scale)
    made = [torch.zeros(t.shape, dtype=t.dtype) if w else None for t, w in zip((q, k, v), wanted, strict=False)]
    sums = [
        torch.zeros(t.shape) if w and t is not None else None
        for t, w in zip((call.bias, call.sinks), wanted[3:], strict=True)
    ]
    if call.packed is None:
        tensors, targets = (
            [None if t is None else heads_first(t, call.layout) for t in each] for each in ((q, k, v, dout), made)
        )
        run(*tensors[:3], terms, cut, (lse, delta), tensors[3], Gradients(*targets, *sums))
    else:
        for b, rows, keys in _sequences(call.packed, q.shape[0], k.shape[0]):
            lengths = b, rows.stop - rows.start, keys.stop - keys.start
            places = (rows, keys, keys)
            dq, dk, dv = (None if t is None else _one(t, place) for t, place in zip(made, places, strict=True))
            bias = None if sums[0] is None else terms._replace(bias=sums[0]).sequence(*lengths).bias
            statistics = lse[None, :, rows], delta[None, :, rows]
            run(_one(q, rows), _one(k, keys), _one(v, keys), terms.sequence(*lengths), cut, statistics,
                _one(dout, rows), Gradients(dq, dk, dv, bias, sums[1]))  # fmt: skip
    totals = (
        None if s is None or t is None else s.to(t.dtype) for s, t in zip(sums, (call.bias, call.sinks), strict=True)
    )
    return *made, *totals


# ---------------------------------------------------------------- caches


class Cached:
    """Attention over a KV cache, as a `Decoder` and as a launch of `attention_cached`."""

    def __init__(self, plan: "TorchPlan", call: Call, scale: float) -> None:
        self.plan, self.scale, self.window = plan, scale, window_of(call.window, call.causal)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: Call,
            cache: Any, scales: Any, watch: Any = None) -> None:  # fmt: skip
        served("attention_kvcache")(q, k, v, scales, terms_of(call, self.window, self.scale), cache, out, lse)

    def __call__(self, given: tuple[Any, ...]) -> None:
        q, k, v, out, lse, call, cache = given
        self.run(q, k, v, out, lse, call, cache, (None, None))


# ---------------------------------------------------------------- lists of blocks


class Listed:
    """Block-sparse attention over dense, packed and paged keys, of what `sparse_parts.GIVEN` names."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, given: tuple[Any, ...]) -> None:
        q, k, v, out, lse, call = given
        forward, terms = served("sparse_attention"), self.terms(call)
        if call.packed is not None:
            for b, rows, keys in _sequences(call.packed, q.shape[0], k.shape[0]):
                rows = _within(rows, call.lists)
                forward(_one(q, rows), _one(k, keys), _one(v, keys), terms, lists_of(call.lists, b), _one(out, rows),
                        lse[None, :, rows])  # fmt: skip
            return
        q, k, v, out = (heads_first(t, call.layout) for t in (q, k, v, out))
        if call.paged is None:
            forward(q, k, v, terms, call.lists, out, lse)
            return
        for b in range(q.shape[0]):
            own = slice(b, b + 1)
            keys_of = (_paged(t, call.paged, b) for t in (k, v))
            forward(q[own], *keys_of, terms, lists_of(call.lists, b), out[own], lse[own])

    def terms(self, call: Any) -> Any:
        from ..cpu.terms import Terms

        return Terms(self.scale, right=0 if call.causal else None, softcap=float(call.softcap))


def _within(rows: slice, lists: Any) -> slice:
    """The queries for which there are lists."""
    return slice(rows.start, min(rows.stop, rows.start + lists.seq_q))


def lists_of(lists: Any, b: int) -> Any:
    """The lists of sequence b alone."""

    def own(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.dim() == 1 or t.shape[0] == 1 else t[b : b + 1]

    return lists._replace(
        **{name: own(getattr(lists, name)) for name in ("indices", "counts", "block_sizes", "query_sizes")}
    )


def _paged(pages: torch.Tensor, paged: Any, b: int) -> torch.Tensor:
    """The keys of sequence b, [1, kv_heads, seq_k, dim], of pages [pages, kv_heads, page, dim]."""
    length, size = int(paged.cache_seqlens[b]), pages.shape[2]
    numbers = paged.block_table[b, : -(-length // size)].long()
    return pages[numbers].transpose(0, 1).flatten(1, 2)[None, :, :length]


def sparse_backward(
    saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None, call: Any, bound: Listed, wanted: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of q, k and v; see `ops.sparse.sparse_backward.backward`."""
    q, k, v, out, lse = saved
    run, terms = served("sparse_attention_backward"), bound.terms(call)
    delta = delta_of(out, dout, dlse, call.packed is not None or call.layout == "bshd")
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) if w else None for t, w in zip((q, k, v), wanted, strict=True))
    if call.packed is None:
        first = [None if t is None else heads_first(t, call.layout) for t in (q, k, v, dout, dq, dk, dv)]
        run(*first[:3], terms, call.lists, (lse, delta), first[3], tuple(first[4:]))
        return dq, dk, dv
    for b, rows, keys in _sequences(call.packed, q.shape[0], k.shape[0]):
        rows = _within(rows, call.lists)
        own = [None if t is None else _one(t, at) for t, at in zip((dq, dk, dv), (rows, keys, keys), strict=True)]
        statistics = lse[None, :, rows], delta[None, :, rows]
        run(_one(q, rows), _one(k, keys), _one(v, keys), terms, lists_of(call.lists, b), statistics,
            _one(dout, rows), tuple(own))  # fmt: skip
    return dq, dk, dv
