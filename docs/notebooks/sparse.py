# %% [markdown]
# # Lists of blocks
#
# [Block-sparse attention](../explanation/sparse.md): a list for each block of queries says which blocks of keys it attends. We
# start from a map of blocks and check that nothing else is different from dense attention with a mask.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import matplotlib.pyplot as plt
import torch

import tilefold
from tilefold import sparse

torch.manual_seed(0)
q, k, v = torch.randn(1, 64, 2, 16), torch.randn(1, 96, 1, 16), torch.randn(1, 96, 1, 16)
keep = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)  # 2 blocks of queries, 3 of keys
index = tilefold.BlockIndex.from_map(keep[None, None], block_q=32, block_k=32)
print("lists: ", index.indices[0, 0].tolist())
print("counts:", index.counts[0, 0].tolist())

# %% [markdown]
# ## The same as a dense mask
#
# The same mask for single tokens, given to dense attention:

# %%
mask = keep.repeat_interleave(32, 0).repeat_interleave(32, 1)
out = tilefold.sparse_attention(q, k, v, index)
dense = tilefold.attention(q, k, v, mask=mask[None, None])
assert torch.allclose(out, dense, atol=1e-5)

# %% [markdown]
# ## Order and counts
#
# The order of a list does not matter (the fold is commutative, up to rounding), and what stands behind the count is not read.

# %%
lists = torch.tensor([[2, 0, 99], [1, 0, 99]], dtype=torch.int32)[None, None]
counts = torch.tensor([2, 2], dtype=torch.int32)[None, None]
other = tilefold.BlockIndex(lists, counts, 32, 32, 64, 96)
assert torch.allclose(tilefold.sparse_attention(q, k, v, other), out, atol=1e-5)

# %% [markdown]
# ## Empty lists
#
# A block with an empty list gets 0, and lse -inf.

# %%
half = tilefold.BlockIndex.from_map(torch.tensor([[False] * 3, [True] * 3])[None, None], block_q=32, block_k=32)
out, lse = tilefold.sparse_attention(q, k, v, half, return_lse=True)
assert not out[:, :32].any()
assert (lse[..., :32] == -torch.inf).all()

# %% [markdown]
# ## Patterns
#
# Lists come from many places: scores, patterns, functions of block numbers. Three patterns of 12 blocks:

# %%
patterns = {
    "sliding_tile(2)": sparse.sliding_tile(2),
    "dilated(3)": sparse.dilated(3),
    "any of both": sparse.any_of(sparse.sliding_tile(2), sparse.dilated(3)),
}
fig, axes = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
maps = {}
for axis, (name, predicate) in zip(axes, patterns.items(), strict=True):
    made = tilefold.BlockIndex.from_predicate(predicate, seq_q=12 * 16, seq_k=12 * 16, block_q=16, block_k=16)
    maps[name] = made.to_map()[0, 0]
    axis.imshow(maps[name].numpy(), cmap="Blues")
    axis.set(title=name, xlabel="block of keys", ylabel="block of queries")
assert torch.equal(maps["any of both"], maps["sliding_tile(2)"] | maps["dilated(3)"])

# %% [markdown]
# ## Gradients
#
# Gradients go to the listed blocks only.

# %%
k.requires_grad_()
first = tilefold.BlockIndex.from_map(torch.tensor([[True, False, True]] * 2)[None, None], block_q=32, block_k=32)
tilefold.sparse_attention(q, k, v, first).sum().backward()
print("gradient of the keys, by block:", k.grad.abs().sum((0, 2, 3)).view(3, 32).sum(1).tolist())
assert not k.grad[:, 32:64].any()
assert k.grad[:, :32].any()
