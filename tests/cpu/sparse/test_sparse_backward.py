"""Gradients of block-sparse attention against fp64 autograd: counts, sizes, tails, blocks, sharing, mods, lse, refusals."""

import re
from typing import Any

import pytest
import torch

import tilefold
from cases import dilated, dilated_twin, gradient, looped, one, qkv, rand, relative, relative_twin, same
from cases.gradient import judged
from cases.index import lists
from cases.index import plan_of as forward_plan
from tilefold import BlockIndex, reference
from tilefold.ops.call import Call
from tilefold.ops.source import Lists
from tilefold.ops.sparse import sparse as sparse_ops
from tilefold.ops.sparse import sparse_backward as backward_ops
from tilefold.plan import device_named
from tilefold.plan.limits import Tile
from tilefold.plan.sparse.sparse_backward import SparseBackwardPlan, plan_sparse_backward

BOX = "sparse_backward_box"


def plan_of(q, k, v, index, **options) -> SparseBackwardPlan:
    call = Call(lists=Lists.of(index), **options)
    return backward_ops._plan(sparse_ops.prepare(q, k, v, call), call, q)


def oracle(q, k, v, index, dout, dlse, dtype, options):
    return gradient.oracle((q, k, v), dout, dlse, dtype, (index,), of="sparse_attention", **options)


def gradients(q, k, v, index, dout, dlse, options):
    return gradient.gradients((q, k, v), dout, dlse, (index,), of="sparse_attention", **options)


def check(q, k, v, index, lse=True, kernel=None, twins: dict[str, Any] | None = None, **options):
    dout, dlse = gradient.upstream(q, v, options.get("layout", "bshd"), lse)
    python = {**options, **(twins or {})}
    if kernel:
        hooks = {name: value for name, value in options.items() if name not in gradient.OURS}
        options["backward_plan"] = plan_of(q, k, v, index, **hooks).with_tiles(kernel=kernel)
    got = gradients(q, k, v, index, dout, dlse, options)
    sides = (oracle(q, k, v, index, dout, dlse, kind, python) for kind in (torch.float64, q.dtype))
    judged(got, *sides, f"{tuple(q.shape)} {tuple(k.shape)} {q.dtype} {kernel} {sorted(options)}")
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lse", [False, True])
def test_lists(dtype, lse, device):
    """Batch, groups of heads, a V of another width, rows with no block, one and all."""
    q, k, v = qkv(2, 48, 80, 4, 2, 32, 24, dtype=dtype, device=device)
    check(q, k, v, lists(2, 4, 48, 80, device=device), lse)


@pytest.mark.parametrize("kernel", ["sparse_backward", BOX])
def test_tails(kernel, device):
    """Lengths that are no multiple of the block, on both sides."""
    for sq, sk in ((33, 70), (16, 17), (5, 90), (64, 1)):
        q, k, v = qkv(1, sq, sk, 2, 1, 32, dtype=torch.float16, device=device)
        check(q, k, v, lists(1, 2, sq, sk, device=device), kernel=kernel)


