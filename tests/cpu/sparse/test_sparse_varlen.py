"""Block-sparse attention within packed sequences, each with its own lists, against the fp64 oracle."""

import pytest
import torch
import triton
import triton.language as tl

import tilefold
from cases import dilated, dilated_twin, one, one_graph, packed, prefix, prefix_twin, rand, relative, relative_twin
from cases.index import held, lists, plan_of
from cases.refusals import refuses
from tilefold import BlockIndex, reference

LENGTHS = [
    ([20, 0, 33, 1], [10, 30, 0, 5]),
    ([17], [40]),
    ([64, 31], [64, 31]),
    ([5, 40, 16], [90, 2, 16]),
]


def batch(lengths_q, lengths_k, block=16, block_q=None, heads=4, shared=False, density=0.5, **shape):
    """(q, k, v), index with lists of every sequence, {cu_seqlens_q, cu_seqlens_k}."""
    device = shape.get("device", "cpu")
    tensors, (cu_q, cu_k, max_q, max_k) = packed(lengths_q, lengths_k, heads, **shape)
    own = (1, 1) if shared else (len(lengths_q), heads)
    index = lists(*own, max_q, max_k, block=block, block_q=block_q, density=density, device=device)
    return tensors, index, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}


def check(tensors, index, where, **options):
    return held("sparse_attention_varlen", tensors, index, where, **options)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("causal", "splits"), [(False, 3), (True, 1)])
def test_lengths(lengths, causal, splits, device):
    """Odd and zero lengths on both sides; first query block with an empty list, last one with a full one."""
    check(*batch(*lengths, device=device), causal=causal, splits=splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 2])
def test_dtypes_and_dims(dtype, splits, device):
    check(*batch([20, 7], [33, 12], d=40, dv=24, dtype=dtype, device=device), causal=True, splits=splits)


@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (64, 128), (16, 32)])
def test_blocks_of_several_tiles(blocks, device):
    """Unequal blocks, several tiles each, sequences shorter than a block."""
    case = batch([70, 20], [90, 140], blocks[1], blocks[0], d=16, dv=16, dtype=torch.float16, device=device)
    check(*case, causal=True, splits=2, tile={"block_m": 16, "block_n": 16})


def test_shared_lists_and_strides(device):
    """Lists shared over sequences and heads; q, k and v cut from one projection; q with gaps between its rows."""
    _, index, where = batch([20, 7], [20, 7], shared=True, device=device)
    q, k, v = rand(27, 3, 4, 32, device=device).unbind(1)
    check((q, k, v), index, where, causal=True)
    spread = rand(54, 4, 64, device=device)[::2, :, :32]
    check((spread, k, v), index, where, splits=2)


def test_order_of_a_list_and_group(device):
    """Unsorted lists whose entries reach past the shorter sequence; seven query heads on one KV head."""
    indices = torch.tensor([4, 1, 5, 0], dtype=torch.int32, device=device).expand(1, 1, 3, 4).contiguous()
    index = BlockIndex.from_indices(indices, None, block_q=16, block_k=16, seq_q=40, seq_k=90, sort=False)
    tensors, (cu_q, cu_k, _, _) = packed([40, 9], [90, 20], h=7, hk=1, device=device)
    check(tensors, index, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, causal=True)


def test_sizes(device):
    """Valid tokens per block and query block, per sequence; zero-length blocks first."""
    tensors, (cu_q, cu_k, _, _) = packed([40, 25], [60, 33], device=device)
    sizes = torch.tensor([[0, 16, 3, 12], [0, 5, 16, 0]], dtype=torch.int32, device=device)
    queries = torch.tensor([[16, 0, 5], [3, 16, 8]], dtype=torch.int32, device=device)
    index = lists(2, 4, 40, 60, density=0.8, block_sizes=sizes, query_sizes=queries, device=device)
    check(tensors, index, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, splits=2)


