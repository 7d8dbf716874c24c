"""Gradients of block-sparse attention on a GPU: planned tiles at real sizes, graphs with changed lists, the same bits, memory."""

import pytest
import torch

import tilefold
from cases import judge, qkv
from index_cases import top
from tilefold import reference
from tilefold.ops import sparse as sparse_ops
from tilefold.ops import sparse_backward as backward_ops

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.no_poison


def gradients(attend, inputs, dout, dlse):
    out, lse = attend(*inputs)
    return torch.autograd.grad((out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)))


def held(q, k, v, index, **options):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    dout = torch.randn(*q.shape[:3], v.shape[3], device=DEVICE, dtype=q.dtype)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=DEVICE)
    live = reference.sparse_attention(q, k, v, index)[1].isfinite()
    dlse = torch.where(live, dlse, 0.0)
    got = gradients(lambda *t: tilefold.sparse_attention(*t, index, return_lse=True, **options), inputs, dout, dlse)
    exact, plain = (
        gradients(
            lambda *t, d=d: _live(reference.sparse_attention(*t, index, dtype=d)),
            [t.detach().to(d).requires_grad_() for t in inputs],
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


def test_graph_replays_with_changed_lists():
    inputs = [t.requires_grad_() for t in qkv(1, 512, 2048, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)]
    index = top(512, 2048, 9)
    dout = torch.randn(1, 512, 4, 128, device=DEVICE, dtype=torch.bfloat16)

    def step():
        turned = index.with_tensors(*index.tensors())  # a record of its own: its transpose belongs to the graph
        return torch.autograd.grad(tilefold.sparse_attention(*inputs, turned), inputs, dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
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


def test_memory_of_the_portable_kernels():
    """Beside the gradients and two fp32 numbers a query and head nothing is allocated: no scores, no copies."""
    inputs = [t.requires_grad_() for t in qkv(1, 4096, 4096, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)]
    index = top(4096, 4096, 8)
    index.transpose()
    call = sparse_ops.SparseCall(sparse_ops.Lists(*index.tensors(), *index.geometry))
    plan = backward_ops._plan(sparse_ops.prepare(*inputs, call), call, inputs[0], portable=True)
    out = tilefold.sparse_attention(*inputs, index, backward_plan=plan)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, inputs, dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, inputs, dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
    assert extra <= 2 * 4 * 4096 * 4 + 4096


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
