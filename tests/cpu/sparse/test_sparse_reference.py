"""The oracle of block-sparse attention against masks written element by element."""

import pytest
import torch

from cases import prefix_twin, qkv, rand, same
from tilefold import BlockIndex, reference


def by_element(index: BlockIndex, batch: int, heads: int) -> torch.Tensor:
    """bool [B, H, Sq, Sk] from single tokens, by the words of the record's contract."""
    full = index.expand(batch, heads)
    keep = torch.zeros(batch, heads, index.seq_q, index.seq_k, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(index.seq_q):
                row, o_q = divmod(i, index.block_q)
                if full.query_sizes is not None and o_q >= int(full.query_sizes[b, h, row]):
                    continue
                for block in full.indices[b, h, row, : int(full.counts[b, h, row])].tolist():
                    size = index.block_k if full.block_sizes is None else int(full.block_sizes[b, h, block])
                    first = block * index.block_k
                    keep[b, h, i, first : min(first + size, index.seq_k)] = True
    return keep


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("sizes", ["none", "shared", "batch", "head"])
def test_lists_written_out(sizes: str, layout: str) -> None:
    """Tails on both sides, unequal blocks, GQA, empty lists and empty blocks."""
    b, h, hk, sq, sk, bq, bk = 2, 4, 2, 50, 75, 16, 32
    shape = {"none": None, "shared": (3,), "batch": (b, 3), "head": (b, h, 3)}[sizes]
    block_sizes = None if shape is None else torch.randint(0, 12, shape, dtype=torch.int32)
    query_sizes = None if shape is None else torch.randint(0, 3, (*shape[:-1], 4), dtype=torch.int32)
    keep = torch.rand(b, h, 4, 3) < 0.5
    keep[0, 0, 1] = False
    index = BlockIndex.from_map(
        keep, block_q=bq, block_k=bk, seq_q=sq, seq_k=sk, block_sizes=block_sizes, query_sizes=query_sizes, check=True
    )
    q, k, v = qkv(b, sq, sk, h, hk, 8, 6)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = by_element(index, b, h)
    out, lse = reference.sparse_attention(q, k, v, index, layout=layout)
    want_out, want_lse = reference.attention(q, k, v, mask=mask, layout=layout)
    assert out.dtype == lse.dtype == torch.float64
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    assert lse[0, 0, 16:32].eq(float("-inf")).all()
    rows = out if layout == "bhsd" else out.transpose(1, 2)
    assert rows[0, 0, 16:32].eq(0).all() and not out.isnan().any()


def test_all_blocks_are_dense_attention() -> None:
    index = BlockIndex.from_map(torch.ones(1, 1, 4, 5, dtype=torch.bool), block_q=16, block_k=16, seq_q=60, seq_k=70)
    q, k, v = qkv(2, 60, 70, 3, 1, 8)
    options = {"causal": True, "softcap": 5.0, "bias": rand(1, 3, 60, 70), "sinks": rand(3)}
    assert same(reference.sparse_attention(q, k, v, index, **options), reference.attention(q, k, v, **options))


def test_masks_narrow_the_lists() -> None:
    index = BlockIndex.from_map(torch.rand(1, 2, 4, 4) < 0.6, block_q=16, block_k=16)
    q, k, v = qkv(1, 64, 64, 2, 2, 8)
    mask = torch.rand(1, 1, 64, 64) < 0.5
    both = by_element(index, 1, 2) & mask
    out, lse = reference.sparse_attention(q, k, v, index, mask=mask, mask_mod=prefix_twin, mask_args=(5,))
    want, want_lse = reference.attention(q, k, v, mask=both, mask_mod=prefix_twin, mask_args=(5,))
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_gradients_flow_and_dead_rows_have_none() -> None:
    keep = torch.tensor([[[[True, False], [False, False]]]])
    index = BlockIndex.from_map(keep, block_q=16, block_k=16)
    q, k, v = (t.double().requires_grad_() for t in qkv(1, 32, 32, 1, 1, 4))
    out, lse = reference.sparse_attention(q, k, v, index)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    for t, dead in ((q, slice(16, 32)), (k, slice(16, 32)), (v, slice(16, 32))):
        assert t.grad is not None and not t.grad.isnan().any()
        assert t.grad[:, dead].eq(0).all() and t.grad[:, :16].ne(0).any()


def test_lengths_have_to_fit() -> None:
    index = BlockIndex.from_map(torch.ones(1, 1, 2, 2, dtype=torch.bool))
    q, k, v = qkv(1, 128, 100, 1, 1, 8)
    with pytest.raises(ValueError, match="128 and 100 tokens"):
        reference.sparse_attention(q, k, v, index)
