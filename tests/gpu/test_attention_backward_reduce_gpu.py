"""The Gluon kernel that adds dq in memory against the fp64 oracle and the kernel that keeps the order of its sums."""

import math

import pytest
import torch

import tilefold
from cases import judge, qkv, rand
from gradient_cases import gradients, oracle
from graphs import captured
from tilefold.plan.attention_backward_reduce import KERNEL, ORDERS, ReduceOptions
from tilefold.reference.rounding import Rounding

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.no_poison,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
    ),
]
MASKS = [{}, {"causal": True}, {"window": (200, 50)}, {"window": (0, 0)}, {"window": (130, -1)}, {"window": (-1, 64)}]
LENGTHS = ((1, 1), (127, 129), (128, 128), (333, 1001), (1001, 333), (64, 2000), (2000, 63))
VERSIONS = [
    (dim, ReduceOptions(slots, order, stagger, fence, rounded))
    for dim, orders in ((64, (ORDERS[0], ORDERS[2])), (128, ORDERS))
    for order in orders
    for slots, stagger, fence, rounded in ((0, 0, True, dim == 64), (1, 3, False, True), (2, 2, True, dim == 64))
]


def forced(q, k, v, options=None, heads_at_once=None, **call):
    """A plan with the kernel, whether plans take it by themselves or not."""
    plan = tilefold.attention_backward_plan(q, k, v, **call)
    return plan.with_tiles(kernel=KERNEL, options=options, heads_at_once=heads_at_once)


def upstream(q, v, layout="bshd"):
    heads, rows = (q.shape[1], q.shape[2]) if layout == "bhsd" else (q.shape[2], q.shape[1])
    dout = rand(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=DEVICE)
    return dout, rand(q.shape[0], heads, rows, device=DEVICE)


class RoundedTwice(torch.autograd.Function):
    """Scores, whose gradient is rounded once more: a factor of dS, the probabilities, is rounded before they are multiplied."""

    @staticmethod
    def forward(ctx, s, *_):
        return s.view_as(s)

    @staticmethod
    def backward(ctx, grad):
        return Rounding.entered[-1].narrowed(grad) if Rounding.entered else grad, *[None] * 5


def held(q, k, v, options=None, **call):
    """Hold the kernel to the oracle; dk and dv have the same bits every run, also with fewer heads at a time."""
    dout, dlse = upstream(q, v, call.get("layout", "bshd"))
    plan = forced(q, k, v, options, **call)
    got = gradients((q, k, v), dout, dlse, backward_plan=plan, **call)
    want = oracle((q, k, v), dout, dlse, torch.float64, **call)
    plain = oracle(
        (q, k, v), dout, dlse, q.dtype, score_mod=RoundedTwice.apply if plan.options.rounded else None, **call
    )
    note = f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {options} {call}"
    for name, a, b, c in zip(("dq", "dk", "dv"), got, want, plain, strict=True):
        judge(a, b, c, f"{name} {note}")
    again = gradients((q, k, v), dout, dlse, backward_plan=forced(q, k, v, options, 1, **call), **call)
    assert all(torch.equal(a, b) for a, b in zip(got[1:], again[1:], strict=True))
    judge(again[0], want[0], plain[0], f"dq again {note}")


@pytest.mark.parametrize(("dim", "options"), VERSIONS, ids=str)
def test_versions(dim, options):
    for call in (MASKS[0], MASKS[1], MASKS[2]):
        for sq, sk in ((127, 129), (333, 1001), (1001, 333)):
            held(*qkv(2, sq, sk, 4, 2, dim, dtype=torch.bfloat16, device=DEVICE), options, **call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("call", MASKS, ids=str)
def test_lengths(call, dim, dtype):
    for sq, sk in LENGTHS:
        held(*qkv(2, sq, sk, 4, 2, dim, dtype=dtype, device=DEVICE), **call)


@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (12, 3), (7, 1)])
@pytest.mark.parametrize("call", MASKS[:3], ids=str)
def test_heads(heads, call):
    held(*qkv(3, 400, 700, *heads, 128, dtype=torch.bfloat16, device=DEVICE), **call)


