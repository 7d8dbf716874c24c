"""What only a GPU shows: compilations, graphs, streams, large tensors, the planned tiles, few queries, several devices."""

import gc
from functools import partial

import pytest
import torch

import tilefold
from cases import check, dense_plan, dilated, dilated_twin, hold, packed, qkv, rand, same
from cases.device import DEVICE, alike_every_run, captured, compiled_once, followed, no_waiting
from tilefold import reference
from tilefold.plan import DecodePlan

pytestmark = pytest.mark.no_poison


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [32, 40, 64, 96, 128, 192, 256, 320, 512])
def test_planned_tiles(dim, dtype):
    """The planner's own tiles, lengths that are no multiple of anything."""
    q, k, v = qkv(2, 333, 1001, 8, 2, dim, dtype=dtype, device=DEVICE)
    for options in ({}, {"causal": True}, {"window": (200, 50)}, {"softcap": 5.0, "sinks": rand(8, device=DEVICE)}):
        check(q, k, v, None, **options)


@pytest.mark.parametrize("dim", [64, 128, 512])
def test_planned_mods(dim):
    q, k, v = qkv(2, 500, 700, 4, 2, dim, dtype=torch.bfloat16, device=DEVICE)
    check(q, k, v, None, bias=rand(2, 1, 500, 700, dtype=torch.bfloat16, device=DEVICE), causal=True)
    check(q, k, v, None, mask=rand(1, 4, 500, 700, device=DEVICE) > 0, alibi_slopes=rand(4, device=DEVICE).abs())


def test_planned_varlen():
    lengths = [500, 0, 33, 1, 1000], [700, 30, 0, 999, 1000]
    for dim in (64, 128, 512):
        tensors, where = packed(*lengths, h=8, hk=2, d=dim, dv=dim, dtype=torch.bfloat16, device=DEVICE)
        for options in ({}, {"causal": True}, {"window": (100, 0)}):
            check(*tensors, None, varlen=where, **options)


def test_one_compilation_serves_all_lengths():
    """Lengths, batch, heads, group, scale and window are run-time values."""
    from tilefold.kernels.dense import attention_forward as kernels

    made = kernels.attention_forward, kernels.attention_forward_box, kernels.attention_forward_varlen

    def run(b, sq, sk, h, hk, scale, window):
        q, k, v = qkv(b, sq, sk, h, hk, 64, dtype=torch.bfloat16, device=DEVICE)
        tilefold.attention(q, k, v, scale=scale, window=window, plan=_fixed(q, k, v, window))

    calls = (
        (2, 300, 400, 4, 2, 0.1, (100, 10)),
        (1, 301, 1000, 8, 8, 0.2, (7, 3)),
        (3, 1, 1, 16, 2, 1.0, (0, 0)),
        (2, 4096, 777, 2, 2, 0.5, (5000, 1)),
    )
    compiled_once(made, [partial(run, *call) for call in calls])


