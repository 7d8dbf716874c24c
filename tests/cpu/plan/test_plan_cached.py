"""How attention over a cache is cut: tiles and splits as a function of shapes and device alone."""

import pytest

from tilefold.errors import ValueRangeError
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.cache.cached import LEAST_TILES, MAX_SPLITS, plan_cached

H200 = device_named("h200")


def problem(batch=1, seq_q=1, seq_k=8192, heads=28, kv_heads=4, dim=128):
    return AttentionProblem(batch, seq_q, seq_k, heads, kv_heads, dim, dim)


def test_splits_fill_the_device_once():
    tile, splits = plan_cached(problem(), H200, 0)
    assert tile.block_m == 16
    assert splits * 28 <= H200.sms < (splits + 1) * 28
    assert plan_cached(problem(batch=64), H200, 0)[1] == 1  # the query tiles fill it
    assert plan_cached(problem(seq_q=4096), H200, 0)[1] == 1


def test_a_short_cache_is_not_split_to_crumbs():
    for rows in (0, 1, 64, 200, 512, 4096, 1 << 20):
        tile, splits = plan_cached(problem(seq_k=rows, heads=1, kv_heads=1), H200, 0)
        assert 1 <= splits <= MAX_SPLITS
        assert splits == 1 or rows >= splits * LEAST_TILES * tile.block_n - LEAST_TILES * tile.block_n


def test_the_caller_decides():
    for splits in (1, 7, MAX_SPLITS):
        assert plan_cached(problem(), H200, splits)[1] == splits
    for splits in (-1, MAX_SPLITS + 1):
        with pytest.raises(ValueRangeError, match="num_splits"):
            plan_cached(problem(), H200, splits)


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "l4", "mi300x", "interpreter"])
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_every_device_has_a_tile(name, dim):
    for dtype in ("bfloat16", "float32"):
        made = AttentionProblem(2, 3, 5000, 8, 2, dim, dim, dtype=dtype)
        assert plan_cached(made, device_named(name), 0)[1] >= 1
