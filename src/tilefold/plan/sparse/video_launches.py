"""What each launch of a stage of sparse video attention does: the tiles' padding, every load of an SM and every exponential.

`plan.video.stage_costs` says what a stage is asked for; this says what its kernels do for that, as their plans cut it.
"""

from dataclasses import dataclass

from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem
from tilefold.plan.sparse.coarse import CoarsePlan, CoarseProblem, plan_coarse
from tilefold.plan.sparse.select import SelectProblem, plan_select
from tilefold.plan.sparse.sparse import SparseProblem, plan_sparse
from tilefold.plan.sparse.sparse_hopper import KERNEL as HOPPER_KERNEL
from tilefold.plan.sparse.sparse_hopper import UNIT
from tilefold.plan.sparse.video import VideoShape

TOGETHER = "fine + fuse at once"  # what a call without gradients does
# Warp instructions of a selection for each number that a thread holds: 2.2 for each step of the sort and 85 besides, fitted to
# compiled code (2944 for 16 numbers and 45 steps, 6608 for 32 and 55); 70 % of them go to a pipe of half the issue rate.
PER_STEP, BESIDES, ALU_SHARE = 2.2, 85.0, 0.7


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """One launch. what: which of several alike, "k" of the gathers; "" for the only one.

    flops: of products, with what tiles compute beyond the ends. read, written: bytes between memory and the device, each tensor
    once. l2_bytes: what all SMs draw from the L2 cache. exps: exponentials, padded as the products are. alu: warp
    instructions of integer and comparison pipes. items: equal pieces of work that the SMs share, 0 where they are not equal.
    """

    kernel: str
    what: str = ""
    flops: int = 0
    read: int = 0
    written: int = 0
    l2_bytes: int = 0
    exps: int = 0
    alu: int = 0
    items: int = 0

    @property
    def bytes(self) -> int:
        """Between memory and the device."""
        return self.read + self.written


def launch_works(
    shape: VideoShape, listed: int, capacity: int, device: Device, kind: str = "block", reduction: str = "mean"
) -> dict[str, tuple[LaunchWork, ...]]:
    """By stage, and for the fine stage with the gates in its epilogue, the launches in order; () where torch's kernels run.

    listed: pairs of blocks that all lists name together; capacity: entries a list. kind: "block" or "pooled", () for "dense".
    Raises Unsupported where no kernel serves the shape."""
    fine = _fine(shape, listed, capacity, device)
    fuse = _fuse(shape)
    return {
        "coarse": _coarse(shape, device, kind, reduction),
        "select": _select(shape, capacity, device),
        "fine": (fine,),
        "fuse": (fuse,),
        TOGETHER: (_mixed(shape, fine),) if fine.kernel == HOPPER_KERNEL else (fine, fuse),
    }


def _coarse(shape: VideoShape, device: Device, kind: str, reduction: str) -> tuple[LaunchWork, ...]:
    if kind == "dense":
        return ()
    gathers = (_gather(shape, "k", shape.kv_heads), _gather(shape, "v", shape.kv_heads))
    each = kind == "pooled"
    queries = shape.blocks if each else shape.seq
    heads = (shape.heads, shape.kv_heads)
    attention = AttentionProblem(shape.batch, queries, shape.blocks, *heads, shape.dim, shape.dim, dtype=shape.dtype)
    problem = CoarseProblem(attention, 1 if each else shape.block, "each" if each else reduction)
    rows = _rows(plan_coarse(problem, device))
    if not each:
        return (*gathers, rows)
    out = shape.q_bytes
    pooled = shape.batch * shape.heads * shape.blocks * shape.dim * shape.itemsize
    spread = LaunchWork("spread_blocks", "", 0, pooled, out, pooled, items=shape.batch * shape.heads * shape.blocks)
    return (*gathers, _gather(shape, "q", shape.heads), rows, spread)


