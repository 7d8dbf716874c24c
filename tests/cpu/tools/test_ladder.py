"""The five rungs against fp64, their masks, their refusals, and what they declare against what the interpreter counts."""

import inspect
from pathlib import Path

import pytest
import torch

import tilefold
from cases import qkv, rand
from cases.ladder import NAMES, held, held_by_lengths, rung
from cases.refusals import refuses
from tilefold import ladder
from tilefold.errors import DeviceError, DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError
from tilefold.ladder import Tile, split
from tilefold.ladder.inputs import problem_of
from tilefold.plan import AttentionProblem
from tilefold.plan.cost import attention_cost

SMALL = Tile(16, 16, 4, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name, dtype, device):
    held(name, *qkv(1, 21, 21, 2, 2, 16, dtype=dtype, device=device), causal=True, tile=SMALL)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("sq", "sk", "h", "hk", "d"), [(3, 23, 4, 2, 24), (33, 17, 1, 1, 16), (1, 20, 7, 1, 8), (16, 32, 1, 1, 100)]
)
def test_lengths_groups_and_head_dims(name, sq, sk, h, hk, d, device):
    """More queries than keys under a causal mask leave rows without a live key: 0."""
    q, k, v = qkv(2 if sq < 9 else 1, sq, sk, h, hk, d, device=device)
    got = held(name, q, k, v, causal=True, tile=SMALL)
    assert not got[:, : max(0, sq - sk)].any()


@pytest.mark.parametrize(
    ("name", "keys"), [*((name, 1100) for name in NAMES), ("naive", 256), ("naive", 257), ("profile", 2049)]
)
def test_rows_longer_than_1024(name, keys, device):
    """The softmax of the naive rungs goes over a row in pieces, of which one may be whole or one key; the others over tiles."""
    held(name, *qkv(1, 3, keys, 1, 1, 16, dtype=torch.float16, device=device), tile=Tile(16, 128))


@pytest.mark.parametrize("name", NAMES)
def test_strides(name, device):
    q, k, v = rand(1, 20, 3, 2, 16, device=device).unbind(2)
    held(name, q, k, v, tile=SMALL)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    held(name, q, k, v, tile=SMALL)


@pytest.mark.parametrize("name", ["naive", "profile", "flash"])
def test_additive_and_padding_masks(name, device):
    q, k, v = qkv(2, 18, 21, 2, 1, 16, device=device)
    there = torch.ones(2, 21, dtype=torch.bool, device=device)
    there[0, :9], there[1] = False, False  # left padding, and a sequence without any key
    for shape in ((2, 2, 18, 21), (1, 2, 1, 21), (1, 18, 21), (1, 21)):
        bias = rand(*shape, device=device)
        got = held(name, q, k, v, True, {"causal": True, "bias": bias, "mask": there[:, None, None]}, tile=SMALL, bias=bias,
                   padding_mask=there)  # fmt: skip
        assert not got[1].any()
    bias = torch.full((18, 21), float("-inf"), device=device)  # an additive mask is one, too
    bias[..., :4] = 0.0
    held(name, q, k, v, False, {"bias": bias}, tile=SMALL, bias=bias)
    bias = rand(21, 2, 18, device=device).permute(
        1, 2, 0
    )  # three dimensions are heads, queries and keys, of any strides
    held(name, q, k, v, False, {"bias": bias}, tile=SMALL, bias=bias)


@pytest.mark.parametrize("name", ["paged", "split"])
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_unequal_lengths(name, causal, device):
    """A query sits at its sequence's own end; one sequence is empty, one shorter than the queries."""
    q, k, v = qkv(4, 5, 40, 2, 1, 16, device=device)
    lengths = torch.tensor([40, 0, 3, 20], dtype=torch.int32, device=device)
    options = {"splits": 3} if name == "split" else {}
    held_by_lengths(name, q, k, v, causal, lengths, tile=SMALL, **options)


@pytest.mark.parametrize("splits", [1, 2, 5, 20])
def test_empty_splits_are_the_identity(splits, device):
    """Under a causal mask early queries see nothing of late splits, and 20 splits of three tiles are mostly empty."""
    q, k, v = qkv(1, 20, 40, 1, 1, 16, dtype=torch.float16, device=device)
    got = held("split", q, k, v, causal=True, tile=SMALL, splits=splits)
    assert got.isfinite().all()
    held("split", *qkv(1, 17, 9, 1, 1, 16, device=device), causal=True, tile=SMALL, splits=splits)


