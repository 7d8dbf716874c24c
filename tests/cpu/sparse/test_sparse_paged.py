"""Block-sparse attention over a KV cache in pages against the fp64 oracle: page sizes, lengths, poison, splits, refusals.

Every cache here is NaN wherever no key of a sequence lies, and its table holds -1 past each sequence's last page.
"""

import pytest
import torch

import tilefold
from cases import dilated, dilated_twin, one_graph, prefix, prefix_twin, rand, relative, relative_twin
from cases.index import cache, held, lists, plan_of
from cases.refusals import refuses
from tilefold import BlockIndex
from tilefold.ops.call import Call
from tilefold.ops.source import Lists, Paged
from tilefold.ops.sparse.sparse_library import SPARSE_PAGED


def check(tensors, index, where, **options):
    return held("sparse_attention_paged", tensors, index, where, **options)


@pytest.mark.parametrize(("page", "splits"), [(1, 1), (7, 3), (16, 1), (16, 3), (24, 1), (64, 3), (100, 1)])
def test_page_sizes(page, splits, device):
    """Multiples and divisors of the block, and neither; an empty sequence among others."""
    lengths = [70, 0, 33]
    index = lists(3, 4, 20, 70, device=device)
    tensors, where = cache(lengths, page, device=device)
    out, lse = check(tensors, index, where, causal=True, splits=splits)
    assert out[1].eq(0).all() and lse[1].eq(float("-inf")).all()


@pytest.mark.parametrize(("blocks", "page"), [((64, 64), 16), ((128, 64), 256), ((64, 128), 48), ((16, 32), 64)])
def test_blocks_of_several_tiles(blocks, page, device):
    """Blocks of several tiles over small pages, and pages of several blocks; room for more keys than any sequence has."""
    tensors, where = cache([90, 140], page, sq=70, d=16, dv=16, room=200, dtype=torch.float16, device=device)
    index = lists(2, 4, 70, 160, block=blocks[1], block_q=blocks[0], device=device)
    check(tensors, index, where, causal=True, splits=2, tile={"block_m": 16, "block_n": 16})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dtypes_and_layouts(dtype, layout, device):
    tensors, where = cache([70, 45], 16, d=40, dv=24, dtype=dtype, device=device, layout=layout)
    check(tensors, lists(2, 4, 20, 70, device=device), where, causal=True, layout=layout, splits=2)


def test_one_query_each(device):
    """Decoding: causal from the end of each sequence, 7 query heads on one KV head, lists shared by all."""
    tensors, where = cache([70, 3, 64], 16, h=7, hk=1, sq=1, device=device)
    check(tensors, lists(1, 1, 1, 70, device=device), where, causal=True, splits=2)


def test_more_queries_than_keys(device):
    """The first queries see nothing under a causal mask."""
    tensors, where = cache([9, 5], 16, device=device)
    out, lse = check(tensors, lists(2, 4, 20, 9, density=1.0, device=device), where, causal=True)
    assert lse[1, :, :15].eq(float("-inf")).all() and out[1, :15].eq(0).all()


def test_strides_and_shared_pages(device):
    """K and V interleaved in one pool, a strided q, and two sequences that share their first pages."""
    (q, k, v), where = cache([70, 70], 16, dv=32, device=device)
    pool = torch.stack([k, v], 1)
    where["block_table"][1, :3] = where["block_table"][0, :3]
    spread = rand(2, 40, 4, 64, device=device)[:, ::2, :, :32]
    check((spread, *pool.unbind(1)), lists(2, 4, 20, 70, device=device), where, causal=True)


def test_order_of_a_list_and_sizes(device):
    """Unsorted lists; valid tokens per block and sequence, a block without any first; query sizes."""
    tensors, where = cache([90, 40], 16, sq=40, device=device)
    indices = torch.tensor([4, 1, 5, 0], dtype=torch.int32, device=device).expand(1, 1, 3, 4).contiguous()
    sizes = torch.tensor([[3, 16, 16, 16, 0, 10], [16, 7, 16, 16, 16, 16]], dtype=torch.int32, device=device)
    queries = torch.tensor([16, 0, 5], dtype=torch.int32, device=device)
    index = BlockIndex(
        indices, torch.full((1, 1, 3), 4, dtype=torch.int32, device=device), 16, 16, 40, 90, sizes, queries
    )
    check(tensors, index, where, splits=2)


