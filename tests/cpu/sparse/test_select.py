"""select against its fp64 oracle: rows, methods, bounds, forced blocks, settings per head, lengths, edges; what it refuses."""

import math
import re

import pytest
import torch

from cases import pairs
from cases.select import KINDS, bounds, held, kept, rows
from tilefold import reference, sparse
from tilefold.errors import DtypeError, LayoutError, ShapeError, ValueRangeError
from tilefold.plan.sparse.select import LONGEST_ROW

METHODS = {
    "gini": {},
    "gini, own range": {"tau_min": 0.2, "tau_max": 0.8},
    "tau": {"tau": lambda g: 0.9 - 0.5 * g * g},
    "top_p": {"method": "top_p", "top_p": 0.7},
    "top_p all": {"method": "top_p", "top_p": 1.0},
    "top_p none": {"method": "top_p", "top_p": 0, "min_blocks": 0},
    "top_k": {"method": "top_k", "top_k": 7},
    "sparsity": {"method": "top_k", "sparsity": 0.85},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_kinds_of_rows(kind, method, device):
    scores = rows(kind, 2, 3, 9, 45).to(device)
    got, sure = held(scores, **METHODS[method])
    if kind in ("random", "peaked", "huge", "tiny"):
        assert sure.float().mean() > 0.9  # the comparison means something
    if kind == "equal":
        assert bool((got.gini == 0).all())


@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 364, 500])
@pytest.mark.parametrize("method", ["gini", "top_p", "top_k", "sparsity"])
def test_lengths_of_rows(blocks, method, device):
    held(rows("peaked", 1, 2, 5, blocks).to(device), **METHODS[method])
    held(rows("tied", 1, 1, 3, blocks).to(device), **METHODS[method], force_self=True, seq_k=64 * blocks)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("longest", [0, LONGEST_ROW])
def test_logits(method, longest, device, monkeypatch):
    """Their softmax is the scores: as many blocks, and blocks that differ only where scores are equal up to rounding."""
    import sys

    monkeypatch.setattr(sys.modules["tilefold.sparse.select"], "LONGEST_ROW", longest)
    g = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(2, 3, 9, 45, generator=g)).to(device)
    logits[0, 0, 0, 3:30] = float("-inf")
    sizes = torch.full((45,), 64, dtype=torch.int32, device=device)
    sizes[7] = 0
    logits[..., 7] = 1e4  # of a block without tokens: nothing
    options = {**METHODS[method], "block_sizes": sizes}
    hidden = logits.masked_fill(sizes == 0, float("-inf"))
    want = reference.select((hidden.double() * 0.4).softmax(-1).cpu(), **{**options, "block_sizes": sizes.cpu()})
    got = sparse.select(logits, softmax_scale=0.4, **options)
    gini, mass, share = (10 * bound for bound in bounds(logits))  # and an exponential, rounded, for each score
    same = (kept(got) == want.keep).all(-1)
    assert bool((same | (want.gap <= share)).all())
    assert same.float().mean() > 0.9
    assert bool(((got.gini.cpu() - want.gini).abs() <= gini).all())
    assert bool(((got.mass.cpu() - want.mass).abs() <= mass)[same].all())


def test_the_longest_row_of_the_kernel(device):
    held(rows("peaked", 1, 1, 3, LONGEST_ROW).to(device))
    held(rows("tied", 1, 1, 2, LONGEST_ROW - 1).to(device), method="top_k", top_k=99)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_too_long_for_the_kernel(kind, method, device, monkeypatch):
    """The path in torch, on short rows."""
    import sys

    monkeypatch.setattr(sys.modules["tilefold.sparse.select"], "LONGEST_ROW", 0)
    held(rows(kind, 2, 2, 5, 30).to(device), **METHODS[method])
    names = torch.rand(5, 30, device=device) < 0.2
    held(rows(kind, 1, 1, 5, 30).to(device), **METHODS[method], force=names, force_first=1, capacity=6)


def test_a_really_long_row(device):
    scores = rows("peaked", 1, 1, 2, LONGEST_ROW + 5).to(device)
    held(scores, force_self=True, max_blocks=40)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, device):
    held(rows("random", 1, 2, 6, 70).to(device, dtype))
    held(rows("infinite", 1, 2, 6, 70).to(device, dtype), method="top_p", top_p=0.6)