def test_the_last_rung_is_what_the_library_exports(device):
    q, k, v = qkv(2, 3, 50, 4, 2, 32, dtype=torch.float16, device=device)
    lengths = torch.tensor([50, 17], dtype=torch.int32, device=device)
    ours, library = (f(q, k, v, True, lengths=lengths) for f in (split.attention, split.library))
    assert torch.equal(library, tilefold.attention_kvcache(q, k, v, causal=True, cache_seqlens=lengths))
    assert torch.allclose(ours, library, rtol=2e-3, atol=2e-3)


def test_a_paged_cache_wastes_less_than_a_block_a_sequence(device):
    k, v = (rand(3, 100, 2, 16, dtype=torch.float16, device=device) for _ in range(2))
    cache = ladder.paged_cache(k, v, torch.tensor([100, 33, 0], dtype=torch.int32, device=device), 16)
    found, token = cache.memory(), 2 * 2 * 16 * 2
    assert found.used == 133 * token
    assert found.allocated == (112 + 48) * token == cache.k.numel() * 2 * 2
    assert found.wasted == found.allocated - found.used < 3 * 16 * token
    assert found.contiguous == 300 * token
    blocks = cache.table[0, :7].tolist() + cache.table[1, :3].tolist()
    assert sorted(blocks) == list(range(10)) and blocks != sorted(blocks)
    assert torch.equal(cache.k[cache.table[1, 2], 0], k[1, 32])


@pytest.mark.interpreter
@pytest.mark.parametrize("name", NAMES)
def test_declared_is_counted(name, device):
    """Every byte loaded and stored, and the FLOPs of every tile, odd lengths, groups and causal masks included."""
    cases = (
        ((2, 21, 34, 2, 1, 16), True, SMALL),
        ((1, 20, 45, 1, 1, 24), False, Tile(32, 16)),
        ((1, 1, 70, 2, 1, 16), True, None),
    )
    for shape, causal, tile in cases:
        q, k, v = qkv(*shape, dtype=torch.float16, device=device)
        p = problem_of(q, k, causal)
        call = ladder.RUNGS[name].prepare(q, k, v, causal, tile)
        with ladder.counting() as counts:
            call()
        cost = ladder.RUNGS[name].cost(p, tile)
        assert (counts.bytes, counts.flops) == (cost.l2_bytes, cost.flops), (name, shape, causal, tile)


@pytest.mark.interpreter
def test_splits_are_counted(device):
    q, k, v = qkv(1, 10, 60, 2, 1, 16, dtype=torch.float16, device=device)
    for splits in (3, 7):
        with ladder.counting() as counts:
            split.attention(q, k, v, True, splits=splits, tile=SMALL)
        cost = split.cost(problem_of(q, k, True), SMALL, splits)
        assert (counts.bytes, counts.flops) == (cost.l2_bytes, cost.flops)


def test_intensity_before_and_after_tiling():
    """Memory traffic of flash is the plan's; that of naive grows with N squared, so its intensity does not grow with N."""
    found = {}
    for n in (1024, 4096):
        p = AttentionProblem(1, n, n, 16, 16, 128, 128)
        costs = {name: ladder.RUNGS[name].cost(p) for name in ("naive", "flash")}
        assert costs["flash"].bytes == attention_cost(p).bytes - 16 * n * 4  # the plan writes the lse as well
        assert costs["flash"].flops == attention_cost(p).flops
        found[n] = {name: cost.flops / cost.bytes for name, cost in costs.items()}
    assert found[4096]["naive"] < 1.2 * found[1024]["naive"] < 40
    assert found[4096]["flash"] == pytest.approx(4 * found[1024]["flash"]) and found[4096]["flash"] > 2000


def test_every_rung_is_short_and_has_its_page():
    for each in ladder.RUNGS.values():
        source = Path(inspect.getsourcefile(each.program))
        assert len(source.read_text().splitlines()) < 150, each.name
        page = Path(__file__).resolve().parents[3] / each.page
        assert f"tilefold.ladder.{each.name}" in page.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_compute(name, device):
    q, k, v = qkv(2, 5, 0, 2, 2, 16, device=device)
    assert not rung(name, q, k, v).any()
    assert rung(name, q[:, :0], *qkv(2, 5, 5, 2, 2, 16, device=device)[1:]).shape == (2, 0, 2, 16)
    empty = (t[:0] for t in qkv(2, 5, 5, 2, 2, 16, device=device))
    assert rung(name, *empty).shape == (0, 5, 2, 16)