def test_mods(device):
    """Mods are told the indices and lengths of their sequence, also where a listed block lies past its end."""
    case = batch([20, 0, 33, 9], [10, 30, 25, 0], device=device)
    check(*case, softcap=2.0, scale=0.3)
    check(*case, mask_mod=prefix, mask_args=(4,), twins={"mask_mod": prefix_twin})
    hook = {"score_mod": relative, "score_args": (rand(4, 9, device=device), 4), "mask_mod": dilated, "mask_args": (2,)}
    check(*case, splits=2, twins={"score_mod": relative_twin, "mask_mod": dilated_twin}, **hook)


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
    tensors, index, where = batch(*lengths, density=1.0, device=device)
    inputs, seen = [t.requires_grad_() for t in tensors], torch.zeros(1, device=device)
    hook = {"score_mod": inside, "score_args": (seen,), "score_grad": one}
    tilefold.sparse_attention_varlen(*inputs, index, **where, **hook).sum().backward()
    assert seen.item() == 0


@pytest.mark.parametrize("splits", [1, 2])
def test_what_lies_past_a_sequence_is_not_read(splits, device):
    """A short sequence's lists name blocks that lie in the next sequence, which is NaN: nothing of it comes through."""
    tensors, index, where = batch([20, 33], [17, 60], density=1.0, device=device)
    clean = check(tensors, index, where, splits=splits)
    q, k, v = tensors
    k[17:], v[17:] = float("nan"), float("nan")
    plan = plan_of(q, k, v, index, **where).with_tile(splits=splits)
    dirty = tilefold.sparse_attention_varlen(q, k, v, index, **where, plan=plan, return_lse=True)
    assert torch.equal(clean[0][:20], dirty[0][:20])
    assert torch.equal(clean[1][:, :20], dirty[1][:, :20])


def test_rows_of_no_sequence_are_left_alone(device):
    """The poisoned output shows which rows were written; the index may count more rows than any sequence has."""
    tensors, (cu_q, cu_k, _, _) = packed([20, 7], [33, 12], device=device)
    index = lists(2, 4, 50, 80, device=device)
    q = torch.cat([tensors[0], rand(5, 4, 32, device=device)])
    out, lse = tilefold.sparse_attention_varlen(q, *tensors[1:], index, cu_q, cu_k, return_lse=True)
    assert not out[:27].isnan().any()
    assert out[27:].isnan().all() and lse[:, 27:].isnan().all()


