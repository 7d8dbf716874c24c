# %% [markdown]
# # When are the keys split?
#
# While a model generates, some steps launch one attention kernel and some launch two. [Dispatch](../explanation/dispatch.md)
# explains the rule of flash-attention 2 and ours. Both are pure functions here, so we can ask on any machine.

# %%
import matplotlib.pyplot as plt

from tilefold.plan import AttentionProblem, Generation, device_named, plan_splits, trace_generation

h200 = device_named("h200")
qwen = {"heads": 28, "kv_heads": 4}  # Qwen2.5-7B


def step(keys, batch=1):
    problem = AttentionProblem(batch, 1, keys, **qwen, dim_qk=128, dim_v=128)
    return plan_splits(problem, h200, "flash-attn", call="dense")


print(step(8192))

# %% [markdown]
# ## Blocks of 128 keys
#
# Keys are cut between blocks of 128 only. One block cannot be cut, two can.

# %%
assert step(128).splits == 1
assert step(129).splits == 2
assert step(129).combine == "flash_fwd_splitkv_combine_kernel"

# %% [markdown]
# ## From which batch on
#
# With one query, the 7 query heads of a KV head are rows of one tile. So one sequence is 4 tiles, for 264 slots (two an SM).
# From 80 % of the slots on, nothing is split: here, from 53 sequences on.

# %%
first = next(batch for batch in range(1, 100) if step(8192, batch).splits == 1)
print("not split from a batch of", first)
assert first * 4 >= 0.8 * 264 > (first - 1) * 4

# %% [markdown]
# ## A whole generation
#
# A prompt of 40 tokens and 512 new ones.

# %%
trace = trace_generation(Generation(**qwen, dim=128, prompt=40, new=512), h200, "flash-attn")
for part in trace.ranges:
    print(f"steps {part.first_step:3} to {part.last_step:3}: {part.first.kernel}, {part.first.splits} splits")
two = [part for part in trace.ranges if part.first.combine]
assert two[0].first_step == 90  # 40 + 89 = 129 keys: the first step with two blocks

# %%
fig, axis = plt.subplots(figsize=(6, 2.5), layout="constrained")
for policy in ("flash-attn", "tilefold"):
    generation = Generation(**qwen, dim=128, prompt=40, new=512, call="kvcache", capacity=4096)
    ranges = trace_generation(generation, h200, policy).ranges
    steps = [s for part in ranges for s in (part.first_step, part.last_step)]
    axis.plot(steps, [part.first.splits for part in ranges for _ in range(2)], label=f"{policy}, cache of 4096 rows")
axis.plot(
    [s for part in trace.ranges for s in (part.first_step, part.last_step)],
    [part.first.splits for part in trace.ranges for _ in range(2)],
    label="flash-attn, cache that grows",
)
axis.legend()
_ = axis.set(title="28 heads on 4, D=128, on an H200", xlabel="step", ylabel="splits", yscale="log")

# %% [markdown]
# ## A cache of fixed capacity
#
# With a cache of fixed capacity flash-attention decides by the capacity, since the lengths lie on the device: most of its
# programs find no keys there.

# %%
fixed = trace_generation(
    Generation(**qwen, dim=128, prompt=40, new=512, call="kvcache", capacity=4096), h200, "flash-attn"
)
last = fixed.ranges[-1].first
print(last.programs, "programs,", last.working, "with keys")
assert last.working < last.programs / 4
