"""attention_kvcache against fp64: pages, lengths, groups, dtypes, masks, both cuts, both merges."""

import pytest
import torch

import tilefold
from cases.decode import E4M3, INT8, Case, run, small

LENGTHS = [40, 0, 9, 52]
KERNEL = {"merge": "kernel"}
WAYS = [  # one part, several, too many and too few tiles; merges by the last program and by a kernel; two kinds of pages each
    *((page, {}) for page in (0, 7, 64)),
    *((page, KERNEL) for page in (0, 7)),
    *((0, {"splits": splits}) for splits in (1, 2)),
    *((page, {"splits": 3}) for page in (7, 64)),
    *((page, {"splits": 3, **KERNEL}) for page in (0, 64)),
    *((page, {"programs": 1}) for page in (0, 64)),
    *((page, {"programs": 20}) for page in (0, 7)),
    *((page, {"least": 5}) for page in (7, 64)),
]


@pytest.mark.parametrize(("page", "way"), WAYS)
def test_cuts_and_merges(device, way, page):
    run(Case(LENGTHS, heads=4, kv_heads=2, page=page), device, {"block_n": 16, **way})


@pytest.mark.parametrize(
    ("programs", "merge"), [(6, "last"), (3, "kernel"), (14, "last"), (14, "kernel"), (5, "last"), (5, "kernel")]
)
def test_equal_sequences(device, programs, merge):
    """6 items of 5 tiles: a program each, two of them each, two shares of 3 and 2 tiles, and slices across items."""
    run(
        Case([70, 70, 70], heads=4, kv_heads=2, page=16),
        device,
        {"block_n": 16, "programs": programs, "least": 1, "merge": merge},
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_make_bits_independent_of_the_batch(device, splits):
    q, k, v = (torch.randn(3, n, heads, 32, device=device) for n, heads in ((1, 4), (200, 2), (200, 2)))
    lengths = torch.tensor([200, 3, 150], dtype=torch.int32, device=device)
    together = tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths, num_splits=splits)
    for b in range(3):
        one = slice(b, b + 1)
        alone = tilefold.attention_kvcache(q[one], k[one], v[one], cache_seqlens=lengths[one], num_splits=splits)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize(("group", "seq_q"), [(1, 1), (8, 1), (4, 2), (7, 2), (1, 5), (7, 5)])
def test_rows(device, group, seq_q):
    run(Case([40, 3, 65], seq_q, heads=2 * group, kv_heads=2, options={"causal": True}), device)


@pytest.mark.parametrize("page", [1, 3, 16, 32, 96, 1024])
def test_pages(device, page):
    run(Case([50, 1, 97], heads=4, page=page, dim=24, dim_v=40), device)
    run(Case([50, 1, 97], heads=4, page=page, dim=512, dim_v=384), device)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (20, 0)}, {"window": (9, 3)}, {"causal": True, "window": (0, None)}]
)
@pytest.mark.parametrize("page", [0, 16])
def test_masks(device, options, page):
    run(Case([50, 2, 0, 37], 4 if page else 1, heads=3, page=page, options=options), device, {"block_n": 16})


def test_window_sequences_shorter_than_queries(device):
    run(Case([2, 1, 7], 5, heads=2, options={"causal": True}), device)
    run(Case([2, 0, 7], 5, heads=2, options={"window": (1, 1)}), device)


@pytest.mark.parametrize(("page", "way"), [(0, {"splits": 2}), (16, {})])
def test_scores(device, page, way):
    slopes, sinks = torch.rand(3, 4, device=device), torch.randn(4, device=device)
    for options in (
        {"alibi_slopes": slopes, "causal": True},
        {"alibi_slopes": slopes[0]},
        {"sinks": sinks},
        {"softcap": 3.0},
        {"scale": 0.4, "softcap": 2.0, "alibi_slopes": slopes, "sinks": sinks, "window": (40, 0)},
    ):
        case = Case([50, 0, 19], 2, heads=4, kv_heads=2, page=page, options=options)
        run(case, device, {"block_n": 16, **way})


@pytest.mark.parametrize("page", [0, 16, 64])
def test_padding(device, page):
    run(Case([70, 9, 33], 2, heads=4, page=page, pads=[5, 9, 40], options={"causal": True}), device, {"block_n": 16})


