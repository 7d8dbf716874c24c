"""Gradients of block-sparse attention on a GPU: planned tiles at real sizes, graphs with changed lists, the same bits, memory."""

import pytest
import torch

import tilefold
from cases import judge, qkv
from graphs import captured
from index_cases import top
from tilefold import BlockIndex, reference
from tilefold.ops.device import device_of
from tilefold.plan.sparse_backward import plan_sparse_backward

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.no_poison
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="kernels for sm_90"
)


def gradients(attend, inputs, dout, dlse):
    out, lse = attend(*inputs)
    return torch.autograd.grad((out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)))


def held(q, k, v, index, kernel=None, **options):
    if kernel is not None:
        plan = plan_sparse_backward(tilefold.sparse_plan(q, k, v, index).problem, device_of(DEVICE))
        options["backward_plan"] = plan.with_tiles(kernel=kernel)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    dout = torch.randn(*q.shape[:3], v.shape[3], device=DEVICE, dtype=q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=DEVICE)
    live = reference.sparse_attention(q, k, v, index)[1].isfinite()
    dlse = torch.where(live, dlse, 0.0)
    got = gradients(lambda *t: tilefold.sparse_attention(*t, index, return_lse=True, **options), inputs, dout, dlse)
    exact, plain = (
        gradients(
            lambda *t, d=d: _live(reference.sparse_attention(*t, index, dtype=d)),
            [t.detach().double().requires_grad_() for t in inputs],
            dout,
            dlse,
        )
        for d in (torch.float64, q.dtype)
    )
    for name, a, b, c in zip(("dq", "dk", "dv"), got, exact, plain, strict=True):
        judge(a, b, c, f"{name} {tuple(q.shape)} {q.dtype} {options}")


