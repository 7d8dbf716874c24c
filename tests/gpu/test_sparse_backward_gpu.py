"""Gradients of block-sparse attention on a GPU against the fp64 oracle: planned tiles at real sizes, the Gluon kernel for sm_90
over lists of every kind, graphs with changed lists, the same bits, memory."""

import random
from functools import partial

import pytest
import torch

import tilefold
from cases import qkv, rand, same
from cases.device import (
    DEVICE,
    SM_90,
    SPARE,
    compiled_once,
    followed,
    memory_beside,
    near,
    repeated,
    take_kernels_away,
)
from cases.gradient import judged, upstream
from cases.index import top, uneven
from tilefold import BlockIndex, reference
from tilefold.ops.call import Call
from tilefold.ops.device import device_of
from tilefold.ops.source import Lists
from tilefold.ops.sparse import sparse as sparse_ops
from tilefold.ops.sparse import sparse_backward as backward_ops
from tilefold.plan.sparse.sparse_backward import plan_sparse_backward
from tilefold.plan.sparse.sparse_backward_hopper import KERNEL, kept_bytes

BF = torch.bfloat16


lists = partial(uneven, most=2, unlisted=True)


def plan_of(q, k, v, index, **changes):
    """The planned kernels, or those that are named."""
    plan = plan_sparse_backward(tilefold.sparse_plan(q, k, v, index).problem, device_of(DEVICE))
    return plan.with_tiles(**changes) if changes else plan


def called_plan(q, k, v, index, portable=False):
    """The plan of a call, which is for sm_90, or the portable one of the same problem."""
    call = Call(lists=Lists.of(index))
    plan = backward_ops._plan(sparse_ops.prepare(q, k, v, call), call, q)
    assert plan.kernel == KERNEL
    return plan_sparse_backward(plan.problem, plan.device, portable=True) if portable else plan


def gradients(attend, tensors, dout, dlse, dtype=None):
    inputs = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    out, lse = attend(*inputs)
    lse = torch.where(lse.isfinite(), lse, 0.0)
    return torch.autograd.grad((out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)))


def ours(q, k, v, index, dout, dlse, plan=None, **options):
    options |= {"return_lse": True, "backward_plan": plan}
    return gradients(lambda *t: tilefold.sparse_attention(*t, index, **options), (q, k, v), dout, dlse)


