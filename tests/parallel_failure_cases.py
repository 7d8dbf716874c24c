"""What goes wrong on several ranks: arguments that differ, ranks that stay away or die, calls that are refused."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist

import tilefold
from cases.refusals import refuses
from parallel_cases import check
from parallel_plain import PLAIN, plain_backward, plain_forward
from tilefold import parallel as tp
from tilefold.parallel import agree
from tilefold.sparse import BlockIndex


def on_four():
    yield "disagreement", disagreement
    yield "refusals", refusals
    yield "forgetting", forgetting


def disagreement():
    """Different arguments: every rank says which, and the group can go on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding = tp.shard(8, ranks)
    x = torch.zeros(1, sharding.length(rank), 4, 8)
    odd = rank == 2
    call = {"kernels": PLAIN, "scheme": "ring"}

    def refused(text, *tensors, **options):
        refuses(tilefold.ShapeError, text, tp.attention, *tensors, sharding, **(call | options))

    def only_here(text):
        return text if odd else "rank 2 were refused"

    wide = torch.zeros(1, sharding.length(rank), 4, 16 if odd else 8)
    refused("dim_qk is", wide, wide, x)
    refused("window is", x, x, x, causal=odd)
    refused("scheme is", x, x, x, scheme="heads" if odd else "ring")
    refused("deterministic is", x, x, x, deterministic=not odd)
    half = x.half() if odd else x
    refused("dtype of q is", half, half, half)
    refused(only_here("q has 5 tokens"), torch.zeros(1, 5, 4, 8) if odd else x, x, x)
    if odd:
        refuses(tilefold.ShapeError, "function is", tp.attention_kvcache, x, x, x)
    else:
        refused("function is", x, x, x)
    several = torch.zeros(2 if odd else 1, 1, 4, 8)
    cache = torch.zeros(len(several), 3, 4, 8)
    refuses(tilefold.ShapeError, "shape of q is", tp.attention_kvcache, several, cache, cache)
    part = torch.zeros(1, 1 if odd else sharding.length(rank), 3)
    refuses(tilefold.ShapeError, only_here("x has 1 tokens"), tp.gather_sequence, part, sharding)
    narrow = torch.zeros(1, sharding.length(rank), 2 if odd else 3)
    refuses(tilefold.ShapeError, "sizes of x beside its tokens is", tp.gather_sequence, narrow, sharding)
    losses = torch.ones(3, dtype=torch.int64 if odd else torch.float32)
    error = tilefold.DtypeError if odd else tilefold.ShapeError
    refuses(error, only_here("losses must be floating"), tp.loss_mean, losses)
    keep = torch.ones(3, dtype=torch.float32)
    refuses(tilefold.DtypeError, "keep must be a bool tensor", tp.loss_mean, keep, keep)
    tp.attention(x, x, x, sharding, **call)  # nothing is left over


