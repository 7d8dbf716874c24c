"""A packed batch as the backward pass on sm_90 is told of it: kernels.backward_packed run in the interpreter, for the tests of
its order and of the kernel that follows it."""

import random

import torch

from tilefold.kernels.backward import backward_packed as kernel
from tilefold.ops.backward.attention_backward_packed import CHUNK, ENTRY
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan.backward import attention_backward_packed as rules

DIM_QK, DIM, UNIT = 24, 16, 64
NAMES = ("what", "head", "tile", "first_q", "n_q", "first_k", "n_k", "place", "line", "block", "before", "wanted")


def offsets(lengths, before):
    return [sum(lengths[:i]) + before for i in range(len(lengths) + 1)]


class Batch:
    """A packed batch, what the launch is given, and what it made."""

    def __init__(
        self, lengths_q, lengths_k, kv_heads, group, slots=None, rows=UNIT, around=(0, 0), most=(None, None), **mask
    ):
        self.lengths_q, self.lengths_k = lengths_q, lengths_k
        self.kv_heads, self.group, self.rows = kv_heads, group, rows
        batch, self.heads = len(lengths_q), kv_heads * group
        self.cu_q, self.cu_k = offsets(lengths_q, around[0]), offsets(lengths_k, around[0])
        self.total_q, self.total_k = self.cu_q[-1] + around[1], self.cu_k[-1] + around[1]
        self.max_q, self.max_k = most[0] or max(lengths_q), most[1] or max(lengths_k)
        problem = AttentionProblem(
            batch, self.max_q, self.max_k, self.heads, kv_heads, 64, 64, varlen=True, dtype="float16", **mask
        )
        keys = 64 * slots if slots else rules.kept_at_once(problem, device_named("h200"))[1]
        order = rules.order_of(problem, device_named("h200"), keys, self.total_q, self.total_k)
        self.order = order._replace(queries=self.heads * (self.total_q // rows + batch), together=rows // UNIT)
        self.launch()

    def launch(self):
        o, total_q, total_k = self.order, self.total_q, self.total_k

        def rand(*shape):
            return torch.randn(*shape)

        self.out, self.dout = rand(total_q, self.heads, DIM), rand(total_q, self.heads, DIM)
        self.lse, self.dlse = rand(self.heads, total_q), rand(self.heads, total_q)
        self.lse[:, ::7] = -torch.inf
        shapes = (total_q, self.heads, DIM_QK), (total_k, self.kv_heads, DIM_QK), (total_k, self.kv_heads, DIM)
        self.beyond = [torch.full((rows + 1, *shape), torch.nan) for rows, *shape in shapes]
        self.grads = [t[:-1] for t in self.beyond]
        self.statistics = torch.full((self.heads * o.q_places + 1, 2, UNIT), torch.nan)
        self.progress = torch.full((1 + 2 * o.blocks,), 77, dtype=torch.int32)
        self.entries = torch.full((o.keys + o.queries, ENTRY), 1 << 30, dtype=torch.int32)
        batch = len(self.lengths_q)
        offsets = (torch.tensor(cu, dtype=torch.int32) for cu in (self.cu_q, self.cu_k))
        programs = self.heads * o.q_places + 1 + -(-o.keys // CHUNK) + -(-o.queries // CHUNK)
        programs += -(-total_q // UNIT) - (-total_k // UNIT)
        strides = (s for t in (self.out, self.dout, *self.grads) for s in t.stride()[:2])
        kernel.backward_packed[(programs,)](
            self.out, self.dout, self.lse, self.dlse, *offsets, *self.grads, self.statistics, self.progress, self.entries,
            batch, (batch - 1).bit_length(), self.max_q, self.max_k, total_q, total_k, self.heads, self.kv_heads, o.keys,
            o.queries, o.longest, o.shift, o.slots, self.progress.numel(), *strides,
            WIDE=False, DIM_QK=DIM_QK, DIM=DIM, BLOCK_D=32, UNIT=UNIT, ROWS=self.rows, CHUNK=CHUNK,
        )  # fmt: skip
        self.work = [dict(zip(NAMES, entry, strict=True)) for entry in self.entries.tolist()]


def draw(seed):
    pick = random.Random(seed)
    batch = pick.choice((1, 2, 3, 12))
    some = (0, 0, 1, 63, 64, 65, 128, 200, 400)
    lengths_q = [pick.choice(some) for _ in range(batch)]
    lengths_k = list(lengths_q) if pick.random() < 0.3 else [pick.choice(some) for _ in range(batch)]
    if max(lengths_q) == 0 or max(lengths_k) == 0:
        lengths_q[0] = lengths_k[-1] = 70
    kv_heads, group = pick.choice(((1, 1), (3, 1), (2, 3), (1, 4)))
    longest = -(-max(lengths_k) // 64) + 1
    slots = pick.choice((None, longest, longest + 1, longest + 5, 3 * longest))
    rows = pick.choice((64, 128))
    return lengths_q, lengths_k, kv_heads, group, slots, rows, pick.choice(((0, 0), (5, 0), (200, 333)))
