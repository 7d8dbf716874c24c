"""Shared by the tests of dense gradients: tilefold's, and those of the oracle by fp64 autograd."""

from typing import Any

import torch

import tilefold
from cases import WHERE, judge, rand
from tilefold import reference
from tilefold.plan.limits import Tile
from tilefold.reference.rounding import binade

BOX_BACKWARD = "attention_backward_box"
OURS = ("score_grad", "backward_plan", "plan")  # what the reference has no use for
LEARNED = ("bias", "sinks")


def learned_args(options):
    """Which of score_args require a gradient."""
    args = options.get("score_args", ())
    return [i for i, each in enumerate(args) if isinstance(each, torch.Tensor) and each.requires_grad]


def learned(tensors, options, dtype=None, fixed=()):
    """q, k, v, bias and sinks that are not fixed, and those of score_args that require a gradient, as leaves that do, in dtype or
    as they are; and the options with them."""
    names = [name for name in LEARNED if options.get(name) is not None and name not in fixed]
    args, places = list(options.get("score_args", ())), learned_args(options)
    inputs = [*tensors, *(options[name] for name in names), *(args[i] for i in places)]
    leaves = [(t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_() for t in inputs]
    of_args = leaves[3 + len(names) :]
    for i, leaf in zip(places, of_args, strict=True):
        args[i] = leaf
    more = {"score_args": tuple(args)} if places else {}
    return leaves, {**options, **dict(zip(names, leaves[3 : 3 + len(names)], strict=True)), **more}


def call(fn, leaves, varlen, options):
    return fn(*leaves[:3], *(varlen or ()), **options)


def gradients(tensors, dout, dlse, varlen=None, fixed=(), of=None, **options):
    """Of q, k, v, of bias and sinks where given and not fixed, and of those of score_args that require one.  of: another
    function, which takes what is in `varlen` behind the tensors."""
    leaves, options = learned(tensors, options, fixed=fixed)
    fn = getattr(tilefold, of or ("attention" if varlen is None else "attention_varlen"))
    out, lse = call(fn, leaves, varlen, {**options, "return_lse": True})
    given = (dout,) if dlse is None else (dout, dlse)
    return torch.autograd.grad((out, lse)[: len(given)], leaves, given)


def oracle(tensors, dout, dlse, dtype, varlen=None, fixed=(), of=None, **options):
    """Gradients of sum(out dout) + sum(lse dlse) over the rows that see a key, in fp64, as computed for `dtype`."""
    leaves, options = learned(tensors, {n: o for n, o in options.items() if n not in OURS}, torch.float64, fixed)
    fn = getattr(reference, of or ("attention" if varlen is None else "attention_varlen"))
    out, lse = call(fn, leaves, varlen, {**options, "dtype": dtype})
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * dlse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def with_stored_ds(plain, tensors, dout, dlse, **options):
    """plain, of a call whose plan stores dS: where the bias is shared its gradient is a sum of numbers of q's dtype, each off by
    up to half a unit in its last place, evenly."""
    q, bias = tensors[0], options["bias"]
    batch, *sides = q.shape[:-1]
    shape = batch, sides[0 if options.get("layout") == "bhsd" else 1], *bias.shape[2:]
    if shape == bias.shape:
        return plain
    each = oracle(tensors, dout, dlse, torch.float64, **options | {"bias": bias.expand(shape)})[3]
    variances = (binade(each.abs()) * torch.finfo(q.dtype).eps / 2).square() / 3
    exact = each.sum_to_size(bias.shape)
    off = torch.hypot(plain[3] - exact, variances.sum_to_size(bias.shape).sqrt())
    return *plain[:3], exact + off, *plain[4:]


def upstream(q, v, layout="bshd", lse=True):
    """Random gradients of out and, or None, of lse; of a packed call too."""
    heads, rows = (q.shape[-3], q.shape[-2]) if layout == "bhsd" else (q.shape[-2], q.shape[-3])
    dout = rand(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    return dout, rand(*q.shape[:-3], heads, rows, device=q.device) if lse else None


def judged(got, want, plain, note, names=("dq", "dk", "dv")):
    for name, *three in zip(names, got, want, plain, strict=True):
        judge(*three, f"{name} {note}")


def small_backward(tensors, tile, kernel, varlen, shares, options):
    """The backward plan with tiles so small that short sequences span several; None: the planner's own, or the kernel's."""
    leaves, options = learned(tensors, options)
    where = {} if varlen is None else dict(zip(WHERE, varlen, strict=True))
    plan = tilefold.attention_backward_plan(*leaves[:3], **where, **options)
    if tile is not None:
        tile = Tile(*tile, 4, 1)
        plan = plan.with_tiles(tile, tile, tile, kernel=kernel, bias_shares=shares)
    elif kernel is not None and plan.kernel != kernel:
        plan = plan.with_tiles(kernel=kernel)
    return plan


def check_gradients(
    q, k, v, lse=True, tile: tuple[int, int] | None = (16, 16), kernel=None, varlen=None, shares=None,
    twins: dict[str, Any] | None = None, unjudged: tuple[str, ...] = (), **options: Any,
):  # fmt: skip
    """Hold tilefold's gradients to the oracle's.  twins: Python versions of score_mod and mask_mod.  unjudged: gradients of so
    few numbers that their errors make no statistic, only held to be finite."""
    dout, dlse = upstream(q, v, options.get("layout", "bshd"), lse)
    python = {**options, **(twins or {})}
    if 0 not in q.shape:
        options["backward_plan"] = small_backward((q, k, v), tile, kernel, varlen, shares, options)
    got = gradients((q, k, v), dout, dlse, varlen, **options)
    want = oracle((q, k, v), dout, dlse, torch.float64, varlen, **python)
    plain = oracle((q, k, v), dout, dlse, q.dtype, varlen, **python)
    names = ["dq", "dk", "dv", *(f"d{name}" for name in LEARNED if options.get(name) is not None)]
    names += [f"dargs[{i}]" for i in learned_args(options)]
    note = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {kernel} {sorted(options)}"
    for name, a, b, c in zip(names, got, want, plain, strict=True):
        if name in unjudged:
            assert a.isfinite().all(), name
            continue
        judge(a, b, c, f"{name} {note}")
    return got