@pytest.mark.parametrize("page", [0, 8])
def test_packed_queries(device, page):
    run(
        Case([70, 9, 33, 20], [3, 0, 1, 5], heads=4, kv_heads=2, page=page, options={"causal": True}),
        device,
        {"block_n": 16},
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(device, dtype):
    for page in (0, 16):
        run(Case(LENGTHS, 2, heads=8, kv_heads=2, dim=64, page=page, dtype=dtype, options={"causal": True}), device)


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PLACES = [(0, "head"), (0, "page"), (16, "head"), (16, "page"), (64, "page")]
STORED = [  # every dtype of queries beside every kind of bytes
    *((E4M3, *place, dtype) for place, dtype in zip(PLACES, (F16, BF16, F32, BF16, F16), strict=True)),
    *((INT8, *place, dtype) for place, dtype in zip(PLACES, (F32, F16, BF16, F16, BF16), strict=True)),
]


@pytest.mark.parametrize(("stored", "page", "scales", "dtype"), STORED)
def test_bytes(device, dtype, stored, page, scales):
    run(
        Case([50, 0, 19], 2, heads=4, kv_heads=2, page=page, dtype=dtype, stored=stored, scales=scales),
        device,
        {"block_n": 16},
    )


def test_all_bytes_and_large_queries(device):
    """Every e4m3 number, and queries that float16 does not hold."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F].to(device)
    k = numbers.view(1, -1, 1, 1).expand(1, -1, 1, 16).contiguous().view(E4M3)
    q = torch.full((1, 1, 1, 16), 2.0**90, dtype=torch.bfloat16, device=device)
    out, lse = tilefold.attention_kvcache(q, k, k, scale=2.0**-96, return_lse=True)
    exact = tilefold.reference.attention(q, k.float(), k.float(), scale=2.0**-96)
    assert torch.allclose(out.double(), exact[0], rtol=1e-2)
    assert torch.allclose(lse.double(), exact[1], rtol=1e-5)


@pytest.mark.parametrize(("dim", "dim_v"), [(72, 64), (64, 64), (48, 24), (576, 512)])
@pytest.mark.parametrize(("page", "dtype", "stored"), [(0, BF16, E4M3), (16, F16, None)])
def test_values_are_part_of_keys(device, dim, dim_v, page, dtype, stored):
    case = Case([20, 0, 37], 1, heads=16, dim=dim, dim_v=dim_v, page=page, dtype=dtype, stored=stored, shared=True)
    run(case, device, {"block_n": 16})


def test_more_sequences_than_are_counted_first(device):
    run(Case([5, 40, 0] + [0] * 124 + [17, 3], heads=2, dim=16), device, {"programs": 7, "block_n": 16})


def test_sequences_are_counted_a_chunk_at_a_time(device, monkeypatch):
    """Chunks of thousands would take the interpreter minutes."""
    from tilefold.ops.cache import decode

    monkeypatch.setattr(decode, "ONE_CHUNK", 4)
    monkeypatch.setattr(decode, "LARGE_CHUNK", 8)
    found, bound = [], decode._constants
    monkeypatch.setattr(decode, "_constants", lambda *given: found.append(bound(*given)) or found[-1])
    for merge in ("last", "kernel"):
        run(Case([3, 0, 17, 5] * 5 + [40], heads=2, dim=8), device, {"programs": 5, "block_n": 16, "merge": merge})
    assert [made["BLOCK_B"] for made in found] == [8, 8]


def test_many_rows(device):
    run(Case([60, 5], 5, heads=32, kv_heads=1, options={"causal": True}), device, {"block_m": 64, "block_n": 16})
    run(Case([60, 5], 5, heads=32, kv_heads=1, options={"window": (9, 0)}), device, {"block_m": 16, "block_n": 16})


def test_batch_index_and_strides(device):
    k, v = torch.randn(2, 5, 2, 40, 32, device=device).transpose(2, 3).unbind()
    q = torch.randn(3, 1, 4, 32, device=device)
    index = torch.tensor([3, 0, 4], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 40, 21], dtype=torch.int32, device=device)
    got = tilefold.attention_kvcache(q, k, v, cache_seqlens=lengths, cache_batch_idx=index)
    want = tilefold.attention_kvcache(q, k[index.long()], v[index.long()], cache_seqlens=lengths)
    assert torch.equal(got, want)


# ---------------------------------------------------------------- what check finds


def test_check_names_the_entry(device):
    int32 = {"dtype": torch.int32, "device": device}
    tilefold.attention_kvcache(**small(device), check=True)  # 99 lies behind the last key
    for changes, text in (
        ({"block_table": torch.tensor([[0, 6], [2, 99]], **int32)}, r"block_table\[0, 1\] is 6"),
        ({"block_table": torch.tensor([[0, 1], [-1, 99]], **int32)}, r"block_table\[1, 0\] is -1"),
        ({"cache_seqlens": torch.tensor([9, 17], **int32)}, r"cache_seqlens\[1\]"),
        ({"cache_seqlens": torch.tensor([-1, 3], **int32)}, r"cache_seqlens\[0\]"),
    ):
        with pytest.raises(tilefold.ValueRangeError, match=text):
            tilefold.attention_kvcache(**small(device, **changes), check=True)


def test_nothing_there(device):
    given = small(device)
    out, lse = tilefold.attention_kvcache(
        **{**given, "cache_seqlens": torch.zeros_like(given["cache_seqlens"])}, return_lse=True
    )
    assert not out.any() and (lse == float("-inf")).all()
    empty = {name: given[name][:0] for name in ("q", "cache_seqlens", "block_table")}
    assert tilefold.attention_kvcache(**{**given, **empty}).shape == (0, 2, 4, 16)