def refused(device):
    q, k, v = qkv(1, 8, 8, 4, 2, 16, device=device)
    bias, flat, keys = (torch.zeros(shape, device=device) for shape in ((1, 4, 8, 9), (2, 8, 8), (8,)))
    ones = torch.ones(1, 8, device=device)
    dims = "bias has shape (2, 8, 8), expected [heads|1, seq_q|1, seq_k]: dimension 0 (heads) is 2, should be 4 or 1"
    return [
        ("naive", (q, k.half(), v), {}, DtypeError, "k has dtype float16, but q has float32"),
        ("flash", (q[0], k, v), {}, ShapeError, "q has 3 dimensions"),
        ("flash", (q[:, :, :3], k, v), {}, ShapeError, "k has 2 heads: q's must be a multiple of them, got 3"),
        ("split", (q.transpose(2, 3).contiguous().transpose(2, 3), k, v), {}, LayoutError, "q needs a contiguous last"),
        ("naive", (q, k, v), {"bias": bias}, ShapeError, "bias has shape (1, 4, 8, 9)"),
        ("naive", (q, k, v), {"padding_mask": ones}, DtypeError, "padding_mask has dtype float32"),
        ("split", (q, k, v), {"lengths": torch.ones(1, device=device)}, DtypeError, "lengths has dtype float32"),
        ("split", (q, k, v), {"splits": 0}, ValueRangeError, "splits must be an integer from 1 to 64 or None, got 0"),
        ("flash", (q, k, v), {"bias": flat}, ShapeError, dims),
        ("naive", (q, k, v), {"bias": keys}, ShapeError, "bias has 1 dimensions, shape (8,)"),
        ("profile", (q, k, v), {"tile": (16, 16)}, DtypeError, "tile must be a ladder.Tile or None, got tuple"),
        ("flash", (q, k, v), {"causal": 1}, DtypeError, "causal must be True or False, got 1"),
        ("flash", (q.clone().requires_grad_(), k, v), {}, Unsupported, "q requires a gradient"),
        ("paged", (q, k, v), {"block": 0}, ValueRangeError, "block must be an integer of at least 1, got 0"),
    ]


@pytest.mark.parametrize("i", range(14))
def test_refusals(i, device):
    name, given, options, error, text = refused(device)[i]
    refuses(error, text, rung, name, *given, **options)


def test_the_cache_is_checked(device):
    q, k, v = (rand(2, 9, 2, 16, dtype=torch.float16, device=device) for _ in range(3))
    for given, error, text in (
        (([1], v), DtypeError, "k must be a torch.Tensor, got list"),
        ((k, v.float()), DtypeError, "v has dtype float32, but k has float16"),
        ((k, v[:, :8]), ShapeError, "v has shape (2, 8, 2, 16)"),
        ((k, v, [9, 9]), DtypeError, "lengths must be a torch.Tensor or None, got list"),
        ((k, v, torch.full((2, 1), 9, dtype=torch.int32, device=device)), ShapeError, "lengths has 2 dimensions"),
        ((k, v, torch.full((2,), 10, dtype=torch.int32, device=device)), ValueRangeError, "lengths must be 2 numbers"),
    ):
        refuses(error, text, ladder.paged_cache, *given)
    refuses(DtypeError, "cache must be a ladder.PagedCache, got Tensor", ladder.paged.attention, q, k, v)


@pytest.mark.parametrize("name", ["naive", "flash", "split"])
def test_transforms_and_tensors_without_values_are_refused(name, device):
    q, k, v = (rand(1, 9, 2, 16, dtype=torch.float16, device=device) for _ in range(3))
    program = getattr(ladder, name)
    with pytest.raises(Unsupported, match="the ladder has no rule for vmap"):
        torch.func.vmap(lambda q: program.attention(q, k, v))(q[None])
    with pytest.raises(Unsupported, match="q carries a forward-mode tangent"):
        torch.func.jvp(lambda q: program.attention(q, k, v), (q,), (q,))
    refuses(DeviceError, "q is on the meta device", program.attention, *(t.to("meta") for t in (q, k, v)))


def test_tiles_and_names_are_checked():
    refuses(ValueRangeError, "tile.block_n must be a power of two of at least 16, got 24", Tile, 16, 24)
    tiles = Tile(128, 64, 8, 3).around()
    assert tiles[0] == Tile(128, 64, 8, 3) and len(set(tiles)) == len(tiles) == 10
    for tile in tiles[1:]:
        names = ("block_m", "block_n", "warps", "stages")
        assert sum(getattr(tile, name) != getattr(tiles[0], name) for name in names) == 1
    with pytest.raises(ValueRangeError, match="rung must be one of naive, profile, paged, flash, split, got 'fast'"):
        ladder.rung_named("fast")
