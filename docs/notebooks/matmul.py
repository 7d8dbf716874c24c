# %% [markdown]
# # Matrix products: layouts, fusion, rounding
#
# [Matrix products](../explanation/matmul.md) with a bias and an activation in the same pass, without copies, and with one
# rounding at the end.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch
import torch.nn.functional as F

from tilefold import ops, reference
from tilefold.plan.device import device_named
from tilefold.plan.matrix.matmul import MatmulProblem, plan_matmul

torch.manual_seed(0)
x, weight, bias = torch.randn(33, 40), torch.randn(24, 40), torch.randn(24)

# %% [markdown]
# ## Layouts
#
# A weight [N, K], as a linear layer keeps it, goes in transposed. Nothing is copied: the kernel reads it as it lies.

# %%
y = ops.matmul(x, weight.t(), bias=bias, activation="gelu")
assert torch.allclose(y, F.gelu(F.linear(x, weight, bias)), atol=1e-4)

# %% [markdown]
# ## Rounding once
#
# In 16 bits the sum, the bias and the activation are in fp32 and rounded once. Three separate operations round three times.

# %%
a, b, c = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
exact = F.gelu(a.double() @ b.double().t() + c.double())
once = ops.matmul(a, b.t(), bias=c, activation="gelu")
thrice = F.gelu((a @ b.t()) + c)
error = {name: ((got.double() - exact).norm() / exact.norm()).item() for name, got in (("1", once), ("3", thrice))}
print("relative error with one rounding:", error["1"], " with three:", error["3"])
assert error["1"] < error["3"]

# %% [markdown]
# ## The limit of an error
#
# The project judges a result by one function: the error against fp64 may be what rounding does in
# that dtype. A reference in bfloat16 is one standard deviation of it off.

# %%
plain = reference.matmul(a, b.t(), bias=c, activation="gelu", dtype=torch.bfloat16)
verdict = reference.compare(once, exact, plain)
print(verdict)
assert verdict.ok

# %% [markdown]
# ## Batches
#
# One matrix may serve the whole batch. Its gradient is summed over the batch inside the product.

# %%
batch = torch.randn(3, 5, 40)
shared = weight.t().clone().requires_grad_()
ops.bmm(batch, shared).square().sum().backward()
plain = weight.t().clone().requires_grad_()
(batch @ plain).square().sum().backward()
assert torch.allclose(shared.grad, plain.grad, atol=1e-2, rtol=1e-4)

# %% [markdown]
# ## What the plan says
#
# Where there is too little work for all SMs and a long sum, the plan shares the sum out. It says so:

# %%
h200 = device_named("h200")
square = plan_matmul(MatmulProblem(1, 4096, 4096, 4096), h200)
narrow = plan_matmul(MatmulProblem(1, 128, 128, 16384), h200)
print(narrow)
assert square.splits == 1
assert narrow.splits > 1
