"""The Gluon kernel for the gradients of block-sparse attention on sm_90 against the fp64 oracle and the portable kernels."""

import pytest
import torch

import tilefold
from cases import judge, qkv, rand
from graphs import captured
from tilefold import BlockIndex, reference
from tilefold.ops.sparse import sparse as sparse_ops
from tilefold.ops.sparse import sparse_backward as backward_ops
from tilefold.plan.sparse_backward import plan_sparse_backward
from tilefold.plan.sparse_backward_hopper import KERNEL, kept_bytes

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)


def lists(b, h, sq, sk, block_q=64, block_k=64, density=0.5, **options):
    """Random lists: query blocks with none, one, two and all KV blocks, a KV block that nobody lists."""
    chosen = torch.rand(b, h, -(-sq // block_q), -(-sk // block_k)) < density
    for row, count in enumerate((0, 1, 2)):
        if row < chosen.shape[2]:
            chosen[..., row, :] = False
            chosen[..., row, -count:] = count > 0
    chosen[..., -1, :] = True
    if chosen.shape[3] > 3:
        chosen[..., 1] = False
    return BlockIndex.from_map(chosen.to(DEVICE), block_q=block_q, block_k=block_k, seq_q=sq, seq_k=sk, **options)


def plan_of(q, k, v, index, portable=False, **options):
    call = sparse_ops.SparseCall(sparse_ops.Lists(*index.tensors(), *index.geometry), **options)
    plan = backward_ops._plan(sparse_ops.prepare(q, k, v, call), call, q)
    assert plan.kernel == KERNEL
    return plan_sparse_backward(plan.problem, plan.device, portable=True) if portable else plan


def gradients(attend, inputs, dout, dlse):
    out, lse = attend(*inputs)
    lse = torch.where(lse.isfinite(), lse, 0.0)
    return torch.autograd.grad((out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)))


def ours(q, k, v, index, dout, dlse, plan=None, **options):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    return gradients(
        lambda *t: tilefold.sparse_attention(*t, index, return_lse=True, backward_plan=plan, **options),
        inputs,
        dout,
        dlse,
    )


def upstream(q):
    return torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], device=DEVICE)


def check(q, k, v, index):
    """Whatever number of heads is done at a time, the bits are the same, and they hold against the oracle."""
    dout, dlse = upstream(q)
    plan = plan_of(q, k, v, index)
    first = ours(q, k, v, index, dout, dlse, plan)
    total = q.shape[0] * k.shape[2]
    for heads in (d for d in range(1, total + 1) if total % d == 0):
        again = ours(q, k, v, index, dout, dlse, plan.with_tiles(heads_at_once=heads))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), heads
    exact, plain = (
        gradients(
            lambda *t, d=d: reference.sparse_attention(*t, index, dtype=d),
            [t.detach().double().requires_grad_() for t in (q, k, v)],
            dout,
            dlse,
        )
        for d in (torch.float64, q.dtype)
    )
    for name, a, b, c in zip(("dq", "dk", "dv"), first, exact, plain, strict=True):
        judge(a, b, c, f"{name} {tuple(q.shape)} {tuple(k.shape)} {q.dtype} {index}")
    return first, dout, dlse, plan


@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lists(dtype, dim, blocks):
    q, k, v = qkv(2, 640, 1024, 4, 2, dim, dtype=dtype, device=DEVICE)
    check(q, k, v, lists(2, 4, 640, 1024, *blocks))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("sq", "sk"), [(500, 1000), (1, 1), (65, 63), (640, 129), (130, 1024)])
