# %% [markdown]
# # Filling a cache and attending over it
#
# [KV caches](../explanation/cache_append.md): `kvcache_append` writes new keys and values into pages, `attention_kvcache`
# attends to what stands there, `attention_shared_prefix` reads what a batch shares only once.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch

import tilefold

torch.manual_seed(0)
pages_k, pages_v = (torch.zeros(6, 8, 2, 16) for _ in range(2))  # 6 pages of 8 keys, 2 KV heads
table = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32)  # whose pages are whose, first keys first
history_k, history_v = torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)  # what the two sequences will write

# %% [markdown]
# ## Append prompts
#
# Prompts of 10 and 7 tokens, packed one after the other. `lengths` counts the keys that are there before.

# %%
lengths = torch.tensor([0, 0], dtype=torch.int32)
cu = torch.tensor([0, 10, 17], dtype=torch.int32)
packed = [torch.cat([x[0, :10], x[1, :7]]) for x in (history_k, history_v)]
tilefold.kvcache_append(*packed, pages_k, pages_v, cache_seqlens=lengths, block_table=table, cu_seqlens=cu)
lengths = torch.tensor([10, 7], dtype=torch.int32)

# %% [markdown]
# ## Where a key lies
#
# Key 9 of the first sequence is row 1 of its second page, page 1.

# %%
assert torch.equal(pages_k[1, 1], history_k[0, 9])
assert torch.equal(pages_v[5, 6], history_v[1, 6])
assert not pages_k[[0, 2, 4]].any()  # pages that nobody reached yet

# %% [markdown]
# ## Append a token and attend
#
# One more token each, then one query each over all its keys. `cache_seqlens` now counts the new tokens, too.

# %%
new_k, new_v = (torch.stack([x[0, 10], x[1, 7]])[:, None] for x in (history_k, history_v))
tilefold.kvcache_append(new_k, new_v, pages_k, pages_v, cache_seqlens=lengths, block_table=table)
after = lengths + 1
q = torch.randn(2, 1, 4, 16)
out = tilefold.attention_kvcache(q, pages_k, pages_v, cache_seqlens=after, block_table=table, causal=True)
for b, n in enumerate(after.tolist()):
    alone = tilefold.attention(q[b : b + 1], history_k[b : b + 1, :n], history_v[b : b + 1, :n])
    assert torch.allclose(out[b : b + 1], alone, atol=1e-5)

# %% [markdown]
# ## Caches in 8 bits
#
# Caches in 8 bits hold twice the tokens. A stored number times its head's factor is the key; the error is at most half a step.

# %%
codes, factor = tilefold.quantize_kv(history_k, torch.int8)
back = codes.float() * factor[:, None]
print("factor by head:", factor.tolist(), " largest error:", (back - history_k).abs().max().item())
assert ((back - history_k).abs() <= factor[:, None] / 2 * 1.0001).all()

# %% [markdown]
# ## A shared page
#
# Both sequences begin with the same page now. Attending to it once and merging gives the same as attending twice.

# %%
shared = torch.tensor([[3, 1], [3, 2]], dtype=torch.int32)
sizes = torch.tensor([11, 15], dtype=torch.int32)
pages_k[2], pages_v[2] = torch.randn(8, 2, 16), torch.randn(8, 2, 16)
once, twice = (
    tilefold.attention_shared_prefix(
        q, pages_k, pages_v, prefix_length=8, cache_seqlens=sizes, block_table=shared, cascade=cascade
    )
    for cascade in (True, False)
)
assert torch.allclose(once, twice, atol=1e-5)