def held(q, k, v, index, plan=None):
    """-> gradients, those of out and lse."""
    dout, dlse = upstream(q, v)
    got = ours(q, k, v, index, dout, dlse, plan)
    exact, plain = (
        gradients(lambda *t, d=d: reference.sparse_attention(*t, index, dtype=d), (q, k, v), dout, dlse, torch.float64)
        for d in (torch.float64, q.dtype)
    )
    judged(got, exact, plain, f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {index}")
    return got, dout, dlse


def check(q, k, v, index):
    """Whatever number of heads the kernel for sm_90 does at a time, the bits are the same, and they hold against the oracle."""
    plan = called_plan(q, k, v, index)
    first, dout, dlse = held(q, k, v, index, plan)
    total = q.shape[0] * k.shape[2]
    for heads in (d for d in range(1, total + 1) if total % d == 0):
        assert same(first, ours(q, k, v, index, dout, dlse, plan.with_tiles(heads_at_once=heads))), heads
    return first, dout, dlse, plan


@pytest.mark.no_poison
@pytest.mark.parametrize("dtype", [torch.float16, BF, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_planned_tiles(dim, dtype):
    q, k, v = qkv(2, 500, 1000, 4, 2, dim, dtype=dtype, device=DEVICE)
    sizes = torch.randint(0, 65, (16,), dtype=torch.int32, device=DEVICE)
    for index in (top(500, 1000, 7), top(500, 1000, 7, block_sizes=sizes), top(500, 1000, 3, batch=2)):
        held(q, k, v, index)


@pytest.mark.no_poison
@SM_90
@pytest.mark.parametrize("dtype", [torch.float16, BF])
@pytest.mark.parametrize("dim", [64, 128])
def test_every_kernel(dim, dtype):
    """The kernels that the plan does not choose by itself as well."""
    q, k, v = qkv(2, 500, 1000, 4, 2, dim, dtype=dtype, device=DEVICE)
    for kernel in ("sparse_backward", "sparse_backward_box", "sparse_backward_hopper"):
        index = top(500, 1000, 7)
        held(q, k, v, index, plan_of(q, k, v, index, kernel=kernel))


@pytest.mark.no_poison
@pytest.mark.parametrize("dtype", [torch.float16, BF])
def test_whole_blocks(dtype):
    """No tails: nothing is masked."""
    for dim, heads in ((64, 4), (128, 4)):
        q, k, v = qkv(2, 512, 1024, 4, heads, dim, dtype=dtype, device=DEVICE)
        held(q, k, v, top(512, 1024, 7))


@pytest.mark.no_poison
def test_query_sizes():
    q, k, v = qkv(1, 500, 700, 4, 4, 128, dtype=BF, device=DEVICE)
    queries = torch.randint(0, 65, (8,), dtype=torch.int32, device=DEVICE)
    held(q, k, v, top(500, 700, 5, query_sizes=queries))
    sizes = torch.randint(0, 65, (11,), dtype=torch.int32, device=DEVICE)
    held(q, k, v, top(500, 700, 5, query_sizes=queries, block_sizes=sizes))


@SM_90
@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF, torch.float16])
def test_lists(dtype, dim, blocks):
    q, k, v = qkv(2, 640, 1024, 4, 2, dim, dtype=dtype, device=DEVICE)
    check(q, k, v, lists(2, 4, 640, 1024, *blocks))


@SM_90
@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("sq", "sk", "heads", "kv_heads"), [(640, 1024, 4, 4), (500, 900, 6, 2)])
def test_spans_of_queries(sq, sk, heads, kv_heads, dim, blocks):
    """dk and dv over spans of one block, two and three, the last one shorter: right, and the same bits in every run."""
    q, k, v = qkv(2, sq, sk, heads, kv_heads, dim, dtype=BF, device=DEVICE)
    sizes = torch.randint(0, blocks[1] + 1, (-(-sk // blocks[1]),), dtype=torch.int32, device=DEVICE)
    whole = lists(2, heads, sq, sk, *blocks)
    for index in (whole, whole.with_tensors(whole.indices, whole.counts, sizes, None)):
        plan = called_plan(q, k, v, index)
        for i in (1, 2, 3):
            own = plan.with_tiles(queries_at_once=i * blocks[0], heads_at_once=i % 2 + 1)
            got, dout, dlse = held(q, k, v, index, own)
            assert same(got, ours(q, k, v, index, dout, dlse, own))


@SM_90
def test_heads_that_list_nothing():
    """The ring of dS has four slots: heads 4 to 7, which have theirs and list nothing, hand them on when they are free."""
    q, k, v = qkv(2, 2048, 2048, 16, 16, 128, dtype=BF, device=DEVICE)
    chosen = torch.rand(2, 16, 32, 32, device=DEVICE) < 0.5
    chosen[:, 4:8] = False
    index = BlockIndex.from_map(chosen)
    plan = called_plan(q, k, v, index)
    first, dout, dlse = held(q, k, v, index, plan.with_tiles(heads_at_once=1))
    for heads in (1, 1, 1, 2, 4):
        assert same(first, ours(q, k, v, index, dout, dlse, plan.with_tiles(heads_at_once=heads)))


@SM_90
@pytest.mark.parametrize("seed", range(12))
def test_random_lists_in_random_spans(seed):
    """Some heads and blocks are in no list; spans have any size, also of more queries than there are."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, group = draw.choice((1, 2)), draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 3))
    block_q, block_k, dim = draw.choice((64, 128)), draw.choice((64, 128)), draw.choice((64, 128))
    sq, sk, heads = draw.randint(1, 1500), draw.randint(1, 1500), kv_heads * group
    q, k, v = qkv(batch, sq, sk, heads, kv_heads, dim, dtype=BF, device=DEVICE)
    chosen = torch.rand(batch, heads, -(-sq // block_q), -(-sk // block_k), device=DEVICE) < draw.choice((0.1, 0.6))
    for shape in ((batch, heads, 1, 1), (1, heads, chosen.shape[2], 1), (1, 1, 1, chosen.shape[3])):
        chosen &= torch.rand(shape, device=DEVICE) < 0.7
    index = BlockIndex.from_map(chosen, block_q=block_q, block_k=block_k, seq_q=sq, seq_k=sk)
    plan = called_plan(q, k, v, index)
    at_once = [d for d in range(1, batch * kv_heads + 1) if batch * kv_heads % d == 0]
    for _ in range(3):
        queries = draw.randint(1, chosen.shape[2] + 2) * block_q
        own = plan.with_tiles(heads_at_once=draw.choice(at_once), queries_at_once=queries)
        got, dout, dlse = held(q, k, v, index, own)
        assert same(got, ours(q, k, v, index, dout, dlse, own))


@SM_90
def test_spans_at_real_lengths():
    """Programs of many spans at a time; dq has the bits of one span, dk and dv differ by the order of a sum."""
    q, k, v = qkv(1, 16384, 16384, 2, 2, 128, dtype=BF, device=DEVICE)
    index = top(16384, 16384, 77, heads=2)
    plan = called_plan(q, k, v, index)
    dout, dlse = upstream(q, v)
    wanted = ours(q, k, v, index, dout, dlse, plan)
    for queries in (1024, 3 * 64, 8192):
        own = plan.with_tiles(queries_at_once=queries, heads_at_once=1)
        for _ in range(3):
            got = ours(q, k, v, index, dout, dlse, own)
            assert same(got[0], wanted[0])
            for a, b in zip(got[1:], wanted[1:], strict=True):
                assert float((a.float() - b.float()).norm() / b.float().norm()) < 2e-3


@SM_90
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("sq", "sk"), [(500, 1000), (1, 1), (65, 63), (640, 129), (130, 1024)])
def test_tails_and_groups(sq, sk, block):
    q, k, v = qkv(1, sq, sk, 7, 1, 128, dtype=BF, device=DEVICE)
    check(q, k, v, lists(1, 7, sq, sk, block, block))


@SM_90
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kind", ["random", "zero", "full"])
def test_sizes(kind, block):
    """What lies past the valid tokens of a KV block or of a query block may be NaN, and gets gradients of 0."""
    q, k, v = qkv(2, 400, 700, 2, 2, 128, dtype=BF, device=DEVICE)
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
    assert same(clean, dirty)
    assert all((g[where] == 0).all() for g, where in zip(dirty, (dead_q, dead_k, dead_k), strict=True))


@SM_90
def test_shared_lists_strides_and_layouts():
    """Lists shared over batch and heads; q, k, v cut from one tensor; [B, H, S, D]."""
    index = lists(1, 1, 640, 640)
    q, k, v = rand(3, 640, 3, 4, 128, dtype=BF, device=DEVICE).unbind(2)
    first, dout, dlse, _ = check(q, k, v, index)
    turned = ours(*(t.transpose(1, 2) for t in (q, k, v)), index, dout.transpose(1, 2), dlse, layout="bhsd")
    assert same(first, [t.transpose(1, 2) for t in turned])


@SM_90
def test_unsorted_lists():
    q, k, v = qkv(1, 64, 640, 2, 2, 128, dtype=BF, device=DEVICE)
    blocks = {"block_q": 64, "block_k": 64, "seq_q": 64, "seq_k": 640, "sort": False}
    counts = torch.full((1, 1, 1), 5, dtype=torch.int32, device=DEVICE)
    for order in ([0, 1, 3, 4, 7], [7, 4, 3, 1, 0], [3, 0, 7, 4, 1]):
        indices = torch.tensor([[[order]]], dtype=torch.int32, device=DEVICE)
        check(q, k, v, BlockIndex.from_indices(indices, counts, **blocks))


@pytest.mark.no_poison
@pytest.mark.parametrize("dim", [64, 128])
def test_padding_may_hold_nan(dim):
    """Keys past their block's size and queries past theirs, empty lists and empty blocks first, in the middle and last."""
    q, k, v = qkv(2, 500, 900, 4, 4, dim, dtype=BF, device=DEVICE)
    sizes = torch.randint(0, 65, (15,), dtype=torch.int32, device=DEVICE)
    queries = torch.randint(0, 65, (8,), dtype=torch.int32, device=DEVICE)
    sizes[[0, 7]], queries[[0, 3]] = 0, 0
    keep = torch.rand(2, 4, 8, 15, device=DEVICE) < 0.5
    keep[:, :, 1] = False
    keep[:, :, :, [4, 14]] = False
    index = BlockIndex.from_map(keep, seq_q=500, seq_k=900, block_sizes=sizes, query_sizes=queries)
    dout = torch.randn(2, 500, 4, dim, device=DEVICE, dtype=BF)
    plan = plan_of(q, k, v, index, **({"kernel": KERNEL} if torch.cuda.get_device_capability() == (9, 0) else {}))

    def gradients_of(*tensors):
        inputs = [t.detach().requires_grad_() for t in tensors[:3]]
        out = tilefold.sparse_attention(*inputs, index, backward_plan=plan)
        return torch.autograd.grad(out, inputs, tensors[3])

    want = gradients_of(q, k, v, dout)
    at_k, at_q = torch.arange(900, device=DEVICE), torch.arange(500, device=DEVICE)
    bad_k, bad_q = at_k % 64 >= sizes.long()[at_k // 64], at_q % 64 >= queries.long()[at_q // 64]
    k[:, bad_k], v[:, bad_k], q[:, bad_q], dout[:, bad_q] = (float("nan"),) * 4
    got = gradients_of(q, k, v, dout)
    assert same(got, want)
    assert not got[0][:, bad_q].any()
    assert not got[1][:, bad_k].any()
    assert not got[2][:, bad_k].any()


@pytest.mark.no_poison
def test_same_bits_and_no_synchronisation():
    q, k, v = qkv(1, 1024, 2048, 4, 2, 128, dtype=BF, device=DEVICE)
    index = top(1024, 2048, 20)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    dout = torch.randn(1, 1024, 4, 128, device=DEVICE, dtype=BF)
    first, runs = repeated(lambda: torch.autograd.grad(tilefold.sparse_attention(*inputs, index), inputs, dout), 20)
    assert all(same(first, run) for run in runs)


@SM_90
@pytest.mark.parametrize("block", [64, 128])
def test_twenty_runs_and_the_portable_kernels(block):
    """Rings that go round many times; no synchronisation; the same bits; what the portable kernels make, to rounding."""
    s = 24 * 6 * block
    q, k, v = qkv(2, s, s, 4, 2, 128, dtype=BF, device=DEVICE)
    index = lists(1, 4, s, s, block, block, density=0.3)
    dout, dlse = upstream(q, v)
    first, runs = repeated(lambda: ours(q, k, v, index, dout, dlse), 20)
    assert all(same(first, run) for run in runs)
    assert near(first, ours(q, k, v, index, dout, dlse, called_plan(q, k, v, index, portable=True)), 1e-3)


@pytest.mark.parametrize(
    "kind", [pytest.param("planned", marks=pytest.mark.no_poison), pytest.param("sm_90", marks=SM_90)]
)
def test_graph_replays_with_changed_lists(kind):
    sq, sk = (512, 2048) if kind == "planned" else (640, 1024)
    q, k, v = qkv(1, sq, sk, 4, 4, 128, dtype=BF, device=DEVICE)
    index = top(sq, sk, 9) if kind == "planned" else lists(1, 4, sq, sk)
    dout, dlse = upstream(q, v)

    def step():
        return ours(q, k, v, index.with_tensors(*index.tensors()), dout, dlse)  # its transpose belongs to the graph

    def change(keep):
        other = top(sq, sk, keep) if kind == "planned" else lists(1, 4, sq, sk)
        index.indices[..., : other.indices.shape[-1]].copy_(other.indices)
        index.counts.copy_(other.counts)
        q.normal_()

    followed(step, *(partial(change, keep) for keep in (1, 9, 5)))


@pytest.mark.no_poison
@pytest.mark.parametrize("kernel", [None, "sparse_backward_box"])
def test_memory(kernel):
    """Beside the gradients: two fp32 numbers a query and head, and what the plan says is kept of ds; no scores, no copies."""
    inputs = [t.requires_grad_() for t in qkv(1, 4096, 4096, 4, 4, 128, dtype=BF, device=DEVICE)]
    index = top(4096, 4096, 8)
    turned = index.transpose()
    plan = plan_of(*inputs, index, **({"kernel": kernel} if kernel else {}))
    out = tilefold.sparse_attention(*inputs, index, backward_plan=plan)
    dout = torch.randn_like(out)
    _, extra = memory_beside(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))
    places = turned.indices.numel() * 4 if plan.scratch_bytes else 0
    assert extra <= 2 * 4 * 4096 * 4 + plan.scratch_bytes + places + SPARE
    assert (plan.scratch_bytes > 0) == (kernel is None)


@pytest.mark.no_poison
@SM_90
def test_memory_of_some_heads():
    """Beside the gradients: room for dS as the plan says, one place an entry, two numbers a query and head."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 4096, 4096, 16, 16, 128, dtype=BF, device=DEVICE))
    keep = torch.rand(1, 16, 64, 64).argsort(-1)[..., :8].sort(-1).values.to(DEVICE, torch.int32)
    counts = torch.full((1, 16, 64), 8, dtype=torch.int32, device=DEVICE)
    index = BlockIndex.from_indices(keep, counts, block_q=64, block_k=64, seq_q=4096, seq_k=4096)
    index.transpose()
    plan = called_plan(q, k, v, index).with_tiles(heads_at_once=2)
    out = tilefold.sparse_attention(q, k, v, index, backward_plan=plan)
    dout = torch.randn_like(out)
    _, extra = memory_beside(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    places, statistics = 16 * 64 * 64 * 4, (16 * 64 + 1) * 128 * 4
    assert kept_bytes(plan.problem, 2, 0) == 4 * 2 * 64 * 8 * 64 * 64 * 2  # four slots
    assert extra <= kept_bytes(plan.problem, 2, 0) + places + statistics + 4096


@SM_90
def test_one_compilation_serves_all_lengths():
    from tilefold.kernels.hopper.sparse_backward import sparse_backward_hopper

    def run(b, s, h):
        q, k, v = qkv(b, s, s, h, 1, 128, dtype=BF, device=DEVICE)
        ours(q, k, v, lists(1, h, s, s), *upstream(q, v))

    sizes = (1, 320, 2), (1, 64, 1), (2, 640, 16), (3, 1088, 5)
    compiled_once(sparse_backward_hopper, [partial(run, *size) for size in sizes])


@SM_90
def test_falls_back_with_a_warning(monkeypatch):
    q, k, v = qkv(1, 320, 320, 2, 2, 128, dtype=BF, device=DEVICE)
    index = lists(1, 2, 320, 320)
    dout, dlse = upstream(q, v)
    wanted = ours(q, k, v, index, dout, dlse, called_plan(q, k, v, index, portable=True))
    prepared = sparse_ops.prepare(*(t.detach().requires_grad_() for t in (q, k, v)), Call(lists=Lists.of(index)))
    prepared.further.clear()  # it may have run in another test
    prepared.shared = None  # nor launches of other lengths
    take_kernels_away(monkeypatch)
    with pytest.warns(RuntimeWarning, match="a portable one serves instead"):
        got = ours(q, k, v, index, dout, dlse)
    assert same(got, wanted)


@pytest.mark.no_poison
@pytest.mark.large
def test_more_than_2_to_the_31_elements():
    b, s, h, d = 33, 8192, 64, 128
    assert b * s * h * d > 1 << 31
    inputs = [torch.randn(b, s, h, d, dtype=BF, device=DEVICE, requires_grad=True) for _ in range(3)]
    index = top(s, s, 2, heads=1)
    dout = torch.randn(b, s, h, d, dtype=BF, device=DEVICE)
    grads = torch.autograd.grad(tilefold.sparse_attention(*inputs, index), inputs, dout)
    for i_b, i_h in ((0, 0), (b - 1, h - 1)):
        cut = (slice(i_b, i_b + 1), slice(None), slice(i_h, i_h + 1))
        one = [t.detach()[cut].contiguous().requires_grad_() for t in inputs]
        alone = torch.autograd.grad(tilefold.sparse_attention(*one, index), one, dout[cut].contiguous())
        assert same([g[cut] for g in grads], alone)
