"""The Gluon kernel for block-sparse attention on sm_90 against the fp64 oracle and the portable kernels."""

from functools import partial

import pytest
import torch

import tilefold
from cases import hold, qkv, rand, same
from cases.device import DEVICE, SM_90, captured, compiled_once, no_waiting, repeated
from cases.index import PORTABLE, cache, offsets
from cases.index import uneven as lists
from tilefold import BlockIndex, reference
from tilefold.ops.call import Call
from tilefold.ops.source import Lists
from tilefold.ops.sparse import sparse as sparse_ops

HOPPER = "sparse_forward_hopper"
pytestmark = SM_90


def plans(q, k, v, index, **options):
    """The Hopper plan as made, one program a query block, few programs; and a portable plan."""
    call = Call(lists=Lists.of(index), **options)
    plan = sparse_ops.prepare(q, k, v, call).plan
    hopper = plan.with_tile(kernel=HOPPER, splits=1)
    return [hopper, hopper.with_tile(programs=3)], plan.with_tile(kernel="sparse_forward", splits=1)


def laid_out(name, tensors, index, where, **options):
    """Every Hopper plan gives the same bits, and they hold against the oracle."""
    run = getattr(tilefold, name)
    plan = tilefold.sparse_plan(*tensors, index, **where, **options).with_tile(kernel=HOPPER, splits=1)
    first, other = (
        run(*tensors, index, **where, plan=p, return_lse=True, **options) for p in (plan, plan.with_tile(programs=3))
    )
    assert same(first, other)
    hold(first, partial(getattr(reference, name), **where), *tensors, index, what=f"{name} {index}", **options)
    return first


def check(q, k, v, index, **options):
    return laid_out("sparse_attention", (q, k, v), index, {}, **options)


held_packed, held_paged = (partial(laid_out, f"sparse_attention_{layout}") for layout in ("varlen", "paged"))


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
    check(q, k, v, lists(1, 4, sq, sk, block, block), causal=True)