def _gather(shape: VideoShape, what: str, heads: int) -> LaunchWork:
    """A program a block and head: its tokens in, one row out."""
    rows = shape.batch * heads * shape.blocks
    moved = shape.batch * heads * shape.seq * shape.dim * shape.itemsize
    made = rows * shape.dim * shape.itemsize
    return LaunchWork("gather_blocks", what, 0, moved, made, moved, items=rows)


def _rows(plan: CoarsePlan) -> LaunchWork:
    """Two passes over the rows: K and V, then K again."""
    n, tile = plan.problem.attention, plan.forward
    programs = plan.grid("forward")[0]
    padded = programs * tile.block_m * -(-n.seq_k // tile.block_n) * tile.block_n
    q = n.batch * n.heads * n.seq_q * n.dim_qk * n.itemsize
    rows = n.batch * n.kv_heads * n.seq_k * (n.dim_qk + n.dim_v) * n.itemsize
    drawn = programs * n.seq_k * (2 * n.dim_qk + n.dim_v) * n.itemsize
    out = n.batch * n.heads * n.seq_q * (n.dim_v * n.itemsize + 4)
    blocks = -(-n.seq_q // plan.problem.block)
    scores = 4 * plan.parts * n.batch * n.heads * blocks * n.seq_k
    flops = 2 * padded * (2 * n.block_qk + n.block_v)
    return LaunchWork("coarse_forward", "", flops, q + rows, out + scores, q + drawn, 2 * padded, items=programs)


def _select(shape: VideoShape, capacity: int, device: Device) -> tuple[LaunchWork, ...]:
    """All rows take equally long: sorting does not depend on what is sorted."""
    problem = SelectProblem(shape.batch, shape.heads, shape.blocks, shape.blocks)
    plan = plan_select(problem, device)
    if plan.kernel != "select":
        return ()
    steps = plan.log * (plan.log + 1) // 2
    instructions = plan.regs * (PER_STEP * steps + BESIDES) * plan.num_warps
    scores, lists = 4 * problem.rows * shape.blocks, 4 * problem.rows * (capacity + 4)
    alu = round(ALU_SHARE * instructions * plan.programs)
    return (LaunchWork("select", "", 0, scores, lists, scores, alu=alu, items=plan.programs),)


def _fine(shape: VideoShape, listed: int, capacity: int, device: Device) -> LaunchWork:
    heads = (shape.heads, shape.kv_heads)
    n = AttentionProblem(shape.batch, shape.seq, shape.seq, *heads, shape.dim, shape.dim, dtype=shape.dtype)
    plan = plan_sparse(SparseProblem(n, shape.block, shape.block, capacity), device)
    lists = shape.batch * shape.heads * shape.blocks
    pairs = listed
    if plan.kernel == HOPPER_KERNEL:  # takes blocks in units: the last of a list may be half full
        per = UNIT // shape.block
        mean = -(-listed // lists)
        pairs = max(listed, lists * -(-mean // per) * per)
    scores = pairs * shape.block**2
    drawn = 2 * listed * shape.block * (shape.block // plan.block_m) * shape.dim * shape.itemsize + shape.q_bytes
    lse = 4 * shape.batch * shape.heads * shape.seq
    flops = 2 * scores * (n.block_qk + n.block_v)
    moved = shape.q_bytes + shape.kv_bytes, shape.q_bytes + lse
    return LaunchWork(plan.kernel, "", flops, *moved, drawn, scores, items=lists)


def _gates(shape: VideoShape) -> int:
    """Bytes of two gates a token and head."""
    return 2 * shape.batch * shape.heads * shape.seq * shape.itemsize


def _fuse(shape: VideoShape) -> LaunchWork:
    taken = 2 * shape.q_bytes + _gates(shape)
    return LaunchWork("fuse_forward", "", 0, taken, shape.q_bytes, taken)


def _mixed(shape: VideoShape, fine: LaunchWork) -> LaunchWork:
    """The branch comes through the ring of V, and nothing of the fine branch alone is written."""
    more = shape.q_bytes + _gates(shape)
    return LaunchWork(
        fine.kernel, "", fine.flops, fine.read + more, fine.written, fine.l2_bytes + more, fine.exps, items=fine.items
    )
