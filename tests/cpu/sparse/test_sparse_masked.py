"""Lists that came from a mask of tokens: the mask goes to the call, or the call is refused."""

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree

import tilefold
from cases import judge, qkv
from tilefold import BlockIndex, DtypeError, ShapeError, Unsupported, reference
from tilefold.parallel import shard_blocks, shard_index

LENGTHS = (70, 100)
DOCUMENTS = (23, 3)  # tokens a document, the same documents for queries and keys; tokens on the left


def near(batch, head, q_index, kv_index):
    """The keys of the query's document, from 3 before it on, other documents for the second head."""
    tokens = DOCUMENTS[0] + 8 * head
    return (q_index // tokens == kv_index // tokens) & (kv_index >= q_index - DOCUMENTS[1])


@triton.jit
def near_mod(score, batch, head, q_index, kv_index, args):
    tokens, left, seq_q, seq_k = args
    tokens += 8 * head
    seen = (q_index // tokens == kv_index // tokens) & (kv_index >= q_index - left)
    return seen.to(tl.int1)


def made(how, rule=near, lengths=LENGTHS, heads=2, **options):
    if how == "mask":
        return BlockIndex.from_mask(rule, seq_q=lengths[0], seq_k=lengths[1], heads=heads, block_q=32, block_k=16,
                                    device="cpu", **options)  # fmt: skip
    blocks = create_block_mask(rule, 1, heads, *lengths, device="cpu", BLOCK_SIZE=(32, 16))
    return BlockIndex.from_flex(blocks, **options)


def dense(rule=near, lengths=LENGTHS, heads=2):
    i, j, h = torch.arange(lengths[0])[:, None], torch.arange(lengths[1]), torch.arange(heads)[:, None, None]
    return rule(torch.zeros(1, 1, 1, 1, dtype=torch.long), h, i, j).expand(1, heads, *lengths)


@pytest.mark.no_poison
@pytest.mark.parametrize("at_once", [1 << 24, 1])
def test_a_mask_of_tokens_lists_what_flex_lists(at_once, monkeypatch):
    monkeypatch.setattr(tilefold.sparse.convert, "AT_ONCE", at_once)  # 1: one block of queries at a time
    found = made("mask", check=True)
    assert torch.equal(found.to_map(), made("flex").to_map())
    assert found.geometry == (32, 16, *LENGTHS) and found.masked
    some = dense().new_zeros(1, 2, 96, 112)
    some[..., :70, :100] = dense()
    assert torch.equal(found.to_map(), some.view(1, 2, 3, 32, 7, 16).any(5).any(3))


@pytest.mark.no_poison
@pytest.mark.parametrize("how", ["flex", "mask"])
def test_the_mask_is_kept_by_the_call_or_the_call_is_refused(how, device):
    q, k, v = qkv(1, *LENGTHS, 2, 2, 32, device=device)
    index = made(how).to(device)
    exact, _ = reference.attention(q, k, v, mask=dense().to(device))
    plain, _ = reference.attention(q, k, v, mask=dense().to(device), dtype=q.dtype)
    out = tilefold.sparse_attention(q, k, v, index, mask_mod=near_mod, mask_args=DOCUMENTS)
    judge(out, exact, plain, "out")
    cu = (
        torch.tensor([0, 70], dtype=torch.int32, device=device),
        torch.tensor([0, 100], dtype=torch.int32, device=device),
    )
    table, length = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [100]))
    for call in (
        lambda: tilefold.sparse_attention(q, k, v, index),
        lambda: tilefold.sparse_attention(q, k, v, index, check="device"),
        lambda: tilefold.sparse_attention_varlen(q[0], k[0], v[0], index, *cu),
        lambda: tilefold.sparse_attention_paged(q, k, v, index, table, length),
        lambda: tilefold.sparse_plan(q, k, v, index),
    ):
        with pytest.raises(
            Unsupported, match=r"index was made from a mask .* Give the mask as mask_mod, or as causal=True"
        ):
            call()
    whole = tilefold.sparse_attention(q, k, v, made(how, masked=False).to(device))
    error = float((whole.double() - exact).abs().max())
    assert error > 0.1, "these blocks are to be cut by the mask, so that leaving it out is seen"


def test_causal_is_a_mask(device):
    """Of as many queries as keys, as FlexAttention's is; the diagonal blocks are cut by causal=True."""
    q, k, v = qkv(1, 70, 70, 2, 2, 32, device=device)
    index = made("mask", lambda b, h, i, j: j <= i, (70, 70)).to(device)
    assert (index.batch, index.heads) == (1, 1) and index.masked
    exact, _ = reference.attention(q, k, v, causal=True)
    plain, _ = reference.attention(q, k, v, causal=True, dtype=q.dtype)
    judge(tilefold.sparse_attention(q, k, v, index, causal=True), exact, plain, "out")


@pytest.mark.no_poison
@pytest.mark.parametrize("how", ["flex", "mask"])
def test_blocks_that_are_whole_need_no_mask(how, device):
    """Known without reading a value only where there is no mask function; by check=True otherwise."""
    rule = lambda b, h, i, j: (i // 32 * 2 >= j // 16) & (b >= 0)  # noqa: E731
    assert made(how, rule, (64, 96)).masked
    index = made(how, rule, (64, 96), check=True)
    assert not index.masked
    q, k, v = qkv(1, 64, 96, 2, 2, 32, device=device)
    mask = dense(rule, (64, 96)).to(device)
    exact, plain = (reference.attention(q, k, v, mask=mask, **d)[0] for d in ({}, {"dtype": q.dtype}))
    judge(tilefold.sparse_attention(q, k, v, index.to(device)), exact, plain, "out")


@pytest.mark.no_poison
def test_a_block_mask_without_a_mask_function_is_whole():
    from torch.nn.attention.flex_attention import BlockMask

    counts, blocks = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    assert not BlockIndex.from_flex(BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=64)).masked


def test_records_made_of_a_masked_one_are_masked():
    index = made("mask")
    leaves, spec = _pytree.tree_flatten(index)
    sharded = shard_index(index, shard_blocks(70, 2, 32), 0)
    for other in (index.transpose(), index.expand(2, 2), index.to("meta"), sharded,
                  _pytree.tree_unflatten(leaves, spec)):  # fmt: skip
        assert other.masked
    assert "masked" in repr(index)


def test_refusals():
    for error, text, call in (
        (
            DtypeError,
            r"mask must be a function of \(batch, head, q_index, kv_index\), got None",
            lambda: made("mask", None),
        ),
        (DtypeError, "got one of", lambda: made("mask", lambda i, j: i >= j)),
        (DtypeError, "mask must return a bool tensor", lambda: made("mask", lambda b, h, i, j: i - j)),
        (
            ShapeError,
            r"broadcast to \[batch, heads, queries, seq_k\]",
            lambda: made("mask", lambda b, h, i, j: (i >= j)[1:]),
        ),
        (DtypeError, "masked must be a bool, got 1", lambda: made("mask", masked=1)),
    ):
        with pytest.raises(error, match=text):
            call()
