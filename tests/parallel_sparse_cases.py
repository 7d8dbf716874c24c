"""Block-sparse attention over sequence shards: beside one process with all tokens, and what travels is what the lists name."""

import torch
import torch.distributed as dist

import tilefold
from cases.refusals import refuses
from tilefold import parallel as tp
from tilefold import reference
from tilefold.parallel import exchange as exchanges
from tilefold.reference import compare, deviating
from tilefold.sparse import BlockIndex


def suite():
    ranks = dist.get_world_size()
    yield "sparse-heads", lambda: check(tp.shard_blocks(59, ranks, 16), 1, (4, 2), 0.4)
    if ranks == 2:
        yield "sparse-shared", lambda: check(tp.shard(75, 2, lengths=[16, 59]), 2, (1, 1), 0.5, shared=True, sizes=True)
        yield "sparse-nothing", lambda: check(tp.shard(48, 2, lengths=[48, 0]), 1, (2, 2), 0.0)
        yield "sparse-bf16", lambda: check(tp.shard_blocks(64, 2, 16), 1, (2, 1), 0.5, dtype=torch.bfloat16)
        yield "sparse-select", selected
        yield "sparse-refusals", refusals


def leaves_of(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def check(sharding, batch, heads, share, shared=False, sizes=False, dtype=torch.float32):
    """out, lse and gradients of this rank beside the oracle; and the bytes of every exchange beside the lists."""
    rank, tokens = dist.get_rank(), sharding.total
    random = torch.Generator().manual_seed(6)
    q, k, v, w = (torch.randn(batch, tokens, n, 16, generator=random).to(dtype) for n in (*heads, heads[1], heads[0]))
    blocks = -(-tokens // 16)
    keep = torch.rand(1 if shared else batch, 1 if shared else heads[0], blocks, blocks, generator=random) < share
    block_sizes = torch.randint(0, 9, (blocks,), dtype=torch.int32, generator=random) if sizes else None
    index = BlockIndex.from_map(keep, block_q=16, block_k=16, seq_q=tokens, seq_k=tokens, block_sizes=block_sizes)

    def expected():
        leaves = leaves_of(t.double() for t in (q, k, v))
        out, lse = reference.sparse_attention(*leaves, index)
        (out * w.double()).sum().backward()
        return [out.detach(), lse.detach(), *(t.grad for t in leaves)]

    wanted = [expected(), deviating(expected, dtype, kept=dtype)]  # parts are handed on in dtype, and added up
    mine = leaves_of(tp.shard_sequence(t, sharding, rank) for t in (q, k, v))
    rows = tp.shard_index(index, sharding, rank)
    exchange = tp.block_exchange(rows, sharding, heads[1])
    sent = []
    kept = dist.all_to_all_single

    def counting(got, message, takes, gives, group=None):
        sent.append([n * message.element_size() for r, n in enumerate(gives) if r != rank])
        return kept(got, message, takes, gives, group=group)

    exchanges.dist.all_to_all_single = counting
    try:
        out, lse = tp.sparse_attention(*mine, rows, sharding, exchange=exchange, return_lse=True)
        (out * tp.shard_sequence(w, sharding, rank)).sum().backward()
    finally:
        exchanges.dist.all_to_all_single = kept
    named = (
        keep.expand(batch, heads[0], -1, -1).unflatten(1, (heads[1], -1)).any(2)
    )  # [batch, KV heads, blocks, blocks]
    by_rank = [
        [b for start, stop in sharding.spans(r) for b in range(start // 16, -(-stop // 16))]
        for r in range(sharding.ranks)
    ]
    pairs = [sum(int(named[:, :, by_rank[r]][..., by_rank[s]].any(2).sum()) for r in range(sharding.ranks) if r != s)
             for s in range(sharding.ranks)]  # fmt: skip
    back = sum(
        int(named[:, :, by_rank[rank]][..., by_rank[s]].any(2).sum()) for s in range(sharding.ranks) if s != rank
    )
    block = 16 * 2 * 16 * out.element_size()
    assert [sum(each) for each in sent] == [pairs[rank] * block, back * block]
    assert exchange.bytes_sent(k, v) == pairs[rank] * block
    assert exchange.bytes_received(k, v) == back * block
    got = (out, lse, *(t.grad for t in mine))
    for i, (name, one) in enumerate(zip(("out", "lse", "dq", "dk", "dv"), got, strict=True)):
        exact, plain = (tp.shard_sequence(each[i], sharding, rank, 2 if name == "lse" else 1) for each in wanted)
        verdict = compare(one, exact, plain, unit=1.0 if name == "lse" else 0.0)
        assert verdict.ok, f"{name}: {verdict}"


def selected():
    """Lists that each rank makes for its own rows from the gathered means of the key blocks are those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding = tp.shard_blocks(96, ranks, 16)
    q, k = (torch.randn(1, 96, 2, 16, generator=torch.Generator().manual_seed(7)) for _ in range(2))

    def means(x):
        return x.unflatten(1, (-1, 16)).mean(2)

    def lists(q, k, **lengths):
        scores = torch.einsum("bqhd,bkhd->bhqk", means(q), k)
        return BlockIndex.from_topk(scores, 2, block_q=16, block_k=16, **lengths)

    whole = lists(q, means(k), seq_q=96, seq_k=96)
    own_q, own_k = (tp.shard_sequence(t, sharding, rank) for t in (q, k))
    gathered = tp.gather_sequence(means(own_k), tp.shard(6, ranks))
    mine = lists(own_q, gathered, seq_q=sharding.length(rank), seq_k=96)
    rows = tp.shard_index(whole, sharding, rank)
    assert torch.equal(mine.indices, rows.indices)
    assert torch.equal(mine.counts, rows.counts)


def refusals():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = tp.shard_blocks(64, ranks, 16)
    x = torch.zeros(1, 32, 2, 16)
    ones = BlockIndex.from_map(torch.ones(1, 1, 2, 4, dtype=torch.bool), block_q=16, block_k=16, seq_q=32, seq_k=64)

    def refused(error, text, *tensors, index=ones, sharding=whole, **options):
        refuses(error, text, tp.sparse_attention, *tensors, index, sharding, **options)

    refused(tilefold.ShapeError, "use shard_blocks", x, x, x, sharding=tp.shard(64, ranks, lengths=[40, 24]))
    refused(tilefold.ShapeError, "k has 31 tokens", x, x[:, :31], x[:, :31])
    exchange = tp.block_exchange(ones, whole, 2)
    made = {"exchange": exchange}
    y, other = torch.zeros(1, 32, 2, 8), "rank 1 were refused"  # of no call before
    short, half = (y[:, :31], y.half()) if rank else (y, y)  # one rank's own tensors: the other does not wait for them
    refused(tilefold.ShapeError, "k has 31 tokens" if rank else other, y, short, short, **made)
    refused(tilefold.ShapeError, "dtype of q is", half, half, half, scale=0.5, **made)
    refused(tilefold.ShapeError, "index is of 32 queries" if rank else other, short, y, y, **made)
    error, text, scale = (tilefold.DtypeError, "scale must be", "a") if rank else (tilefold.ShapeError, other, None)
    refused(error, text, y, y, y, scale=scale, **made)
    refused(tilefold.ShapeError, "exchange given is", y, y, y, exchange=exchange if rank else None)
    wrong = BlockIndex(ones.indices[..., :2], ones.counts // 2, 16, 32, 32, 64)
    refused(tilefold.ShapeError, "the exchange is of 32 in blocks of 16 x 16", y, y, y, index=wrong, **made)
    masked = BlockIndex(ones.indices, ones.counts, *ones.geometry, masked=True)
    refused(tilefold.Unsupported, "takes no mask_mod", x, x, x, index=masked)
    refused(tilefold.DtypeError, "exchange must be", y, y, y, exchange=3)
    refuses(tilefold.ValueRangeError, "kv_heads must be", tp.block_exchange, ones, whole, 0)
    refuses(tilefold.DtypeError, "index must be", tp.shard_index, None, whole, rank)
    refuses(tilefold.ValueRangeError, "ranks must be", tp.shard_blocks, 64, 0, 16)
    said = f"BlockExchange of rank {rank} of 2: blocks of 16 keys, 2 sent, 2 received, 4 held a KV head"
    assert str(exchange) == said
    refuses(
        tilefold.ShapeError, "block_k is", tp.block_exchange, ones if rank else wrong, whole, 2
    )  # compared each time
    three = BlockIndex(ones.indices.expand(3, -1, -1, -1), ones.counts.expand(3, -1, -1), 16, 16, 32, 64)
    refused(tilefold.ShapeError, "index has lists", *(x.expand(2, -1, -1, -1),) * 3, index=three)