def _live(result):
    out, lse = result
    return out, torch.where(lse.isfinite(), lse, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_planned_tiles(dim, dtype):
    q, k, v = qkv(2, 500, 1000, 4, 2, dim, dtype=dtype, device=DEVICE)
    sizes = torch.randint(0, 65, (16,), dtype=torch.int32, device=DEVICE)
    for index in (top(500, 1000, 7), top(500, 1000, 7, block_sizes=sizes), top(500, 1000, 3, batch=2)):
        held(q, k, v, index)


@hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_kernel(dim, dtype):
    """The kernels that the plan does not choose by itself as well."""
    q, k, v = qkv(2, 500, 1000, 4, 2, dim, dtype=dtype, device=DEVICE)
    for kernel in ("sparse_backward", "sparse_backward_box", "sparse_backward_hopper"):
        held(q, k, v, top(500, 1000, 7), kernel)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whole_blocks(dtype):
    """No tails: nothing is masked."""
    for dim, heads in ((64, 4), (128, 4)):
        q, k, v = qkv(2, 512, 1024, 4, heads, dim, dtype=dtype, device=DEVICE)
        held(q, k, v, top(512, 1024, 7))


def test_query_sizes():
    q, k, v = qkv(1, 500, 700, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    queries = torch.randint(0, 65, (8,), dtype=torch.int32, device=DEVICE)
    held(q, k, v, top(500, 700, 5, query_sizes=queries))
    sizes = torch.randint(0, 65, (11,), dtype=torch.int32, device=DEVICE)
    held(q, k, v, top(500, 700, 5, query_sizes=queries, block_sizes=sizes))


def test_graph_replays_with_changed_lists():
    inputs = [t.requires_grad_() for t in qkv(1, 512, 2048, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)]
    index = top(512, 2048, 9)
    dout = torch.randn(1, 512, 4, 128, device=DEVICE, dtype=torch.bfloat16)

    def step():
        turned = index.with_tensors(*index.tensors())  # a record of its own: its transpose belongs to the graph
        return torch.autograd.grad(tilefold.sparse_attention(*inputs, turned), inputs, dout)

    graph, got = captured(step)
    for keep in (1, 9, 5):
        other = top(512, 2048, keep)
        index.indices[..., :keep].copy_(other.indices)
        index.counts.copy_(other.counts)
        graph.replay()
        want = step()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_same_bits_and_no_synchronisation():
    inputs = [t.requires_grad_() for t in qkv(1, 1024, 2048, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)]
    index = top(1024, 2048, 20)
    dout = torch.randn(1, 1024, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    first = torch.autograd.grad(tilefold.sparse_attention(*inputs, index), inputs, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [torch.autograd.grad(tilefold.sparse_attention(*inputs, index), inputs, dout) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for run in runs for a, b in zip(first, run, strict=True))


@pytest.mark.parametrize("kernel", [None, "sparse_backward_box"])
def test_memory(kernel):
    """Beside the gradients: two fp32 numbers a query and head, and what the plan says is kept of ds; no scores, no copies."""
    inputs = [t.requires_grad_() for t in qkv(1, 4096, 4096, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)]
    index = top(4096, 4096, 8)
    turned = index.transpose()
    plan = plan_sparse_backward(tilefold.sparse_plan(*inputs, index).problem, device_of(DEVICE))
    plan = plan if kernel is None else plan.with_tiles(kernel=kernel)
    out = tilefold.sparse_attention(*inputs, index, backward_plan=plan)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, inputs, dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, inputs, dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
    places = turned.indices.numel() * 4 if plan.scratch_bytes else 0
    assert extra <= 2 * 4 * 4096 * 4 + plan.scratch_bytes + places + 8192
    assert (plan.scratch_bytes > 0) == (kernel is None)


@hopper
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dim", [64, 128])
def test_some_heads_at_a_time(dim, heads):
    """Whatever the number of heads whose dS is kept at a time: the same bits."""
    inputs = [t.requires_grad_() for t in qkv(2, 500, 1000, 8, 2, dim, dtype=torch.float16, device=DEVICE)]
    index = top(500, 1000, 7, heads=8)
    dout = torch.randn(2, 500, 8, dim, device=DEVICE, dtype=torch.float16)
    plan = plan_sparse_backward(tilefold.sparse_plan(*inputs, index).problem, device_of(DEVICE))
    every, other = (plan.with_tiles(kernel="sparse_backward_hopper", heads_at_once=n) for n in (4, heads))
    want, got = (
        torch.autograd.grad(tilefold.sparse_attention(*inputs, index, backward_plan=p), inputs, dout)
        for p in (every, other)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
def test_padding_may_hold_nan(dim):
    """Keys past their block's size and queries past theirs, empty lists and empty blocks first, in the middle and last."""
    q, k, v = qkv(2, 500, 900, 4, 4, dim, dtype=torch.bfloat16, device=DEVICE)
    sizes = torch.randint(0, 65, (15,), dtype=torch.int32, device=DEVICE)
    queries = torch.randint(0, 65, (8,), dtype=torch.int32, device=DEVICE)
    sizes[[0, 7]], queries[[0, 3]] = 0, 0
    keep = torch.rand(2, 4, 8, 15, device=DEVICE) < 0.5
    keep[:, :, 1] = False
    keep[:, :, :, [4, 14]] = False
    index = BlockIndex.from_map(keep, seq_q=500, seq_k=900, block_sizes=sizes, query_sizes=queries)
    dout = torch.randn(2, 500, 4, dim, device=DEVICE, dtype=torch.bfloat16)

    plan = plan_sparse_backward(tilefold.sparse_plan(q, k, v, index).problem, device_of(DEVICE))
    plan = plan.with_tiles(kernel="sparse_backward_hopper") if torch.cuda.get_device_capability() == (9, 0) else plan

    def gradients_of(*tensors):
        inputs = [t.detach().requires_grad_() for t in tensors[:3]]
        out = tilefold.sparse_attention(*inputs, index, backward_plan=plan)
        return torch.autograd.grad(out, inputs, tensors[3])

    want = gradients_of(q, k, v, dout)
    at_k, at_q = torch.arange(900, device=DEVICE), torch.arange(500, device=DEVICE)
    bad_k, bad_q = at_k % 64 >= sizes.long()[at_k // 64], at_q % 64 >= queries.long()[at_q // 64]
    k[:, bad_k], v[:, bad_k], q[:, bad_q], dout[:, bad_q] = (float("nan"),) * 4
    got = gradients_of(q, k, v, dout)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not got[0][:, bad_q].any()
    assert not got[1][:, bad_k].any()
    assert not got[2][:, bad_k].any()


@pytest.mark.large
def test_more_than_2_to_the_31_elements():
    b, s, h, d = 33, 8192, 64, 128
    assert b * s * h * d > 1 << 31
    inputs = [torch.randn(b, s, h, d, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for _ in range(3)]
    index = top(s, s, 2, heads=1)
    dout = torch.randn(b, s, h, d, dtype=torch.bfloat16, device=DEVICE)
    grads = torch.autograd.grad(tilefold.sparse_attention(*inputs, index), inputs, dout)
    for i_b, i_h in ((0, 0), (b - 1, h - 1)):
        cut = (slice(i_b, i_b + 1), slice(None), slice(i_h, i_h + 1))
        one = [t.detach()[cut].contiguous().requires_grad_() for t in inputs]
        alone = torch.autograd.grad(tilefold.sparse_attention(*one, index), one, dout[cut].contiguous())
        assert all(torch.equal(a[cut], b) for a, b in zip(grads, alone, strict=True))
