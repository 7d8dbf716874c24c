# %% [markdown]
# # Sparse video attention, stage by stage
#
# [The pipeline](../explanation/video.md) has five stages: coarse, select, index, fine, fuse. We run it on 256 tokens in blocks of
# 64, look at what each stage made, and compute the formulas again in plain torch.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import matplotlib.pyplot as plt
import torch

import tilefold
from tilefold import sparse

torch.manual_seed(0)
q, k, v = (torch.randn(1, 256, 2, 16) for _ in range(3))
subjects = (
    torch.randn(1, 4, 1, 2, 16).expand(1, 4, 64, 2, 16).reshape(1, 256, 2, 16)
)  # what the tokens of a block share
q, k = q + 1.5 * subjects.roll(64, 1), k + 1.5 * subjects  # each block of queries looks for the block before it
gates = {"gate_coarse": torch.full((2,), 0.25), "gate_fine": torch.ones(2)}
keep_half = sparse.SelectOptions(method="top_k", top_k=2)
out, stages = sparse.sparse_video_attention(q, k, v, select=keep_half, return_stages=True, **gates)

# %% [markdown]
# ## Coarse
#
# Each block of keys becomes one row, its mean, and every query attends these 4 rows. The score of a pair of blocks
# is the mean probability that the queries of the one put on the row of the other.

# %%
rows_k, rows_v = (x.view(1, 4, 64, 2, 16).mean(2) for x in (k, v))
p = torch.softmax(torch.einsum("bthd,bjhd->bhtj", q, rows_k) / 4, -1)  # scale 1 / sqrt(16)
scores = p.view(1, 2, 4, 64, 4).mean(3)
assert torch.allclose(stages.scores, scores, atol=1e-5)
assert torch.allclose(stages.coarse_out, torch.einsum("bhtj,bjhd->bthd", p, rows_v), atol=1e-5)
assert torch.allclose(scores.sum(-1), torch.ones(1, 2, 4), atol=1e-5)

# %% [markdown]
# ## Select and index
#
# Two of four blocks are kept, those of the highest scores.

# %%
listed = stages.index.to_map()
assert torch.equal(stages.index.counts, torch.full((1, 2, 4), 2, dtype=torch.int32))
best = scores.topk(2).indices
assert torch.equal(listed, torch.zeros_like(listed).scatter(-1, best, True))
assert torch.allclose(stages.mass, (scores * listed).sum(-1), atol=1e-5)

fig, axes = plt.subplots(1, 2, figsize=(6, 2.8), layout="constrained")
for axis, image, title in zip(axes, (scores[0, 0], listed[0, 0]), ("scores, head 0", "listed"), strict=True):
    axis.imshow(image.numpy(), cmap="Blues", vmin=0)
    axis.set(title=title, xlabel="block of keys", ylabel="block of queries")
print("mass that is listed, by block of queries:", [round(x, 2) for x in stages.mass[0, 0].tolist()])

# %% [markdown]
# ## Fine and fuse
#
# Attention over the tokens of the listed blocks, then a gate times each branch.

# %%
mask = listed.repeat_interleave(64, 2).repeat_interleave(64, 3)
fine = tilefold.attention(q, k, v, mask=mask)
assert torch.allclose(stages.fine_out, fine, atol=1e-4)
assert torch.allclose(out, 0.25 * stages.coarse_out + 1.0 * fine, atol=1e-4)

# %% [markdown]
# ## What half of the blocks costs
#
# What half of the blocks costs here, against dense attention, beside the same number of other blocks:

# %%
dense = tilefold.attention(q, k, v)
worst = sparse.index(~listed, seq_q=256, seq_k=256)
for name, found in (("best two", fine), ("other two", tilefold.sparse_attention(q, k, v, worst))):
    print(f"{name}: relative error {((found - dense).norm() / dense.norm()).item():.2f}")
assert (fine - dense).norm() < (tilefold.sparse_attention(q, k, v, worst) - dense).norm()