@pytest.mark.parametrize("dim", [64, 128])
def test_strides_and_layouts(dim):
    packed = rand(2, 500, 3, 4, dim, dtype=torch.bfloat16, device=DEVICE).unbind(2)
    held(*packed)
    transposed = [t.transpose(1, 2) for t in qkv(2, 4, 4, 500, 500, dim, dtype=torch.bfloat16, device=DEVICE)]
    held(*transposed, causal=True)
    held(*(t.transpose(1, 2) for t in packed), layout="bhsd")


@pytest.mark.parametrize("call", [{}, {"causal": True}, {"window": (1000, 0)}], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_thirty_runs_and_the_deterministic_kernel(dim, call):
    """No synchronisation; dk and dv always alike; dq to fp32's rounding of its sums; what the other kernel makes, to rounding."""
    q, k, v = qkv(2, 4096, 4096, 16, 8, dim, dtype=torch.bfloat16, device=DEVICE)
    dout, dlse = upstream(q, v)
    plan = tilefold.attention_backward_plan(q, k, v, **call).with_tiles(kernel=KERNEL)
    first = gradients((q, k, v), dout, dlse, backward_plan=plan, **call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [gradients((q, k, v), dout, dlse, backward_plan=plan, **call) for _ in range(30)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for run in runs:
        assert all(torch.equal(a, b) for a, b in zip(first[1:], run[1:], strict=True))
        assert (first[0].double() - run[0].double()).norm() <= 1e-3 * first[0].double().norm()
    for a, b in zip(first, gradients((q, k, v), dout, dlse, **call), strict=True):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


def test_hard_numbers():
    """Logits of 1e4, numbers below the least normal one, and a NaN that stays in the rows it is in."""
    for dim in (64, 128):
        for size in (100.0, 1e-30):
            q, k, v = (t * size for t in qkv(1, 300, 500, 4, 4, dim, dtype=torch.bfloat16, device=DEVICE))
            dout, _ = upstream(q, v)
            got = gradients((q, k, v), dout, None, backward_plan=forced(q, k, v), scale=1.0)
            assert all(g.isfinite().all() for g in got)
        q, k, v = qkv(1, 512, 512, 2, 2, dim, dtype=torch.bfloat16, device=DEVICE)
        dout, _ = upstream(q, v)
        plan = forced(q, k, v, causal=True)
        clean = gradients((q, k, v), dout, None, backward_plan=plan, causal=True)
        q[0, 500, 0] = math.nan
        dirty = gradients((q, k, v), dout, None, backward_plan=plan, causal=True)
        assert dirty[0][0, 500, 0].isnan().all()
        assert not dirty[0][:, :384].isnan().any()
        for a, b in zip(clean[1:], dirty[1:], strict=True):
            assert torch.equal(a[:, :, 1], b[:, :, 1])  # the other head


def test_graph():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2048, 2048, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE))
    plan = forced(q, k, v, causal=True)
    dout = rand(1, 2048, 16, 128, dtype=torch.bfloat16, device=DEVICE)

    def step():
        return torch.autograd.grad(tilefold.attention(q, k, v, causal=True, backward_plan=plan), (q, k, v), dout)

    graph, got = captured(step)
    for _ in range(3):
        with torch.no_grad():
            q.copy_(rand(*q.shape, dtype=q.dtype, device=DEVICE))
        graph.replay()
        now = step()
        assert all(torch.equal(a, b) for a, b in zip(got[1:], now[1:], strict=True))
        assert (got[0].double() - now[0].double()).norm() <= 1e-3 * now[0].double().norm()


def test_memory():
    """Beside the gradients: the fp32 sums of dq, and statistics."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 4096, 4096, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE))
    plan = forced(q, k, v, causal=True)
    out = tilefold.attention(q, k, v, causal=True, backward_plan=plan)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
    assert extra <= plan.scratch_bytes + 8192


def test_compiled():
    """torch.compile passes deterministic on."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 16384, 16384, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE))
    dout = rand(1, 16384, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    assert tilefold.attention_backward_plan(q, k, v, causal=True, deterministic=False).kernel == KERNEL

    def f(q, k, v):
        return tilefold.attention(q, k, v, causal=True, deterministic=False)

    want = torch.autograd.grad(f(q, k, v), (q, k, v), dout)
    got = torch.autograd.grad(torch.compile(f, fullgraph=True)(q, k, v), (q, k, v), dout)
    assert all(torch.equal(a, b) for a, b in zip(got[1:], want[1:], strict=True))
    assert (got[0].double() - want[0].double()).norm() <= 1e-3 * want[0].double().norm()
