"""Shared by the tests of attention: random inputs, small tiles, the comparison with the oracle, and mods in both languages."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

import tilefold
from tilefold import reference
from tilefold.plan import AttentionPlan, DecodePlan, plan_attention
from tilefold.plan.dense.attention_hopper import hopper_options, hopper_tile, is_split
from tilefold.plan.limits import Tile
from tilefold.reference.rounding import stored

BOX = "attention_forward_box"
WHERE = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
"""Do tests take products of options, not pairs?"""


def pairs(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of the options, so few that each pair of values is in one; all of them by HYPOTHESIS_PROFILE=deep."""

    def held(one):
        return set(itertools.combinations(enumerate(one), 2))

    every = list(itertools.product(*(range(len(values)) for values in options)))
    if not DEEP:
        left, chosen = set().union(*map(held, every)), []
        while left:
            chosen.append(max(every, key=lambda one: len(left & held(one))))
            left -= held(chosen[-1])
        every = sorted(chosen)
    return [tuple(values[i] for values, i in zip(options, one, strict=True)) for one in every]


def rand(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard normal, drawn in fp32 on the CPU so that every dtype and device sees the same numbers."""
    return torch.randn(*shape).to(device=device, dtype=dtype)


def ints(*values: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Lengths, offsets or pages, int32."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def qkv(b, sq, sk, h, hk, d, dv=None, dtype=torch.float32, device="cpu"):
    """q [B, Sq, H, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv]."""
    return (
        rand(b, sq, h, d, dtype=dtype, device=device),
        rand(b, sk, hk, d, dtype=dtype, device=device),
        rand(b, sk, hk, dv or d, dtype=dtype, device=device),
    )


def packed(lengths_q, lengths_k, h=4, hk=2, d=32, dv=32, dtype=torch.float32, device="cpu"):
    """(q [Tq, H, D], k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""

    def offsets(lengths):
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)

    tq, tk = sum(lengths_q), sum(lengths_k)
    q, k = rand(tq, h, d, dtype=dtype, device=device), rand(tk, hk, d, dtype=dtype, device=device)
    v = rand(tk, hk, dv, dtype=dtype, device=device)
    return (q, k, v), (offsets(lengths_q), offsets(lengths_k), max(lengths_q), max(lengths_k))


def small_plan(q, k, v, tile: tuple[int, int] | None = (16, 16), kernel: str | None = None, **options: Any):
    """The plan of this call with tiles so small that short sequences span several; None: the planner's own."""
    plan = tilefold.attention_plan(q, k, v, **options)
    if tile is None:
        return plan
    return plan.with_tile(block_m=tile[0], block_n=tile[1], num_warps=4, num_stages=2, kernel=kernel)


def dense_plan(plan: AttentionPlan | DecodePlan) -> AttentionPlan:
    """The dense kernels' plan of a problem, also where the decode kernel takes it from them."""
    return plan_attention(plan.problem.attention, plan.device) if isinstance(plan, DecodePlan) else plan


def hopper_plan(plan: AttentionPlan | DecodePlan, **changes: Any) -> AttentionPlan:
    """The plan for the dense kernel of sm_90, whether it would be taken or not.  changes: fields of its tile, and options,
    which else are those of the tile."""
    dense = dense_plan(plan)
    chosen = hopper_tile(dense.problem, dense.device)
    fields = {
        name: changes.get(name, getattr(chosen, name)) for name in ("block_m", "block_n", "num_warps", "num_stages")
    }
    options = changes.get("options", hopper_options(dense.problem, Tile(**fields), dense.device))
    if "turns" in options and not is_split(dense.problem):  # two warpgroups take them
        fields["block_m"] = changes.get("block_m", max(fields["block_m"], 128))
    return dense.with_tile(kernel="attention_forward_hopper", **fields, options=options)


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def one_graph(fn: Any, **options: Any) -> Any:
    """`fn` as one graph of torch.compile, captured anew; the operators in it run as eager ones do.  options: dynamic=True."""
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **options)


def graph_gives(fn: Any, *args: Any, times: int = 1, seed: int = 5, **options: Any) -> Any:
    """One graph gives, so many times, the bits of `fn`: its results, and gradients of those of `args` that require one, of the
    sum of what is finite, squared.  Returns the graph."""
    compiled = one_graph(fn)
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]

    def run(fn: Any) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        made = fn(*args, **options)
        made = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        if not leaves:
            return made
        lost = [torch.where(t.isfinite(), t, 0.0).float().square().sum() for t in made if t.requires_grad]
        return *made, *torch.autograd.grad(sum(lost), leaves)

    want = run(fn)
    assert all(same(run(compiled), want) for _ in range(times))
    return compiled


