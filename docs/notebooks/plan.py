# %% [markdown]
# # Asking for a plan
#
# [The plan](../explanation/plan.md) of a call is a value that a pure function makes of a problem and a device. No tensor and no
# GPU is needed, so we can ask about any machine.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt

from tilefold import PlanError
from tilefold.plan import AttentionPlan, AttentionProblem, device_named, live_pairs, plan_attention

h200 = device_named("h200")
prefill = AttentionProblem(1, 4096, 4096, heads=28, kv_heads=4, dim_qk=128, dim_v=128, causal=True)
plan = plan_attention(prefill, h200)
print(plan)

# %% [markdown]
# ## The same question, the same answer
#
# The same question has the same answer, and every alternative that was rejected has its reason.

# %%
assert plan_attention(prefill, h200) == plan
assert plan.rejected
assert all(one.why for one in plan.rejected)

# %% [markdown]
# ## One query
#
# One query instead of 4096: another rule decides, and another resource is the limit. A long prompt is bound by the tensor
# cores, a single query by memory.

# %%
decode = replace(prefill, seq_q=1)
one = plan_attention(decode, h200)
print(plan.rule, plan.bound.resource, "|", one.rule, one.bound.resource)
assert plan.bound.resource == "tensor pipe"
assert one.bound.resource == "DRAM"
assert one.block_m < plan.block_m

# %% [markdown]
# ## The cost
#
# The cost is exact. `live_pairs` counts the pairs of query and key that the mask leaves, in closed form; for a small problem
# we can count them one by one.

# %%
small = AttentionProblem(1, 5, 9, heads=1, kv_heads=1, dim_qk=16, dim_v=16, causal=True, window=(2, 0))
counted = sum(i + 4 - 2 <= j <= i + 4 for i in range(5) for j in range(9))  # query i sits at key i + 9 - 5
print(counted, "live pairs of", 5 * 9)
assert live_pairs(small) == counted

# %% [markdown]
# ## Where the limit changes
#
# The least time for more and more queries over 8192 keys, by resource.

# %%
queries = [2**n for n in range(13)]
plans = [plan_attention(replace(prefill, seq_q=n, seq_k=8192, causal=False), h200) for n in queries]
fig, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for resource in ("DRAM", "tensor pipe", "exp unit"):
    axis.loglog(queries, [dict(p.bound.times)[resource] * 1e6 for p in plans], marker=".", label=resource)
axis.set(xlabel="queries", ylabel="us at least", title="H200, 28 heads on 4, D=128, 8192 keys")
axis.legend()
assert plans[0].bound.resource == "DRAM"
assert plans[-1].bound.resource == "tensor pipe"

# %% [markdown]
# ## Change a plan
#
# A plan can be changed; everything that follows from the tile is computed anew. What breaks a limit of the device is refused,
# naming the field.

# %%
mine = plan_attention(prefill, h200, portable=True).with_tile(block_n=32)
assert (mine.block_n, mine.rule) == (32, "override")
try:
    mine.with_tile(block_m=4096)
except PlanError as error:
    print(error)
else:
    raise AssertionError("a tile of 4096 rows was accepted")

# %% [markdown]
# ## Keep a plan
#
# And it can be kept as JSON. A text that contradicts itself does not load.

# %%
text = plan.to_json()
assert AttentionPlan.from_json(text) == plan
try:
    AttentionPlan.from_json(text.replace('"num_warps": ', '"num_warps": 7'))
except PlanError as error:
    print(error)
else:
    raise AssertionError("a plan that was changed by hand was accepted")
