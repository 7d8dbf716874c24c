# %% [markdown]
# # A convolution is a matrix product
#
# [Convolution](../explanation/conv.md): rows are pixels of the result, columns its channels, and the sum runs over the filter's
# taps and the input's channels. We write that matrix product by hand, then let the kernel do it without writing the left
# matrix.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import torch
import torch.nn.functional as F

from tilefold import ops

torch.manual_seed(0)
x = torch.randn(2, 16, 7, 6)  # [N, C, H, W]
weight = torch.randn(8, 16, 3, 3)  # [K, C, R, S]
bias = torch.randn(8)

# %% [markdown]
# ## The left matrix
#
# One row for each pixel of the result, one column for each channel and tap. It has 9 times the input's
# elements, but for the border.

# %%
left = F.unfold(x, 3, padding=1).transpose(1, 2).reshape(2 * 7 * 6, 16 * 9)
right = weight.view(8, 16 * 9).t()
print("input:", x.numel(), "elements, left matrix:", left.numel())
by_hand = ops.matmul(left, right, bias=bias).view(2, 7, 6, 8).permute(0, 3, 1, 2)
assert torch.allclose(by_hand, F.conv2d(x, weight, bias, padding=1), atol=1e-4)

# %% [markdown]
# ## Without writing it
#
# The implicit product reads its tiles straight from the input. `method="im2col"` writes the matrix. Both give the same numbers.

# %%
x_last = x.contiguous(memory_format=torch.channels_last)
implicit = ops.conv2d(x_last, weight, bias, padding=1, method="implicit")
columns = ops.conv2d(x_last, weight, bias, padding=1, method="im2col")
assert torch.allclose(implicit, by_hand, atol=1e-4)
assert torch.allclose(columns, by_hand, atol=1e-4)
assert implicit.is_contiguous(memory_format=torch.channels_last)

# %% [markdown]
# ## Stride, dilation, activation
#
# In the same pass:

# %%
y = ops.conv2d(x_last, weight, bias, stride=2, padding=2, dilation=2, activation="relu")
assert torch.allclose(y, F.conv2d(x, weight, bias, stride=2, padding=2, dilation=2).relu(), atol=1e-4)

# %% [markdown]
# ## The gradient of the input
#
# The gradient of the input with stride 2: pixels fall into 2 x 2 phases, each met by its own taps. With a 3 x 3 filter the four
# phases are met by 4, 2, 2 and 1 taps: 9 together, so nothing is multiplied by zero.

# %%
taps = [len(range(a, 3, 2)) * len(range(b, 3, 2)) for a in range(2) for b in range(2)]
assert sorted(taps) == [1, 2, 2, 4]
mine, theirs = (x.clone().requires_grad_() for _ in range(2))
ops.conv2d(mine, weight, stride=2, padding=1).square().sum().backward()
F.conv2d(theirs, weight, stride=2, padding=1).square().sum().backward()
assert torch.allclose(mine.grad, theirs.grad, atol=1e-2, rtol=1e-4)
