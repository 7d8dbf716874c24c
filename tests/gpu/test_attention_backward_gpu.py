"""Gradients of dense attention on a GPU: planned tiles at real sizes, reruns, graphs, compilations, memory, no waiting."""

from functools import partial

import pytest
import torch

import tilefold
from cases import loads, packed, prefix, prefix_twin, qkv, rand, same, squashed, squashed_twin
from cases.device import DEVICE, alike_every_run, captured, compiled_once, memory_beside, no_waiting
from cases.gradient import check_gradients, gradients, judged, oracle
from tilefold.plan.limits import Tile

pytestmark = pytest.mark.no_poison


@pytest.mark.parametrize("portable", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [32, 40, 64, 96, 128, 192, 256, 320, 512])
def test_planned_tiles(monkeypatch, dim, dtype, portable):
    """The planner's own tiles, lengths that are no multiple of anything, with one head a KV head and with four."""
    if portable == "1" and (dim not in (64, 128) or dtype == torch.float32):
        pytest.skip("planned as portable anyway")
    monkeypatch.setenv("TILEFOLD_DISABLE_HOPPER", portable)
    for kv_heads in (1, 4):
        q, k, v = qkv(
            2, 333 + int(portable), 1001, 4, kv_heads, dim, dtype=dtype, device=DEVICE
        )  # a new shape: see ops.hopper.disabled
        for options in ({}, {"causal": True}, {"window": (200, 50)}):
            check_gradients(q, k, v, tile=None, **options)


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_planned_options(dim):
    q, k, v = qkv(2, 500, 700, 4, 2, dim, dtype=torch.bfloat16, device=DEVICE)
    check_gradients(q, k, v, tile=None, softcap=5.0, sinks=rand(4, device=DEVICE), causal=True, unjudged=("dsinks",))
    mask = rand(1, 4, 500, 700, device=DEVICE) > 0
    check_gradients(q, k, v, tile=None, mask=mask, alibi_slopes=rand(4, device=DEVICE).abs())
    check_gradients(q, k, v, tile=None, mask_mod=prefix, mask_args=(40,), twins={"mask_mod": prefix_twin})
    derived = {"score_mod": squashed, "score_args": (3.0,), "twins": {"score_mod": squashed_twin}}  # no score_grad
    check_gradients(q, k, v, tile=None, causal=True, **derived)
    for shape in ((2, 4, 500, 700), (1, 4, 500, 700), (2, 1, 1, 700), (1, 1, 1, 700)):
        check_gradients(q, k, v, tile=None, bias=rand(*shape, dtype=torch.bfloat16, device=DEVICE), causal=True)


@pytest.mark.parametrize("dim", [64, 128, 512])
def test_planned_varlen(dim):
    lengths = [500, 0, 33, 1, 1000], [700, 30, 0, 999, 1000]
    tensors, where = packed(*lengths, h=8, hk=2, d=dim, dv=dim, dtype=torch.bfloat16, device=DEVICE)
    for options in ({}, {"causal": True}, {"window": (100, 0)}):
        check_gradients(*tensors, tile=None, varlen=where, **options)


