# %% [markdown]
# # How many blocks does a row need?
#
# [Selection](../explanation/video_select.md) keeps the fewest best blocks whose mass is enough. How much is enough follows from
# how concentrated the row is, measured by its Gini coefficient.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import matplotlib.pyplot as plt
import torch

from tilefold import sparse

_ = torch.manual_seed(0)

# %% [markdown]
# ## Rows, flat and sharp
#
# Rows between flat (all 16 blocks alike) and sharp (one block has everything).

# %%
sharpness = torch.tensor([0.0, 0.5, 1.0, 2.0, 4.0, 50.0])
# [batch, heads, 6 query blocks, 16 KV blocks]
scores = torch.softmax(sharpness[:, None] * torch.randn(16), -1)[None, None]
gini = sparse.gini(scores)[0, 0]

x = scores[0, 0].double()
by_definition = (x[:, :, None] - x[:, None, :]).abs().sum((1, 2)) / (2 * 16 * x.sum(1))
assert torch.allclose(gini.double(), by_definition, atol=1e-5)
assert gini[0] < 1e-6
assert abs(gini[-1] - 15 / 16) < 1e-3

# %% [markdown]
# ## The fewest blocks
#
# tau goes from `tau_max` for a flat row to `tau_min` for a sharp one, and a list gets the fewest blocks that reach it.

# %%
made = sparse.select(scores, tau_min=0.5, tau_max=0.95, block_q=16, block_k=16)
tau, counts = made.tau[0, 0], made.index.counts[0, 0]
assert torch.allclose(tau, 0.5 + 0.45 * (1 - gini), atol=1e-5)
ordered = x.sort(-1, descending=True).values.cumsum(-1)
fewest = (ordered < tau[:, None].double() - 1e-6).sum(-1) + 1
assert torch.equal(counts.long(), fewest)
for row in range(6):
    print(f"Gini {gini[row]:.2f}: {counts[row]:2} blocks hold {made.mass[0, 0, row]:.2f}, asked was {tau[row]:.2f}")

# %%
fig, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for row in range(6):
    (line,) = axis.plot(range(1, 17), ordered[row], label=f"G = {gini[row]:.2f}")
    axis.plot(counts[row], ordered[row, counts[row] - 1], marker="o", color=line.get_color())
axis.legend()
_ = axis.set(xlabel="best blocks", ylabel="their mass", title="where each row's list ends")

# %% [markdown]
# ## Other rules
#
# A fixed mass, or a fixed number.

# %%
top_p = sparse.select(scores, method="top_p", top_p=0.8, block_q=16, block_k=16)
assert (top_p.mass >= 0.8 - 1e-5).all()
top_k = sparse.select(scores, method="top_k", sparsity=0.75, block_q=16, block_k=16)
assert (top_k.index.counts == 4).all()

# %% [markdown]
# ## Forced blocks
#
# Blocks can be forced. `force_self` keeps each query block's own tokens, whatever their score.

# %%
forced = sparse.select(
    scores[..., :6], method="top_k", top_k=2, force_self=True, block_q=16, block_k=16, seq_q=96, seq_k=96
)
assert forced.index.to_map()[0, 0].diagonal().all()
assert (forced.index.counts == 2).all()
