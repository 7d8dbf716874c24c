"""What is measured: dense attention, or attention over lists of blocks as video models have them, of so many tokens, and each way
to compute it: the library's schemes, sparse attention over shards, PyTorch's own context parallelism."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilefold import parallel as tp
from tilefold.api import attention
from tilefold.plan.parallel.problem import BACKWARD_FLOPS, ParallelProblem
from tilefold.sparse import BlockIndex
from tilefold.sparse_api import sparse_attention

SCHEMES = ("ring", "all_gather", "heads", "two_level")
PEERS = ("torch", "torch-alltoall")
"""torch.distributed.tensor.experimental.context_parallel, by its two ways to rotate K and V."""

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Work:
    """What all ranks do.  tokens: of the whole sequence; heads: of Q and of K and V; ways: of SCHEMES, "sparse" and PEERS.

    rounds: timed calls; budget: seconds after which no line begins; per_node: ranks of a node, for two_level; trace: a file's
    stem, or ""; density: share of the KV blocks that a block of queries attends, for sparse; block: tokens of one.
    deterministic: the library's gradients of dense attention have the same bits every run, as they have if nobody says otherwise;
    torch's have not."""

    tokens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = True
    backward: tuple[bool, ...] = (False, True)
    ways: tuple[str, ...] = (*SCHEMES[:3], "torch", "torch-alltoall")
    rounds: int = 3
    budget: float | None = None
    per_node: int = 1
    trace: str = ""
    density: float = 0.1
    block: int = 128
    deterministic: bool = True

    def problem(self, tokens: int, backward: bool) -> ParallelProblem:
        window = (-1, 0) if self.causal else (-1, -1)
        return ParallelProblem(
            1, tokens, tokens, *self.heads, self.dim, self.dim, self.dtype, window, "zigzag", backward,
            deterministic=self.deterministic,
        )  # fmt: skip


class Load(NamedTuple):
    """One pass of attention over all tokens.  flops: of all ranks; seen: which keys queries see, from their numbers that are
    broadcast, None if all; alone: the call of a rank that has all tokens."""

    flops: float
    seen: Mask | None
    alone: Call


def dense(work: Work, tokens: int, backward: bool) -> Load:
    """Causal, or full."""
    n = work.problem(tokens, backward)
    seen: Mask | None = (lambda queries, keys: keys <= queries) if work.causal else None
    flops = n.flops * (BACKWARD_FLOPS if backward else 1.0)
    options: dict[str, Any] = {"causal": work.causal, "deterministic": work.deterministic}
    return Load(flops, seen, lambda q, k, v: attention(q, k, v, **options))


def lists_of(work: Work, tokens: int, device: torch.device) -> torch.Tensor:
    """Bool [blocks, blocks]: which KV blocks each block of queries attends.  Four fifths are its nearest ones, as in video where
    neighbours lie together; the others lie at equal distances all over the sequence and are the same for all."""
    blocks = -(-tokens // work.block)
    many = max(1, round(work.density * blocks))
    apart, reach = max(1, 5 * blocks // many), (many * 4 // 5) // 2
    number = torch.arange(blocks, device=device)
    return ((number[:, None] - number).abs() <= reach) | (number % apart == 0)


def index_of(work: Work, keep: torch.Tensor, tokens: int) -> BlockIndex:
    """The same for all heads."""
    return BlockIndex.from_map(keep[None, None], block_q=work.block, block_k=work.block, seq_q=tokens, seq_k=tokens)


def sparse(work: Work, tokens: int, backward: bool, device: torch.device) -> Load:
    """Over `lists_of`."""
    keep, block = lists_of(work, tokens, device), work.block
    sizes = torch.full((len(keep),), float(block), dtype=torch.float64, device=device)
    sizes[-1] = tokens - block * (len(keep) - 1)
    pairs = float(sizes @ (keep.double() @ sizes))
    index = index_of(work, keep, tokens)
    flops = 4.0 * pairs * work.heads[0] * work.dim * (BACKWARD_FLOPS if backward else 1.0)
    return Load(
        flops,
        lambda queries, keys: keep[queries // block, keys // block],
        lambda q, k, v: sparse_attention(q, k, v, index),
    )


# --- one rank's call by each way ---------------------------------------------------------------------------------------------


def sharding_of(work: Work, way: str, tokens: int, ranks: int) -> tp.Sharding:
    """Zigzag; lists of blocks lie in contiguous shards whose borders are blocks'."""
    return tp.shard_blocks(tokens, ranks, work.block) if way == "sparse" else tp.shard(tokens, ranks, "zigzag")


class Note(NamedTuple):
    """What there is to say of a line: of all ranks, the one with the largest number says it."""

    number: float = 0.0
    text: str = ""


@contextmanager
def way_of(
    work: Work, way: str, sharding: tp.Sharding, device: torch.device
) -> Iterator[tuple[Callable[..., torch.Tensor], Note]]:
    """The call on this rank's tensors [1, tokens, heads, dim], and a Note."""
    if way == "sparse":
        yield _sparse(work, sharding, device)
    elif way in PEERS:
        with _torch(work, way, sharding) as call:
            yield call, Note()
    else:
        ranks = tp.ranks_of(None, ranks_per_node=work.per_node if way == "two_level" else None)
        options: dict[str, Any] = {"scheme": way, "causal": work.causal, "deterministic": work.deterministic}
        yield lambda q, k, v: tp.attention(q, k, v, sharding, group=ranks, **options), Note()


def _sparse(work: Work, sharding: tp.Sharding, device: torch.device) -> tuple[Callable[..., torch.Tensor], Note]:
    """Lists that every rank can make; which blocks travel is found out once, as layers and steps with the same lists do."""
    keep = lists_of(work, sharding.total, device)
    rows = tp.shard_index(index_of(work, keep, sharding.total), sharding, dist.get_rank())
    exchange = tp.block_exchange(rows, sharding, work.heads[1])
    each = 2 * work.block * work.heads[1] * work.dim * getattr(torch, work.dtype).itemsize
    received, others = (n * each / 1e6 for n in (exchange.blocks_received, len(keep) - rows.indices.shape[2]))
    share = float(keep.double().mean())
    text = f"{share:.1%} of the blocks; a rank receives at most {received:.3g} MB of the others' {others:.3g} MB"

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = tp.sparse_attention(q, k, v, rows, sharding, exchange=exchange)
        return found

    return call, Note(received, text)


@contextmanager
def _torch(work: Work, way: str, sharding: tp.Sharding) -> Iterator[Callable[..., torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    set_rotate_method("alltoall" if way == "torch-alltoall" else "allgather")
    with ExitStack() as stack:
        # What it shards is a stand-in: our shards are the same, chunks r and 2N - 1 - r, and are there already.
        buffer = torch.zeros(sharding.total, device=device)
        stack.enter_context(context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]))
        if device == "cuda":
            stack.enter_context(
                sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)
            )

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            group = q.shape[2] // k.shape[2]  # it serves no grouped heads
            q, k, v = (t.transpose(1, 2) for t in (q, *(x.repeat_interleave(group, 2) for x in (k, v))))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=work.causal)
            return out.transpose(1, 2)

        yield call
