"""Context parallelism on 2, 3 and 4 processes over gloo; each suite of parallel_cases.py is one start of processes."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import tilefold
import tilefold.parallel as tp
from parallel_worker import run_ranks

pytestmark = [pytest.mark.no_poison, pytest.mark.xdist_group("parallel")]  # the ranks poison their own memory


def judge(found, ranks, least):
    """Every case ran on every rank and failed on none."""
    broken = [f"{name}, rank {r}: {text}" for name, texts in found.items() for r, text in texts.items() if text]
    assert not broken, "\n".join(broken[:4])
    assert len(found) >= least
    assert all(len(texts) == ranks for texts in found.values())


@pytest.mark.parametrize(("suite", "ranks", "least"), [("two", 2, 52), ("four", 4, 69)])
def test_suite(suite, ranks, least):
    judge(run_ranks("parallel_cases", suite, ranks, limit=400.0), ranks, least)


def test_a_rank_that_dies():
    """The others say so, well before the limit; the dead one has reported what came before its death."""
    found = run_ranks("parallel_failure_cases", "dying", 3, timeout=8.0, limit=60.0)
    for case in ("before", "late"):
        assert found[case] == dict.fromkeys(range(3))
    assert found["death"] == {0: None, 1: None}
    assert "hung" not in found


def test_a_destroyed_group_is_let_go():
    """Nothing here keeps it, not even a result with its graph: its threads would end the process when the interpreter stops."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = weakref.ref(dist.group.WORLD)
        ranks, again, nodes = tp.ranks_of(), tp.ranks_of(), tp.ranks_of(ranks_per_node=1)
        assert ranks == again
        assert hash(ranks) == hash(again)
        assert ranks != nodes
        assert nodes is tp.ranks_of(ranks_per_node=1)
        assert ranks.flat is group()
        assert repr(ranks) == f"Ranks(flat={group()!r}, inner=None, outer=None)"
        assert nodes.inner is not None
        sharding = tp.shard(5, 1, kind="zigzag")
        q = torch.randn(1, 5, 1, 16, requires_grad=True)
        results = [tp.attention(q, q, q, sharding, group=by) for by in (None, nodes)]
        results.append(tp.gather_sequence(results[0], sharding))
        results.append(tp.loss_mean(results[0]))
        results[-1].backward()
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert group() is None
    assert repr(ranks) == "Ranks(flat=None, inner=None, outer=None)"
    with pytest.raises(tilefold.Unsupported, match="was destroyed"):
        _ = ranks.size
