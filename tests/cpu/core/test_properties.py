"""The algebra of the fold: merge is associative and commutative with the empty state as identity, and folding in parts and
merging equals folding the whole."""

import pytest
import torch
import triton
import triton.language as tl

import tilefold
from cases import judge, rand
from examples import examples
from tilefold import reference
from tilefold.device.state import state_finish, state_init, state_init_sink, state_merge, state_step

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

ROWS, DIM, KEYS = 16, 16, 16


@triton.jit
def load_state(P, i, ROWS: tl.constexpr, DIM: tl.constexpr):
    """State i of [n, ROWS, DIM + 2]: acc, m, l."""
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, DIM)
    p = P + i * ROWS * (DIM + 2) + o_r * (DIM + 2)
    return tl.load(p[:, None] + o_d[None, :]), tl.load(p + DIM), tl.load(p + DIM + 1)


@triton.jit
def store_state(P, i, acc, m, l, ROWS: tl.constexpr, DIM: tl.constexpr):
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, DIM)
    p = P + i * ROWS * (DIM + 2) + o_r * (DIM + 2)
    tl.store(p[:, None] + o_d[None, :], acc)
    tl.store(p + DIM, m)
    tl.store(p + DIM + 1, l)


@triton.jit
def fold_kernel(S, V, P, Which, ROWS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr):
    """State i folds the tiles t with Which[t] == i of scores S [T, ROWS, KEYS] and values V [T, KEYS, DIM], in order."""
    o_r, o_d, o_n = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    acc, m, l = state_init(ROWS, DIM)
    for t in range(tl.load(Which)):
        if tl.load(Which + 1 + t) == tl.program_id(0):
            s = tl.load(S + t * ROWS * KEYS + o_r[:, None] * KEYS + o_n[None, :])
            v = tl.load(V + t * KEYS * DIM + o_n[:, None] * DIM + o_d[None, :])
            acc, m, l = state_step(acc, m, l, s, v, 1.0, None)
    store_state(P, tl.program_id(0), acc, m, l, ROWS, DIM)


