# %% [markdown]
# # Pages, forks and copies on write
#
# [The paged KV cache](../explanation/paged_cache.md) owns the pages and decides whose page is whose. We fork a sequence, write
# into the fork, and see which pages are copied.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch

import tilefold
from tilefold import OutOfPages

torch.manual_seed(0)
cache = tilefold.PagedKVCache(
    1, 2, 16, num_pages=8, page_size=4, max_sequences=4, max_tokens=24, dtype=torch.float32, device="cpu"
)  # one layer, 2 KV heads, head dim 16
written = {}  # what each sequence should hold


def grow(sequence, tokens):
    """Write `tokens` new keys and values, as a model's layer does."""
    batch = cache.batch([sequence], [tokens])
    k, v = torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    cache.append(0, k, v, batch)
    before = written.get(sequence, (k[:0], v[:0]))
    written[sequence] = tuple(torch.cat(pair) for pair in zip(before, (k, v), strict=True))
    return batch


# %% [markdown]
# ## A prompt
#
# A prompt of 6 tokens takes two pages of 4.

# %%
first = cache.add()
grow(first, 6)
print(cache.pages(first), "free:", cache.free_pages)
assert len(cache.pages(first)) == 2
assert cache.free_pages == 6

# %% [markdown]
# ## Fork
#
# A fork shares both pages: no memory is taken.

# %%
beam = cache.fork(first)
written[beam] = written[first]
assert cache.pages(beam) == cache.pages(first)
assert cache.free_pages == 6

# %% [markdown]
# ## Copy on write
#
# The second page is not full. When one of its owners writes, that page is copied first; the full page stays shared.

# %%
grow(beam, 1)
print("first:", cache.pages(first), " beam:", cache.pages(beam), " shared pages:", cache.statistics().pages_shared)
assert cache.pages(beam)[0] == cache.pages(first)[0]
assert cache.pages(beam)[1] != cache.pages(first)[1]

# %% [markdown]
# ## Attend
#
# Each still has its own keys: attention over the cache is attention over what was written.

# %%
for sequence in (first, beam):
    batch = grow(sequence, 1)
    q = torch.randn(1, 4, 16)
    k, v = written[sequence]
    found = cache.attend(0, q, batch)
    alone = tilefold.attention(q[None], k[None], v[None])
    assert torch.allclose(found, alone[0], atol=1e-5)

# %% [markdown]
# ## When pages run out
#
# Where pages run out, nothing has changed, and the error says what would help.

# %%
free, length = cache.free_pages, cache.length(first)
try:
    cache.batch([first, beam], [16, 16])
except OutOfPages as error:
    print(error)
    assert error.needed > error.free
else:
    raise AssertionError("8 pages of 4 hold 32 tokens, not 40")
assert (cache.free_pages, cache.length(first)) == (free, length)

# %% [markdown]
# ## Truncate and free
#
# A rejected draft is cut off; a sequence that ends gives its pages back, but for those that another one still owns.

# %%
cache.truncate(beam, 5)
assert cache.length(beam) == 5
cache.free(first)
assert len(cache.pages(beam)) == 2
cache.free(beam)
assert cache.free_pages == cache.num_pages
