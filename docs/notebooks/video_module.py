# %% [markdown]
# # The video module, from its start to a first step
#
# [`SparseVideoAttention`](../explanation/video_module.md) is self-attention for a (T, H, W) grid of tokens. We look at how it
# cuts the grid into cubes, what it computes at the start, and what the first step of training changes.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch

from tilefold.nn import SparseVideoAttention
from tilefold.sparse import GridTiling, SelectOptions

_ = torch.manual_seed(0)

# %% [markdown]
# ## The grid in cubes
#
# A grid of 2 x 6 x 4 tokens in cubes of 2 x 4 x 2. Six rows are one and a half cubes: those at the edge are cut, and their
# blocks hold 8 tokens instead of 16.

# %%
tiling = GridTiling((2, 6, 4), (2, 4, 2))
print(tiling.blocks, "blocks of up to", tiling.slots, "tokens:", tiling.block_sizes().tolist())
assert tiling.block_sizes().sum() == 2 * 6 * 4
x = torch.randn(1, 48, 8)
assert torch.equal(tiling.untile(tiling.tile(x)), x)

# %% [markdown]
# ## Tokens of a block
#
# The tokens of a block are neighbours in time, height and width:

# %%
positions = torch.stack(torch.meshgrid(*(torch.arange(n) for n in (2, 6, 4)), indexing="ij"), -1).view(1, 48, 3)
first = tiling.tile(positions)[0, :16]
assert first.amax(0).tolist() == [1, 3, 1]
assert first.amin(0).tolist() == [0, 0, 0]

# %% [markdown]
# ## The start
#
# At the start the coarse gate is 0 and the fine gate 1. With lists that hold every block, the module is dense attention: the
# same as one without a coarse branch.

# %%
every = SelectOptions(method="top_k", top_k=4)
module = SparseVideoAttention(8, heads=1, head_dim=16, grid=(2, 6, 4), cube=(2, 4, 2), select=every)
dense = SparseVideoAttention(8, heads=1, head_dim=16, grid=(2, 6, 4), cube=(2, 4, 2), coarse=None)
print(dense.load_state_dict(module.state_dict(), strict=False))
assert torch.allclose(module(x), dense(x), atol=1e-5)

# %% [markdown]
# ## Half of the blocks
#
# Keep half of the blocks, and look at what the stages made.

# %%
module.select = SelectOptions(method="top_k", top_k=2, force_self=True)
y, stages = module(x, return_stages=True)
assert (stages.index.counts == 2).all()
print("mass of the listed blocks, in the mean:", round(stages.mass.mean().item(), 2))

# %% [markdown]
# ## The first step
#
# A closed gate has a gradient, so it opens with the first step. The projections behind it learn from the second one on.

# %%
y.square().mean().backward()
assert module.gate_coarse.bias.grad.abs().sum() > 0
assert not module.coarse.weight_v.grad.any()
with torch.no_grad():
    for parameter in module.parameters():
        parameter -= 0.5 * parameter.grad
module.zero_grad()
assert (module.gate_coarse.bias != 0).any()
module(x).square().mean().backward()
assert module.coarse.weight_v.grad.any()
