"""Block-sparse forward attention against the fp64 oracle: each sequence in a row of one tensor, packed, or over pages of a cache.

Every cache here is NaN wherever no key of a sequence lies, and its table holds -1 past each sequence's last page."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

import cases
import tilefold
from cases import dilated, dilated_twin, packed, prefix, prefix_twin, qkv, rand, relative, relative_twin, same
from cases.index import PORTABLE, cache, held, lists, plan_of
from cases.refusals import refuses
from tilefold import BlockIndex, DtypeError, LayoutError, PlanError, ShapeError, Unsupported, ValueRangeError, reference
from tilefold.ops.launch import Launch
from tilefold.ops.sparse import sparse as sparse_ops
from tilefold.plan.sparse.sparse import SparsePlan
from tilefold.sparse import Selection

ROWS, PACKED, PAGED = PORTABLE
DTYPES = F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOX, SMALL = "sparse_forward_box", {"block_m": 16, "block_n": 16}
int32 = partial(torch.tensor, dtype=torch.int32)


def rows(device, *shape, own=True, dtype=F32, **options):
    """q, k, v of these sizes, lists of every head or shared ones, nothing else."""
    tensors = qkv(*shape, dtype=dtype, device=device)
    index = lists(*((shape[0], shape[3]) if own else (1, 1)), *shape[1:3], device=device, **options)
    return tensors, index, {}


def batch(device, lengths_q, lengths_k, own=True, heads=4, most=None, **options):
    """(q, k, v), index with lists of every sequence or shared ones, {cu_seqlens_q, cu_seqlens_k}.  most: rows of the index."""
    shape = {name: options.pop(name) for name in ("hk", "d", "dv", "dtype") if name in options}
    tensors, (cu_q, cu_k, *longest) = packed(lengths_q, lengths_k, heads, device=device, **shape)
    index = lists(*((len(lengths_q), heads) if own else (1, 1)), *(most or longest), device=device, **options)
    return tensors, index, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def paged(device, lengths, page=16, sq=20, own=True, seq_k=None, density=0.5, block=16, block_q=None, **options):
    """(q, k_pages, v_pages), index, {block_table, cache_seqlens}."""
    index = lists(*((len(lengths), 4) if own else (1, 1)), sq, seq_k or max(lengths), block, density, block_q, device)
    tensors, where = cache(lengths, page, sq=sq, device=device, **options)
    return tensors, index, where


def ordered(device, order, seq_q, seq_k, **sizes):
    """Every query block has this list; sizes: as Python has them."""
    indices = int32(order, device=device).expand(1, 1, -(-seq_q // 16), len(order)).contiguous()
    sizes = {name: int32(each, device=device) for name, each in sizes.items()}
    return BlockIndex(indices, torch.full_like(indices[..., 0], len(order)), 16, 16, seq_q, seq_k, **sizes)


def joined(device, layout):
    """q, k and v cut from one projection, lists shared over sequences and heads."""
    if layout == PACKED:
        return rand(27, 3, 4, 32, device=device).unbind(1), *batch(device, [20, 7], [20, 7], own=False)[1:]
    return rand(2, 48, 3, 4, 32, device=device).unbind(2), lists(1, 1, 48, 48, device=device), {}


def turned(device):
    tensors, *rest = joined(device, ROWS)
    return [t.transpose(1, 2) for t in tensors], *rest


def spread(device):
    """q with gaps between its rows."""
    (_, *kv), *rest = joined(device, PACKED)
    return (rand(54, 4, 64, device=device)[::2, :, :32], *kv), *rest


def shared_pages(device):
    """K and V interleaved in one pool, a strided q, and two sequences that share their first pages."""
    (_, *pool), index, where = paged(device, [70, 70], dv=32)
    where["block_table"][1, :3] = where["block_table"][0, :3]
    return (rand(2, 40, 4, 64, device=device)[:, ::2, :, :32], *torch.stack(pool, 1).unbind(1)), index, where


SIZES = {  # valid tokens of blocks and of query blocks: per sequence, and per head
    PACKED: ([[0, 16, 3, 12], [0, 5, 16, 0]], [[16, 0, 5], [3, 16, 8]]),
    ROWS: ([[16, 3, 0, 9], [0, 16, 5, 16]], [[16, 2, 9], [0, 16, 16]]),
    "heads": ([[[16, 3, 0, 9], [1, 2, 3, 4], [0, 0, 16, 7], [16] * 4], [[0] * 4, [5, 0, 0, 0], [9, 16, 2, 16], [3, 16, 0, 1]]],
              [[[16, 0, 3]], [[7, 16, 16]]]),
}  # fmt: skip


def sized(device, kind):
    names = "block_sizes", "query_sizes"
    options = {name: int32(each, device=device) for name, each in zip(names, SIZES[kind], strict=True)} | {
        "density": 0.8
    }
    if kind == PACKED:
        return batch(device, [40, 25], [60, 33], **options)
    return rows(device, 2, 48, 64, 4, 2, 16, **options)


def listed(device, layout, order):
    """The tail, the sizes and the causal mask follow the block wherever it is listed."""
    tensors, index = (
        qkv(1, 16, 70, 2, 2, 16, device=device),
        ordered(device, order, 16, 70, block_sizes=[16, 2, 16, 7, 6]),
    )
    ends = {f"cu_seqlens_{side}": int32([0, n], device=device) for side, n in (("q", 16), ("k", 70))}
    return (tensors, index, {}) if layout == ROWS else ([t[0] for t in tensors], index, ends)


def listed_pages(device):
    """Unsorted lists; valid tokens per block and sequence, a block without any first; query sizes."""
    tensors, where = cache([90, 40], 16, sq=40, device=device)
    sizes = {"block_sizes": [[3, 16, 16, 16, 0, 10], [16, 7, 16, 16, 16, 16]], "query_sizes": [16, 0, 5]}
    return tensors, ordered(device, [4, 1, 5, 0], 40, 90, **sizes), where


def group_of_seven(device):
    """Unsorted lists whose entries reach past the shorter sequence; seven query heads on one KV head."""
    tensors, _, where = batch(device, [40, 9], [90, 20], heads=7, hk=1)
    return tensors, ordered(device, [4, 1, 5, 0], 40, 90), where


ORDERS = [1, 2, 3, 4], [4, 1, 3, 2], [3, 4, 2, 1]
C, TWO = {"causal": True}, {"splits": 2}
CASES = [  # layout; (tensors, index, where) on a device; options
    *((ROWS, lambda at, t=t: rows(at, 2, 48, 80, 4, 2, 32, 24, dtype=t), {"splits": n})
      for t, n in ((F32, 3), (F16, 1), (BF16, 3))),
    *((ROWS, lambda at, q=q, k=k: rows(at, 1, 140, 130, 2, 1, 16, dtype=F16, block=k, block_q=q), {**TWO, "tile": SMALL})
      for q, k in ((16, 32), (32, 16), (64, 64), (128, 16))),
    *((layout, lambda at, kind=kind: sized(at, kind), TWO) for kind, layout in zip(SIZES, (PACKED, ROWS, ROWS), strict=True)),
    (ROWS, lambda at: rows(at, 1, 48, 48, 4, 2, 16), C),
    (ROWS, lambda at: joined(at, ROWS), {}),
    (ROWS, turned, {"layout": "bhsd"}),
    *((ROWS, lambda at, o=o: (qkv(1, 16, 80, 2, 2, 16, device=at), ordered(at, o, 16, 80), {}), {})
      for o in ([0, 1, 3, 4], [4, 3, 1, 0], [3, 0, 4, 1])),
    *((layout, lambda at, o=o, layout=layout: listed(at, layout, o), C) for layout in (ROWS, PACKED) for o in ORDERS),
    # Odd and zero lengths on both sides; first query block with an empty list, last one with a full one.
    *((PACKED, lambda at, n=n: batch(at, *n), o)
      for n in (([20, 0, 33, 1], [10, 30, 0, 5]), ([17], [40]), ([64, 31], [64, 31]), ([5, 40, 16], [90, 2, 16]))
      for o in ({"splits": 3}, C)),
    *((PACKED, lambda at, t=t: batch(at, [20, 7], [33, 12], d=40, dv=24, dtype=t), C | {"splits": n})
      for t, n in ((F16, 2), (BF16, 1))),
    # Unequal blocks, several tiles each, sequences shorter than a block.
    *((PACKED, lambda at, q=q, k=k: batch(at, [70, 20], [90, 140], block=k, block_q=q, d=16, dv=16, dtype=F16),
       C | TWO | {"tile": SMALL}) for q, k in ((128, 64), (64, 128), (16, 32))),
    (PACKED, lambda at: joined(at, PACKED), C),
    (PACKED, spread, TWO),
    (PACKED, group_of_seven, C),
    # Pages that are multiples and divisors of the block, and neither; an empty sequence among others.
    *((PAGED, lambda at, page=page: paged(at, [70, 0, 33], page), C | {"splits": n})
      for page, n in ((1, 1), (7, 3), (16, 1), (16, 3), (24, 1), (64, 3), (100, 1))),
    # Blocks of several tiles over small pages, and pages of several blocks; room for more keys than any sequence has.
    *((PAGED, lambda at, q=q, k=k, page=page: paged(at, [90, 140], page, 70, seq_k=160, block=k, block_q=q, d=16, dv=16,
                                                    room=200, dtype=F16), C | TWO | {"tile": SMALL})
      for q, k, page in ((128, 64, 256), (64, 128, 16), (16, 32, 48))),
    *((PAGED, lambda at, t=t, o=o: paged(at, [70, 45], d=40, dv=24, dtype=t, layout=o), C | TWO | {"layout": o})
      for t, o in ((F32, "bhsd"), (F16, "bshd"), (BF16, "bhsd"))),
    # Decoding: causal from the end of each sequence, 7 query heads on one KV head, lists shared by all.
    (PAGED, lambda at: paged(at, [70, 3, 64], sq=1, own=False, h=7, hk=1), C | TWO),
    (PAGED, lambda at: paged(at, [9, 5], density=1.0), C),  # the first queries see nothing
    (PAGED, shared_pages, C),
    (PAGED, listed_pages, TWO),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "make", "options"), CASES, ids=[f"{case[0][7:]}-{i}" for i, case in enumerate(CASES)]
)
def test_cases(layout, make, options, device):
    """A row without a live key has output 0."""
    out, lse = held(layout, *make(device), **options)
    dead = lse.isneginf()
    assert not (out if options.get("layout") == "bhsd" else out.transpose(-3, -2))[dead].any()


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kernel", ["sparse_forward", BOX])
def test_tails(splits, kernel, device):
    """Lengths that are no multiple of the block, on both sides, lengths differ."""
    for sq, sk in ((33, 70), (16, 17), (5, 90), (64, 1)):
        case = rows(device, 1, sq, sk, 2, 1, 32, dtype=F16)
        held(ROWS, *case, splits=splits, tile={"kernel": kernel} if kernel else None)


EXAMPLES = {
    ROWS: lambda at: rows(at, 1, 48, 48, 4, 2, 16),
    PACKED: lambda at: batch(at, [20, 0, 33, 9], [10, 30, 25, 0]),
    PAGED: lambda at: paged(at, [70, 0, 33]),
}
LAYOUTS = pytest.mark.parametrize("layout", EXAMPLES)
HOOKS = {"mask_mod": dilated, "mask_args": (2,), "score_mod": relative}


@LAYOUTS
def test_mods(layout, device):
    """Mods are told the indices and lengths of their sequence, also where a listed block lies past its end."""
    case = EXAMPLES[layout](device)
    held(layout, *case, softcap=2.0, scale=0.3)
    held(layout, *case, mask_mod=prefix, mask_args=(4,), twins={"mask_mod": prefix_twin})
    twins = {"score_mod": relative_twin, "mask_mod": dilated_twin}
    held(layout, *case, splits=2, twins=twins, score_args=(rand(4, 9, device=device), 4), **HOOKS)


@triton.jit
def inside(score, batch, head, q_index, kv_index, args):
    """The score; args[0] is set to 1 if an index lies outside its sequence."""
    seen, seq_q, seq_k = args
    outside = (q_index < 0) | (q_index >= seq_q) | (kv_index < 0) | (kv_index >= seq_k)
    tl.store(seen + q_index * 0 + kv_index * 0, 1.0, mask=outside)
    return score


@pytest.mark.parametrize("lengths", [([20, 33], [0, 17]), ([0, 33], [20, 17]), ([5, 33], [60, 1])])
def test_mods_are_never_given_an_index_outside(lengths, device):
    """Forward and backward, also where a sequence has no keys, no queries, or fewer than its lists name."""
    tensors, index, where = batch(device, *lengths, density=1.0)
    inputs, seen = [t.requires_grad_() for t in tensors], torch.zeros(1, device=device)
    hook = {"score_mod": inside, "score_args": (seen,), "score_grad": cases.one}
    tilefold.sparse_attention_varlen(*inputs, index, **where, **hook).sum().backward()
    assert seen.item() == 0


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sizes", [[16, 0, 5, 16, 1], [0] * 5, [0, 16, 16, 16, 16], [16, 16, 16, 16, 3], None])
def test_what_is_no_key_is_not_read(sizes, splits, device):
    """NaN past a block's valid tokens, or None: past a packed sequence whose lists name blocks of the next one."""
    if sizes is None:
        layout, case, mine = PACKED, batch(device, [20, 33], [17, 60], density=1.0), slice(20)
        unseen = torch.arange(77, device=device) >= 17
    else:
        valid, position = int32(sizes, device=device), torch.arange(80, device=device)
        layout, case = ROWS, rows(device, 1, 48, 80, 2, 2, 16, density=0.7, block_sizes=valid)
        unseen, mine = position % 16 >= valid.long()[position // 16], slice(48)
    tensors, index, where = case
    clean = held(layout, *case, splits=splits)
    for t in tensors[1:]:
        t[..., unseen, :, :] = float("nan")
    plan = plan_of(*tensors, index, **where).with_tile(splits=splits)
    dirty = getattr(tilefold, layout)(*tensors, index, **where, plan=plan, return_lse=True)
    assert torch.equal(clean[0][..., mine, :, :], dirty[0][..., mine, :, :])
    assert torch.equal(clean[1][..., mine], dirty[1][..., mine])


def test_rows_of_no_sequence_are_left_alone(device):
    """The poisoned output shows which rows were written; the index may count more rows than any sequence has."""
    (q, k, v), index, where = batch(device, [20, 7], [33, 12], most=(50, 80))
    q = torch.cat([q, rand(5, 4, 32, device=device)])
    out, lse = tilefold.sparse_attention_varlen(q, k, v, index, **where, return_lse=True)
    assert not out[:27].isnan().any()
    assert out[27:].isnan().all() and lse[:, 27:].isnan().all()


def test_all_blocks_is_dense(device):
    (q, k, v), index, _ = rows(device, 2, 48, 64, 4, 2, 32, dtype=F16)
    index = BlockIndex.from_map(torch.ones_like(index.to_map()), block_q=16, block_k=16, seq_q=48, seq_k=64)
    cases.hold(tilefold.sparse_attention(q, k, v, index), reference.attention, q, k, v)


def test_equals_one_call_a_sequence(device):
    """The bits of sparse_attention on each sequence alone, lists cut to its blocks."""
    (q, k, v), index, where = batch(device, [20, 33], [60, 17])
    out, lse = tilefold.sparse_attention_varlen(q, k, v, index, **where, causal=True, return_lse=True)
    for b, (mine, keys) in enumerate(((slice(0, 20), slice(0, 60)), (slice(20, 53), slice(60, 77)))):
        n, m = mine.stop - mine.start, keys.stop - keys.start
        own = index.to_map()[b : b + 1, :, : -(-n // 16), : -(-m // 16)]
        alone = BlockIndex.from_map(own, block_q=16, block_k=16, seq_q=n, seq_k=m)
        sequence = q[None, mine], k[None, keys], v[None, keys]
        got = tilefold.sparse_attention(*sequence, alone, causal=True, return_lse=True)
        assert same((got[0][0], got[1][0]), (out[mine], lse[:, mine]))


def test_equals_contiguous_keys(device):
    """The bits of sparse_attention over the same keys laid out in order."""
    (q, *pool), index, where = paged(device, [70], 7)
    got = tilefold.sparse_attention_paged(q, *pool, index, **where, causal=True, return_lse=True)
    k, v = (side[where["block_table"][0].long()].flatten(0, 1)[None, :70] for side in pool)
    assert same(got, tilefold.sparse_attention(q, k, v, index, causal=True, return_lse=True))


@pytest.mark.parametrize(
    ("layout", "make", "shapes"),
    [
        (ROWS, lambda at: rows(at, 1, 0, 32, 2, 2, 16), ((1, 0, 2, 16), (1, 2, 0))),
        (PACKED, lambda at: batch(at, [0, 0], [3, 4]), ((0, 4, 32), (4, 0))),
        (PACKED, lambda at: batch(at, [0], [0]), ((0, 4, 32), (4, 0))),
        (PAGED, lambda at: paged(at, [70], sq=0), ((1, 0, 4, 24), (1, 4, 0))),
    ],
)
def test_no_queries(layout, make, shapes, device):
    tensors, index, where = make(device)
    out, lse = getattr(tilefold, layout)(*tensors, index, **where, return_lse=True)
    assert (out.shape, lse.shape) == shapes
    refuses(Unsupported, "there is no plan", plan_of, *tensors, index, **where)


@LAYOUTS
def test_plan(layout, device):
    """JSON both ways; overrides that do not divide a block, kernels and plans of other layouts and lists are refused."""
    tensors, index, where = EXAMPLES[layout](device)
    plan = plan_of(*tensors, index, **where)
    assert plan.kernel == PORTABLE[layout] or layout == ROWS
    assert {ROWS: "sparse_forward", PACKED: "packed", PAGED: "pages of 16"}[layout] in str(plan)
    dense = plan.problem.attention
    want = {ROWS: (False, 48, 0), PACKED: (True, 30, 0), PAGED: (False, 70, 16)}[layout]
    assert (dense.varlen, dense.seq_k, plan.problem.page_size) == want
    assert SparsePlan.from_json(plan.to_json()) == plan
    for fields in ({"block_m": 64}, {"block_n": 48}, {"splits": 0}, {"kernel": "attention_forward"}):
        refuses(PlanError, next(iter(fields)), plan.with_tile, **fields)
    other, kernel, text = {
        ROWS: (rows(device, 1, 48, 48, 4, 2, 16, block=32), "sparse_forward_varlen", "block_q"),
        PACKED: (rows(device, 1, 33, 30, 4, 2, 32), "sparse_forward", "plan was made for"),
        PAGED: (paged(device, [70, 0, 33], 24), "sparse_forward_box", "page_size=16, the call has page_size=24"),
    }[layout]
    refuses(PlanError, f"kernel: {kernel} does not serve varlen={layout == PACKED}", plan.with_tile, kernel=kernel)
    call = tilefold.sparse_attention_paged if layout == PAGED else tilefold.sparse_attention
    refuses(PlanError, text, call, *other[0], other[1], **other[2], plan=plan)


def test_plans_that_are_refused(device):
    tensors, index, where = paged(device, [70, 33])
    offsets = {"cu_seqlens_q": where["cache_seqlens"], "cu_seqlens_k": where["cache_seqlens"]}
    refuses(Unsupported, "no kernel takes packed queries to pages", plan_of, *tensors, index, **where, **offsets)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        plan_of(*tensors, index, **where, window=(3, 0))


@LAYOUTS
def test_refusals(layout, device):
    """Before anything is launched, naming the argument, what was given and what is accepted."""
    (q, k, v), index, where = EXAMPLES[layout](device)
    rest = tuple(where.values())
    first, second = rest or (None, None)  # offsets of queries and of keys, or the table and the lengths
    given = (q, k, v, index, *rest)
    table = [
        (DtypeError, "index must be a tilefold.BlockIndex, got Tensor", (q, k, v, q, *rest), {}),
        (ValueRangeError, "scale must be greater than 0", given, {"scale": 0.0}),
        (ValueRangeError, "scale must be greater than 0", given, {"scale": -1.0}),
        (DtypeError, "plan must be a SparsePlan", given, {"plan": 3}),
    ]
    if layout == ROWS:
        turned = [t.transpose(1, 2) for t in (q, k, v)]
        table += [
            (
                ShapeError,
                "index was made for seq_k=48, but the tensors have seq_k=47",
                (q, k[:, 1:], v[:, 1:], index),
                {},
            ),
            (ShapeError, "index.indices has heads=4, expected 2", (q[:, :, :2], k, v, index), {}),
            (ShapeError, "seq_q=48, but the tensors have seq_q=4 (layout is 'bshd')", (*turned, index), {}),
            (DtypeError, "return_lse must be a bool, got 'no'", given, {"return_lse": "no"}),
            (DtypeError, "backward_plan must be a SparseBackwardPlan", given, {"backward_plan": "x"}),
            (DtypeError, "got Selection: pass its .index", (q, k, v, Selection(index, q, None, q)), {}),
            (DtypeError, "make one with BlockIndex.from_flex", (q, k, v, SimpleNamespace(kv_num_blocks=0)), {}),
            (DtypeError, "causal must be a bool", given, {"causal": 1}),
        ]
    elif layout == PACKED:
        three = lists(3, 4, 33, 30, device=device)
        table += [
            (DtypeError, "cu_seqlens_q has dtype int64, accepted: int32", (q, k, v, index, first.long(), second), {}),
            (DtypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType", (q, k, v, index, first, None), {}),
            (ShapeError, "cu_seqlens_k has shape (4,)", (q, k, v, index, first, second[1:]), {}),
            (ShapeError, "expected [batch+1]", (q, k, v, index, first[None], second), {}),
            (ShapeError, "q has 4 dimensions", (q[None], k, v, index, *rest), {}),
            (ShapeError, "index.indices has batch=3, expected 4 (as in cu_seqlens_q)", (q, k, v, three, *rest), {}),
            (ShapeError, "cu_seqlens_q is empty", (q, k, v, index, first[:0], second[:0]), {}),
            (ShapeError, "the heads of q must be a multiple", (q[:, :3], k, v, index, *rest), {}),
        ]
    else:
        far, none = lists(3, 4, 20, 100, device=device), torch.empty(3, 0, 2, 32, device=device)
        table += [
            (DtypeError, "block_table has dtype int64, accepted: int32", (q, k, v, index, first.long(), second), {}),
            (DtypeError, "cache_seqlens must be a torch.Tensor, got list", (q, k, v, index, first, [70, 0, 33]), {}),
            (DtypeError, "v_pages has dtype float16, but q has float32", (q, k, v.half(), index, *rest), {}),
            (ShapeError, "block_table has shape (1, 5)", (q, k, v, index, first[:1], second), {}),
            (ShapeError, "cache_seqlens has shape (1,)", (q, k, v, index, first, second[:1]), {}),
            (ShapeError, "k_pages has 3 dimensions", (q, k[0], v, index, *rest), {}),
            (ShapeError, "v_pages has shape", (q, k, v[1:], index, *rest), {}),
            (ShapeError, "a page must hold at least 1 key", (q, none, none[..., :24], index, *rest), {}),
            (ShapeError, "seq_k=100, but block_table has room for 80 keys: 5 pages", (q, k, v, far, *rest), {}),
            (
                ShapeError,
                "index was made for seq_q=20, but the tensors have seq_q=19",
                (q[:, 1:], k, v, index, *rest),
                {},
            ),
            (ShapeError, "q has 3 heads and k_pages has 2", (q[:, :, :3], k, v, index, *rest), {}),
            (ValueRangeError, "cache_seqlens[0] is 70, but k_pages has no pages", (q, k[:0], v[:0], index, *rest), {}),
            (LayoutError, "k_pages needs a contiguous last dimension", (q, k.mT.contiguous().mT, v, index, *rest), {}),
            (ValueRangeError, "layout must be 'bshd' or 'bhsd'", given, {"layout": "sbhd"}),
        ]
    for error, text, args, options in table:
        refuses(error, text, getattr(tilefold, layout), *args, **options)


def test_gradients_over_pages_are_refused(device):
    (q, k, v), index, where = EXAMPLES[PAGED](device)
    for needy in ((q.clone().requires_grad_(), k, v), (q, k.clone().requires_grad_(), v)):
        with pytest.raises(Unsupported, match="attention over pages has no backward pass"):
            tilefold.sparse_attention_paged(*needy, index, **where)
        with torch.no_grad():
            tilefold.sparse_attention_paged(*needy, index, **where)


@pytest.mark.interpreter
@pytest.mark.parametrize(("layout", "name", "place", "value", "text"), [
    (ROWS, "indices", (0, 0, 0, 1), 2**29, "index.indices[0, 0, 0, 1] is 536870912, expected 0 to"),
    (ROWS, "indices", (0, 0, 0, 1), -1, "index.indices[0, 0, 0, 1] is -1, expected 0 to"),
    (ROWS, "counts", (0, 0, 0), 4, "index.counts[0, 0, 0] is 4, expected 0 to"),
    (ROWS, "counts", (0, 0, 0), -1, "index.counts[0, 0, 0] is -1, expected 0 to"),
    (PACKED, "cu_seqlens_q", slice(None), [0, 20, 20, 53, 65], "cu_seqlens_q must ascend"),
    (PACKED, "cu_seqlens_q", slice(None), [0, 20, 10, 53, 62], "cu_seqlens_q must ascend"),
    (PACKED, "cu_seqlens_q", slice(None), [-1, 20, 20, 53, 62], "cu_seqlens_q must ascend"),
    (PAGED, "cache_seqlens", (0,), 71, "cache_seqlens[0] is 71, expected 0 to 70"),
    (PAGED, "cache_seqlens", (1,), -1, "cache_seqlens[1] is -1, expected 0 to 70"),
    (PAGED, "block_table", (2, 2), 99, "block_table[2, 2] is 99, expected 0 to 10, the last page"),
    (PAGED, "block_table", (0, 0), -1, "block_table[0, 0] is -1, expected 0 to 10, the last page"),
])  # fmt: skip
def test_values_are_checked_in_the_interpreter(layout, name, place, value, text, device):
    """On a GPU nobody may read them on the host; here a read outside a tensor would end the process."""
    tensors, index, where = EXAMPLES[layout](device)
    if layout == ROWS:
        index = ordered(device, [1, 2, 0], 48, 48)
        past = ordered(device, [1, 2, 7], 48, 48)  # what a row does not mean is not looked at
        past.counts.fill_(2)
        tilefold.sparse_attention(*tensors, past)
    (getattr(index, name) if layout == ROWS else where[name])[place] = int32(value)
    refuses(ValueRangeError, text, getattr(tilefold, layout), *tensors, index, **where)


class Allocations(TorchDispatchMode):
    """Numbers of elements of every tensor that an operator makes on memory of its own."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in result if isinstance(result, tuple) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.sizes.append(t.numel())
        return result


@pytest.mark.no_poison  # which fills what it allocates, and would be counted
@pytest.mark.parametrize("splits", [1, 3])
@LAYOUTS
def test_strided_and_cached_keys_are_taken_as_they_lie(layout, splits, monkeypatch, device):
    """No copy of q, k or v and nothing of size [Q, KV]: the kernel is given their own memory, and what is allocated is out, lse
    and, with splits, their parts."""
    q = rand(1, 40, 4, 64, device=device)[:, ::2, :, :32]
    pool = rand(1, 140, 2, 3, 32, device=device)[:, ::2]  # K and V of a longer, interleaved cache
    tensors, index, where = (q, pool[:, :, :, 0], pool[:, :, :, 1]), lists(1, 4, 20, 70, device=device), {}
    if layout == PACKED:
        tensors = tuple(t[0] for t in tensors)
        where = {f"cu_seqlens_{side}": int32([0, n], device=device) for side, n in (("q", 20), ("k", 70))}
    if layout == PAGED:
        pages, where = cache([70], 16, dv=32, device=device)
        tensors = (q, *torch.stack(pages[1:], 3).unbind(3))
    assert not any(t.is_contiguous() for t in tensors)
    plan = plan_of(*tensors, index, **where).with_tile(splits=splits)
    run = getattr(tilefold, layout)
    run(*tensors, index, **where, plan=plan)  # what is made once for all calls like this one is made here
    launched = []
    monkeypatch.setattr(sparse_ops, "check_lists", lambda lists: None)  # the interpreter's look at values is no part
    monkeypatch.setattr(Launch, "__call__", lambda self, args: launched.append(args))
    # straight to the kernels though something watches
    monkeypatch.setattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
    with Allocations() as made:
        run(*tensors, index, **where, plan=plan, check=False)
    assert [getattr(t, "base", t).data_ptr() for t in launched[0][:3]] == [t.data_ptr() for t in tensors]
    parts = [splits * 20 * 4 * 32, splits * 20 * 4] if splits > 1 else []
    assert sorted(made.sizes) == sorted([20 * 4 * 32, 20 * 4, *parts])


def test_a_page_of_more_than_2_to_the_31_elements_is_wide():
    """Rows of such a page are addressed in 64 bits; here only the compile-time constant is looked at, on no memory at all."""
    from tilefold.ops.sparse.sparse_example import example_launch
    from tilefold.plan import AttentionProblem, device_named
    from tilefold.plan.sparse.sparse import SparseProblem, plan_sparse

    for keys, wide in ((1 << 20, False), (1 << 22, True)):
        dense = AttentionProblem(1, 64, keys, 8, 8, 64, 64)
        plan = plan_sparse(SparseProblem(dense, 64, 64, 8, page_size=keys), device_named("h200"))
        assert example_launch(plan)[2]["WIDE"] is wide


@triton.jit
def numbers(score, batch, head, q_index, kv_index, args):
    return (kv_index <= q_index).to(tl.int32)


@triton.jit
def without_args(score, batch, head, q_index, kv_index, args):
    first = args + 1  # a tuple and a number
    return kv_index < first


@pytest.mark.interpreter
def test_an_error_inside_a_mod_is_said_once(device):
    """The interpreter wraps it in one InterpreterError a function on the way."""
    (q, k, v), index, _ = rows(device, 1, 16, 16, 2, 2, 16)
    for mod, text in ((numbers, "a mask_mod has to return booleans (a comparison), not scores"),
                      (without_args, "TypeError in without_args (")):  # fmt: skip
        with pytest.raises(triton.runtime.errors.InterpreterError) as caught:
            tilefold.sparse_attention(q, k, v, index, mask_mod=mod)
        assert str(caught.value).startswith(text), str(caught.value)