@triton.jit
def merge_kernel(P, Out, a, b, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Out = merge(state a, state b); -1 is the identity."""
    if a < 0:
        acc_a, m_a, l_a = state_init(ROWS, DIM)
    else:
        acc_a, m_a, l_a = load_state(P, a, ROWS, DIM)
    if b < 0:
        acc_b, m_b, l_b = state_init(ROWS, DIM)
    else:
        acc_b, m_b, l_b = load_state(P, b, ROWS, DIM)
    acc, m, l = state_merge(acc_a, m_a, l_a, acc_b, m_b, l_b)
    store_state(Out, 0, acc, m, l, ROWS, DIM)


@triton.jit
def finish_kernel(P, Out, Lse, i, ROWS: tl.constexpr, DIM: tl.constexpr):
    acc, m, l = load_state(P, i, ROWS, DIM)
    out, lse = state_finish(acc, m, l)
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, DIM)
    tl.store(Out + o_r[:, None] * DIM + o_d[None, :], out)
    tl.store(Lse + o_r, lse)


@triton.jit
def sink_kernel(P, sink, ROWS: tl.constexpr, DIM: tl.constexpr):
    acc, m, l = state_init_sink(sink, ROWS, DIM)
    store_state(P, 0, acc, m, l, ROWS, DIM)


def fold(s, v, which, states):
    p = torch.empty(states, ROWS, DIM + 2, device=s.device)
    where = torch.tensor([len(which), *which], dtype=torch.int32, device=s.device)
    fold_kernel[(states,)](s, v, p, where, ROWS, DIM, KEYS)
    return p


def merge(p, a, b):
    out = torch.empty(1, ROWS, DIM + 2, device=p.device)
    merge_kernel[(1,)](p, out, a, b, ROWS, DIM)
    return out


def finish(p, i=0):
    out, lse = torch.empty(ROWS, DIM, device=p.device), torch.empty(ROWS, device=p.device)
    finish_kernel[(1,)](p, out, lse, i, ROWS, DIM)
    return out, lse


def same(a, b):
    """Equal up to fp32 rounding of a handful of operations, identical in what is dead."""
    for x, y in zip(finish(a), finish(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def scores(tiles, seed, device):
    """Scores with masked lanes and some rows that are dead in a whole tile."""
    torch.manual_seed(seed)
    s = 4 * torch.randn(tiles, ROWS, KEYS)
    s[torch.rand(tiles, ROWS, KEYS) < 0.3] = float("-inf")
    s[torch.rand(tiles, ROWS) < 0.3] = float("-inf")
    return s.to(device), torch.randn(tiles, KEYS, DIM).to(device)


SEEDS = st.integers(0, 2**31)


@hypothesis.given(seed=SEEDS)
@examples(25)
def test_merge_is_commutative_associative_with_identity(seed, device):
    s, v = scores(3, seed, device)
    p = fold(s, v, [0, 1, 2], 3)
    same(merge(p, 0, 1), merge(p, 1, 0))  # to rounding: a compiler fuses one of the two products into the sum
    for i in range(3):
        assert torch.equal(merge(p, i, -1), p[i : i + 1])
        assert torch.equal(merge(p, -1, i), p[i : i + 1])
    assert torch.equal(merge(p, -1, -1)[0, :, DIM], torch.full((ROWS,), float("-inf"), device=device))
    left = merge(torch.cat([merge(p, 0, 1), p[2:]]), 0, 1)
    right = merge(torch.cat([p[:1], merge(p, 1, 2)]), 0, 1)
    same(left, right)


@hypothesis.given(seed=SEEDS, which=st.lists(st.integers(0, 2), min_size=1, max_size=6))
@examples(25)
def test_fold_of_parts_merged_is_the_fold_of_all(seed, which, device):
    """Any assignment of tiles to three folds, merged in any order, is the one fold; so tile order does not matter either."""
    s, v = scores(len(which), seed, device)
    parts = fold(s, v, which, 3)
    whole = fold(s, v, [0] * len(which), 1)
    same(merge(torch.cat([merge(parts, 0, 1), parts[2:]]), 0, 1), whole)
    order = torch.randperm(len(which))
    same(fold(s[order], v[order], [0] * len(which), 1), whole)
    # And the one fold is softmax times V (scores are in base 2 here).
    flat = s.double().permute(1, 0, 2).reshape(ROWS, -1) * 0.6931471805599453
    lse = torch.logsumexp(flat, 1)
    p = torch.exp(flat - torch.where(lse.isinf(), 0.0, lse)[:, None])
    out, got = finish(whole)
    torch.testing.assert_close(got.double(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), p @ v.double().reshape(-1, DIM), rtol=1e-5, atol=1e-5)


def test_dead_rows_finish_as_zero_and_minus_infinity(device):
    p = fold(torch.full((1, ROWS, KEYS), float("-inf"), device=device), rand(1, KEYS, DIM, device=device), [0], 1)
    out, lse = finish(p)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("sink", [0.7, -3.0, float("-inf")])
def test_a_sink_is_a_key_with_value_zero(sink, device):
    p = torch.empty(1, ROWS, DIM + 2, device=device)
    sink_kernel[(1,)](p, sink, ROWS, DIM)
    out, lse = finish(p)
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, sink), rtol=1e-6, atol=1e-6)


@hypothesis.given(cut=st.integers(0, 60), seed=SEEDS)
@examples(10)
def test_attention_over_two_shards_merges_to_the_whole(cut, seed, device):
    """The public lse is what makes outputs over disjoint keys mergeable."""
    torch.manual_seed(seed)
    q, k, v = rand(1, 20, 2, 16, device=device), rand(1, 60, 2, 16, device=device), rand(1, 60, 2, 16, device=device)
    halves = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    merged = join(*(tilefold.attention(q, *half, return_lse=True) for half in halves))
    plain = reference.deviating(lambda: join(*(reference.attention(q, *half) for half in halves)), torch.float32)
    for got, want, baseline, what in zip(merged, reference.attention(q, k, v), plain, ("out", "lse"), strict=True):
        judge(got, want, baseline, f"{what}, merged")


def join(a, b):
    """Two results over disjoint keys -> the result over both; (out [B, S, H, D], lse [B, H, S])."""
    lse = torch.logaddexp(a[1], b[1])
    weights = [torch.exp(e - lse).transpose(1, 2)[..., None] for e in (a[1], b[1])]
    return weights[0] * a[0] + weights[1] * b[0], lse