@pytest.mark.parametrize("kernel", ["attention_backward", "attention_backward_box"])
@pytest.mark.parametrize("tile", [(16, 16, 4, 1), (32, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2)])
def test_given_tiles(tile, kernel):
    if kernel == "attention_backward_box" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("boxes are read by sm_90 and newer")
    q, k, v = qkv(1, 300, 400, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    chosen = Tile(*tile)
    plan = tilefold.attention_backward_plan(q, k, v, causal=True).with_tiles(chosen, chosen, kernel=kernel)
    dout = rand(1, 300, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    got = gradients((q, k, v), dout, None, causal=True, backward_plan=plan)
    want, plain = (oracle((q, k, v), dout, None, d, causal=True) for d in (torch.float64, q.dtype))
    judged(got, want, plain, f"{tile} {kernel}")


def learned_mod(seq_k, heads=4):
    """A mod that loads from two tensors that are learned."""
    factors, rows = (rand(n, device=DEVICE).requires_grad_() for n in (heads, seq_k))
    columns = torch.randperm(seq_k, dtype=torch.int32).to(DEVICE)
    return {"score_mod": loads.mixed, "score_args": (factors, rows, columns, seq_k - 20)}


def test_gradients_of_score_args():
    """Held to fp64; the same bits in ten runs; without waiting for the device; in any order nearly the same."""
    q, k, v = qkv(2, 200, 300, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    options = learned_mod(300)
    check_gradients(q, k, v, tile=None, causal=True, twins={"score_mod": loads.mixed_twin}, **options)
    dout = rand(2, 200, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    first = gradients((q, k, v), dout, None, **options)
    with no_waiting():
        runs = [gradients((q, k, v), dout, None, **options) for _ in range(10)]
    assert all(same(first, run) for run in runs)
    for got, one in zip(gradients((q, k, v), dout, None, deterministic=False, **options), first, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


def test_same_bits_in_fifty_runs():
    q, k, v = qkv(2, 1000, 1500, 8, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    extra = {"bias": rand(1, 8, 1, 1500, device=DEVICE), "sinks": rand(8, device=DEVICE), "causal": True}
    dout, dlse = rand(2, 1000, 8, 128, dtype=torch.bfloat16, device=DEVICE), rand(2, 8, 1000, device=DEVICE)
    alike_every_run(lambda: gradients((q, k, v), dout, dlse, **extra), 50)


def test_no_host_synchronisation():
    q, k, v = qkv(1, 200, 300, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    dout = rand(1, 200, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    extra = {"bias": rand(1, 1, 1, 300, device=DEVICE), "sinks": rand(4, device=DEVICE)}
    with no_waiting():
        gradients((q, k, v), dout, None, causal=True, **extra)


def test_long_and_huge():
    """Lengths where one head's rows are many waves; scores of 1e4 without NaN."""
    q, k, v = qkv(1, 4096, 4096, 2, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    check_gradients(q, k, v, tile=None, causal=True)
    dout = rand(1, 4096, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    assert all(g.isfinite().all() for g in gradients((100 * q, 100 * k, v), dout, None, causal=True))


def test_cuda_graph_of_forward_and_backward():
    """A training step that is captured follows its inputs, packed offsets too."""
    tensors, where = packed(
        [100, 200, 300], [100, 200, 300], h=4, hk=2, d=64, dv=64, dtype=torch.bfloat16, device=DEVICE
    )
    leaves = [t.requires_grad_() for t in tensors]
    dout = rand(600, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    where = (*where[:2], 600, 600)

    def step():
        return torch.autograd.grad(tilefold.attention_varlen(*leaves, *where, causal=True), leaves, dout)

    graph, got = captured(step)
    for offsets in ([0, 600, 600, 600], [0, 1, 2, 600], [0, 250, 251, 600]):
        for each in where[:2]:
            each.copy_(torch.tensor(offsets, dtype=torch.int32))
        with torch.no_grad():
            for t in leaves:
                t.copy_(torch.randn_like(t))
        graph.replay()
        want, plain = (oracle(leaves, dout, None, d, where, causal=True) for d in (torch.float64, leaves[0].dtype))
        judged(got, want, plain, f"{offsets}")


def test_one_compilation_serves_all_lengths():
    """Lengths, batch, heads, group, scale and window are run-time values."""
    from tilefold.kernels.backward import attention_backward as kernels

    made = (kernels.attention_backward_queries, kernels.attention_backward_keys)

    def run(b, sq, sk, h, hk, scale, window):
        q, k, v = qkv(b, sq, sk, h, hk, 64, dtype=torch.bfloat16, device=DEVICE)
        tile = Tile(64, 64, 4, 2)
        plan = tilefold.attention_backward_plan(q, k, v, window=window).with_tiles(
            tile, tile, kernel="attention_backward"
        )
        gradients((q, k, v), torch.ones_like(q), None, scale=scale, window=window, backward_plan=plan)

    calls = (
        (2, 300, 400, 4, 2, 0.1, (100, 10)),
        (1, 301, 1000, 8, 4, 0.2, (7, 3)),
        (3, 17, 33, 16, 2, 1.0, (0, 0)),
        (2, 2048, 777, 4, 1, 0.5, (5000, 1)),
    )
    compiled_once(made, [partial(run, *call) for call in calls])


def test_memory():
    """Beside the gradients: two numbers a query and head, and nothing of the size of the scores."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 8192, 8192, 8, 8, 64, dtype=torch.bfloat16, device=DEVICE))
    plan = tilefold.attention_backward_plan(q, k, v, causal=True).with_tiles(kernel="attention_backward_box")
    out = tilefold.attention(q, k, v, causal=True, backward_plan=plan)
    dout = torch.randn_like(out)
    _, extra = memory_beside(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    assert extra <= plan.scratch_bytes + 4096


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dropout(dim):
    """The planned tiles drop what the oracle drops; packed ones too."""
    drop = {"dropout_p": 0.2, "dropout_seed": torch.tensor([1 << 40], device=DEVICE), "causal": True}
    check_gradients(*qkv(2, 333, 500, 4, 2, dim, dtype=torch.bfloat16, device=DEVICE), tile=None, **drop)
    tensors, where = packed([500, 0, 33], [700, 30, 100], h=4, hk=2, d=dim, dv=dim, dtype=torch.bfloat16, device=DEVICE)
    check_gradients(*tensors, tile=None, varlen=where, **drop)


def test_dropout_in_a_graph():
    """Every replay draws another seed, and the backward pass in it drops what the forward pass did."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 256, 256, 2, 2, 64, dtype=torch.bfloat16, device=DEVICE))

    def step():
        out = tilefold.attention(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, v, torch.ones_like(out))

    graph, (out, dv) = captured(step)
    seen = []
    for _ in range(3):
        graph.replay()
        # out is linear in v: the sum of out is that of v times its gradient
        torch.testing.assert_close(out.float().sum(), (v * dv).float().sum(), rtol=2e-2, atol=2.0)
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
