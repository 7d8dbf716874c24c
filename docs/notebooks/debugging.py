# %% [markdown]
# # Finding a wrong kernel
#
# [Debugging kernels](../guides/debugging.md): conditions on programs, printing inside a kernel, checks before a launch, and a
# kernel run under watch. The kernels here are wrong on purpose.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # most of this works in the interpreter only

import torch
import triton
import triton.language as tl

from tilefold import debug

# %% [markdown]
# ## Conditions on programs
#
# A condition is a text with one part for each axis of the grid.

# %%
chosen = debug.parse_condition("0,>1")
print(chosen)

# %% [markdown]
# ## Print inside a kernel
#
# It works inside kernels: here only program 1 prints.


# %%
@triton.jit
def row_sums(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, at < columns)
    debug.print_if("1", values)
    tl.store(out + row, tl.sum(values, 0))


x, sums = torch.arange(18.0).view(3, 6), torch.empty(3)
row_sums[(3,)](x, sums, 6, BLOCK=8)
assert torch.equal(sums, x.sum(1))

# %% [markdown]
# ## Check tensors before a launch
#
# Before a launch: a kernel believes what it is told about addresses. This output is a part of its input.

# %%
try:
    debug.check_tensors(x=x, out=x[:, :3], outputs=["out"], contiguous=False, device="cpu")
except ValueError as error:
    print(error)
else:
    raise AssertionError("the overlap was not seen")

# %% [markdown]
# ## An element nobody wrote
#
# A kernel whose mask is off by one. `check_kernel` runs it on copies that start as NaN, sees every load and store, and says
# which element nobody wrote.


# %%
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n - 1  # wrong
    tl.store(out + at, tl.load(x + at, mask) * 2, mask)


args = {"x": torch.arange(70.0), "out": torch.empty(70), "n": 70, "BLOCK": 32}
report = debug.check_kernel(double, (3,), args, reference=lambda x: x * 2, outputs=("out",))
print(report)
assert [fault.kind for fault in report.faults] == ["unwritten"]
assert report.faults[0].index == (69,)

# %% [markdown]
# ## A race
#
# Two programs that write different values to one element: a race, even though the interpreter runs one after the other.


# %%
@triton.jit
def last_wins(x, out):
    program = tl.program_id(0)
    tl.store(out + program // 2, tl.load(x + program))


args = {"x": torch.arange(4.0), "out": torch.empty(2)}
report = debug.check_kernel(last_wins, (4,), args, reference=lambda x: x[1::2], outputs=("out",))
print(report)
assert "race" in {fault.kind for fault in report.faults}

# %% [markdown]
# ## Every launch, checked
#
# As a decorator, every launch is checked, and a wrong one raises.


# %%
@debug.checked(reference=lambda x: x + 1, outputs=("out",))
@triton.jit
def add_one(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.where(at == 5, 2.0, 1.0), at < n)


try:
    add_one[(1,)](torch.arange(9.0), torch.empty(9), 9, BLOCK=16)
except debug.KernelFault as fault:
    (found,) = fault.report.faults
    print(found.kind, found.tensor, found.index)
    assert (found.kind, found.index) == ("mismatch", (5,))
else:
    raise AssertionError("the wrong element was not seen")
