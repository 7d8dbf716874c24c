"""Context parallelism: one sequence's attention over several GPUs, by torch.distributed.

In processes that torchrun started, after `torch.distributed.init_process_group`:

    sharding = shard(tokens, ranks, "zigzag")                            # which tokens lie on which rank
    q, k, v = (shard_sequence(x, sharding, rank) for x in (q, k, v))     # this rank's
    out = attention(q, k, v, sharding, causal=True)                      # its rows of what one process would compute

or, around a model whose attention is `tilefold.attention`, `with context_parallel(mesh["cp"], sharding):`.  Wherever there is a
group: a ProcessGroup, DeviceMesh or `Ranks`, None for all processes."""

from ..errors import CommunicationError
from ..plan.parallel.plan import ParallelPlan, plan_parallel
from ..plan.parallel.problem import Links, ParallelProblem
from ..plan.parallel.sharding import Sharding, shard
from .blocks import shard_blocks, shard_index
from .calls import (
    all_gather_attention,
    attention,
    attention_plan,
    head_exchange_attention,
    ring_attention,
    two_level_attention,
)
from .context import context_parallel
from .decode import attention_kvcache, cache_lengths, merge_ranks
from .group import Ranks, ranks_of
from .local import Kernels
from .sparse import BlockExchange, block_exchange, sparse_attention
from .tokens import causal_batch, gather_sequence, loss_mean, next_tokens, positions, shard_sequence, unshard_sequence

__all__ = [
    "BlockExchange",
    "CommunicationError",
    "Kernels",
    "Links",
    "ParallelPlan",
    "ParallelProblem",
    "Ranks",
    "Sharding",
    "all_gather_attention",
    "attention",
    "attention_kvcache",
    "attention_plan",
    "block_exchange",
    "cache_lengths",
    "causal_batch",
    "context_parallel",
    "gather_sequence",
    "head_exchange_attention",
    "loss_mean",
    "merge_ranks",
    "next_tokens",
    "plan_parallel",
    "positions",
    "ranks_of",
    "ring_attention",
    "shard",
    "shard_blocks",
    "shard_index",
    "shard_sequence",
    "sparse_attention",
    "two_level_attention",
    "unshard_sequence",
]