def test_equals_one_call_a_sequence(device):
    """The bits of sparse_attention on each sequence alone, lists cut to its blocks."""
    (q, k, v), index, where = batch([20, 33], [60, 17], device=device)
    out, lse = tilefold.sparse_attention_varlen(q, k, v, index, **where, causal=True, return_lse=True)
    keep = index.to_map()
    for b, (rows, keys) in enumerate(((slice(0, 20), slice(0, 60)), (slice(20, 53), slice(60, 77)))):
        n, m = rows.stop - rows.start, keys.stop - keys.start
        own = keep[b : b + 1, :, : -(-n // 16), : -(-m // 16)]
        alone = BlockIndex.from_map(own, block_q=16, block_k=16, seq_q=n, seq_k=m)
        same = tilefold.sparse_attention(
            q[None, rows], k[None, keys], v[None, keys], alone, causal=True, return_lse=True
        )
        assert torch.equal(same[0][0], out[rows])
        assert torch.equal(same[1][0], lse[:, rows])


@pytest.mark.parametrize("lengths", [([0, 0], [3, 4]), ([0], [0])])
def test_no_queries(lengths, device):
    tensors, index, where = batch(*lengths, device=device)
    out, lse = tilefold.sparse_attention_varlen(*tensors, index, **where, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 32), (4, 0))
    with pytest.raises(tilefold.Unsupported, match="there is no plan"):
        plan_of(*tensors, index, **where)


def test_plan(device):
    from tilefold.plan.sparse.sparse import SparsePlan

    tensors, index, where = batch([20, 33], [60, 17], device=device)
    plan = plan_of(*tensors, index, **where, causal=True)
    assert (plan.kernel, plan.problem.attention.varlen) == ("sparse_forward_varlen", True)
    assert "packed" in str(plan)
    assert SparsePlan.from_json(plan.to_json()) == plan
    with pytest.raises(tilefold.PlanError, match="kernel: sparse_forward does not serve varlen=True"):
        plan.with_tile(kernel="sparse_forward")
    dense = [t[None, :17] for t in tensors]
    with pytest.raises(tilefold.PlanError, match="plan was made for"):
        tilefold.sparse_attention(*dense, lists(1, 4, 17, 17, device=device), causal=True, plan=plan)


def test_refusals(device):
    """Before anything is launched, naming the argument, what was given and what is accepted."""
    (q, k, v), index, where = batch([20, 33], [60, 17], device=device)
    cu_q, cu_k = where.values()
    three = lists(3, 4, 33, 60, device=device)
    for error, text, args, options in (
        (tilefold.DtypeError, "index must be a tilefold.BlockIndex, got Tensor", (q, k, v, q, cu_q, cu_k), {}),
        (tilefold.DtypeError, "cu_seqlens_q has dtype int64, accepted: int32", (q, k, v, index, cu_q.long(), cu_k), {}),
        (tilefold.DtypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType", (q, k, v, index, cu_q, None), {}),
        (tilefold.ShapeError, "cu_seqlens_k has shape (2,)", (q, k, v, index, cu_q, cu_k[1:]), {}),
        (tilefold.ShapeError, "expected [batch+1]", (q, k, v, index, cu_q[None], cu_k), {}),
        (tilefold.ShapeError, "q has 4 dimensions", (q[None], k, v, index, cu_q, cu_k), {}),
        (
            tilefold.ShapeError,
            "index.indices has batch=3, expected 2 (as in cu_seqlens_q)",
            (q, k, v, three, cu_q, cu_k),
            {},
        ),
        (tilefold.ShapeError, "cu_seqlens_q is empty", (q, k, v, index, cu_q[:0], cu_k[:0]), {}),
        (tilefold.ValueRangeError, "scale must be greater than 0", (q, k, v, index, cu_q, cu_k), {"scale": -1.0}),
        (tilefold.DtypeError, "plan must be a SparsePlan", (q, k, v, index, cu_q, cu_k), {"plan": 3}),
        (tilefold.ShapeError, "the heads of q must be a multiple", (q[:, :3], k, v, index, cu_q, cu_k), {}),
    ):
        refuses(error, text, tilefold.sparse_attention_varlen, *args, **options)


@pytest.mark.interpreter
@pytest.mark.parametrize("offsets", [[0, 30], [0, 20, 10, 27], [-1, 27]])
def test_offsets_are_checked_in_the_interpreter(offsets):
    (q, k, v), _ = packed([20, 7], [20, 7])
    bad = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(tilefold.ValueRangeError, match="cu_seqlens_q must ascend"):
        tilefold.sparse_attention_varlen(q, k, v, lists(1, 4, 20, 20), bad, bad)


@pytest.mark.no_poison
def test_compile_fullgraph_with_gradients(device):
    """One graph, forward and backward: the eager bits; and gradients against the oracle's."""
    tensors, index, where = batch([20, 0, 33], [40, 30, 17], device=device)
    inputs = [t.requires_grad_() for t in tensors]

    def loss_of(result):
        out, lse = result
        return out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()

    def layer(q, k, v, index, cu_q, cu_k):
        return tilefold.sparse_attention_varlen(2 * q, k, v, index, cu_q, cu_k, causal=True, return_lse=True)

    compiled = one_graph(layer)
    eager, traced = ((*run(*inputs, index, *where.values()),) for run in (layer, compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
    mine, same = (torch.autograd.grad(loss_of(result), inputs) for result in (eager, traced))
    assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    oracle = reference.sparse_attention_varlen(2 * wide[0], *wide[1:], index, *where.values(), causal=True)
    for got, want in zip(mine, torch.autograd.grad(loss_of(oracle), wide), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)