def test_mods(device):
    """Mods are told the number of keys in the cache as seq_k."""
    tensors, where = cache([70, 0, 33], 16, device=device)
    index = lists(3, 4, 20, 70, device=device)
    check(tensors, index, where, softcap=2.0, scale=0.3)
    check(tensors, index, where, mask_mod=prefix, mask_args=(4,), twins={"mask_mod": prefix_twin})
    hook = {"score_mod": relative, "score_args": (rand(4, 9, device=device), 4), "mask_mod": dilated, "mask_args": (2,)}
    check(tensors, index, where, splits=2, twins={"score_mod": relative_twin, "mask_mod": dilated_twin}, **hook)


def test_equals_contiguous_keys(device):
    """The bits of sparse_attention over the same keys laid out in order."""
    tensors, where = cache([70], 7, device=device)
    index = lists(1, 4, 20, 70, device=device)
    got = tilefold.sparse_attention_paged(*tensors, index, **where, causal=True, return_lse=True)
    k, v = (side[where["block_table"][0].long()].flatten(0, 1)[None, :70] for side in tensors[1:])
    same = tilefold.sparse_attention(tensors[0], k, v, index, causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))


def test_the_cache_grows_under_one_plan(device):
    """Lengths and table change in place, the plan and the lists stay: what a captured graph does."""
    tensors, where = cache([70, 60], 16, device=device)
    index = lists(2, 4, 20, 70, density=1.0, device=device)
    for lengths in ([1, 0], [33, 17], [70, 60]):
        where["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        check(tensors, index, where, causal=True)


def test_no_queries(device):
    tensors, where = cache([70], 16, sq=0, device=device)
    index = lists(1, 4, 0, 70, device=device)
    assert tilefold.sparse_attention_paged(*tensors, index, **where).shape == (1, 0, 4, 24)
    with pytest.raises(tilefold.Unsupported, match="there is no plan"):
        plan_of(*tensors, index, **where)


def test_plan(device):
    from tilefold.plan.sparse.sparse import SparsePlan

    tensors, where = cache([70, 33], 16, device=device)
    index = lists(2, 4, 20, 70, device=device)
    plan = plan_of(*tensors, index, **where)
    assert (plan.kernel, plan.problem.page_size, plan.problem.attention.seq_k) == ("sparse_forward_paged", 16, 70)
    assert "pages of 16" in str(plan)
    assert SparsePlan.from_json(plan.to_json()) == plan
    with pytest.raises(
        tilefold.PlanError, match="kernel: sparse_forward_box does not serve varlen=False, page_size=16"
    ):
        plan.with_tile(kernel="sparse_forward_box")
    other, there = cache([70, 33], 24, device=device)
    with pytest.raises(tilefold.PlanError, match="page_size=16, the call has page_size=24"):
        tilefold.sparse_attention_paged(*other, index, **there, plan=plan)
    offsets = {"cu_seqlens_q": where["cache_seqlens"], "cu_seqlens_k": where["cache_seqlens"]}
    with pytest.raises(tilefold.Unsupported, match="no kernel takes packed queries to pages"):
        plan_of(*tensors, index, **where, **offsets)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        plan_of(*tensors, index, **where, window=(3, 0))


def test_refusals(device):
    """Before anything is launched, naming the argument, what was given and what is accepted."""
    (q, k, v), where = cache([70, 33], 16, device=device)
    index = lists(2, 4, 20, 70, device=device)
    table, lengths = where.values()
    rest = (index, table, lengths)
    far = lists(2, 4, 20, 100, device=device)
    none = torch.empty(3, 0, 2, 32, device=device)
    for error, text, args, options in (
        (tilefold.DtypeError, "index must be a tilefold.BlockIndex, got Tensor", (q, k, v, q, table, lengths), {}),
        (tilefold.DtypeError, "block_table has dtype int64, accepted: int32", (q, k, v, index, table.long(), lengths), {}),
        (tilefold.DtypeError, "cache_seqlens must be a torch.Tensor, got list", (q, k, v, index, table, [70, 33]), {}),
        (tilefold.DtypeError, "v_pages has dtype float16, but q has float32", (q, k, v.half(), *rest), {}),
        (tilefold.ShapeError, "block_table has shape (1, 5)", (q, k, v, index, table[:1], lengths), {}),
        (tilefold.ShapeError, "cache_seqlens has shape (1,)", (q, k, v, index, table, lengths[:1]), {}),
        (tilefold.ShapeError, "k_pages has 3 dimensions", (q, k[0], v, *rest), {}),
        (tilefold.ShapeError, "v_pages has shape", (q, k, v[1:], *rest), {}),
        (tilefold.ShapeError, "a page must hold at least 1 key", (q, none, none[..., :24], *rest), {}),
        (tilefold.ShapeError, "seq_k=100, but block_table has room for 80 keys: 5 pages", (q, k, v, far, table, lengths), {}),
        (tilefold.ShapeError, "index was made for seq_q=20, but the tensors have seq_q=19", (q[:, 1:], k, v, *rest), {}),
        (tilefold.ShapeError, "q has 3 heads and k_pages has 2", (q[:, :, :3], k, v, *rest), {}),
        (tilefold.ValueRangeError, "cache_seqlens[0] is 70, but k_pages has no pages", (q, k[:0], v[:0], *rest), {}),
        (tilefold.LayoutError, "k_pages needs a contiguous last dimension", (q, k.mT.contiguous().mT, v, *rest), {}),
        (tilefold.ValueRangeError, "layout must be 'bshd' or 'bhsd'", (q, k, v, *rest), {"layout": "sbhd"}),
        (tilefold.DtypeError, "plan must be a SparsePlan", (q, k, v, *rest), {"plan": 3}),
    ):  # fmt: skip
        refuses(error, text, tilefold.sparse_attention_paged, *args, **options)


def test_gradients_are_refused(device):
    (q, k, v), where = cache([70, 33], 16, device=device)
    index = lists(2, 4, 20, 70, device=device)
    for needy in ((q.clone().requires_grad_(), k, v), (q, k.clone().requires_grad_(), v)):
        with pytest.raises(tilefold.Unsupported, match="attention over pages has no backward pass"):
            tilefold.sparse_attention_paged(*needy, index, **where)
        with torch.no_grad():
            tilefold.sparse_attention_paged(*needy, index, **where)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "entry", "value", "text"),
    [
        ("cache_seqlens", (0,), 71, r"cache_seqlens\[0\] is 71, expected 0 to 70"),
        ("cache_seqlens", (1,), -1, r"cache_seqlens\[1\] is -1, expected 0 to 70"),
        ("block_table", (1, 2), 99, r"block_table\[1, 2\] is 99, expected 0 to 10, the last page"),
        ("block_table", (0, 0), -1, r"block_table\[0, 0\] is -1, expected 0 to 10, the last page"),
    ],
)
def test_values_are_checked_in_the_interpreter(name, entry, value, text):
    """There a read outside a tensor would end the process."""
    tensors, where = cache([70, 33], 16)
    where[name][entry] = value
    with pytest.raises(tilefold.ValueRangeError, match=text):
        tilefold.sparse_attention_paged(*tensors, lists(2, 4, 20, 70), **where)