def test_strides(device):
    """Nothing is copied: batch, heads and rows lie apart and the other way round, one head for all."""
    base = rows("random", 4, 6, 3, 50).to(device)
    scores = base.permute(1, 2, 0, 3)[::2, :, 1:, 3:]
    got, _ = held(scores)
    same = sparse.select(scores.contiguous())
    assert torch.equal(got.index.indices, same.index.indices)
    held(base[:, :1].expand(-1, 3, -1, -1), max_blocks=9)


BOUNDS = {
    "min": {"min_blocks": 30},
    "max": {"max_blocks": 4},
    "both": {"min_blocks": 5, "max_blocks": 5},
    "capacity": {"capacity": 3},
    "more than there are": {"min_blocks": 100, "max_blocks": 200},
    "top_k more than there are": {"method": "top_k", "top_k": 100},
    "top_k with min": {"method": "top_k", "top_k": 2, "min_blocks": 6},
    "none": {"method": "top_k", "top_k": 0, "min_blocks": 0},
}


@pytest.mark.parametrize("kind", ["random", "tied", "infinite", "nan"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_bounds(kind, bound, device):
    options = BOUNDS[bound]
    got, _ = held(rows(kind, 1, 2, 6, 40).to(device), **options)
    least, most = (
        min(options.get("min_blocks", 1), 40),
        min(options.get("max_blocks", 40), options.get("capacity", 40), 40),
    )
    assert bool(((got.index.counts >= least) & (got.index.counts <= most)).all())


FORCED = {
    "self": {"force_self": True},
    "first": {"force_first": 3},
    "window": {"local_window": 2},
    "window of itself": {"local_window": 0},
    "all": {"force_self": True, "force_first": 2, "local_window": 1, "min_blocks": 7, "max_blocks": 9},
    "larger query blocks": {"block_q": 128, "block_k": 64, "seq_q": 1100, "seq_k": 1280, "local_window": 0},
    "smaller query blocks": {"block_q": 16, "block_k": 64, "seq_q": 131, "seq_k": 1279, "local_window": 1},
    "more queries than keys": {"block_q": 256, "block_k": 64, "seq_q": 2200, "seq_k": 1270, "force_self": True},
}


@pytest.mark.parametrize(
    ("kind", "name", "method"), pairs(["random", "tied", "infinite", "nan"], [*FORCED], ["gini", "top_p", "top_k"])
)
def test_forced(kind, name, method, device):
    held(rows(kind, 1, 2, 9, 20).to(device), **METHODS[method], **FORCED[name])


def test_window_at_the_end_of_the_keys(device):
    """Queries are aligned to the end of the keys: one block of new tokens owns the last KV block."""
    got = sparse.select(
        rows("equal", 1, 1, 1, 10).to(device), method="top_k", top_k=1, local_window=1, seq_q=64, seq_k=640
    )
    assert kept(got)[0, 0, 0].nonzero().flatten().tolist() == [8, 9]


@pytest.mark.parametrize("shape", [(2, 3, 7, 21), (7, 21), (3, 1, 21), (1, 3, 7, 1), (7, 1)])
def test_forced_by_a_map(shape, device):
    force = torch.rand(shape).to(device) < 0.2
    scores = rows("random", 2, 3, 7, 21).to(device)
    held(scores, force=force)
    held(scores, force=force, force_first=1, method="top_k", top_k=4)
    held(scores, force=force, max_blocks=3)  # more forced than room: the lowest stay


def test_the_mass_of_forced_blocks_counts(device):
    scores = torch.tensor([[[[0.1, 0.6, 0.2, 0.1]]]], device=device)
    got = sparse.select(
        scores, method="top_p", top_p=0.55, force=torch.tensor([[True, False, False, False]], device=device)
    )
    assert kept(got).flatten().tolist() == [True, True, False, False]
    got = sparse.select(
        scores, method="top_p", top_p=0.55, force=torch.tensor([[True, True, False, False]], device=device)
    )
    assert kept(got).flatten().tolist() == [True, True, False, False]
    assert float(got.mass) == pytest.approx(0.7)


@pytest.mark.parametrize("per_head", [False, True])
def test_empty_blocks_have_no_score(per_head, device):
    sizes = torch.randint(0, 3, (2, 3, 33) if per_head else (33,), dtype=torch.int32, device=device) * 20
    sizes[..., -1].clamp_(max=64)
    scores = rows("random", 2, 3, 8, 33).to(device)
    got, _ = held(scores, block_sizes=sizes)
    wide = sizes.expand(2, 3, 33)[:, :, None].cpu()
    assert not bool((kept(got) & (wide == 0)).any())
    held(scores, block_sizes=sizes, min_blocks=30)  # nothing else is left
    held(scores, block_sizes=sizes, method="top_k", top_k=30, force_first=2)
    assert got.index.block_sizes is sizes


def test_settings_per_head_and_row(device):
    scores = rows("random", 2, 4, 6, 40).to(device)
    heads = torch.tensor([0.3, 0.5, 0.7, 1.0], device=device)
    held(scores, tau_min=heads / 2, tau_max=heads)
    held(scores, method="top_p", top_p=torch.rand(2, 1, 6).to(device))
    held(scores, method="top_p", top_p=heads.double()[:, None])
    held(scores, method="top_k", top_k=torch.tensor([1, 5, 30, 60], device=device))
    held(
        scores, method="top_k", sparsity=heads, min_blocks=torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=device)
    )
    held(scores, max_blocks=torch.tensor([[[5]], [[9]]], device=device), min_blocks=6)
    held(scores, method="top_k", top_k=torch.tensor(3, device=device))
    held(scores, tau=lambda g: heads[None, :, None])
    assert sparse.select(scores, tau=lambda g: 0.25).tau.unique().tolist() == [0.25]


@pytest.mark.parametrize("share", [0.0, 5e-324, 1e-45, 6.6e-38, 1e-30, 1.0])
def test_the_smallest_shares_are_shares(share, device):
    scores = rows("random", 1, 2, 3, 20).to(device)
    held(scores, method="top_p", top_p=share)
    held(scores, method="gini", tau_min=share, tau_max=share)
    held(scores, method="top_k", sparsity=share)


def test_shares_out_of_range_count_as_the_nearest(device):
    scores = rows("random", 1, 4, 3, 20).to(device)
    asked = torch.tensor([-1.0, 2.0, float("nan"), 0.5], device=device)
    got, _ = held(scores, method="top_p", top_p=asked)
    assert got.tau[0, :, 0].tolist() == [0.0, 1.0, 1.0, 0.5]
    assert got.index.counts[0, :, 0].tolist()[:3] == [1, 20, 20]


def test_ties_go_to_the_lower_block(device):
    scores = torch.tensor([[[[1.0, 2, 1, 2, 1, 0, 1]]]], device=device)
    assert kept(sparse.select(scores, method="top_k", top_k=4)).flatten().tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert kept(sparse.select(scores, method="top_p", top_p=0.3)).flatten().tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert kept(sparse.select(scores, method="top_p", top_p=1.0)).flatten().tolist() == [1, 1, 1, 1, 1, 0, 1]


def test_infinite_scores_come_first_and_have_no_mass(device):
    scores = torch.tensor([[[[0.5, float("inf"), 0.3, 0.2]]]], device=device)
    got, _ = held(scores, method="top_p", top_p=0.4)
    assert kept(got).flatten().tolist() == [1, 1, 0, 0]
    assert float(got.mass) == pytest.approx(0.5)


def test_minus_zero_is_zero(device):
    scores = torch.tensor([[[[-0.0, 0.0, -0.0, 1.0]]]], device=device)
    assert kept(sparse.select(scores, method="top_k", top_k=2)).flatten().tolist() == [1, 0, 0, 1]


def test_gini(device):
    """By the definition, as a double sum; the two ends of its range."""
    scores = rows("infinite", 2, 3, 5, 40).to(device)
    got = sparse.gini(scores)
    want = torch.zeros(2, 3, 5, dtype=torch.float64)
    for at in ((b, h, q) for b in range(2) for h in range(3) for q in range(5)):
        x = scores[at].cpu().double()
        x = x[x.isfinite()]
        want[at] = (x[:, None] - x).abs().sum() / (2 * len(x) * x.sum())
    assert bool(((got.cpu() - want).abs() <= bounds(scores)[0]).all())
    assert torch.equal(got, sparse.select(scores).gini)
    one = torch.zeros(1, 1, 1, 8, device=device)
    assert sparse.gini(one).item() == 0
    one[..., 3] = 5e-6
    assert sparse.gini(one).item() == pytest.approx(7 / 8)
    sizes = torch.tensor([0, 9, 9, 9, 9, 9, 9, 9], dtype=torch.int32, device=device)
    assert sparse.gini(one, block_sizes=sizes).item() == pytest.approx(6 / 7)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_do(shape, device):
    got = sparse.select(torch.empty(shape, device=device))
    assert got.index.counts.shape == shape[:3]
    assert got.index.capacity == shape[3]
    assert not bool(got.index.counts.any())
    assert got.gini.shape == got.mass.shape == shape[:3]


def test_capacity_follows_what_can_be_asked(device):
    scores = rows("random", 1, 1, 4, 50).to(device)

    def room(**options):
        return sparse.select(scores, **options).index.capacity

    assert room() == 50
    assert room(max_blocks=7) == 7
    assert room(max_blocks=90) == 50
    assert room(max_blocks=7, capacity=9) == 9
    assert room(method="top_k", top_k=5) == 5
    assert room(method="top_k", sparsity=0.9) == 5
    assert room(method="top_k", sparsity=0.91) == 5  # 4.5 blocks are kept as 5, and so are 4.1
    assert room(method="top_k", sparsity=0.918) == 5
    assert room(method="top_k", top_k=5, min_blocks=6) == 6
    assert room(method="top_k", top_k=1, local_window=2, force_first=1) == 6
    assert room(method="top_k", top_k=torch.tensor([5], device=device)) == 50
    assert room(method="top_k", top_k=5, force=torch.ones(4, 50, dtype=torch.bool, device=device)) == 50


def test_no_gradient(device):
    scores = rows("random", 1, 2, 3, 20).to(device).requires_grad_()
    asked = torch.tensor([0.5, 0.7], device=device, requires_grad=True)
    got = sparse.select(scores, tau_min=asked / 2, tau_max=asked)
    assert not any(t.requires_grad for t in (got.index.indices, got.index.counts, got.gini, got.tau, got.mass))


def test_the_same_bits_every_run(device):
    scores = rows("tied", 2, 3, 7, 90).to(device)
    first, again = (sparse.select(scores, local_window=1) for _ in range(2))
    for mine, other in zip(first.index.tensors(), again.index.tensors(), strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)
    assert all(torch.equal(getattr(first, n), getattr(again, n)) for n in ("gini", "tau", "mass"))


def test_the_record_goes_on_to_attention(device):
    """Geometry and sizes arrive on the index."""
    sizes = torch.tensor([16, 16, 5], dtype=torch.int32, device=device)
    got = sparse.select(
        rows("random", 1, 2, 2, 3).to(device), block_q=32, block_k=16, seq_q=33, seq_k=48, block_sizes=sizes
    )
    assert got.index.geometry == (32, 16, 33, 48)
    assert got.index.block_sizes is sizes


def test_index_is_the_map(device):
    scores = rows("random", 2, 2, 5, 31).to(device)
    keep = scores > 0.6
    index = sparse.index(keep, capacity=20, block_k=32)
    assert torch.equal(index.to_map(), keep)
    assert index.block_k == 32
    got = sparse.select(scores, method="top_k", top_k=9)
    again = sparse.index(got.index.to_map(), capacity=9)
    assert torch.equal(again.indices, got.index.indices)
    assert torch.equal(again.counts, got.index.counts)


def test_the_oracle_by_hand():
    scores = torch.tensor([[[[0.4, 0.1, 0.3, 0.2], [1, 1, 1, 1]]]])
    want = reference.select(scores, method="top_p", top_p=0.65)
    assert want.keep[0, 0].tolist() == [[True, False, True, False], [True, True, True, False]]
    assert want.mass[0, 0].tolist() == pytest.approx([0.7, 0.75])
    assert want.gap[0, 0].tolist() == pytest.approx([0.05, 0.1])
    assert want.gini[0, 0].tolist() == pytest.approx([0.25, 0.0])
    assert reference.select(scores, tau_min=0.0, tau_max=1.0).tau[0, 0].tolist() == pytest.approx([0.75, 1.0])
    assert math.isinf(reference.select(scores, method="top_k", top_k=1).gap[0, 0, 0])


# ---------------------------------------------------------------- refusals


SCORES = torch.rand(2, 3, 4, 8)
HEADS = torch.rand(3)

REFUSED = {
    "coefficients of gini": ((SCORES,), {"return_gini": False}, ValueRangeError,
                             "return_gini is False, but method 'gini' keeps blocks by the Gini coefficients, accepted: 'top_p', "
                             "'top_k'"),
    "return_gini": ((SCORES,), {"return_gini": 1}, DtypeError, "return_gini must be a bool, got 1"),
    "softmax_scale": ((SCORES,), {"softmax_scale": 0.0}, ValueRangeError, "softmax_scale must be greater than 0, got 0.0"),
    "no tensor": ((7,), {}, DtypeError, "scores must be a torch.Tensor, got int"),
    "dtype": ((SCORES.double(),), {}, DtypeError, "scores has dtype float64, accepted: float16, bfloat16, float32"),
    "rank": ((SCORES[0],), {}, ShapeError,
             "scores has 3 dimensions, shape (3, 4, 8); expected [batch, heads, q_blocks, kv_blocks]"),
    "last stride": ((SCORES.transpose(2, 3),), {}, LayoutError,
                    "scores needs a contiguous last dimension (stride 1), got strides (96, 32, 1, 8) "
                    "for shape (2, 3, 8, 4); call scores.contiguous() first if a copy is acceptable"),
    "method": ((SCORES,), {"method": "best"}, ValueRangeError, "method must be one of 'gini', 'top_p', 'top_k', got 'best'"),
    "another method's": ((SCORES,), {"top_k": 3}, ValueRangeError, "top_k is for method 'top_k', got method 'gini'"),
    "tau for top_p": ((SCORES,), {"method": "top_p", "top_p": 0.5, "tau_min": 0.1}, ValueRangeError,
                      "tau_min is for method 'gini', got method 'top_p'"),
    "no top_p": ((SCORES,), {"method": "top_p"}, ValueRangeError, "method 'top_p' needs top_p, got none"),
    "no top_k": ((SCORES,), {"method": "top_k"}, ValueRangeError, "method 'top_k' needs top_k or sparsity, got neither"),
    "both top_k": ((SCORES,), {"method": "top_k", "top_k": 2, "sparsity": 0.5}, ValueRangeError,
                   "method 'top_k' needs top_k or sparsity, got top_k and sparsity"),
    "tau twice": ((SCORES,), {"tau": lambda g: g, "tau_max": 0.5}, ValueRangeError,
                  "tau takes the place of tau_min and tau_max, got tau_max, tau"),
    "tau a number": ((SCORES,), {"tau": 0.5}, DtypeError,
                     "tau must be a function of the Gini tensor, got float; for one share use method 'top_p'"),
    "tau range": ((SCORES,), {"tau_max": 1.5}, ValueRangeError, "tau_max must be at most 1, got 1.5"),
    "tau low": ((SCORES,), {"tau_min": -0.5}, ValueRangeError, "tau_min must be at least 0, got -0.5"),
    "tau order": ((SCORES,), {"tau_min": 0.75, "tau_max": 0.5}, ValueRangeError, "tau_min is 0.75, more than tau_max, 0.5"),
    "tau's result": ((SCORES,), {"tau": lambda g: g[..., None]}, ShapeError,
                     "what tau returns has shape (2, 3, 4, 1), expected [heads] = [3] or what broadcasts to "
                     "[batch, heads, Q blocks] = [2, 3, 4]"),
    "tau's type": ((SCORES,), {"tau": lambda g: None}, DtypeError,
                   "what tau returns must be a number, got None of type NoneType"),
    "top_p type": ((SCORES,), {"method": "top_p", "top_p": HEADS > 0}, DtypeError,
                   "top_p must be a number or a tensor of real numbers, got dtype bool"),
    "heads": ((SCORES,), {"method": "top_p", "top_p": torch.rand(4)}, ShapeError,
              "top_p has shape (4,), expected [heads] = [3] or what broadcasts to [batch, heads, Q blocks] = [2, 3, 4]"),
    "top_k kind": ((SCORES,), {"method": "top_k", "top_k": 2.5}, DtypeError, "top_k must be an int, got 2.5 of type float"),
    "top_k low": ((SCORES,), {"method": "top_k", "top_k": -1}, ValueRangeError, "top_k must be at least 0, got -1"),
    "sparsity": ((SCORES,), {"method": "top_k", "sparsity": 90}, ValueRangeError, "sparsity must be at most 1, got 90"),
    "min_blocks": ((SCORES,), {"min_blocks": -1}, ValueRangeError, "min_blocks must be at least 0, got -1"),
    "max_blocks": ((SCORES,), {"max_blocks": 0}, ValueRangeError, "max_blocks must be at least 1, got 0"),
    "min over max": ((SCORES,), {"min_blocks": 5, "max_blocks": 4}, ValueRangeError, "min_blocks is 5, more than max_blocks, 4"),
    "min over capacity": ((SCORES,), {"min_blocks": 5, "capacity": 4}, ValueRangeError, "min_blocks is 5, more than capacity, 4"),
    "capacity": ((SCORES,), {"capacity": 0}, ValueRangeError, "capacity must be at least 1, got 0"),
    "forced over max": ((SCORES,), {"max_blocks": 3, "local_window": 1, "force_first": 1}, ValueRangeError,
                        "max_blocks leaves room for 3 blocks a list, but force_first, force_self and local_window force up to 4"),
    "force_self": ((SCORES,), {"force_self": 1}, DtypeError, "force_self must be a bool, got 1 of type int"),
    "force_first": ((SCORES,), {"force_first": -1}, ValueRangeError, "force_first must be at least 0, got -1"),
    "local_window": ((SCORES,), {"local_window": -1}, ValueRangeError, "local_window must be at least 0, got -1"),
    "force dtype": ((SCORES,), {"force": torch.zeros(4, 8)}, DtypeError, "force must be a bool tensor, got float32"),
    "force type": ((SCORES,), {"force": "self"}, DtypeError, "force must be a bool tensor, got str"),
    "force shape": ((SCORES,), {"force": torch.zeros(8, 4, dtype=torch.bool)}, ShapeError,
                    "force has shape (8, 4), which does not broadcast to [batch, heads, Q blocks, KV blocks] = [2, 3, 4, 8]"),
    "block": ((SCORES,), {"block_k": 48}, ValueRangeError, "block_k must be a power of two and at least 16 tokens, got 48"),
    "length": ((SCORES,), {"seq_k": 449, "block_k": 128}, ShapeError,
               "scores has 8 KV blocks, shape (2, 3, 4, 8); expected 4 for seq_k 449 in blocks of 128"),
    "sizes": ((SCORES,), {"block_sizes": torch.zeros(7, dtype=torch.int32)}, ShapeError,
              "block_sizes has shape (7,), expected [kv_blocks]: dimension 0 (kv_blocks) is 7, should be 8"),
    "sizes dtype": ((SCORES,), {"block_sizes": torch.zeros(8)}, DtypeError, "block_sizes has dtype float32, accepted: int32"),
    "query sizes": ((SCORES,), {"query_sizes": torch.zeros(8, dtype=torch.int32)}, ShapeError,
                    "query_sizes has shape (8,), expected [q_blocks]: dimension 0 (q_blocks) is 8, should be 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    args, options, kind, text = REFUSED[name]
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        sparse.select(*args, **options)


def test_refused_in_words_of_their_own():
    meta = torch.zeros(3, device="meta")
    for name, options in {
        "top_p": {"method": "top_p", "top_p": meta},
        "force": {"force": meta.bool()[:, None, None]},
    }.items():
        with pytest.raises(ValueError, match=f"^{name} is on meta, but scores is on cpu$"):
            sparse.select(SCORES, **options)


def test_gini_refuses_the_same():
    with pytest.raises(DtypeError, match="^scores has dtype int64, accepted: float16, bfloat16, float32$"):
        sparse.gini(SCORES.long())
