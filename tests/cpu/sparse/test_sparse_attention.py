"""Block-sparse forward attention against the fp64 oracle: counts, sizes, tails, blocks, splits, sharing, mods, refusals."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tilefold
from cases import dilated, dilated_twin, hold, judge, qkv, rand, relative, relative_twin
from cases.index import held, lists, plan_of
from cases.refusals import refuses
from sources import run_source
from tilefold import BlockIndex, reference
from tilefold.sparse import Selection

BOX = "sparse_forward_box"


def check(q, k, v, index, splits=1, kernel=None, **options):
    return held(
        "sparse_attention", (q, k, v), index, {}, splits=splits, tile={"kernel": kernel} if kernel else None, **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 3])
def test_lists(dtype, splits, device):
    q, k, v = qkv(2, 48, 80, 4, 2, 32, 24, dtype=dtype, device=device)
    check(q, k, v, lists(2, 4, 48, 80, device=device), splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kernel", ["sparse_forward", BOX])
def test_tails(splits, kernel, device):
    """Lengths that are no multiple of the block, on both sides, lengths differ."""
    for sq, sk in ((33, 70), (16, 17), (5, 90), (64, 1)):
        q, k, v = qkv(1, sq, sk, 2, 1, 32, dtype=torch.float16, device=device)
        check(q, k, v, lists(1, 2, sq, sk, device=device), splits, kernel)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sizes", [[16, 0, 5, 16, 1], [0, 0, 0, 0, 0], [0, 16, 16, 16, 16], [16, 16, 16, 16, 3]])
def test_block_sizes(sizes, splits, device):
    """Zero-length blocks first, in the middle, everywhere; padding may hold NaN."""
    q, k, v = qkv(1, 48, 80, 2, 2, 16, device=device)
    valid = torch.tensor(sizes, dtype=torch.int32, device=device)
    index = lists(1, 2, 48, 80, density=0.7, block_sizes=valid, device=device)
    clean = check(q, k, v, index, splits)
    position = torch.arange(80, device=device)
    padding = position % 16 >= valid.long()[position // 16]
    k[:, padding], v[:, padding] = float("nan"), float("nan")
    plan = plan_of(q, k, v, index).with_tile(splits=splits)
    dirty = tilefold.sparse_attention(q, k, v, index, plan=plan, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_sizes_per_head_and_query_sizes(device):
    q, k, v = qkv(2, 48, 64, 4, 2, 16, device=device)
    sizes = torch.randint(0, 17, (2, 4, 4), dtype=torch.int32, device=device)
    queries = torch.randint(0, 17, (2, 1, 3), dtype=torch.int32, device=device)
    check(q, k, v, lists(2, 4, 48, 64, block_sizes=sizes, query_sizes=queries, device=device), 2)


def test_sizes_per_sequence(device):
    """[batch, blocks] is one row a sequence, whatever the number of heads."""
    q, k, v = qkv(2, 48, 64, 4, 2, 16, device=device)
    sizes = torch.tensor([[16, 3, 0, 9], [0, 16, 5, 16]], dtype=torch.int32, device=device)
    queries = torch.tensor([[16, 2, 9], [0, 16, 16]], dtype=torch.int32, device=device)
    check(q, k, v, lists(2, 4, 48, 64, density=0.8, block_sizes=sizes, query_sizes=queries, device=device), 2)


@pytest.mark.parametrize("blocks", [(16, 32), (32, 16), (64, 64), (128, 16)])
def test_blocks_of_several_tiles(blocks, device):
    q, k, v = qkv(1, 140, 130, 2, 1, 16, dtype=torch.float16, device=device)
    index = lists(1, 2, 140, 130, block=blocks[1], block_q=blocks[0], device=device)
    plan = plan_of(q, k, v, index).with_tile(block_m=16, block_n=16, splits=2)
    out, lse = tilefold.sparse_attention(q, k, v, index, plan=plan, return_lse=True)
    hold((out, lse), reference.sparse_attention, q, k, v, index)


def test_shared_lists_and_strides(device):
    """Lists shared over batch and heads; q, k, v cut from one tensor; [B, H, S, D]."""
    index = lists(1, 1, 48, 48, device=device)
    q, k, v = rand(2, 48, 3, 4, 32, device=device).unbind(2)
    out, _ = check(q, k, v, index)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    same = tilefold.sparse_attention(*turned, index, layout="bhsd")
    judge(same.transpose(1, 2), out.double(), out, "layout")


def test_order_of_a_list(device):
    q, k, v = qkv(1, 16, 80, 2, 2, 16, device=device)
    for order in ([0, 1, 3, 4], [4, 3, 1, 0], [3, 0, 4, 1]):
        indices = torch.tensor([[[order]]], dtype=torch.int32, device=device)
        counts = torch.full((1, 1, 1), 4, dtype=torch.int32, device=device)
        index = BlockIndex.from_indices(indices, counts, block_q=16, block_k=16, seq_q=16, seq_k=80, sort=False)
        check(q, k, v, index)


def test_mods(device):
    q, k, v = qkv(1, 48, 48, 4, 2, 16, device=device)
    index = lists(1, 4, 48, 48, device=device)
    check(q, k, v, index, causal=True)
    check(q, k, v, index, softcap=2.0, scale=0.3)
    hook = {"score_mod": relative, "score_args": (rand(4, 9, device=device), 4), "mask_mod": dilated, "mask_args": (2,)}
    check(q, k, v, index, 2, twins={"score_mod": relative_twin, "mask_mod": dilated_twin}, **hook)


def test_all_blocks_is_dense(device):
    q, k, v = qkv(2, 48, 64, 4, 2, 32, dtype=torch.float16, device=device)
    full = torch.ones(1, 1, 3, 4, dtype=torch.bool, device=device)
    index = BlockIndex.from_map(full, block_q=16, block_k=16, seq_q=48, seq_k=64)
    out = tilefold.sparse_attention(q, k, v, index)
    hold(out, reference.attention, q, k, v)


def test_empty(device):
    q, k, v = qkv(1, 0, 32, 2, 2, 16, device=device)
    index = BlockIndex.from_map(
        torch.ones(1, 1, 0, 2, dtype=torch.bool, device=device), block_q=16, block_k=16, seq_q=0, seq_k=32
    )
    assert tilefold.sparse_attention(q, k, v, index).shape == (1, 0, 2, 16)


def test_refusals(device):
    q, k, v = qkv(1, 48, 48, 4, 2, 16, device=device)
    index = lists(1, 4, 48, 48, device=device)
    selection = Selection(index, q, None, q)
    for error, text, args, options in (
        (tilefold.DtypeError, "index must be a tilefold.BlockIndex, got Tensor", (q, k, v, q), {}),
        (
            tilefold.ShapeError,
            "index was made for seq_k=48, but the tensors have seq_k=47",
            (q, k[:, 1:], v[:, 1:], index),
            {},
        ),
        (tilefold.ShapeError, "index.indices has heads=4, expected 2", (q[:, :, :2], k, v, index), {}),
        (
            tilefold.ShapeError,
            "index was made for seq_q=48, but the tensors have seq_q=4 (layout is 'bshd')",
            (*(t.transpose(1, 2) for t in (q, k, v)), index),
            {},
        ),
        (tilefold.DtypeError, "return_lse must be a bool, got 'no'", (q, k, v, index), {"return_lse": "no"}),
        (tilefold.DtypeError, "backward_plan must be a SparseBackwardPlan", (q, k, v, index), {"backward_plan": "x"}),
        (tilefold.DtypeError, "got Selection: pass its .index", (q, k, v, selection), {}),
        (tilefold.DtypeError, "make one with BlockIndex.from_flex", (q, k, v, SimpleNamespace(kv_num_blocks=0)), {}),
        (tilefold.DtypeError, "causal must be a bool", (q, k, v, index), {"causal": 1}),
        (tilefold.ValueRangeError, "scale must be greater than 0", (q, k, v, index), {"scale": 0.0}),
        (tilefold.DtypeError, "plan must be a SparsePlan", (q, k, v, index), {"plan": 3}),
    ):
        refuses(error, text, tilefold.sparse_attention, *args, **options)


def test_plan(device):
    """JSON both ways; overrides that do not divide a block are refused; a plan of other lists too."""
    from tilefold.plan.sparse.sparse import SparsePlan

    q, k, v = qkv(1, 48, 48, 4, 2, 16, device=device)
    index = lists(1, 4, 48, 48, device=device)
    plan = plan_of(q, k, v, index)
    assert SparsePlan.from_json(plan.to_json()) == plan
    assert "sparse_forward" in str(plan)
    for fields in ({"block_m": 64}, {"block_n": 48}, {"splits": 0}, {"kernel": "attention_forward"}):
        with pytest.raises(tilefold.PlanError, match=next(iter(fields))):
            plan.with_tile(**fields)
    other = lists(1, 4, 48, 48, block=32, device=device)
    with pytest.raises(tilefold.PlanError, match="block_q"):
        tilefold.sparse_attention(q, k, v, other, plan=plan)


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
    q, k, v = qkv(1, 16, 16, 2, 2, 16, device=device)
    for mod, text in ((numbers, "a mask_mod has to return booleans (a comparison), not scores"),
                      (without_args, "TypeError in without_args (")):  # fmt: skip
        with pytest.raises(triton.runtime.errors.InterpreterError) as caught:
            tilefold.sparse_attention(q, k, v, lists(1, 2, 16, 16, device=device), mask_mod=mod)
        assert str(caught.value).startswith(text), str(caught.value)


def documented(page: str) -> list[str]:
    """The Python examples of a page, in order."""
    text = (Path(__file__).parents[3] / "docs" / "explanation" / page).read_text()
    return [part.split("```")[0] for part in text.split("```python\n")[1:]]


@pytest.mark.interpreter
def test_the_examples_of_the_page_run():
    names: dict[str, object] = {}
    for example in documented("sparse.md"):
        run_source(example.replace(', device="cuda"', ""), names)


def test_the_documented_merge(device):
    """Also of rows that are dead in both parts: 0 with lse -inf, not NaN."""
    (example,) = documented("merge.md")
    for keys in (24, 0):
        q, k, v = qkv(1, 16, keys, 2, 2, 16, device=device)
        names = {"tilefold": tilefold, "torch": torch, "q": q, "k": k, "v": v, "cut": keys // 3}
        exec(example, names)
        whole, lse = tilefold.attention(q, k, v, return_lse=True)
        torch.testing.assert_close(names["out"], whole, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(names["lse"], lse, atol=1e-5, rtol=1e-5)