@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("dim", [64, 128])
def test_causal(dim, blocks):
    """Blocks on the diagonal, wholly behind it, rows that see no key; with sizes."""
    for sq, sk in ((640, 1024), (640, 300), (500, 500)):
        q, k, v = qkv(2, sq, sk, 4, 2, dim, dtype=torch.bfloat16, device=DEVICE)
        check(q, k, v, lists(2, 4, sq, sk, *blocks), causal=True)
        sizes = torch.randint(0, blocks[1] + 1, (-(-sk // blocks[1]),), dtype=torch.int32, device=DEVICE)
        check(q, k, v, lists(1, 1, sq, sk, *blocks, block_sizes=sizes), causal=True)


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
    first, runs = repeated(partial(tilefold.sparse_attention, q, k, v, index, return_lse=True), 20)
    assert all(same(first, run) for run in runs)
    portable = tilefold.sparse_attention(q, k, v, index, return_lse=True, plan=plans(q, k, v, index)[1])
    for a, b in zip(first, portable, strict=True):
        live = b.isfinite()
        assert torch.equal(live, a.isfinite())
        torch.testing.assert_close(a[live], b[live], atol=2e-2, rtol=2e-2)


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


def refuse(self, args):
    raise RuntimeError("no such instruction, says this test")


@pytest.mark.parametrize(
    ("place", "instead", "text", "blocks"),
    [
        ("tilefold.kernels.hopper.refusal", lambda: "it was taken away", "a portable one serves instead", 50),
        ("tilefold.ops.launch.Launch.compile", refuse, "no such instruction", 51),
    ],
)
def test_falls_back_with_a_warning(place, instead, text, blocks, monkeypatch):
    """Where the kernels are refused, and where this one does not compile."""
    q, k, v = qkv(2, 64 * blocks, 64 * blocks, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    call = Call(lists=Lists.of(lists(1, 1, 64 * blocks, 64 * blocks)))
    monkeypatch.setattr(place, instead)
    with pytest.warns(RuntimeWarning, match=text):
        assert sparse_ops.prepare(q, k, v, call).plan.kernel == "sparse_forward_box"


# ---------------------------------------------------------------- packed sequences, K and V in pages

LENGTHS = [500, 0, 77, 300, 64], [1000, 64, 333, 0, 129]  # of queries, of keys


def pages(lengths, page, sq, dim=128, dtype=torch.bfloat16, **options):
    return cache(lengths, page, sq=sq, d=dim, dv=dim, dtype=dtype, device=DEVICE, **options)


def test_one_sequence_same_bits_wherever_it_lies():
    """The smallest case of each: contiguous, packed, in pages of 64 and of 16."""
    q, k, v = qkv(1, 320, 640, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(1, 4, 320, 640)
    wanted = check(q, k, v, index)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (320, 640))
    out, lse = held_packed([q[0], k[0], v[0]], index, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})
    assert same(wanted, (out[None], lse[None]))
    for page in (64, 16, 32, 128):
        order = torch.randperm(640 // page, device=DEVICE)
        stored = [t.view(-1, page, 2, 128)[order] for t in (k, v)]
        table = order.argsort().to(torch.int32)[None]
        where = {"block_table": table, "cache_seqlens": torch.tensor([640], dtype=torch.int32, device=DEVICE)}
        assert same(wanted, held_paged([q, *stored], index, where))


@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed(dtype, dim, blocks):
    """Empty sequences on either side, odd lengths, groups; lists that name blocks past shorter sequences' ends."""
    tensors, where = offsets(*LENGTHS, dim=dim, dtype=dtype)
    held_packed(tensors, lists(5, 4, 500, 1000, *blocks), where)
    held_packed(tensors, lists(1, 1, 500, 1000, *blocks), where, causal=True)


@pytest.mark.parametrize("block", [64, 128])
def test_packed_sizes(block):
    tensors, where = offsets(*LENGTHS, heads=6, kv_heads=2)
    rows, blocks = -(-500 // block), -(-1000 // block)
    sizes = torch.randint(0, block + 1, (5, 6, blocks), dtype=torch.int32, device=DEVICE)
    queries = torch.randint(0, block + 1, (5, 1, rows), dtype=torch.int32, device=DEVICE)
    index = lists(5, 6, 500, 1000, block, block, block_sizes=sizes, query_sizes=queries)
    for causal in (False, True):
        held_packed(tensors, index, where, causal=causal)


def test_sequences_do_not_see_each_other():
    """What lies before and behind a sequence is NaN."""
    (q, k, v), where = offsets([200] * 3, [300] * 3)
    index = lists(3, 4, 200, 300)
    clean = held_packed((q, k, v), index, where)
    plan = tilefold.sparse_plan(q, k, v, index, **where).with_tile(kernel=HOPPER, splits=1)
    for t, n in ((q, 200), (k, 300), (v, 300)):
        t[:n], t[2 * n :] = float("nan"), float("nan")
    out, lse = tilefold.sparse_attention_varlen(q, k, v, index, **where, plan=plan, return_lse=True)
    assert same((clean[0][200:400], clean[1][:, 200:400]), (out[200:400], lse[:, 200:400]))


@pytest.mark.parametrize("blocks", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("page", [64, 16, 32, 128, 256])
def test_paged(page, blocks):
    """Pages in random order, NaN wherever no key lies, an empty cache, lists that name blocks past a cache's end."""
    for dim, dtype in ((128, torch.bfloat16), (64, torch.float16)):
        tensors, where = pages([1000, 0, 333, 64], page, 200, dim, dtype)
        held_paged(tensors, lists(4, 4, 200, 1000, *blocks), where)
        held_paged(tensors, lists(1, 1, 200, 1000, *blocks), where, causal=True)


@pytest.mark.parametrize("page", [64, 16])
def test_paged_sizes_groups_and_layouts(page):
    sizes = torch.randint(0, 65, (2, 16), dtype=torch.int32, device=DEVICE)
    index = lists(2, 8, 130, 1000, block_sizes=sizes)
    tensors, where = pages([1000, 777], page, 130, h=8, hk=2)
    out, lse = held_paged(tensors, index, where)
    turned = [t.transpose(1, 2) for t in tensors]
    again = held_paged(turned, index, where, layout="bhsd")
    assert same((out, lse), (again[0].transpose(1, 2), again[1]))


def test_few_rows_over_pages():
    """Decoding: one query, more sequences than places."""
    lengths = [torch.randint(1, 700, (1,)).item() for _ in range(300)]
    tensors, where = pages(lengths, 16, 1, room=700)
    held_paged(tensors, lists(300, 1, 1, 700), where)


def test_many_short_sequences():
    """Most places hold no work, and the last ones drawn hold none either."""
    lengths = [n % 70 for n in range(200)]
    tensors, where = offsets(lengths, lengths[::-1])
    held_packed(tensors, lists(200, 4, 69, 69), where)
    tensors, where = offsets([1] * 300 + [0] * 100, [130] * 400)
    held_packed(tensors, lists(400, 1, 1, 130), where)


@pytest.mark.parametrize("layout", ["packed", "pages of 64", "pages of 16"])
def test_long_lists_same_bits_as_contiguous(layout):
    """Chosen by the plan; rings that go round many times, 20 runs alike."""
    s = 64 * 96
    q, k, v = qkv(2, s, s, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    index = lists(2, 4, s, s, density=0.3)
    wanted = tilefold.sparse_attention(q, k, v, index, return_lse=True)
    if layout == "packed":
        cu = torch.tensor([0, s, 2 * s], dtype=torch.int32, device=DEVICE)
        tensors, where = [t.flatten(0, 1) for t in (q, k, v)], {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        wanted = wanted[0].flatten(0, 1), wanted[1].transpose(0, 1).flatten(1)
    else:
        page = int(layout.split()[-1])
        order = torch.randperm(2 * s // page, device=DEVICE)
        tensors = [q, *(t.reshape(-1, page, 2, 128)[order] for t in (k, v))]
        where = {"block_table": order.argsort().to(torch.int32).view(2, -1)}
        where["cache_seqlens"] = torch.full((2,), s, dtype=torch.int32, device=DEVICE)
    assert tilefold.sparse_plan(*tensors, index, **where).kernel == HOPPER
    run = getattr(tilefold, "sparse_attention_varlen" if layout == "packed" else "sparse_attention_paged")
    assert same(wanted, run(*tensors, index, **where, return_lse=True))
    with no_waiting():
        runs = [run(*tensors, index, **where, return_lse=True) for _ in range(20)]
    assert all(same(wanted, one) for one in runs)


def test_graph_replays_with_changed_places():
    """Offsets, tables and lengths are read on the device."""
    tensors, where = offsets([300, 212], [1000, 1048])
    index = lists(2, 4, 512, 2048)
    plan = tilefold.sparse_plan(*tensors, index, **where).with_tile(kernel=HOPPER, splits=1)

    def run():
        return tilefold.sparse_attention_varlen(*tensors, index, **where, plan=plan, return_lse=True)

    run()
    graph, got = captured(run)
    for cut_q, cut_k in ((500, 1), (0, 2048), (77, 999)):
        where["cu_seqlens_q"][1], where["cu_seqlens_k"][1] = cut_q, cut_k
        graph.replay()
        assert same(got, held_packed(tensors, index, where))

    for page in (64, 16):
        paged, there = pages([2048, 2048], page, 200)
        few = lists(2, 4, 200, 2048)
        own = tilefold.sparse_plan(*paged, few, **there).with_tile(kernel=HOPPER, splits=1)

        def run_paged(paged=paged, few=few, there=there, own=own):
            return tilefold.sparse_attention_paged(*paged, few, **there, plan=own, return_lse=True)

        run_paged()
        graph, got = captured(run_paged)
        for lengths in ([2048, 100], [33, 0], [1500, 2047]):
            order = torch.randperm(there["block_table"].numel(), device=DEVICE)
            there["block_table"].copy_(there["block_table"].flatten()[order].view_as(there["block_table"]))
            there["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
            graph.replay()
            assert same(got, held_paged(paged, few, there))


@pytest.mark.parametrize("laid", ["rows", "packed and pages"])
def test_one_compilation_serves_all_lengths_of_a_layout(laid):
    from tilefold.kernels.hopper.sparse_forward import sparse_forward_hopper

    def run(n, b=1, h=2):
        if laid == "rows":
            q, k, v = qkv(b, n, n, h, 1, 128, dtype=torch.bfloat16, device=DEVICE)
            index = lists(1, h, n, n)
            tilefold.sparse_attention(q, k, v, index, plan=plans(q, k, v, index)[0][0])
            return
        tensors, where = offsets([n // 2, 9], [n, 17])
        held_packed(tensors, lists(2, 1, n // 2, n), where)
        tensors, where = pages([n, 17], 16, n // 2)
        held_paged(tensors, lists(2, 1, n // 2, n), where)

    sizes = ((320,), (64, 1, 1), (640, 2, 16), (1088, 3, 5)) if laid == "rows" else ((640,), (1000,), (1700,))
    compiled_once(sparse_forward_hopper, [partial(run, *size) for size in sizes])


def test_what_the_kernel_has_no_boxes_for_takes_the_portable_one():
    for page in (1, 24, 100):
        tensors, where = pages([700, 64], page, 128)
        plan = tilefold.sparse_plan(*tensors, lists(2, 4, 128, 700), **where)
        assert plan.kernel == PORTABLE["sparse_attention_paged"]
