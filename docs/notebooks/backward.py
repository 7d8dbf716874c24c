# %% [markdown]
# # Gradients from two numbers a row
#
# [The backward pass](../explanation/backward.md) needs no probabilities from the forward pass: the lse and delta, one number a
# row each, are enough. Here every formula of that page is computed in fp64 and compared with torch's autograd, and at the
# end the library's kernels are compared with the formulas.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run as Python, on the CPU; leave this out where there is a GPU

import math

import torch

import tilefold

torch.manual_seed(0)
queries, keys, dim, scale = 5, 9, 8, 8**-0.5
q, do = torch.randn(queries, dim, dtype=torch.float64), torch.randn(queries, dim, dtype=torch.float64)
k, v = torch.randn(keys, dim, dtype=torch.float64), torch.randn(keys, dim, dtype=torch.float64)
dl = torch.randn(queries, dtype=torch.float64)  # the loss uses the lse, too


def close(*pairs):
    return all(torch.allclose(a, b, atol=1e-12) for a, b in pairs)


# %% [markdown]
# ## What autograd says
#
# The forward pass, and what autograd says of the loss `(o * do).sum() + (lse * dl).sum()`.


# %%
def forward(q, k, v):
    s = q @ k.T * scale
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[:, None])
    return s, lse, p, p @ v


leaves = [t.clone().requires_grad_() for t in (q, k, v)]
s, lse, p, o = forward(*leaves)
for t in (s, p):
    t.retain_grad()
((o * do).sum() + (lse * dl).sum()).backward()
want = {"q": leaves[0].grad, "k": leaves[1].grad, "v": leaves[2].grad, "s": s.grad}
s, lse, p, o = (t.detach() for t in (s, lse, p, o))
assert close((p.sum(-1), torch.ones(queries, dtype=torch.float64)))

# %% [markdown]
# ## The softmax of one row
#
# The softmax of one row: its matrix of derivatives is `P_k (delta_jk - P_j)`, and with it the chain rule gives
# `P (dP - sum(P dP))`.

# %%
jacobian = torch.autograd.functional.jacobian(lambda row: torch.softmax(row, -1), s[0])
assert close((jacobian, p[0][:, None] * (torch.eye(keys, dtype=torch.float64) - p[0][None, :])))
dp = do @ v.T
assert close((dp[0] @ jacobian, p[0] * (dp[0] - (p[0] * dp[0]).sum())))

# %% [markdown]
# ## Delta
#
# The sum over the row is `do . o`: one number a row, from what is in memory anyway. The gradient of the lse comes off it.

# %%
assert close(((p * dp).sum(-1), (do * o).sum(-1)))
delta = (do * o).sum(-1) - dl
ds = p * (dp - delta[:, None])
assert close((ds, want["s"]))
assert close((p.T @ do, want["v"]), (scale * ds @ k, want["q"]), (scale * ds.T @ q, want["k"]))
assert not close((p * (dp - (do * o).sum(-1)[:, None]), want["s"]))  # without the lse's part it is wrong
print("largest |dS|:", round(ds.abs().max().item(), 4))

# %% [markdown]
# ## In tiles
#
# Probabilities come again from lse, in base 2. A sum over tiles of keys makes dq, one over tiles of queries dk and
# dv. No tile needs another.

# %%
lse2 = lse * math.log2(math.e)


def tile(rows, cols):
    """(p, ds) of a tile, from q, k, v, do and two numbers a row."""
    p = torch.exp2(q[rows] @ k[cols].T * (scale * math.log2(math.e)) - lse2[rows, None])
    return p, p * (do[rows] @ v[cols].T - delta[rows, None])


dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
for cols in torch.arange(keys).split(4):
    dq += tile(torch.arange(queries), cols)[1] @ k[cols]
    for rows in torch.arange(queries).split(2):
        p_tile, ds_tile = tile(rows, cols)
        dv[cols] += p_tile.T @ do[rows]
        dk[cols] += ds_tile.T @ q[rows]
assert close((dq * scale, want["q"]), (dk * scale, want["k"]), (dv, want["v"]))

# %% [markdown]
# ## Rows without a live key
#
# `-inf - (-inf)` is NaN. An lse of `+inf` in the place of `-inf` makes every probability 0.

# %%
dead = torch.full((keys,), -torch.inf)
assert torch.exp2(dead - dead.logsumexp(0)).isnan().all()
assert not torch.exp2(dead - torch.inf).any()

# %% [markdown]
# ## Softcap and sinks
#
# Softcap is a factor, the slope of the tanh. A sink is a key without a value: only delta is left of its ds.

# %%
cap, sink = 1.5, torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
raw = (q @ k.T * scale).requires_grad_()
capped = cap * torch.tanh(raw / cap)
total = torch.logsumexp(torch.cat([capped, sink.expand(queries, 1)], 1), 1)
weights = torch.exp(capped - total[:, None])
out = weights @ v
(out * do).sum().backward()
with torch.no_grad():
    delta_cap = (do * out).sum(-1)
    slope = 1 - torch.tanh(raw / cap) ** 2
    assert close((weights * (dp - delta_cap[:, None]) * slope, raw.grad))
    assert close((-(torch.exp(sink - total) * delta_cap).sum(), sink.grad))

# %% [markdown]
# ## Dropout
#
# Dropout multiplies normalised weights. `do . o` stays the right sum, because `o` has the same factors.

# %%
factor = (torch.rand(queries, keys) < 0.7).double() / 0.7
scores, values = s.clone().requires_grad_(), v.clone().requires_grad_()
dropped = (torch.softmax(scores, -1) * factor) @ values
(dropped * do).sum().backward()
delta_drop = (do * dropped.detach()).sum(-1)
assert close((p * (factor * dp - delta_drop[:, None]), scores.grad), ((p * factor).T @ do, values.grad))

# %% [markdown]
# ## The library's kernels
#
# The library's kernels, with two query heads on one KV head: dk and dv of the heads add up. In fp32, so to fp32's rounding.

# %%
two = torch.stack([q, q.flip(0)], 1)[None].float().requires_grad_()  # the second head has the same queries in reverse
shared = [t[None, :, None].float().requires_grad_() for t in (k, v)]
out, got_lse = tilefold.attention(two, *shared, scale=scale, return_lse=True)
upstream, upstream_lse = torch.stack([do, do.flip(0)], 1)[None].float(), torch.stack([dl, dl.flip(0)])[None].float()
((out * upstream).sum() + (got_lse * upstream_lse).sum()).backward()
for head, rows in enumerate((two.grad[0, :, 0], two.grad[0, :, 1].flip(0))):
    assert torch.allclose(rows.double(), want["q"], atol=1e-5), head
for mine, name in zip(shared, ("k", "v"), strict=True):
    assert torch.allclose(mine.grad[0, :, 0].double(), 2 * want[name], atol=1e-5)  # both heads give the same
print("dk and dv of two heads that share a KV head: twice those of one")