@pytest.mark.parametrize("sizes", [[16, 0, 5, 16, 1], [0, 0, 0, 0, 0], [0, 16, 16, 16, 16], [16, 16, 16, 16, 3]])
def test_block_sizes(sizes, device):
    """Zero-length blocks first, in the middle, everywhere; padding may hold NaN and gets gradient 0."""
    q, k, v = qkv(1, 48, 80, 4, 2, 16, device=device)  # two heads are so few numbers that one rounding decides
    valid = torch.tensor(sizes, dtype=torch.int32, device=device)
    index = lists(1, 4, 48, 80, density=0.7, block_sizes=valid, device=device)
    torch.manual_seed(1)
    clean = check(q, k, v, index)
    position = torch.arange(80, device=device)
    padding = position % 16 >= valid.long()[position // 16]
    k[:, padding], v[:, padding] = float("nan"), float("nan")
    torch.manual_seed(1)
    dout, dlse = rand(1, 48, 4, 16, device=device), rand(1, 4, 48, device=device)
    dirty = gradients(q, k, v, index, dout, dlse, {})
    assert same(clean, dirty)
    assert not dirty[1][:, padding].any()
    assert not dirty[2][:, padding].any()


def test_the_mask_goes_by_block_and_not_by_place_in_the_list(device):
    """Sizes differ from block to block and the list is not the identity: the size of block 4 belongs to block 4."""
    q, k, v = qkv(1, 16, 80, 2, 2, 16, device=device)
    sizes = torch.tensor([1, 16, 3, 16, 7], dtype=torch.int32, device=device)
    for order in ([4, 2, 0], [0, 2, 4], [2, 4, 0]):
        indices = torch.tensor([[[order]]], dtype=torch.int32, device=device)
        index = BlockIndex.from_indices(
            indices, None, block_q=16, block_k=16, seq_q=16, seq_k=80, block_sizes=sizes, sort=False
        )
        check(q, k, v, index)


def test_sizes_per_head_and_query_sizes(device):
    """Queries past their block's size may hold NaN, in q and in dout; two heads of a group have different key sizes."""
    q, k, v = qkv(2, 48, 64, 4, 2, 16, device=device)
    sizes = torch.randint(0, 17, (2, 4, 4), dtype=torch.int32, device=device)
    queries = torch.randint(0, 17, (2, 1, 3), dtype=torch.int32, device=device)
    index = lists(2, 4, 48, 64, block_sizes=sizes, query_sizes=queries, device=device)
    check(q, k, v, index)
    dout = rand(2, 48, 4, 16, device=device)
    position = torch.arange(48, device=device)
    padding = position % 16 >= queries.long()[:, 0, position // 16]
    clean = gradients(q, k, v, index, dout, None, {})
    q[padding], dout[padding] = float("nan"), float("nan")
    dirty = gradients(q, k, v, index, dout, None, {})
    assert same(clean, dirty)


@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (64, 64), (128, 16)])
def test_blocks_of_several_tiles(blocks, device):
    q, k, v = qkv(1, 140, 130, 2, 1, 16, dtype=torch.float16, device=device)
    index = lists(1, 2, 140, 130, block=blocks[1], block_q=blocks[0], device=device)
    tile = Tile(16, 16, 4, 1)
    check(q, k, v, index, backward_plan=plan_of(q, k, v, index).with_tiles(tile, tile))


@pytest.mark.parametrize("kernel", ["sparse_backward", BOX])
def test_shared_lists_and_strides(kernel, device):
    """Lists shared over batch and heads; q, k, v cut from one tensor; [B, H, S, D]."""
    index = lists(1, 1, 48, 48, device=device)
    q, k, v = rand(2, 48, 3, 4, 32, device=device, dtype=torch.float16).unbind(2)
    check(q, k, v, index, kernel=kernel)
    check(*(t.transpose(1, 2) for t in (q, k, v)), index, kernel=kernel, layout="bhsd")


def test_values_whose_rows_are_no_multiples_of_16_bytes(device):
    """K and V may be readable as boxes where the gradient of out, as narrow as V and without room between its rows, is not."""
    q, k, v = qkv(1, 33, 50, 2, 2, 16, dtype=torch.float16, device=device)
    v = torch.cat((v, v), -1)[..., :12]
    index = lists(1, 2, 33, 50, device=device)
    check(q, k, v, index)
    problem = tilefold.sparse_plan(q, k, v, index).problem
    assert problem.descriptors and problem.attention.descriptors
    assert plan_sparse_backward(problem, device_named("h200")).kernel == "sparse_backward"
    plan = tilefold.sparse_plan(*(t.requires_grad_() for t in (q, k, v)), index, direction="backward")
    with pytest.raises(tilefold.PlanError, match="rows of the gradient of out are not multiples of 16 bytes"):
        plan.with_tiles(kernel="sparse_backward_box")


