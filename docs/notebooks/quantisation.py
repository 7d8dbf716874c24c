# %% [markdown]
# # Weights in few bits
#
# [Quantisation](../explanation/quantisation.md): a group of neighbouring weights shares a scale, and each weight becomes a small
# integer. How large is the error, what do groups cost, and how does another tool's file become the same record?

# %%
import matplotlib.pyplot as plt
import torch

from tilefold.quant import QuantizedTensor, from_gptq, quantize_weight

torch.manual_seed(0)
w = torch.randn(64, 256)
q = quantize_weight(w, bits=4, group=64)
print(q)

# %% [markdown]
# ## The largest error
#
# Without refinement no weight is more than half a step off.

# %%
back = q.dequantize()
step = q.scales.t().repeat_interleave(64, 1)
assert ((back - w).abs() <= step / 2 * 1.0001).all()

# %% [markdown]
# ## By hand
#
# By hand: smallest and largest weight of a group (0 among them) give the scale, and the zero point is a code, so 0 stays 0.

# %%
group = w[3, 64:128]
scale = (group.max() - group.min()) / 15
zero = (-group.min() / scale).round()
codes = (group / scale + zero).round().clamp(0, 15)
assert torch.allclose((codes - zero) * scale, back[3, 64:128], atol=1e-5)

# %% [markdown]
# ## Bits and groups
#
# Fewer bits, larger errors; smaller groups, smaller errors, and more bytes for scales.


# %%
def error(**options):
    made = quantize_weight(w, **options)
    return ((made.dequantize() - w).norm() / w.norm()).item()


errors = {bits: [error(bits=bits, group=group) for group in (32, 64, 128, 256)] for bits in (8, 4, 3, 2)}
fig, axis = plt.subplots(figsize=(5, 3), layout="constrained")
for bits, values in errors.items():
    axis.plot((32, 64, 128, 256), values, marker="o", label=f"{bits} bits")
axis.legend()
axis.set(
    title="Error by bits and groups",
    xlabel="weights that share a scale",
    ylabel="relative error",
    yscale="log",
    xscale="log",
)
assert errors[8][1] < errors[4][1] < errors[3][1] < errors[2][1]
assert all(values[0] < values[-1] for values in errors.values())

# %% [markdown]
# ## Refinement
#
# Refined zero points lie between codes. No group ends worse than it started.

# %%
refined = quantize_weight(w, bits=3, group=64, refine="hqq").dequantize()
plain = quantize_weight(w, bits=3, group=64).dequantize()
squares = [(x - w).square().view(64, 4, 64).sum(-1) for x in (refined, plain)]
print("squared error:", squares[1].sum().item(), "refined:", squares[0].sum().item())
assert (squares[0] <= squares[1] * 1.0001).all()
assert squares[0].sum() < squares[1].sum()

# %% [markdown]
# ## Read a GPTQ file
#
# A GPTQ file keeps eight codes of 4 bits in a word, down the columns, and (version 1) zero points minus one. We write such a
# file by hand and read it.

# %%
codes = torch.randint(0, 16, (16, 8))  # [K, N]
zeros, scales = torch.randint(1, 16, (2, 8)), torch.rand(2, 8)  # two groups of 8 rows


def words(x):
    """Eight neighbours of dimension 0 in an int32, the first one lowest."""
    shifts = 4 * torch.arange(8)[None, :, None]
    return (x.view(-1, 8, x.shape[1]) << shifts).sum(1).to(torch.int32)  # the highest bit becomes the sign


read = from_gptq(words(codes), words((zeros - 1).t()).t().contiguous(), scales, bits=4, version=1)
by_hand = (codes - zeros.repeat_interleave(8, 0)) * scales.repeat_interleave(8, 0)
assert torch.equal(read.dequantize(), by_hand.t())

# %% [markdown]
# ## Save
#
# A record is plain tensors by name, for safetensors or a state_dict.

# %%
state = q.state("layer.weight.")
print({name: tuple(tensor.shape) for name, tensor in state.items()})
assert QuantizedTensor.from_state(state, "layer.weight.") == q
