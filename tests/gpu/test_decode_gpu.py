"""attention_kvcache on a GPU: real sizes against fp64, graphs with changed lengths, no synchronisation, the same bits."""

import dataclasses
from functools import partial

import pytest
import torch

import tilefold
from cases import same
from cases.decode import E4M3, INT8, Case, run
from cases.device import DEVICE, by_streams, followed, repeated

pytestmark = pytest.mark.no_poison
BF16 = torch.bfloat16
MERGES = [{"merge": "last", "splits": 0}, {"merge": "kernel", "splits": 0}]  # even slices; the planner's own cut is {}


@pytest.mark.parametrize("way", [*MERGES, {}])
@pytest.mark.parametrize("page", [0, 1, 16, 48, 64, 256])
def test_uneven_lengths(page, way):
    case = Case(
        [5000, 1, 0, 129, 700, 2048], heads=32, kv_heads=8, dim=128, page=page, dtype=BF16, options={"causal": True}
    )
    run(case, DEVICE, way)


@pytest.mark.parametrize("group", [1, 7, 8])
@pytest.mark.parametrize("seq_q", [1, 4])
@pytest.mark.parametrize("dim", [40, 64, 192, 256, 512])
def test_rows_and_dims(dim, seq_q, group):
    case = Case([900, 33, 513], seq_q, heads=2 * group, kv_heads=2, dim=dim, page=16, dtype=torch.float16)
    run(dataclasses.replace(case, options={"causal": True}), DEVICE)


@pytest.mark.parametrize("stored", [E4M3, INT8])
@pytest.mark.parametrize(("page", "scales"), [(0, "head"), (0, "page"), (16, "page"), (128, "page"), (64, "head")])
def test_bytes(page, scales, stored):
    for dtype in (BF16, torch.float16):
        case = Case(
            [3000, 77, 0, 640], 2, heads=32, kv_heads=8, dim=128, page=page, dtype=dtype, stored=stored, scales=scales
        )
        run(case, DEVICE)


@pytest.mark.parametrize("way", [*MERGES, {}])
@pytest.mark.parametrize("stored", [None, E4M3])
def test_values_are_part_of_keys(stored, way):
    case = Case([3000, 77, 0, 640], heads=16, dim=576, dim_v=512, page=64, dtype=BF16, stored=stored, shared=True)
    run(case, DEVICE, way)


def test_masks_and_scores():
    slopes, sinks = torch.rand(4, 16, device=DEVICE), torch.randn(16, device=DEVICE)
    for options in (
        {"window": (500, 0)},
        {"alibi_slopes": slopes, "causal": True},
        {"sinks": sinks},
        {"softcap": 20.0},
    ):
        for page in (0, 16):
            case = Case([3000, 77, 0, 640], 3, heads=16, kv_heads=2, dim=64, page=page, dtype=BF16, options=options)
            run(case, DEVICE)
    case = Case([3000, 77, 640], 3, heads=16, kv_heads=2, dim=64, page=16, dtype=BF16, pads=[100, 77, 5])
    run(case, DEVICE)
    run(
        Case([3000, 77, 640, 9], [1, 5, 0, 2], heads=16, kv_heads=2, dim=64, dtype=BF16, options={"causal": True}),
        DEVICE,
    )


def test_fp32_and_many_sequences():
    run(Case([300, 77, 0, 64], 2, heads=8, kv_heads=2, dim=64, page=16), DEVICE)
    run(Case([5, 140, 0, 31] * 300, heads=4, kv_heads=2, dim=64, dtype=BF16), DEVICE)


def cache(batch=8, rows=4096):
    return [torch.randn(batch, rows, 8, 128, device=DEVICE, dtype=BF16) for _ in range(2)]


@pytest.mark.parametrize("changes", [*MERGES, {"splits": 5}, {}])
def test_graph_with_other_lengths(changes):
    q, (k, v) = torch.randn(8, 1, 32, 128, device=DEVICE, dtype=BF16), cache()
    lengths = torch.full((8,), 4096, dtype=torch.int32, device=DEVICE)
    plan = dataclasses.replace(tilefold.attention_kvcache_plan(q, k, v, cache_seqlens=lengths), **changes)

    def change():
        lengths.copy_(torch.randint(0, 4097, (8,), dtype=torch.int32))
        q.normal_()

    followed(lambda: tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths, plan=plan), *[change] * 20)


def test_same_bits_and_no_synchronisation():
    q, (k, v) = torch.randn(8, 2, 32, 128, device=DEVICE, dtype=BF16), cache()
    lengths = torch.tensor([4096, 1, 0, 77, 4000, 4000, 512, 3], dtype=torch.int32, device=DEVICE)
    run = partial(tilefold.attention_kvcache, q, k, v, cache_seqlens=lengths, causal=True, return_lse=True)
    want, runs = repeated(run, 50)
    assert all(same(one, want) for one in runs)


def test_streams_do_not_share_counters():
    q, (k, v) = torch.randn(8, 1, 32, 128, device=DEVICE, dtype=BF16), cache()
    want = tilefold.attention_kvcache(q, k, v)
    by_streams(lambda: tilefold.attention_kvcache(q, k, v), want, 20)


@pytest.mark.large
def test_one_long_sequence_among_short_ones():
    lengths = [131072] + [100] * 15
    run(Case(lengths, heads=8, kv_heads=2, dim=64, page=64, dtype=BF16), DEVICE)


def test_compiled():
    q, (k, v) = torch.randn(8, 1, 32, 128, device=DEVICE, dtype=BF16), cache()
    lengths = torch.full((8,), 1000, dtype=torch.int32, device=DEVICE)
    fn = torch.compile(lambda n: tilefold.attention_kvcache(q, k, v, cache_seqlens=n) * 2, fullgraph=True)
    assert torch.equal(fn(lengths), tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths) * 2)
