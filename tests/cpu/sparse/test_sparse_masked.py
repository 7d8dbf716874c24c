"""Lists that came from a mask of tokens: the mask goes to the call, or the call is refused."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree

import tilefold
from cases import gradient, hold, judge, qkv
from cases.refusals import each_refuses
from tilefold import BlockIndex, DtypeError, ShapeError, Unsupported, ValueRangeError, reference
from tilefold.ops.sparse.classify import block_kinds
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
    *cu, table, length = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 70], [0, 100], [[0]], [100]))
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
    hold(tilefold.sparse_attention(q, k, v, index, causal=True), reference.attention, q, k, v, causal=True)


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
    hold(tilefold.sparse_attention(q, k, v, index.to(device)), reference.attention, q, k, v, mask=mask)


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
    each_refuses(
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
    )


# ---------------------------------------------------------------- lists of a mask_mod


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1), (64, 64), (33, 130), (0, 5), (5, 0)])
def test_blocks_of_a_mask_mod_are_empty_partial_or_full(lengths):
    """As the mask in memory says; what is past the sequence's end does not count."""
    grid, blocks = (1, 2, *lengths), (32, 16)
    kinds = block_kinds(near_mod, DOCUMENTS, grid, blocks, torch.device("cpu"))
    seen = dense(lengths=lengths)
    shape = (1, 2, -(-lengths[0] // 32), -(-lengths[1] // 16))
    want = torch.zeros(shape, dtype=torch.uint8)
    for h, i, j in itertools.product(range(2), range(shape[2]), range(shape[3])):
        block = seen[0, h, 32 * i : 32 * i + 32, 16 * j : 16 * j + 16]
        want[0, h, i, j] = int(block.any()) + int(block.all())
    assert torch.equal(kinds, want)


@pytest.mark.interpreter
@pytest.mark.parametrize(("block_q", "block_k"), [(16, 256), (128, 32)])
def test_blocks_larger_and_smaller_than_what_is_looked_at_at_a_time(block_q, block_k):
    sizes = {"seq_q": 150, "seq_k": 300, "heads": 2, "block_q": block_q, "block_k": block_k}
    found = BlockIndex.from_mask_mod(near_mod, DOCUMENTS, device="cpu", **sizes)
    assert torch.equal(found.to_map(), BlockIndex.from_mask(near, device="cpu", **sizes).to_map())


@pytest.mark.interpreter
def test_lists_of_a_mask_mod_are_shared_over_what_it_does_not_read(device):
    sizes = {"seq_q": 70, "seq_k": 100, "batch": 3, "heads": 2, "block_q": 32, "block_k": 16, "device": device}
    by_head = BlockIndex.from_mask_mod(near_mod, DOCUMENTS, **sizes)
    assert (by_head.batch, by_head.heads) == (1, 2) and by_head.masked
    assert torch.equal(by_head.to_map().cpu(), made("mask").to_map())
    shared = BlockIndex.from_mask_mod(whole_blocks, (32,), check=True, **sizes)
    assert (shared.batch, shared.heads) == (1, 1) and not shared.masked
    assert BlockIndex.from_mask_mod(by_sequence, (), **sizes).batch == 3


@triton.jit
def whole_blocks(score, batch, head, q_index, kv_index, args):
    size, seq_q, seq_k = args
    return q_index // size == kv_index // size


@triton.jit
def by_sequence(score, batch, head, q_index, kv_index, args):
    return kv_index >= 16 * batch


@pytest.mark.interpreter
def test_attention_over_lists_of_a_mask_mod(device):
    q, k, v = (t.requires_grad_() for t in qkv(2, *LENGTHS, 2, 1, 16, device=device))
    sizes = {"seq_q": LENGTHS[0], "seq_k": LENGTHS[1], "heads": 2, "block_q": 32, "block_k": 16, "device": device}
    index = BlockIndex.from_mask_mod(near_mod, DOCUMENTS, **sizes)
    out = tilefold.sparse_attention(q, k, v, index, mask_mod=near_mod, mask_args=DOCUMENTS)
    mask = dense().to(device)
    given = [t.detach() for t in (q, k, v)]
    judge(out.detach(), *(reference.attention(*given, mask=mask, dtype=t)[0] for t in (torch.float64, q.dtype)), "out")
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    want, plain = (gradient.oracle(given, upstream, None, t, mask=mask) for t in (torch.float64, q.dtype))
    gradient.judged(got, want, plain, "over lists of a mask_mod")


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"mask_mod": near}, DtypeError, "triton.jit"),
        ({"mask_mod": None}, DtypeError, "got None"),
        ({"args": [3]}, DtypeError, "mask_args must be a tuple"),
        ({"args": (3,)}, ValueRangeError, "mask_args"),
        ({"block_q": 24}, ValueRangeError, "block_q"),
        ({"seq_k": -1}, ValueRangeError, "seq_k"),
        ({"heads": 1.0}, DtypeError, "heads"),
    ],
)
def test_mask_mods_that_are_refused(change, error, says, device):
    given = {"mask_mod": near_mod, "args": DOCUMENTS, "seq_q": 70, "seq_k": 100, "device": device} | change
    with pytest.raises(error, match=says):
        BlockIndex.from_mask_mod(**given)
