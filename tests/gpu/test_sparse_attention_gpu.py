"""Block-sparse attention on a GPU: planned tiles at real sizes, graphs with changed lists, the same bits, no synchronisation."""

import pytest
import torch

import tilefold
from cases import hold, qkv, same
from cases.device import DEVICE, captured, no_waiting
from cases.index import top
from tilefold import reference
from tilefold.ops.call import Call
from tilefold.ops.source import Lists
from tilefold.ops.sparse import sparse as sparse_ops

pytestmark = pytest.mark.no_poison


def held(q, k, v, index, got):
    hold(got, reference.sparse_attention, q, k, v, index)


def plan_of(q, k, v, index):
    return sparse_ops.prepare(q, k, v, Call(lists=Lists.of(index))).plan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_planned_tiles(dim, dtype):
    q, k, v = qkv(2, 500, 1000, 4, 2, dim, dtype=dtype, device=DEVICE)
    sizes = torch.randint(0, 65, (16,), dtype=torch.int32, device=DEVICE)
    for index in (top(500, 1000, 7), top(500, 1000, 7, block_sizes=sizes), top(500, 1000, 3, batch=2)):
        held(q, k, v, index, tilefold.sparse_attention(q, k, v, index, return_lse=True))


def test_one_query_block_against_many():
    """Few query blocks: split lists, merged."""
    q, k, v = qkv(1, 64, 8192, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    index = top(64, 8192, 100)
    held(q, k, v, index, tilefold.sparse_attention(q, k, v, index, return_lse=True))


@pytest.mark.parametrize("sq", [64, 512])
def test_graph_replays_with_changed_lists(sq):
    q, k, v = qkv(1, sq, 2048, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    index = top(sq, 2048, 9)
    tilefold.sparse_attention(q, k, v, index)
    graph, got = captured(lambda: tilefold.sparse_attention(q, k, v, index, return_lse=True))
    for keep in (1, 9, 5):
        other = top(sq, 2048, keep)
        index.indices[..., :keep].copy_(other.indices)
        index.counts.copy_(other.counts)
        q.normal_()
        graph.replay()
        held(q, k, v, index, got)


def test_same_bits_and_no_synchronisation():
    q, k, v = qkv(1, 64, 4096, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    index = top(64, 4096, 30)
    first = tilefold.sparse_attention(q, k, v, index, return_lse=True)
    with no_waiting():
        runs = [tilefold.sparse_attention(q, k, v, index, return_lse=True) for _ in range(20)]
    assert all(same(first, run) for run in runs)


@pytest.mark.large
def test_more_than_2_to_the_31_elements():
    b, s, h, d = 33, 8192, 64, 128
    assert b * s * h * d > 1 << 31
    q, k, v = (torch.randn(b, s, h, d, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    index = top(s, s, 2, heads=1)
    out, lse = tilefold.sparse_attention(q, k, v, index, return_lse=True)
    kernel = plan_of(q, k, v, index).kernel
    for i_b, i_h in ((0, 0), (b - 1, h - 1)):
        one = [t[i_b : i_b + 1, :, i_h : i_h + 1].contiguous() for t in (q, k, v)]
        plan = plan_of(*one, index).with_tile(kernel=kernel, splits=1)
        alone = tilefold.sparse_attention(*one, index, return_lse=True, plan=plan)
        assert torch.equal(out[i_b : i_b + 1, :, i_h : i_h + 1], alone[0])
        assert torch.equal(lse[i_b : i_b + 1, i_h : i_h + 1], alone[1])
