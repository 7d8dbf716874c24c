# %% [markdown]
# # Two halves make a whole
#
# [Merge](../explanation/merge.md): attention over two sets of keys can be put together from attention over each of them,
# exactly, if each result comes with its lse (the logarithm of its softmax denominator).

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch

import tilefold

torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 40, 2, 16), torch.randn(1, 40, 2, 16)


def attend(keys, **options):
    return tilefold.attention(q, k[:, keys], v[:, keys], return_lse=True, **options)


whole, whole_lse = attend(slice(None))

# %% [markdown]
# ## Cut anywhere
#
# Cut the keys anywhere, attend to each part, merge.

# %%
for cut in (1, 13, 39):
    out, lse = tilefold.merge_attention(*attend(slice(0, cut)), *attend(slice(cut, None)))
    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(lse, whole_lse, atol=1e-5)
    print(f"cut at {cut:2}: largest difference {(out - whole).abs().max().item():.1e}")

# %% [markdown]
# ## By hand
#
# What `merge_attention` does, by hand: each part counts as much as its share of the whole denominator.

# %%
(a, lse_a), (b, lse_b) = attend(slice(0, 13)), attend(slice(13, None))
total = torch.logaddexp(lse_a, lse_b)
share_a, share_b = (torch.exp(lse - total).transpose(1, 2)[..., None] for lse in (lse_a, lse_b))
assert torch.allclose(share_a + share_b, torch.ones_like(share_a))
assert torch.allclose(share_a * a + share_b * b, whole, atol=1e-5)
print("share of the first 13 of 40 keys, by query:", share_a[0, :, 0, 0].tolist())

# %% [markdown]
# ## Why not the mean
#
# A plain mean of the two is wrong, however natural it looks:

# %%
mean = (a + b) / 2
print("error of the mean:", (mean - whole).abs().max().item())
assert (mean - whole).abs().max() > 0.05

# %% [markdown]
# ## A part without keys
#
# A part without keys is the identity: it changes no bit. And the order of merging does not matter, up to rounding.

# %%
nothing = torch.zeros_like(a), torch.full_like(lse_a, -torch.inf)
out, lse = tilefold.merge_attention(a, lse_a, *nothing)
assert torch.equal(out, a)
assert torch.equal(lse, lse_a)

parts = [attend(slice(start, start + 10)) for start in range(0, 40, 10)]
left = parts[0]
for part in parts[1:]:
    left = tilefold.merge_attention(*left, *part)
pairs = tilefold.merge_attention(
    *tilefold.merge_attention(*parts[2], *parts[3]), *tilefold.merge_attention(*parts[1], *parts[0])
)
assert torch.allclose(left[0], pairs[0], atol=1e-5)

# %% [markdown]
# ## Sinks
#
# An attention sink is a key without a value. It belongs to one of the parts, like any key.

# %%
sinks = torch.tensor([0.5, -1.0])
with_sinks, _ = attend(slice(None), sinks=sinks)
once, _ = tilefold.merge_attention(*attend(slice(0, 13), sinks=sinks), *attend(slice(13, None)))
twice, _ = tilefold.merge_attention(*attend(slice(0, 13), sinks=sinks), *attend(slice(13, None), sinks=sinks))
assert torch.allclose(once, with_sinks, atol=1e-5)
assert not torch.allclose(twice, with_sinks, atol=1e-3)