def test_a_page_of_more_than_2_to_the_31_elements_is_wide():
    """Rows of such a page are addressed in 64 bits; here only the compile-time constant is looked at, on no memory at all."""
    from tilefold.ops.sparse.sparse_example import example_launch
    from tilefold.plan import AttentionProblem, device_named
    from tilefold.plan.sparse.sparse import SparseProblem, plan_sparse

    for keys, wide in ((1 << 20, False), (1 << 22, True)):
        dense = AttentionProblem(1, 64, keys, 8, 8, 64, 64)
        plan = plan_sparse(SparseProblem(dense, 64, 64, 8, page_size=keys), device_named("h200"))
        assert example_launch(plan)[2]["WIDE"] is wide


@pytest.mark.no_poison
def test_compile_and_opcheck(device):
    """One graph gives the eager bits, and follows lengths that change; the operator passes torch's own checks."""
    tensors, where = cache([70, 33], 16, device=device)
    index = lists(2, 4, 20, 70, device=device)
    options = {"causal": True, "return_lse": True, "mask_mod": tilefold.constant(prefix), "mask_args": (4,)}
    compiled = one_graph(lambda q, k, v, i, *w: tilefold.sparse_attention_paged(q, k, v, i, *w, **options))
    for lengths in ([70, 33], [17, 0]):
        where["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        traced = compiled(*tensors, index, *where.values())
        eager = tilefold.sparse_attention_paged(*tensors, index, **where, **options)
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
    call = Call(lists=Lists.of(index), causal=True, source=Paged(*where.values()))
    some = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(SPARSE_PAGED.op, SPARSE_PAGED.flat(*tensors, call), test_utils=some)
