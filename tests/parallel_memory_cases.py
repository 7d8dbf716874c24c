"""The memory that the plan predicts, beside what is alive while a call runs, counted tensor by tensor."""

import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilefold import parallel as tp
from tilefold.parallel import sums
from tilefold.plan.parallel.plan import plan_parallel
from tilefold.plan.parallel.problem import Links, ParallelProblem


class Alive(TorchDispatchMode):
    """The bytes of the storages that operators have made and that are still there, and the most there were."""

    def __init__(self, given):
        super().__init__()
        self.sizes = {t.untyped_storage()._cdata: 0 for t in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.sizes:
                storage = t.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self.drop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def drop(self, key):
        self.now -= self.sizes.pop(key, 0)


def forward(q, k, v, call):
    """As large as a result is, and nothing besides."""
    rows = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_zeros(*q.shape[:-1], v.shape[-1]), torch.zeros(rows)


def backward(saved, dout, dlse, call, wanted):
    return [t.new_zeros(t.shape) for t in saved[:3]]


def merge(out_a, lse_a, out_b, lse_b, out, lse):
    """As much as the kernel allocates, nothing; in the interpreter its frames would hold the tensors until they are collected."""
    out.copy_(out_b)
    lse.copy_(lse_b)


def suite():
    for scheme in ("ring", "all_gather", "heads", "two_level"):
        yield f"memory-{scheme}", lambda s=scheme: patched(s, (8, 4))


def patched(*args):
    kept, sums.merge_into = sums.merge_into, merge
    try:
        check(*args)
    finally:
        sums.merge_into = kept


def check(scheme, heads, tokens=1024, dim=32):
    ranks = tp.ranks_of(None, ranks_per_node=2) if scheme == "two_level" else tp.ranks_of()
    sharding = tp.shard(tokens, ranks.size, "zigzag")
    for needs in (False, True):
        peaks = []
        for _ in range(3):  # a transfer's thread may hold a message a little longer
            q, k, v, dout = (torch.zeros(1, sharding.length(ranks.rank), n, dim, dtype=torch.bfloat16)
                             for n in (heads[0], heads[1], heads[1], heads[0]))  # fmt: skip
            leaves = [t.requires_grad_(needs) for t in (q, k, v)]
            with Alive((*leaves, dout)) as alive:
                call = {"scheme": scheme, "group": ranks, "kernels": tp.Kernels(forward, backward), "causal": True}
                out = tp.attention(*leaves, sharding, **call)
                grads = torch.autograd.grad(out, leaves, dout) if needs else ()
            peaks.append(alive.peak)
            del out, grads
        every = [0] * ranks.size
        dist.all_gather_object(every, min(peaks))
        problem = ParallelProblem(1, tokens, tokens, *heads, dim, dim, window=(-1, 0), kind="zigzag", backward=needs)
        wanted = plan_parallel(problem, Links(ranks.size, ranks.per_node), scheme).cost.memory
        assert abs(max(every) - wanted) <= 0.05 * wanted, (scheme, heads, needs, every, wanted)