def judge(got: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor, what: str, unit: float = 1.0) -> None:
    """`what` begins with "lse" for logarithms; unit: of these, as of `reference.compare`."""
    verdict = reference.compare(got, oracle, plain, unit=unit if what.startswith("lse") else 0.0)
    assert verdict.ok, f"{what}: {verdict}"


def hold(
    got: Any, oracle: Any, /, *args: Any, what: str = "", dtype: torch.dtype | None = None, **options: Any
) -> None:
    """Hold what a call gave, out or (out, lse), to the oracle of its arguments.  dtype: in which plain PyTorch computes, if that
    is not the first one's."""
    sides = [oracle(*args, dtype=kind, **options) for kind in (torch.float64, dtype or args[0].dtype)]
    each = [(side,) if isinstance(side, torch.Tensor) else side for side in (got, *sides)]
    for name, *three in zip(("out", "lse"), *each, strict=False):
        judge(*three, f"{name} {what}")


def hold_back(
    got: Any, oracle: Any, /, *args: Any, names: tuple[str, ...] = ("out", "lse"), what: str = "",
    back: Sequence[torch.Tensor] | None = None, **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Hold the results of a call, and gradients of those of `args` that require one, to the oracle of them.  back: gradients of
    the first results; random ones of all if not given.  Returns results and gradients."""
    there = [t for t in args if t is not None]
    dtype, note = there[0].dtype, f"{what} {[tuple(t.shape) for t in there]} {there[0].dtype}"

    def listed(found: Any) -> tuple[torch.Tensor, ...]:
        return found if isinstance(found, tuple) else (found,)

    def pulled(found: tuple[torch.Tensor, ...], given: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        leaves = [t for t in given if t is not None and t.requires_grad]
        douts = [dout.to(out.dtype) for dout, out in zip(back, found, strict=False)]
        return torch.autograd.grad(found[: len(back)], leaves, douts)

    results = listed(got)
    assert results[0].dtype == dtype
    back = [rand(*r.shape, dtype=r.dtype, device=r.device) for r in results] if back is None else back
    made = (*results, *pulled(results, args))
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in args]
    sides = []
    for kind in (torch.float64, dtype):
        found = listed(oracle(*wide, dtype=kind, **options))
        sides.append((*found, *pulled(found, wide)))
    for leaf, gradient in zip((t for t in there if t.requires_grad), made[len(results) :], strict=True):
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape)
    for i, (one, exact, plain) in enumerate(zip(made, *sides, strict=True)):
        name = names[i] if i < len(results) else f"gradient {i - len(results)}"
        judge(one.detach(), exact.detach(), plain.detach(), f"{name} {note}")
    return made


def hopper_unit(plan: AttentionPlan, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, **_: Any) -> float:
    """What four fp32 roundings of a logarithm are roundings of in the dense kernel for sm_90, whose errors have one sign in all
    keys: of 1; of a softcap's cap (1 - 2 / (1 + e^2x)); of ALiBi's distances, differences of slope times up to 128 keys, rounded
    twice; and a polynomial is right to 1.0e-4."""
    slope = 0.0 if alibi_slopes is None else float(alibi_slopes.abs().max())
    polynomial = any(option.startswith("polynomial") for option in plan.options)
    return 1 + softcap + slope * 64 + (1.0e-4 / (4 * 2.0**-24) if polynomial else 0)


def told(given: Sequence[Any]) -> list[Any]:
    """The arguments of a launch to be compared: descriptors by what they say, tensors by their shapes."""
    return [
        {**a.__dict__, "base": a.base.shape}
        if hasattr(a, "block_shape")
        else tuple(a.shape)
        if hasattr(a, "shape")
        else a
        for a in given
    ]


def arguments_of(prepared: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> list[Any]:
    """Those of a bound launch but for tensors."""
    out = torch.empty(1, dtype=q.dtype, device="meta")
    given = prepared.bound.arguments((q, k, v, out, out, call))
    return told([one for one in given if not isinstance(one, torch.Tensor)])


def as_its_own(again: Any, own: Any, *given: Any) -> None:
    """A record that was bound from another's says what that of a call of its own says."""
    for name in ("plan", "out_shape", "lse_shape", "scale"):
        assert getattr(again, name) == getattr(own, name), name
    assert str(again.plan) == str(own.plan)
    assert again.bound.launch.grid == own.bound.launch.grid
    assert again.bound.launch.keywords == own.bound.launch.keywords
    assert arguments_of(again, *given) == arguments_of(own, *given)


def in_two_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    dtype: torch.dtype,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The causal oracle, one deviation off: as one call for the first keys makes it, one for the rest, and one that merges."""

    def merged() -> tuple[torch.Tensor, torch.Tensor]:
        parts = (
            reference.attention(q, k[:, :first], v[:, :first], **options),
            reference.attention(q, k[:, first:], v[:, first:], causal=True, sinks=sinks, **options),
        )
        both = torch.logaddexp(parts[0][1], parts[1][1])
        shares = [torch.exp(lse - both).transpose(1, 2)[..., None] * stored(out) for out, lse in parts]
        return shares[0] + shares[1], both

    made: tuple[torch.Tensor, torch.Tensor] = reference.deviating(merged, dtype)
    return made


def check(q, k, v, tile: tuple[int, int] | None = (16, 16), kernel: str | tuple[str | None, ...] | None = None,
          twins: dict[str, Any] | None = None, varlen: tuple[Any, ...] | None = None, **options: Any):  # fmt: skip
    """Run tilefold with small tiles and hold out and lse to the oracle.  kernel: several are held to the same one.  twins: Python
    versions of score_mod and mask_mod."""
    name, given, where = "attention", varlen or (), {}
    if varlen is not None:
        name, where = "attention_varlen", dict(zip(WHERE, varlen, strict=True))
    made = []
    for one in kernel if isinstance(kernel, tuple) else (kernel,):
        nothing = varlen is None and 0 in q.shape
        plan = None if nothing else small_plan(q, k, v, tile, one, **where, **options)
        made.append(getattr(tilefold, name)(q, k, v, *given, return_lse=True, plan=plan, **options))
    python = {**options, **(twins or {})}
    oracle, plain = (getattr(reference, name)(q, k, v, *given, dtype=d, **python) for d in (torch.float64, q.dtype))
    note = f"q {tuple(q.shape)} k {tuple(k.shape)} {q.dtype} {sorted(options)}"
    for out, lse in made:
        assert out.dtype == q.dtype
        assert lse.dtype == torch.float32
        judge(out, oracle[0], plain[0], f"out {note}")
        judge(lse, oracle[1], plain[1], f"lse {note}")
    return made[-1]


# ---------------------------------------------------------------- mods, for the kernel and for the oracle


@triton.jit
def relative(score, batch, head, q_index, kv_index, args):
    """A learned bias per head and clipped distance: args = (table [H, 2 * span + 1], span)."""
    table, span, seq_q, seq_k = args
    distance = tl.minimum(tl.maximum(kv_index - q_index, -span), span) + span
    return score + tl.load(table + head * (2 * span + 1) + distance)


@triton.jit
def looped(score, batch, head, q_index, kv_index, args):
    """A mod without a derivative that its source gives: the score goes through a loop."""
    for _ in tl.static_range(2):
        score = score * 0.5
    return score


@triton.jit
def squashed(score, batch, head, q_index, kv_index, args):
    """A score within (-cap, cap), weighted by distance: args = (cap,)."""
    cap, seq_q, seq_k = args
    x = 2.0 * tl.sigmoid(2.0 * score / cap) - 1.0
    return cap * x / (1.0 + 0.01 * tl.abs(q_index - kv_index)) + tl.where(q_index > kv_index, 0.1 * score, 0.0)


def squashed_twin(score, batch, head, q_index, kv_index, args):
    cap = args[0]
    x = 2.0 * torch.sigmoid(2.0 * score / cap) - 1.0
    return cap * x / (1.0 + 0.01 * (q_index - kv_index).abs()) + torch.where(q_index > kv_index, 0.1 * score, 0.0)


def relative_twin(score, batch, head, q_index, kv_index, args):
    table, span = args[:2]
    distance = (kv_index - q_index).clamp(-span, span) + span
    return score + table.to(score.dtype)[head, distance.expand(score.shape)]


@triton.jit
def dilated(score, batch, head, q_index, kv_index, args):
    """Every args[0]-th key, shifted by the batch index."""
    return (kv_index + batch) % args[0] == q_index % args[0]


def dilated_twin(score, batch, head, q_index, kv_index, args):
    return (kv_index + batch) % args[0] == q_index % args[0]


@triton.jit
def prefix(score, batch, head, q_index, kv_index, args):
    """The first args[0] keys, or causal from the bottom right: uses the lengths that end every args."""
    first, seq_q, seq_k = args
    return (kv_index < first) | (kv_index <= q_index + seq_k - seq_q)


def prefix_twin(score, batch, head, q_index, kv_index, args):
    first, seq_q, seq_k = args
    return (kv_index < first) | (kv_index <= q_index + seq_k - seq_q)


@triton.jit
def one(score, batch, head, q_index, kv_index, args):
    """The slope of a mod that only adds."""
    return tl.full(score.shape, 1.0, tl.float32)
