# %% [markdown]
# # The fold, step by step
#
# [The fold](../explanation/fold.md) says that attention needs three things per row: the largest score `m`, the denominator `l`
# and the numerator `acc`. Here we build the fold in plain torch, tile by tile, and compare it with the library's kernel.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl

import tilefold

torch.manual_seed(0)
q, k, v = torch.randn(1, 16), torch.randn(48, 16), torch.randn(48, 16)  # one query, 48 keys
scale = 16**-0.5

# %% [markdown]
# ## One step
#
# One step takes in a tile of keys and values. What was there is rescaled, because the maximum may have grown.


# %%
def step(state, k, v):
    acc, m, l = state
    s = q @ k.T * scale
    m_new = torch.maximum(m, s.amax(-1))
    keep, p = torch.exp(m - m_new), torch.exp(s - m_new[:, None])
    return acc * keep[:, None] + p @ v, m_new, l * keep + p.sum(-1)


state = torch.zeros(1, 16), torch.full((1,), -torch.inf), torch.zeros(1)  # the empty state
seen = []
for start in range(0, 48, 8):
    state = step(state, k[start : start + 8], v[start : start + 8])
    acc, m, l = state
    seen.append((m.item(), l.item(), acc[0, 0].item() / l.item()))
out, lse = acc / l[:, None], m + l.log()

exact = torch.softmax(q.double() @ k.double().T * scale, -1) @ v.double()
assert torch.allclose(out.double(), exact, atol=1e-6)
print("largest difference from softmax over all keys:", (out - exact).abs().max().item())

# %% [markdown]
# ## Exact after every tile
#
# After every tile, `acc / l` is the exact attention over the keys seen so far. It is not an approximation that gets better:
# it is the right answer to a smaller question.

# %%
fig, axes = plt.subplots(1, 3, figsize=(9, 2.4), layout="constrained")
for axis, values, name in zip(axes, zip(*seen, strict=True), ("m", "l", "acc / l, first element"), strict=True):
    axis.plot(range(8, 49, 8), values, marker="o")
    axis.set(title=name, xlabel="keys seen", ylabel="value, one row")

# %% [markdown]
# ## The same through the library
#
# Tensors are [batch, seq, heads, dim].

# %%
ours, our_lse = tilefold.attention(q[None, :, None], k[None, :, None], v[None, :, None], return_lse=True)
assert torch.allclose(ours[0, :, 0], out, atol=1e-5)
assert torch.allclose(our_lse.flatten(), lse, atol=1e-5)

# %% [markdown]
# ## A mask
#
# A mask is a choice of what happens to a score. Your own rule is a function that is compiled into the loop; this one lets a
# query see keys of its own document only.


# %%
@triton.jit
def same_document(score, batch, head, q_index, kv_index, args):
    documents, seq_q, seq_k = args
    return tl.load(documents + q_index) == tl.load(documents + kv_index)


x = torch.randn(1, 20, 1, 16)
document = (torch.arange(20) >= 12).to(torch.int32)  # tokens 0 to 11, and 12 to 19
together = tilefold.attention(x, x, x, causal=True, mask_mod=same_document, mask_args=(document,))
apart = torch.cat([tilefold.attention(part, part, part, causal=True) for part in (x[:, :12], x[:, 12:])], 1)
assert torch.allclose(together, apart, atol=1e-6)

# %% [markdown]
# ## A row without a key
#
# A row that sees no key keeps the empty state: its output is 0 and its lse is -inf. There is no NaN.

# %%
nothing = torch.zeros(1, 1, 20, 20, dtype=torch.bool)
dead, dead_lse = tilefold.attention(x, x, x, mask=nothing, return_lse=True)
assert not dead.any()
assert (dead_lse == -torch.inf).all()
