"""Real structure: rendered video, what a selection keeps of its dense attention, and training on it beside dense attention."""

import functools
import itertools

import pytest
import torch

import video_next_frame as next_frame
from tilefold import reference
from tilefold.errors import ShapeError, ValueRangeError
from tilefold.nn import rotary
from tilefold.reference.rounding import plain
from tilefold.sparse import CoarseOptions, GridTiling, SelectOptions
from tilefold.video.scene import Scene, patches, project, render
from video_next_frame import PlainVideoAttention, Training, train
from video_reconstruction import block_mass, reconstruct, scene_qkv

CUBE = (2, 2, 4)


@plain()
def by_reference(q, k, v, index):
    return reference.sparse_attention(q, k, v, index, dtype=torch.float32)[0]


# ---------------------------------------------------------------- the scene


def test_render_is_a_video():
    video = render(Scene(frames=6, height=24, width=32), batch=2, seed=3)
    assert video.shape == (2, 6, 3, 24, 32)
    assert 0 <= float(video.min()) < 0.1 < 0.9 < float(video.max()) <= 1
    assert torch.equal(video, render(Scene(frames=6, height=24, width=32), batch=2, seed=3))
    assert not torch.equal(video[0], video[1])
    step = (video[:, 1:] - video[:, :-1]).abs().mean()
    far = (video[:, -1] - video[:, 0]).abs().mean()
    assert 0 < step < far, "it moves, and frames that are near in time are alike"


def test_pan_moves_everything():
    video = render(Scene(frames=3, height=16, width=32, speed=0.0, pan=(0.0, 4.0)))
    assert torch.allclose(video[:, 1:, ..., 4:], video[:, :-1, ..., :-4], atol=1e-5)


def test_patches():
    video = render(Scene(frames=4, height=8, width=12))
    tokens, grid = patches(video, (2, 4, 4))
    assert grid == (2, 2, 3)
    assert tokens.shape == (1, 12, 3 * 2 * 4 * 4)
    token = (1 * 2 + 1) * 3 + 2
    assert torch.equal(tokens[0, token].view(3, 2, 4, 4), video[0, 2:4, :, 4:8, 8:12].transpose(0, 1))


def test_scores_follow_likeness_and_place():
    """Without the rotary embedding alike patches score high; with it the near ones of them do."""
    tokens, grid = patches(render(Scene(frames=2, height=32, width=32)), (1, 4, 4))
    tiling = GridTiling(grid, (1, 1, 1))
    q, k, _ = project(tokens, tiling, 2, 32, rotary=None)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)[0, 0].flatten()
    centred = tokens[0] - tokens[0].mean(0)
    alike = torch.nn.functional.cosine_similarity(centred[:, None], centred[None], dim=-1).flatten()
    assert float(torch.corrcoef(torch.stack((scores, alike)))[0, 1]) > 0.8
    turned, _, _ = project(tokens, tiling, 2, 32)
    assert not torch.allclose(turned, q)


def test_scene_errors():
    with pytest.raises(ValueRangeError, match="frames must be at least 1, got 0"):
        Scene(frames=0)
    with pytest.raises(ShapeError, match=r"patch \(1, 5, 4\) must divide .* got \(16, 64, 64\)"):
        patches(torch.zeros(1, 16, 3, 64, 64), (1, 5, 4))


# ---------------------------------------------------------------- what a selection keeps


@pytest.mark.parametrize("frames", [4, 3], ids=["even", "ragged"])
def test_block_mass_is_dense_attention_summed_over_blocks(frames):
    (q, k, _), tiling = scene_qkv(Scene(frames, 16, 32), (1, 4, 4), 2, 16, CUBE)
    got = block_mass(q, k[:, :, :1], tiling)
    assert torch.allclose(got.sum(-1), torch.ones(()))
    valid = tiling.tile(torch.ones(1, tiling.tokens))[0] > 0
    block = torch.arange(tiling.padded) // tiling.slots
    p = (torch.einsum("bqhd,bkd->bhqk", q[:, valid].double(), k[:, valid, 0].double()) / 4).softmax(-1)
    for i, j in ((0, 0), (1, 3), (3, 2)):
        want = p[0, 1][block[valid] == i][:, block[valid] == j].sum(-1).mean()
        assert abs(float(got[0, 1, i, j]) - float(want)) < 1e-5


@pytest.mark.parametrize("kind", ["block", "pooled"])
def test_selected_blocks_hold_more_than_their_share(kind):
    """Mass falls and error rises with sparsity; what the coarse stage selects lies between blind choice and the best there is."""
    (q, k, v), tiling = scene_qkv(Scene(frames=4, height=32, width=48), (1, 4, 4), 4, 32, CUBE)
    counts = [tiling.block_count - round(tiling.block_count * s) for s in (0.0, 0.3, 0.6, 0.8, 0.9)]
    rows = reconstruct(
        q, k, v, tiling, [SelectOptions("top_k", top_k=n) for n in counts], CoarseOptions(kind), by_reference
    )
    assert [round(r.sparsity, 3) for r in rows] == [round(1 - n / tiling.block_count, 3) for n in counts]
    assert rows[0].mass == pytest.approx(1) and rows[0].error < 1e-6
    for less, more in itertools.pairwise(rows):
        assert more.mass < less.mass and more.error > less.error
        assert more.best >= more.mass > more.random + 0.3 * (more.best - more.random)
    assert rows[2].mass > 0.6, "40 % of the blocks"
    (gini,) = reconstruct(q, k, v, tiling, [SelectOptions()], CoarseOptions(kind), by_reference)
    assert 0.1 < gini.sparsity < 0.9 and gini.mass > gini.random + 0.1


# ---------------------------------------------------------------- training


class Blind(PlainVideoAttention):
    """The control: no token learns anything of another."""

    def attend(self, q, k, v, **options):
        if not options["return_stages"]:
            return 0 * q
        out, made = super().attend(q, k, v, **options)
        return 0 * out, made


@pytest.mark.long
@pytest.mark.no_poison
def test_training_goes_as_with_dense_attention(monkeypatch):
    """A next-frame task that cannot be learned without attention, at three quarters of the blocks left out."""
    monkeypatch.setattr(next_frame, "render", functools.cache(render))  # all three see the same videos
    monkeypatch.setattr(rotary, "_is_launched", lambda *tables: False)  # plain, as the attention is
    top = {"select": SelectOptions("top_k", top_k=4)}  # of 16
    dense = train(Training(attention={"coarse": None}), PlainVideoAttention)
    sparse = train(Training(attention=top), PlainVideoAttention)
    blind = train(Training(attention=top), Blind)
    assert sparse.sparsity == pytest.approx(0.75) and dense.sparsity == 0
    assert dense.copy == sparse.copy > 4 * dense.held_out
    assert blind.held_out > 1.8 * dense.held_out, "the task needs attention"
    assert sparse.held_out < 1.2 * dense.held_out

    def smooth(result, step):
        return sum(result.losses[step : step + 25]) / 25

    for step in range(0, 250, 25):
        assert smooth(sparse, step) < 1.25 * smooth(dense, step)


def test_training_in_the_interpreter():
    """A step of the real kernels: the same loss as the reference's, and it falls."""
    tiny = {"steps": 2, "batch": 1, "dim": 32, "scene": Scene(frames=3, height=8, width=16, objects=1), "patch": (2, 2)}
    options = Training(**tiny, attention={"select": SelectOptions("top_k", top_k=2)})
    got, want = train(options), train(options, PlainVideoAttention)
    assert got.losses == pytest.approx(want.losses, rel=1e-4)
    assert got.held_out == pytest.approx(want.held_out, rel=1e-4)
