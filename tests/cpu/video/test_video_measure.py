"""What lists leave out, against its definition in fp64, and the least time by the rates of a GPU."""

import pytest
import torch

from cases import rand
from tilefold import reference
from tilefold.plan.device import H200
from tilefold.plan.sparse.video import VideoShape
from tilefold.sparse import BlockIndex, GridTiling
from tilefold.video.measure import dense_results, least_seconds, left_out


@pytest.mark.parametrize("grid", [(3, 5, 6), (4, 4, 8)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_left_out(grid, kv_heads, device):
    """Mass by probabilities themselves; the error by outputs of the oracle; tokens that pad a cube count nowhere."""
    tiling = GridTiling(grid, (2, 2, 4))
    n, scale = tiling.block_count, 0.3
    q, k, v = (rand(2, tiling.padded, h, 8, device=device) for h in (4, kv_heads, kv_heads))
    keep = torch.rand(1, 4, n, n, device=device) > 0.5
    keep[..., 0] = True  # no empty row
    index = BlockIndex.from_map(keep, block_q=16, block_k=16)
    got = left_out(q, k, v, index, tiling, scale, dense_results(q, k, v, tiling, scale))
    q, k, v = (tiling.untile(one).double().cpu() for one in (q, k, v))
    block = (tiling.destination() // tiling.slots).cpu()
    seen = keep.cpu()[:, :, block][:, :, :, block]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(4 // kv_heads, 2)) * scale
    mass = (scores.softmax(-1) * seen).sum(-1).mean((0, 2))
    exact, sparse = (reference.attention(q, k, v, mask=mask, scale=scale)[0] for mask in (None, seen))
    error = (sparse - exact).square().sum((0, 1, 3)).sqrt() / exact.square().sum((0, 1, 3)).sqrt()
    torch.testing.assert_close(got.listed.cpu(), keep.float().mean((0, 2, 3)).cpu())
    torch.testing.assert_close(got.mass.cpu().double(), mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.error.cpu().double(), error, rtol=1e-4, atol=1e-6)


def test_least_seconds():
    """Dense attention of Wan 14B at 720p: 4 N^2 D H operations at the rate of bf16 products; of a tenth of the pairs a tenth."""
    shape = VideoShape(1, 40, 40, 75600, 128)
    sparse, dense = least_seconds(shape, 0.1, H200)
    assert dense == pytest.approx(
        max(4 * 75600**2 * 128 * 40 / H200.matmul_rate("bfloat16"), 75600**2 * 40 / H200.exp_rate)
    )
    assert 0.1 * dense < sparse < 0.13 * dense
    assert least_seconds(shape, 0.2, H200)[0] > sparse
