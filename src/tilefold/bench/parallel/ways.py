"""One rank's call by each way: the library's schemes, sparse attention over shards, PyTorch's own context parallelism."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilefold import parallel as tp
from tilefold.bench.parallel.loads import Work, index_of, lists_of

PEERS = ("torch", "torch-alltoall")
"""torch.distributed.tensor.experimental.context_parallel, by its two ways to rotate K and V."""


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