def forgetting():
    """A call that was compared too long ago is compared again by all, whatever single ranks still know of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sharding = tp.shard(8, ranks)
    x = torch.zeros(1, sharding.length(rank), 4, 8)
    call = {"kernels": PLAIN, "scheme": "ring"}
    kept, agree.MOST = agree.MOST, 3
    agree.forget()
    try:
        tp.attention(x, x, x, sharding, **call)
        if rank == 0:
            agree.KNOWN.clear()
        for dtype in (torch.float32, torch.float64, torch.int64):
            tp.gather_sequence(x.to(dtype), sharding)
        tp.attention(x, x, x, sharding, **call)
    finally:
        agree.MOST = kept


def refusals():
    ranks = dist.get_world_size()
    sharding = tp.shard(8, ranks)
    mine = sharding.length(dist.get_rank())

    def call(heads=4, kv_heads=4, scheme="ring", sharding=sharding, q=None, **options):
        x = torch.zeros(1, mine, kv_heads, 8)
        return tp.attention(
            torch.zeros(1, mine, heads, 8) if q is None else q, x, x, sharding, scheme=scheme, **options
        )

    refuses(tilefold.Unsupported, "6 query heads are not a multiple of 4 ranks", call, 6, 6, "heads")
    refuses(tilefold.Unsupported, "3 KV heads", call, 12, 3, "heads")
    refuses(tilefold.Unsupported, "two levels", call, scheme="two_level")
    refuses(tilefold.ValueRangeError, "scheme must be", call, scheme="rings")
    refuses(tilefold.ShapeError, "over 3 ranks", call, sharding=tp.shard(8, 3))
    refuses(tilefold.ShapeError, "heads of q must be a multiple", call, 4, 3)
    refuses(tilefold.DtypeError, "q", call, q=torch.zeros(1, mine, 4, 8, dtype=torch.float64))
    refuses(tilefold.DtypeError, "sharding must be", call, sharding=8)
    refuses(tilefold.DtypeError, "group must be", call, group=3)
    refuses(tilefold.ValueRangeError, "ranks_per_node", tp.ranks_of, None, ranks_per_node=3)
    refuses(tilefold.ValueRangeError, "softcap", call, softcap=-1.0)
    refuses(tilefold.DtypeError, "kernels must be", call, kernels="mine")
    x = torch.zeros(1, mine, 4, 8, device="meta")
    refuses(tilefold.DeviceError, "q is on meta, but the process group (gloo)", tp.attention, x, x, x, sharding)
    with pytest.raises(TypeError, match="'caussal'"):
        tp.attention_plan(x, x, x, sharding, caussal=True)
    refuses(tilefold.ShapeError, "over 3 ranks", tp.causal_batch, torch.zeros(1, 8).long(), tp.shard(8, 3))
    refuses(tilefold.ShapeError, "dim is 2, but x", tp.shard_sequence, torch.zeros(1, 8), sharding, 0, dim=2)
    refuses(tilefold.DtypeError, "sharding must be", tp.gather_sequence, torch.zeros(1, 8), 8)
    lengths = torch.ones(2, dtype=torch.int32)
    refuses(tilefold.ValueRangeError, "rank must be 0 to 1", tp.cache_lengths, lengths, 2, 2)
    refuses(tilefold.ValueRangeError, "block must be", tp.cache_lengths, lengths, 0, 2, 0)
    refuses(tilefold.ShapeError, "lse has shape", tp.merge_ranks, torch.zeros(1, 2, 3, 4), torch.zeros(9))
    with tp.context_parallel(None, sharding):
        y = torch.zeros(1, mine, 4, 8)
        refuses(tilefold.ValueRangeError, "layout must be", tilefold.attention, y, y, y, layout="sbhd")
    q = torch.zeros(2, mine, 4, 8)
    packed = tp.shard([0, 3, 8], ranks)
    refuses(tilefold.ShapeError, "packed sequences", tp.attention, q, q, q, packed, scheme="ring")


def dying():
    """The last of three ranks stays away, then leaves in the middle; the others must say so soon after the group's timeout."""
    yield "before", lambda: check("ring", "zigzag", 12, causal=True)
    yield "late", late
    yield "death", death


def late():
    """A rank that does not come: an error on all that wait for it, after the timeout of the group, not the process's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    x = torch.zeros(1, 4, 4, 8)
    calls = {"group": group, "kernels": PLAIN, "scheme": "ring"}
    tp.attention(x, x, x, tp.shard(12, ranks), **calls)
    if rank < ranks - 1:
        began = time.monotonic()
        refuses(tp.CommunicationError, "failed while", tp.attention, x, x, x, tp.shard(12, ranks), **calls)
        assert time.monotonic() - began < 6
    else:
        time.sleep(3)  # alive, elsewhere


def death():
    """Every kind of call, forward and backward, once a rank has died in the middle of one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    calls = {"n": 0}

    def forward(q, k, v, call):
        calls["n"] += 1
        if rank == ranks - 1 and calls["n"] == 2:
            os._exit(7)
        return plain_forward(q, k, v, call)

    x, sharding = torch.zeros(1, 4, 6, 8), tp.shard(12, ranks)
    wide = torch.zeros(1, 16, 2, 16)
    named = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    index = BlockIndex.from_map(named, block_q=16, block_k=16, seq_q=16, seq_k=48)
    blocks = tp.shard_blocks(48, ranks, 16)
    exchange = tp.block_exchange(index, blocks, 2)
    tp.attention_kvcache(x[:, :1], x, x)
    leaf = x.clone().requires_grad_()
    held = tp.attention(leaf, x, x, sharding, scheme="all_gather", kernels=PLAIN)

    def several(scheme):
        for _ in range(3):  # what had been sent before the death may still be enough for one
            tp.attention(x, x, x, sharding, scheme=scheme, kernels=tp.Kernels(forward, plain_backward))

    began = time.monotonic()
    for call in (
        lambda: several("ring"),
        lambda: several("all_gather"),
        lambda: several("heads"),
        lambda: held.sum().backward(),
        lambda: tp.attention_kvcache(x[:, :1], x, x),
        lambda: tp.sparse_attention(wide, wide, wide, index, blocks, exchange=exchange),
        lambda: tp.block_exchange(index, blocks, 2),
    ):
        refuses(tp.CommunicationError, f"rank {rank} of {ranks} failed while", call)
    assert time.monotonic() - began < 20
