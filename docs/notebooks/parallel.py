# %% [markdown]
# # One sequence on several GPUs, played in one process
#
# [Several GPUs](../explanation/parallel.md): each rank holds some of a sequence's tokens. Because attention over sets of keys
# merges exactly, a ring can fold the keys in any order. Here one process plays all the ranks.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import matplotlib.pyplot as plt
import torch

import tilefold
import tilefold.parallel as tp

torch.manual_seed(0)
ranks, tokens = 4, 50
q, k, v = (torch.randn(1, tokens, 2, 16) for _ in range(3))
whole = tilefold.attention(q, k, v, causal=True)

# %% [markdown]
# ## Contiguous shards
#
# 50 tokens over 4 ranks are 12 or 13 each.

# %%
sharding = tp.shard(tokens, ranks)
print(sharding)
parts = [[tp.shard_sequence(x, sharding, rank) for x in (q, k, v)] for rank in range(ranks)]
assert torch.equal(tp.unshard_sequence([part[0] for part in parts], sharding), q)

# %% [markdown]
# ## The ring
#
# In step s a rank meets the keys of the rank that lies s before it. Its own keys have the causal mask, keys of
# earlier ranks are seen by all its queries, keys of later ranks by none.

# %%
rows, folds = [], [0] * ranks
for rank, (queries, _, _) in enumerate(parts):
    state = None
    for s in range(ranks):
        source = (rank - s) % ranks
        if source > rank:
            continue
        _, keys, values = parts[source]
        found = tilefold.attention(queries, keys, values, causal=source == rank, return_lse=True)
        state = found if state is None else tilefold.merge_attention(*state, *found)
        folds[rank] += 1
    rows.append(state[0])
assert torch.allclose(tp.unshard_sequence(rows, sharding), whole, atol=1e-5)
print("pieces folded by each rank:", folds)

# %% [markdown]
# ## Zigzag shards
#
# All wait for the last rank, which has the most to do. Zigzag shards give rank r the chunks r and 2 N - 1 - r, and then all
# ranks have the same number of live pairs, up to a few tokens.

# %%
zigzag = tp.shard(tokens, ranks, kind="zigzag")


def live_pairs(sharding, rank):
    return int((tp.positions(sharding, rank) + 1).sum())  # a token at position p sees p + 1 keys


fig, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
for made, at in ((sharding, -0.2), (zigzag, 0.2)):
    work = [live_pairs(made, rank) for rank in range(ranks)]
    axis.bar([rank + at for rank in range(ranks)], work, 0.4, label=made.kind)
    print(made.kind, [made.spans(rank) for rank in range(ranks)], work)
axis.legend()
axis.set(title="Causal, 50 tokens on 4 ranks", xlabel="rank", ylabel="live pairs", xticks=range(ranks))
spread = [max(w) / min(w) for w in ([live_pairs(made, r) for r in range(ranks)] for made in (sharding, zigzag))]
assert spread[0] > 3
assert spread[1] < 1.2

# %% [markdown]
# ## Labels
#
# A trap: labels must be shifted before they are cut. The label of a shard's last token lies on another rank.

# %%
text = torch.arange(100, 100 + tokens)[None]
labels = tp.next_tokens(text, sharding, 0)
assert labels[0, -1] == 100 + sharding.length(0)

# %% [markdown]
# ## Ask for a scheme
#
# Which scheme is best for a machine is asked of a pure function. The links' rates are assumptions: give your own.

# %%
problem = tp.ParallelProblem(1, 1 << 20, 1 << 20, 64, 8, 128, 128, window=(-1, 0), kind="zigzag", backward=True)
plan = tp.plan_parallel(problem, tp.Links(ranks=64, ranks_per_node=8))
print(plan)
assert plan.heads * plan.ring == 64
few_heads = tp.ParallelProblem(1, 1 << 20, 1 << 20, 6, 2, 128, 128, window=(-1, 0), kind="zigzag")
refused = [cost for cost in tp.plan_parallel(few_heads, tp.Links(ranks=8)).rejected if cost.scheme == "heads"]
print(refused[0])
assert "not a multiple" in refused[0].refusal
