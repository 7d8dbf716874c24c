# %% [markdown]
# # A model in few bits
#
# [Linear layers in few bits](../explanation/lowbit_linear.md): `tilefold.quantize` replaces the linear layers of a model in
# place. We do it to a small one, read the report, save it and load it again.

# %%
import os
import tempfile

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch
from torch import nn

import tilefold


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


x = torch.randn(8, 64)
original = make()
model = make()
report = tilefold.quantize(model, bits=4, group=32, inputs=x, progress=False)
print(report)

# %% [markdown]
# ## What was replaced
#
# The layers are others now, and the whole is less than a third of what it was. (Scales of groups of 32 in fp32 cost a bit a
# weight.)

# %%
assert isinstance(model[0], tilefold.nn.LowBitLinear)
assert report.after < report.before / 3

# %% [markdown]
# ## The product
#
# The product reads the codes as they are kept. It is the product with the dequantised weight:

# %%
weight = model[0].weight
by_hand = nn.functional.linear(x, weight.dequantize(), model[0].bias)
assert torch.allclose(model[0](x), by_hand, atol=1e-4)
error = (model(x) - original(x)).norm() / original(x).norm()
print("relative error of the model's output:", round(error.item(), 3))
assert error < 0.2

# %% [markdown]
# ## What is left alone
#
# What is left alone is named, with the reason. Here the head is skipped by its name, and an embedding's weight is tied to it.

# %%


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight


found = tilefold.quantize(Tied(), bits=8, group=64, progress=False)
print(found)
assert [layer.name for layer in found.layers] == ["body"]
assert [skipped.name for skipped in found.skipped] == ["head"]

# %% [markdown]
# ## Several calls
#
# Calls add up: what a first call skips, a second one can round to other bits.

# %%
mixed = make()
tilefold.quantize(mixed, bits=4, group=32, skip="2", progress=False)
tilefold.quantize(mixed, bits=8, group=32, progress=False)
assert (mixed[0].weight.bits, mixed[2].weight.bits) == (4, 8)

# %% [markdown]
# ## Save and load
#
# Save, build afresh, load: the same bits.

# %%
with tempfile.TemporaryDirectory() as folder:
    tilefold.save_quantized(model, f"{folder}/model.safetensors")
    fresh = make()
    tilefold.load_quantized(fresh, f"{folder}/model.safetensors")
assert torch.equal(fresh(x), model(x))

# %% [markdown]
# ## Gradients
#
# Activations get gradients, codes have none.

# %%
x.requires_grad_()
model[0](x).sum().backward()
assert torch.allclose(x.grad, weight.dequantize().sum(0).expand(8, 64), atol=1e-4)
assert not any(p.requires_grad for p in model[0].parameters())