def test_one_compilation_serves_all_integers_of_a_mod():
    """1, multiples of 16 and others; the results are those of each."""
    from tilefold.kernels.dense import attention_forward as kernels

    q, k, v = qkv(1, 300, 400, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    options = {"mask_mod": dilated, "twins": {"mask_mod": dilated_twin}, "kernel": "attention_forward"}
    runs = [partial(check, q, k, v, mask_args=(step,), **options) for step in (7, 1, 16, 3, 32)]
    compiled_once(kernels.attention_forward, runs)


def _fixed(q, k, v, window):
    plan = dense_plan(tilefold.attention_plan(q, k, v, window=window))
    return plan.with_tile(kernel="attention_forward", block_m=64, block_n=64, num_warps=4, num_stages=2)


@pytest.mark.parametrize("dim", [64, 128])
def test_cuda_graph_replays_with_changed_inputs(dim):
    q, k, v = qkv(2, 300, 500, 8, 2, dim, dtype=torch.bfloat16, device=DEVICE)
    sinks = rand(8, device=DEVICE)
    graph, (out, lse) = captured(lambda: tilefold.attention(q, k, v, causal=True, sinks=sinks, return_lse=True))
    for _ in range(3):
        for t in (q, k, v, sinks):
            t.copy_(torch.randn_like(t))
        graph.replay()
        hold((out, lse), reference.attention, q, k, v, what="of a graph", causal=True, sinks=sinks)


def test_varlen_graph_with_changed_offsets():
    """Other lengths inside the planned maxima: the offsets are read on the device only."""
    q, k, v = (rand(600, 4, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    cu = torch.tensor([0, 100, 300, 600], dtype=torch.int32, device=DEVICE)
    graph, out = captured(lambda: tilefold.attention_varlen(q, k, v, cu, cu, 600, 600, causal=True))
    for offsets in ([0, 600, 600, 600], [0, 1, 2, 600], [0, 250, 251, 600]):
        cu.copy_(torch.tensor(offsets, dtype=torch.int32))
        graph.replay()
        hold(out, reference.attention_varlen, q, k, v, cu, cu, 600, 600, what=f"graph {offsets}", causal=True)


def test_side_stream():
    """The launch goes to the current stream: work queued before it on that stream is seen."""
    q, k, v = qkv(1, 200, 300, 2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    want = tilefold.attention(2 * q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        got = tilefold.attention(2 * q, k, v)
    stream.synchronize()
    assert torch.equal(got, want)


def test_no_host_synchronisation():
    q, k, v = qkv(1, 200, 300, 2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    cu = torch.tensor([0, 50, 200], dtype=torch.int32, device=DEVICE)
    flat = [t[0, :200] for t in (q, k, v)]
    bias = rand(1, 1, 200, 300, device=DEVICE)
    with no_waiting():
        tilefold.attention(q, k, v, causal=True, bias=bias)
        tilefold.attention_varlen(*flat, cu, cu, 150, 150, causal=True)


def test_same_bits_in_twenty_runs():
    q, k, v = qkv(2, 1000, 1500, 8, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    alike_every_run(lambda: tilefold.attention(q, k, v, causal=True, return_lse=True), 20)


def test_long_sequence():
    """128k keys: a sample of rows against fp64."""
    n = 131072
    q, k, v = qkv(1, 256, n, 4, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    check(q, k, v, None, causal=True)


@pytest.mark.large
def test_more_than_2_to_the_31_elements():
    """q, k, v and out beyond 2^31 elements each: the last batch entry is held to the oracle."""
    gc.collect()
    torch.cuda.empty_cache()
    b, s, h, d = 33, 8192, 64, 128
    assert b * s * h * d > 1 << 31
    q, k, v = (torch.randn(b, s, h, d, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    out, lse = tilefold.attention(q, k, v, causal=True, return_lse=True)
    rows = slice(s - 64, s)
    for i_b, i_h in ((0, 0), (b - 1, h - 1), (b - 1, 0)):
        one = [t[i_b : i_b + 1, :, i_h : i_h + 1] for t in (q, k, v)]
        got = out[i_b : i_b + 1, rows, i_h : i_h + 1], lse[i_b : i_b + 1, i_h : i_h + 1, rows]
        hold(got, reference.attention, one[0][:, rows], *one[1:], what=f"of {i_b}, {i_h}", causal=True)
    flat = [t.view(b * s, h, d) for t in (q, k, v)]
    cu = torch.arange(b + 1, dtype=torch.int32, device=DEVICE) * s
    packed, packed_lse = tilefold.attention_varlen(*flat, cu, cu, s, s, causal=True, return_lse=True)
    torch.testing.assert_close(packed.view_as(out)[-1, -64:], out[-1, -64:], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(packed_lse[:, -64:], lse[-1, :, -64:], rtol=1e-4, atol=1e-4)


@pytest.mark.large
def test_far_bias_offsets():
    """A bias of more than 2^31 elements."""
    gc.collect()
    torch.cuda.empty_cache()
    n = 46400
    assert n * n > 1 << 31
    bias = torch.randn(1, 1, n, n, dtype=torch.bfloat16, device=DEVICE)
    q, k, v = qkv(1, n, n, 1, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    out = tilefold.attention(q, k, v, bias=bias)
    rows = slice(n - 32, n)
    hold(out[:, rows], reference.attention, q[:, rows], k, v, what="of the last rows", bias=bias[:, :, rows])


def test_inductor():
    torch._dynamo.reset()
    q, k, v = qkv(2, 300, 500, 8, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    compiled = torch.compile(lambda q, k, v: tilefold.attention(2 * q, k, v, causal=True) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), tilefold.attention(2 * q, k, v, causal=True) + 1)


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    q, k, v = qkv(1, 200, 300, 2, 2, 64, dtype=torch.bfloat16, device="cuda:1")
    check(q, k, v, None, causal=True)
    check(q, k, v, None, causal=True)
    assert torch.cuda.current_device() == 0


# ---------------------------------------------------------------- few queries


BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(("batch", "seq_q", "keys", "heads", "kv_heads"), [
    (1, 1, 8192, 28, 4), (8, 1, 3001, 28, 4), (64, 1, 100, 32, 8), (1, 16, 5000, 8, 1), (3, 64, 700, 2, 2), (2, 5, 300, 7, 1),
])  # fmt: skip
def test_against_fp64(batch, seq_q, keys, heads, kv_heads, dtype):
    for dim, dim_v in ((128, 128), (40, 24)):
        q, k, v = qkv(batch, seq_q, keys, heads, kv_heads, dim, dim_v, dtype, DEVICE)
        assert isinstance(tilefold.attention_plan(q, k, v, causal=True), DecodePlan)
        for options in (
            {"causal": True},
            {"window": (500, 0)},
            {"softcap": 20.0, "sinks": torch.randn(heads, device=DEVICE)},
        ):
            check(q, k, v, tile=None, **options)
        lost = torch.rand(batch, 1, 1, keys, device=DEVICE) > 0.5
        check(q, k, v, tile=None, causal=True, mask=lost)


def test_packed():
    tensors, offsets = packed([1, 3, 0, 2], [5000, 17, 100, 900], 28, 4, 128, 128, BF16, DEVICE)
    check(*tensors, tile=None, varlen=offsets, causal=True)


def test_graphs_compiled_functions_and_bits():
    q, k, v = qkv(2, 1, 4097, 28, 4, 128, None, BF16, DEVICE)

    def call(q, k, v):
        return tilefold.attention(q, k, v, causal=True, return_lse=True)

    right = call(q, k, v)
    with no_waiting():
        again = call(q, k, v)
    assert same(right, again)
    found = torch.compile(call, fullgraph=True)(q, k, v)
    assert same(right, found)
    followed(lambda: call(q, k, v), *[q.normal_] * 3)