def test_tails_and_groups(sq, sk, block):
    q, k, v = qkv(1, sq, sk, 7, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    check(q, k, v, lists(1, 7, sq, sk, block, block))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kind", ["random", "zero", "full"])
def test_sizes(kind, block):
    """What lies past the valid tokens of a KV block or of a query block may be NaN, and gets gradients of 0."""
    q, k, v = qkv(2, 400, 700, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    shape_k, shape_q = (2, 2, -(-700 // block)), (2, 2, -(-400 // block))
    made = {
        "random": lambda s: torch.randint(0, block + 1, s),
        "zero": torch.zeros,
        "full": lambda s: torch.full(s, block),
    }
    sizes, query_sizes = (made[kind](s).to(DEVICE, torch.int32) for s in (shape_k, shape_q))
    index = lists(2, 2, 400, 700, block, block, density=0.7, block_sizes=sizes, query_sizes=query_sizes)
    clean, dout, dlse, plan = check(q, k, v, index)

    def dead(valid, tokens):
        place = torch.arange(tokens, device=DEVICE)
        return (place % block >= valid[..., place // block]).transpose(1, 2)

    dead_k, dead_q = dead(sizes, 700), dead(query_sizes, 400)
    for t, where in ((k, dead_k), (v, dead_k), (q, dead_q), (dout, dead_q)):
        t[where] = float("nan")
    dirty = ours(q, k, v, index, dout, dlse, plan)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all((g[where] == 0).all() for g, where in zip(dirty, (dead_q, dead_k, dead_k), strict=True))


def test_shared_lists_strides_and_layouts():
    """Lists shared over batch and heads; q, k, v cut from one tensor; [B, H, S, D]."""
    index = lists(1, 1, 640, 640)
    q, k, v = rand(3, 640, 3, 4, 128, dtype=torch.bfloat16, device=DEVICE).unbind(2)
    first, dout, dlse, _ = check(q, k, v, index)
    turned = ours(*(t.transpose(1, 2) for t in (q, k, v)), index, dout.transpose(1, 2), dlse, layout="bhsd")
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(first, turned, strict=True))


def test_unsorted_lists():
    q, k, v = qkv(1, 64, 640, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    for order in ([0, 1, 3, 4, 7], [7, 4, 3, 1, 0], [3, 0, 7, 4, 1]):
        indices = torch.tensor([[[order]]], dtype=torch.int32, device=DEVICE)
        counts = torch.full((1, 1, 1), 5, dtype=torch.int32, device=DEVICE)
        check(
            q, k, v, BlockIndex.from_indices(indices, counts, block_q=64, block_k=64, seq_q=64, seq_k=640, sort=False)
        )


@pytest.mark.parametrize("block", [64, 128])
def test_twenty_runs_and_the_portable_kernels(block):
    """Rings that go round many times; no synchronisation; the same bits; what the portable kernels make, to rounding."""
    s = 24 * 6 * block
    q, k, v = qkv(2, s, s, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 4, s, s, block, block, density=0.3)
    dout, dlse = upstream(q)
    first = ours(q, k, v, index, dout, dlse)
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [ours(q, k, v, index, dout, dlse) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for run in runs for a, b in zip(first, run, strict=True))
    portable = ours(q, k, v, index, dout, dlse, plan_of(q, k, v, index, portable=True))
    for a, b in zip(first, portable, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-3 * b.double().norm()


def test_graph_replays_with_changed_lists():
    q, k, v = qkv(1, 640, 1024, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 4, 640, 1024)
    dout, dlse = upstream(q)

    def step():
        return ours(q, k, v, index.with_tensors(*index.tensors()), dout, dlse)  # its transpose belongs to the graph

    graph, got = captured(step)
    for _ in range(3):
        other = lists(1, 4, 640, 1024)
        index.indices.copy_(other.indices)
        index.counts.copy_(other.counts)
        q.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))


@pytest.mark.no_poison
def test_memory():
    """Beside the gradients: room for dS as the plan says, one place an entry, two numbers a query and head."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 4096, 4096, 16, 16, 128, dtype=torch.bfloat16, device=DEVICE))
    keep = torch.rand(1, 16, 64, 64).argsort(-1)[..., :8].sort(-1).values.to(DEVICE, torch.int32)
    counts = torch.full((1, 16, 64), 8, dtype=torch.int32, device=DEVICE)
    index = BlockIndex.from_indices(keep, counts, block_q=64, block_k=64, seq_q=4096, seq_k=4096)
    index.transpose()
    plan = plan_of(q, k, v, index).with_tiles(heads_at_once=2)
    out = tilefold.sparse_attention(q, k, v, index, backward_plan=plan)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
    places, statistics = 16 * 64 * 64 * 4, (16 * 64 + 1) * 128 * 4
    assert kept_bytes(plan.problem, 2) == 4 * 2 * 64 * 8 * 64 * 64 * 2  # four rooms
    assert extra <= kept_bytes(plan.problem, 2) + places + statistics + 4096


def test_one_compilation_serves_all_lengths():
    from tilefold.kernels.hopper.sparse_backward import sparse_backward_hopper

    def compiled():
        return sum(len(caches[0]) for caches in sparse_backward_hopper.device_caches.values())

    def run(b, s, h):
        q, k, v = qkv(b, s, s, h, 1, 128, dtype=torch.bfloat16, device=DEVICE)
        ours(q, k, v, lists(1, h, s, s), *upstream(q))

    run(1, 320, 2)
    before = compiled()
    for b, s, h in ((1, 64, 1), (2, 640, 16), (3, 1088, 5)):
        run(b, s, h)
    assert compiled() == before


def test_falls_back_with_a_warning(monkeypatch):
    from tilefold.kernels import hopper
    from tilefold.ops import hopper as ops

    q, k, v = qkv(1, 320, 320, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 2, 320, 320)
    dout, dlse = upstream(q)
    wanted = ours(q, k, v, index, dout, dlse, plan_of(q, k, v, index, portable=True))
    call = sparse_ops.SparseCall(sparse_ops.Lists(*index.tensors(), *index.geometry))
    sparse_ops.prepare(q, k, v, call).backward.clear()
    monkeypatch.setattr(ops, "_WARNED", set())
    monkeypatch.setattr(hopper, "refusal", lambda: "it was taken away for this test")
    with pytest.warns(RuntimeWarning, match="a portable one serves instead"):
        got = ours(q, k, v, index, dout, dlse)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