def test_gradient_of_a_sum(device):
    """sum() hands back a gradient whose elements share one address; so does a slice of a larger one."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 48, 48, 2, 2, 16, device=device))
    index = lists(1, 2, 48, 48, device=device)
    for loss in (lambda out: out.sum(), lambda out: torch.cat([out, out * 0.5], 3).square().sum()):
        got = torch.autograd.grad(loss(tilefold.sparse_attention(q, k, v, index)), (q, k, v))
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]

        def pulled(loss=loss, wide=wide):
            return torch.autograd.grad(loss(reference.sparse_attention(*wide, index)[0]), wide)

        plain = reference.deviating(pulled, torch.float32)
        judged(got, pulled(), plain, "")


def test_only_what_is_asked(device):
    index = lists(1, 2, 48, 48, device=device)
    q, k, v = qkv(1, 48, 48, 2, 2, 16, device=device)
    dout = rand(1, 48, 2, 16, device=device)
    everything = gradients(q, k, v, index, dout, None, {})
    for wanted in range(3):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((q, k, v))]
        out = tilefold.sparse_attention(*inputs, index)
        out.backward(dout)
        assert [t.grad is not None for t in inputs] == [i == wanted for i in range(3)]
        assert torch.equal(inputs[wanted].grad, everything[wanted])


def test_only_lse(device):
    q, k, v = qkv(1, 48, 48, 2, 2, 16, device=device)
    index = lists(1, 2, 48, 48, device=device)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    _, lse = tilefold.sparse_attention(*inputs, index, return_lse=True)
    dlse = rand(1, 2, 48, device=device)
    got = torch.autograd.grad(lse, inputs, dlse)
    zero = torch.zeros(1, 48, 2, 16, device=device)
    want, plain = (oracle(q, k, v, index, zero, dlse, d, {}) for d in (torch.float64, torch.float32))
    judged(got, want, plain, "")


def test_mods(device):
    q, k, v = qkv(1, 48, 48, 4, 2, 16, device=device)
    index = lists(1, 4, 48, 48, device=device)
    check(q, k, v, index, causal=True)
    check(q, k, v, index, softcap=2.0, scale=0.3)
    check(*(t.half() for t in (q, k, v)), index, softcap=2.0, causal=True)
    hook = {"score_mod": relative, "score_args": (rand(4, 9, device=device), 4), "mask_mod": dilated, "mask_args": (2,)}
    twins = {"score_mod": relative_twin, "mask_mod": dilated_twin}
    check(q, k, v, index, twins=twins, score_grad=one, softcap=3.0, **hook)


def test_a_split_forward(device):
    """The lse of merged shares serves the backward pass as well."""
    q, k, v = qkv(1, 16, 160, 2, 2, 16, device=device)
    index = lists(1, 2, 16, 160, device=device)
    check(q, k, v, index, lse=False, plan=forward_plan(q, k, v, index).with_tile(splits=3))


def test_empty(device):
    for sq, sk in ((0, 32), (32, 0)):
        tensors = [t.requires_grad_() for t in qkv(1, sq, sk, 2, 2, 16, device=device)]
        keep = torch.ones(1, 1, sq // 16, sk // 16, dtype=torch.bool, device=device)
        index = BlockIndex.from_map(keep, block_q=16, block_k=16, seq_q=sq, seq_k=sk)
        grads = torch.autograd.grad(tilefold.sparse_attention(*tensors, index).sum(), tensors)
        assert [g.shape for g in grads] == [t.shape for t in tensors]
        assert not any(g.any() for g in grads)


def test_same_bits(device):
    q, k, v = qkv(1, 48, 80, 4, 2, 32, dtype=torch.float16, device=device)
    index, dout = lists(1, 4, 48, 80, device=device), rand(1, 48, 4, 32, dtype=torch.float16, device=device)
    first, second = (gradients(q, k, v, index, dout, None, {}) for _ in range(2))
    assert same(first, second)


def test_refusals(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 48, 48, 4, 2, 16, device=device))
    index = lists(1, 4, 48, 48, device=device)
    table, learned = rand(4, 9, device=device), rand(4, 9, device=device).requires_grad_()
    with pytest.raises(tilefold.Unsupported, match="(?s)looped, `for _ in .*give score_grad"):
        tilefold.sparse_attention(q, k, v, index, score_mod=looped)
    with pytest.raises(tilefold.Unsupported, match=r"score_args\[0\] requires a gradient"):
        tilefold.sparse_attention(q, k, v, index, score_mod=relative, score_grad=one, score_args=(learned, 4))
    with pytest.raises(tilefold.DtypeError, match="score_grad must be a @triton.jit function"):
        tilefold.sparse_attention(q, k, v, index, score_mod=relative, score_grad=len, score_args=(table, 4))
    with pytest.raises(tilefold.ValueRangeError, match="score_grad was given without score_mod"):
        tilefold.sparse_attention(q, k, v, index, score_grad=one)
    with pytest.raises(tilefold.DtypeError, match="backward_plan must be a SparseBackwardPlan"):
        tilefold.sparse_attention(q, k, v, index, backward_plan=3)
    out = tilefold.sparse_attention(q, k, v, index)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(tilefold.Unsupported, match="first derivatives only"):
        grad.sum().backward()


def test_plan(device):
    """JSON both ways; tiles that do not divide a block are refused; a plan of other lists too."""
    q, k, v = qkv(1, 48, 48, 4, 2, 16, device=device)
    index = lists(1, 4, 48, 48, device=device)
    plan = plan_of(q, k, v, index)
    assert SparseBackwardPlan.from_json(plan.to_json()) == plan
    assert "sparse_backward" in str(plan)
    for fields in ({"queries": Tile(64, 16, 4, 1)}, {"keys": Tile(16, 48, 4, 1)}, {"kernel": "attention_forward"}):
        with pytest.raises(tilefold.PlanError, match=next(iter(fields))):
            plan.with_tiles(**fields)
    other = lists(1, 4, 48, 48, block=32, device=device)
    with pytest.raises(tilefold.PlanError, match="block_q"):
        tilefold.sparse_attention(q.requires_grad_(), k, v, other, backward_plan=plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_sequences(dtype, device):
    """Sequences of different lengths, one without queries, one without keys; rows of no sequence get gradient 0."""
    q_ends, k_ends = [0, 20, 20, 53, 60], [0, 35, 70, 80, 80]
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in (q_ends, k_ends))
    q, k, v = (t[0] for t in qkv(1, 64, 84, 4, 2, 32, 24, dtype=dtype, device=device))
    index = lists(4, 4, 33, 35, density=0.7, device=device)
    dout, dlse = rand(64, 4, 24, dtype=dtype, device=device), rand(4, 64, device=device)
    dout[60:], dlse[:, 60:] = 0, 0

    where, of = (index, cu_q, cu_k), "sparse_attention_varlen"
    for options in ({}, {"causal": True}):
        got = gradient.gradients((q, k, v), dout, dlse, where, of=of, **options)
        sides = (
            gradient.oracle((q, k, v), dout, dlse, kind, where, of=of, **options) for kind in (torch.float64, dtype)
        )
        judged(got, *sides, f"packed {options}")
        assert not any(g[end:].any() for g, end in zip(got, (60, 80, 80), strict=True))


def test_what_changes_in_place_before_the_backward_pass_is_refused(device):
    """As torch refuses a changed q: gradients would be those of other lists than the output's."""

    def attend():
        index = lists(1, 2, 32, 32, device=device, block_sizes=torch.full((2,), 16, dtype=torch.int32, device=device))
        q, k, v = (t.requires_grad_() for t in qkv(1, 32, 32, 2, 2, 16, device=device))
        hook = {"score_mod": relative, "score_args": (rand(2, 9, device=device), 4), "score_grad": one}
        return index, hook["score_args"][0], tilefold.sparse_attention(q, k, v, index, **hook).sum()

    for name in ("index.indices", "index.counts", "index.block_sizes", "score_args[0]"):
        index, table, loss = attend()
        (table if name == "score_args[0]" else getattr(index, name.removeprefix("index."))).fill_(1)
        with pytest.raises(
            tilefold.ModifiedError, match=rf"modified by an inplace operation: {re.escape(name)}, .*version 1"
        ):
            loss.backward()
    assert issubclass(tilefold.ModifiedError, RuntimeError)
    attend()[2].backward()


def test_a_backward_plan_has_a_public_way(device):
    """Made by sparse_plan, changed, followed; what has no backward pass has none."""
    q, k, v = qkv(1, 32, 32, 2, 2, 16, device=device)
    index = lists(1, 2, 32, 32, device=device)
    plan = tilefold.sparse_plan(q, k, v, index, direction="backward")
    assert isinstance(plan, tilefold.plan.SparseBackwardPlan) and plan == plan_of(q, k, v, index)
    assert isinstance(tilefold.sparse_plan(q, k, v, index), tilefold.plan.SparsePlan)
    small = plan.with_tiles(queries=tilefold.plan.Tile(16, 16, 4, 1))
    tilefold.sparse_attention(q.requires_grad_(), k, v, index, backward_plan=small).sum().backward()
    with pytest.raises(tilefold.ValueRangeError, match="direction must be 'forward' or 'backward', got 'both'"):
        tilefold.sparse_plan(q, k, v, index, direction="both")
    with pytest.raises(tilefold.Unsupported, match="give score_grad"):
        tilefold.sparse_plan(q, k, v, index, direction="backward", score_mod=looped)
