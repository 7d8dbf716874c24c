"""The Gluon kernel for block-sparse attention on sm_90 against the fp64 oracle and the portable kernels."""

import pytest
import torch

import tilefold
from cases import judge, qkv, rand, same
from cases.device import DEVICE, SM_90, captured, compilations, no_waiting
from tilefold import BlockIndex, reference
from tilefold.ops.call import Call
from tilefold.ops.source import Lists
from tilefold.ops.sparse import sparse as sparse_ops

HOPPER = "sparse_forward_hopper"
pytestmark = SM_90


def lists(b, h, sq, sk, block_q=64, block_k=64, density=0.5, **options):
    """Random lists with rows of none, one, two, three and all blocks."""
    chosen = torch.rand(b, h, -(-sq // block_q), -(-sk // block_k)) < density
    for row, count in enumerate((0, 1, 2, 3)):
        if row < chosen.shape[2]:
            chosen[..., row, :] = False
            chosen[..., row, -count:] = count > 0
    chosen[..., -1, :] = True
    return BlockIndex.from_map(chosen.to(DEVICE), block_q=block_q, block_k=block_k, seq_q=sq, seq_k=sk, **options)


def plans(q, k, v, index, **options):
    """The Hopper plan as made, one program a query block, few programs; and a portable plan."""
    call = Call(lists=Lists.of(index), **options)
    plan = sparse_ops.prepare(q, k, v, call).plan
    hopper = plan.with_tile(kernel=HOPPER, splits=1)
    return [hopper, hopper.with_tile(programs=3)], plan.with_tile(kernel="sparse_forward", splits=1)


def check(q, k, v, index, **options):
    """Every Hopper plan gives the same bits, and they hold against the oracle."""
    hopper, _ = plans(q, k, v, index, **options)
    first, *others = [
        tilefold.sparse_attention(q, k, v, index, plan=plan, return_lse=True, **options) for plan in hopper
    ]
    assert all(same(first, other) for other in others)
    oracle = reference.sparse_attention(q, k, v, index, **options)
    plain = reference.sparse_attention(q, k, v, index, dtype=q.dtype, **options)
    judge(first[0], oracle[0], plain[0], f"out {tuple(q.shape)} {tuple(k.shape)} {q.dtype} {index}")
    judge(first[1], oracle[1], plain[1], f"lse {tuple(q.shape)} {tuple(k.shape)} {q.dtype} {index}")
    return first


@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lists(dtype, dim, blocks):
    q, k, v = qkv(2, 640, 1024, 4, 2, dim, dtype=dtype, device=DEVICE)
    check(q, k, v, lists(2, 4, 640, 1024, *blocks))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("sq", "sk"), [(500, 1000), (1, 1), (65, 63), (640, 129), (130, 1024)])
def test_tails(sq, sk, block):
    q, k, v = qkv(1, sq, sk, 4, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    check(q, k, v, lists(1, 4, sq, sk, block, block))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kind", ["random", "zero", "first", "middle", "full", "short"])
def test_block_sizes(kind, block):
    """Blocks of no valid token first, in the middle, everywhere; what lies past the valid tokens may be NaN."""
    q, k, v = qkv(1, 320, 700, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    n = -(-700 // block)
    valid = {
        "random": torch.randint(0, block + 1, (n,)),
        "zero": torch.zeros(n),
        "first": torch.full((n,), block).index_fill(0, torch.tensor([0, 1]), 0),
        "middle": torch.full((n,), block).index_fill(0, torch.tensor([n // 2]), 0),
        "full": torch.full((n,), block),
        "short": torch.full((n,), 1),
    }[kind].to(DEVICE, torch.int32)
    index = lists(1, 2, 320, 700, block, block, density=0.7, block_sizes=valid)
    clean = check(q, k, v, index)
    position = torch.arange(700, device=DEVICE)
    padding = position % block >= valid.long()[position // block]
    k[:, padding], v[:, padding] = float("nan"), float("nan")
    for plan in plans(q, k, v, index)[0]:
        dirty = tilefold.sparse_attention(q, k, v, index, return_lse=True, plan=plan)
        assert same(clean, dirty)


@pytest.mark.parametrize("block", [64, 128])
def test_sizes_per_head_and_query_sizes(block):
    q, k, v = qkv(2, 400, 500, 4, 2, 64, dtype=torch.float16, device=DEVICE)
    rows, blocks = -(-400 // block), -(-500 // block)
    sizes = torch.randint(0, block + 1, (2, 4, blocks), dtype=torch.int32, device=DEVICE)
    queries = torch.randint(0, block + 1, (2, 1, rows), dtype=torch.int32, device=DEVICE)
    check(q, k, v, lists(2, 4, 400, 500, block, block, block_sizes=sizes, query_sizes=queries))


def test_shared_lists_strides_and_layouts():
    """Lists shared over batch and heads; q, k, v cut from one tensor; [B, H, S, D]."""
    index = lists(1, 1, 640, 640)
    q, k, v = rand(3, 640, 3, 4, 128, dtype=torch.bfloat16, device=DEVICE).unbind(2)
    out, lse = check(q, k, v, index)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    plan = plans(*turned, index, layout="bhsd")[0][0]
    same = tilefold.sparse_attention(*turned, index, layout="bhsd", plan=plan, return_lse=True)
    assert torch.equal(same[0].transpose(1, 2), out)
    assert torch.equal(same[1], lse)


def test_unaligned_strides_take_the_portable_kernel():
    q, k, v = (rand(1, 640, 4, 130, dtype=torch.bfloat16, device=DEVICE)[..., :128] for _ in range(3))
    index = lists(1, 1, 640, 640)
    call = Call(lists=Lists.of(index))
    for t in ((q, k.contiguous(), v.contiguous()), (q.contiguous(), k, v.contiguous())):
        assert sparse_ops.prepare(*t, call).plan.kernel != HOPPER


def test_order_of_a_list():
    q, k, v = qkv(1, 64, 640, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    for order in ([0, 1, 3, 4, 7], [7, 4, 3, 1, 0], [3, 0, 7, 4, 1]):
        indices = torch.tensor([[[order]]], dtype=torch.int32, device=DEVICE)
        counts = torch.full((1, 1, 1), 5, dtype=torch.int32, device=DEVICE)
        check(
            q, k, v, BlockIndex.from_indices(indices, counts, block_q=64, block_k=64, seq_q=64, seq_k=640, sort=False)
        )


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_shows_where_the_portable_kernel_shows_it(which):
    q, k, v = qkv(1, 320, 320, 2, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    {"q": q, "k": k, "v": v}[which][0, 70, 1, 3] = float("nan")
    index = lists(1, 2, 320, 320)
    hopper, portable = plans(q, k, v, index)
    wanted = tilefold.sparse_attention(q, k, v, index, plan=portable, return_lse=True)
    for plan in hopper:
        got = tilefold.sparse_attention(q, k, v, index, plan=plan, return_lse=True)
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(got, wanted, strict=True))
    assert wanted[0].isnan().any()


@pytest.mark.parametrize("block", [64, 128])
def test_many_blocks_chosen_by_the_plan_same_bits(block):
    """Enough query blocks for the plan to choose the kernel, rings that go round many times, 20 runs alike."""
    s = 24 * 12 * block // 2
    q, k, v = qkv(2, s, s, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 4, s, s, block, block, density=0.3)
    call = Call(lists=Lists.of(index))
    assert sparse_ops.prepare(q, k, v, call).plan.kernel == HOPPER
    first = tilefold.sparse_attention(q, k, v, index, return_lse=True)
    with no_waiting():
        runs = [tilefold.sparse_attention(q, k, v, index, return_lse=True) for _ in range(20)]
    assert all(same(first, run) for run in runs)
    portable = tilefold.sparse_attention(q, k, v, index, return_lse=True, plan=plans(q, k, v, index)[1])
    for a, b in zip(first, portable, strict=True):
        live = b.isfinite()
        assert torch.equal(live, a.isfinite())
        torch.testing.assert_close(a[live], b[live], atol=2e-2, rtol=2e-2)


def test_one_compilation_serves_all_lengths():
    from tilefold.kernels.hopper.sparse_forward import sparse_forward_hopper

    def run(b, s, h):
        q, k, v = qkv(b, s, s, h, 1, 128, dtype=torch.bfloat16, device=DEVICE)
        index = lists(1, h, s, s)
        tilefold.sparse_attention(q, k, v, index, plan=plans(q, k, v, index)[0][0])

    run(1, 320, 2)
    before = compilations(sparse_forward_hopper)
    for b, s, h in ((1, 64, 1), (2, 640, 16), (3, 1088, 5)):
        run(b, s, h)
    assert compilations(sparse_forward_hopper) == before


def test_graph_replays_with_changed_lists():
    q, k, v = qkv(1, 640, 1024, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 4, 640, 1024)
    plan = plans(q, k, v, index)[0][0]
    tilefold.sparse_attention(q, k, v, index, plan=plan)
    graph, got = captured(lambda: tilefold.sparse_attention(q, k, v, index, return_lse=True, plan=plan))
    for _ in range(3):
        other = lists(1, 4, 640, 1024)
        index.indices.copy_(other.indices)
        index.counts.copy_(other.counts)
        q.normal_()
        graph.replay()
        wanted = tilefold.sparse_attention(q, k, v, other, return_lse=True, plan=plan)
        assert same(got, wanted)


def test_falls_back_with_a_warning(monkeypatch):
    from tilefold.kernels import hopper

    q, k, v = qkv(2, 64 * 50, 64 * 50, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 1, 64 * 50, 64 * 50)
    monkeypatch.setattr(hopper, "refusal", lambda: "it was taken away for this test")
    call = Call(lists=Lists.of(index))
    with pytest.warns(RuntimeWarning, match="a portable one serves instead"):
        assert sparse_ops.prepare(q, k, v, call).plan.kernel == "sparse_forward_box"


def test_falls_back_where_the_kernel_does_not_compile(monkeypatch):
    from tilefold.ops.launch import Launch

    def refuse(self, args):
        raise RuntimeError("no such instruction, says this test")

    monkeypatch.setattr(Launch, "compile", refuse)
    q, k, v = qkv(2, 64 * 51, 64 * 51, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 1, 64 * 51, 64 * 51)
    call = Call(lists=Lists.of(index))
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert sparse_ops.prepare(q, k, v, call).plan.kernel == "sparse_forward_box"
