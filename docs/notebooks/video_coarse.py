# %% [markdown]
# # The coarse branch: rows, scores, gates
#
# [The coarse branch](../explanation/video_coarse.md) turns every block of keys into one row and attends the rows. Here: how a row
# is made, what happens in a block that is not full, and what a gate is.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch

from tilefold import sparse

torch.manual_seed(0)
x = torch.randn(1, 40, 1, 16)  # 40 tokens in blocks of 16: the last block has 8

# %% [markdown]
# ## Rows without a weight
#
# Without a weight a row is the mean over the tokens that are there, 8 in the last block.

# %%
rows = sparse.project(x, block=16)
means = torch.stack([part.mean(1) for part in x.split(16, 1)], 1)
assert rows.shape == (1, 3, 1, 16)
assert torch.allclose(rows, means, atol=1e-6)

# %% [markdown]
# ## Rows with a weight
#
# With a weight, one number for each place in a block, there is a factor 16 / n for a block with n tokens. So equal weights of
# 1 / 16 are the mean in every block, the short one too.

# %%
equal = sparse.project(x, torch.full((16,), 1 / 16), block=16)
assert torch.allclose(equal, means, atol=1e-6)
weight = torch.rand(16)
last = sparse.project(x, weight, block=16)[0, 2, 0]
assert torch.allclose(last, (16 / 8) * (weight[:8, None] * x[0, 32:, 0]).sum(0), atol=1e-5)

# %% [markdown]
# ## Scores
#
# Every query attends the three rows. A score is the mean of its block's probabilities, so the scores of a row sum to 1.

# %%
q = torch.randn(1, 40, 1, 16)
rough = sparse.coarse(q, x, x, block=16)
p = torch.softmax(torch.einsum("bthd,bjhd->bhtj", q, means) / 4, -1)
assert torch.allclose(rough.out, torch.einsum("bhtj,bjhd->bthd", p, means), atol=1e-5)
by_block = torch.stack([part.mean(1) for part in p[0].split(16, 1)], 1)
assert torch.allclose(rough.scores[0], by_block, atol=1e-5)
print(rough.scores[0, 0])

# %% [markdown]
# ## The maximum instead
#
# The maximum instead of the mean: for blocks in which one query cares much and the others do not.

# %%
q[0, 5] = 8 * means[0, 2]  # one query of the first block that wants the last block
for reduction in ("mean", "max"):
    scores = sparse.coarse(q, x, x, block=16, reduction=reduction).scores
    print(f"{reduction}: score of (first, last) {scores[0, 0, 0, 2].item():.2f}")
assert scores[0, 0, 0, 2] > 0.9

# %% [markdown]
# ## Gates
#
# A gate multiplies a finished branch. That is no merge: coarse and fine see the same tokens twice, and nothing is normalised.

# %%
coarse, fine = torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16)
per_token, per_head = torch.rand(1, 40, 2), torch.tensor([1.0, 0.5])
out = sparse.fuse(coarse, fine, per_token, per_head)
assert torch.allclose(out, per_token[..., None] * coarse + per_head[:, None] * fine, atol=1e-6)
