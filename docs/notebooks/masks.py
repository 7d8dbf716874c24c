# %% [markdown]
# # Masks that combine
#
# [Masks and scores as values](../explanation/masks.md): which query sees which key, made of parts by `&`, `|` and `~`.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch

import tilefold
from tilefold import masks, reference, scores

torch.manual_seed(0)
q, k, v = torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)


def show(mask):
    """The first sequence and head: a row is a query."""
    seen = mask.dense(2, 1, 12, 12)[0, 0]
    print(mask)
    print("\n".join("".join("#" if see else "." for see in row) for row in seen.tolist()))
    return seen


# %% [markdown]
# ## Prefix-LM
#
# All queries see the first keys, the others see what lies before them.

# %%
seen = show(masks.prefix(4))
assert seen[:, :4].all()
assert torch.equal(seen[4:, 4:], torch.ones(8, 8, dtype=torch.bool).tril())

# %% [markdown]
# ## Combine parts
#
# Parts that all have to hold, one of which is enough, and what must not be.

# %%
cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
near = masks.causal() & masks.documents(cu_seqlens)
sink = near | masks.keys(torch.tensor([1, 1], dtype=torch.int32))
assert show(sink)[:, 0].all()
assert not (show(~masks.causal()) & masks.causal().dense(2, 1, 12, 12)[0, 0]).any()

# %% [markdown]
# ## Held to the oracle
#
# A value goes into the call; the oracle takes it, too, and evaluates it densely.

# %%
for mask in (masks.prefix(4), near, sink, ~masks.window(1, 0) & masks.causal()):
    out, lse = tilefold.attention(q, k, v, mask=mask, return_lse=True)
    want, _ = reference.attention(q, k, v, mask=mask)
    assert torch.allclose(out.double(), want, atol=1e-5)
    print(f"{mask!s:60} {'rows without a key: ' + str(int((lse == -torch.inf).sum()))}")

# %% [markdown]
# ## Keywords
#
# Keywords are shorthands, to the last bit.

# %%
by_value = tilefold.attention(q, k, v, mask=masks.causal() & masks.window(3, None))
assert torch.equal(by_value, tilefold.attention(q, k, v, causal=True, window=(3, None)))

# %% [markdown]
# ## What the plan makes of it
#
# The plan says what a mask became: a prefix is a band, and skips tiles.

# %%
plan = tilefold.attention_plan(q, k, v, mask=masks.prefix(4))
assert plan.problem.mask_mods == ("prefix",)
print(plan)

# %% [markdown]
# ## Scores
#
# Scores go step by step, in the kernels' order. Another order is refused.

# %%
score = scores.softcap(5.0).then(scores.alibi(torch.tensor([0.5, 0.25])))
out = tilefold.attention(q, k, v, mask=near, score=score)
assert torch.allclose(out.double(), reference.attention(q, k, v, mask=near, score=score)[0], atol=1e-5)
try:
    scores.alibi(torch.tensor([0.5, 0.25])).then(scores.softcap(5.0))
except tilefold.Unsupported as error:
    print(error)
else:
    raise AssertionError("kernels have no softcap behind ALiBi")
