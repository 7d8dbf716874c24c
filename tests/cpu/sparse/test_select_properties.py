"""Properties of selection, by hypothesis: more mass never drops a block, heads do not see one another, lengths stay in bounds."""

import pytest
import torch

from cases.select import KINDS, held, kept, rows
from examples import examples
from tilefold import sparse

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
few = examples(25)  # each launches kernels in the interpreter

shares = st.floats(0, 1, width=32)
blocks = st.integers(1, 70)
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**31)


@few
@hypothesis.given(kinds, blocks, st.lists(shares, min_size=2, max_size=6), seeds, st.booleans())
def test_raising_tau_never_drops_a_block(kind, blocks, asked, seed, forced):
    """One row under several shares at once, as heads of their own."""
    tau = torch.tensor(sorted(asked))
    scores = rows(kind, 1, 1, 4, blocks, seed=seed).expand(1, len(asked), -1, -1)
    keep = kept(sparse.select(scores, method="top_p", top_p=tau, force_self=forced, seq_k=64 * blocks))
    assert not bool((keep[:, :-1] & ~keep[:, 1:]).any())


@few
@hypothesis.given(kinds, blocks, shares, seeds)
def test_heads_do_not_see_one_another(kind, blocks, share, seed):
    scores = rows(kind, 2, 5, 3, blocks, seed=seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    tau = torch.rand(5, generator=torch.Generator().manual_seed(seed)) * share
    first = sparse.select(scores, method="top_p", top_p=tau)
    other = sparse.select(scores[:, order], method="top_p", top_p=tau[order])
    assert torch.equal(kept(first)[:, order], kept(other))
    for name in ("gini", "tau", "mass"):
        assert torch.equal(getattr(first, name)[:, order], getattr(other, name))


@few
@hypothesis.given(
    kinds, blocks, st.integers(0, 80), st.integers(1, 80), seeds, st.sampled_from(["gini", "top_p", "top_k"])
)
def test_lengths_keep_their_bounds(kind, blocks, least, more, seed, method):
    asked = {"gini": {}, "top_p": {"top_p": 0.6}, "top_k": {"top_k": more}}[method]
    most = least + more
    scores = rows(kind, 1, 2, 4, blocks, seed=seed)
    counts = sparse.select(scores, method=method, min_blocks=least, max_blocks=most, **asked).index.counts
    assert bool((counts >= min(least, blocks)).all() and (counts <= min(most, blocks)).all())


@few
@hypothesis.given(
    kinds, blocks, seeds, shares, st.integers(0, 3), st.integers(0, 2), st.integers(1, 9), st.integers(0, 40)
)
def test_everything_at_once_is_what_the_oracle_says(kind, blocks, seed, share, first, window, least, room):
    scores = rows(kind, 1, 2, 3, blocks, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    force = torch.rand(3, blocks, generator=generator) < 0.1
    sizes = torch.randint(0, 4, (blocks,), generator=generator, dtype=torch.int32)
    limit = {"max_blocks": least + room + first + 2 * window + 1}
    held(scores, method="top_p", top_p=share, force=force, force_first=first, local_window=window, min_blocks=least,
         block_sizes=sizes, seq_k=64 * blocks, **limit)  # fmt: skip


@few
@hypothesis.given(kinds, blocks, seeds)
def test_the_order_of_columns_moves_only_ties(kind, blocks, seed):
    """The Gini coefficient and the lengths of lists do not depend on where scores stand."""
    scores = rows(kind, 1, 2, 3, blocks, seed=seed)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    first, other = (sparse.select(s, method="top_p", top_p=0.7) for s in (scores, scores[..., order]))
    assert torch.equal(first.gini, other.gini)
    assert torch.equal(first.index.counts, other.index.counts)
    assert torch.equal(first.mass, other.mass)
