"""When the Gluon kernels for sm_90 serve a block-sparse backward pass, and for how many heads at a time they keep ds."""

from typing import TYPE_CHECKING

from tilefold.plan.device import Device
from tilefold.plan.limits import Tile, box_refusal

if TYPE_CHECKING:
    from tilefold.plan.sparse import SparseProblem

__all__ = ["BLOCK", "KERNEL", "KEYS", "QUERIES", "SCRATCH_LIMIT", "heads_at_once", "hopper_refusal", "scratch_bytes"]

KERNEL = "sparse_backward_hopper"
BLOCK = 64
QUERIES, KEYS = Tile(BLOCK, BLOCK, 4, 4), Tile(BLOCK, BLOCK, 4, 2)
SCRATCH_LIMIT = 2560 << 20
"""Bytes of ds that are kept at a time: fixed, whatever the lengths; lists that need more have the portable kernels."""
MOST_HEADS = 4096


def hopper_refusal(problem: "SparseProblem", device: Device) -> str | None:
    """Why the kernels do not serve this problem, as a sentence, or None if they do."""
    n = problem.attention
    if device.backend != "cuda" or device.arch != 90:
        return f"it is written for sm_90, this is {device.target}"
    if n.dtype not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 and float16, not {n.dtype}"
    if n.dim_qk != n.dim_v or n.dim_qk not in (64, 128):
        return f"it has head dims of 64 and 128, the same for V, not {n.dim_qk} and {n.dim_v}"
    if (problem.block_q, problem.block_k) != (BLOCK, BLOCK):
        return f"it has blocks of 64 tokens, not {problem.block_q} x {problem.block_k}"
    if not n.plain or n.causal or n.window != (-1, -1):
        return "it has no masks and no changes of scores inside a block"
    if n.varlen or problem.page_size:
        return "it reads sequences of one length, neither packed nor in pages"
    if not problem.descriptors:
        return "the base or the strides of Q are not multiples of 16 bytes"
    if problem.capacity == 0 or n.seq_k == 0:
        return "there is nothing listed"
    if n.batch * n.heads * -(-n.seq_q // BLOCK) * 2 * BLOCK >= 1 << 31:
        return "there are more than 2**24 query blocks"
    if scratch_bytes(problem, 1) > SCRATCH_LIMIT:
        return f"ds of one KV head takes {scratch_bytes(problem, 1) >> 20} MiB, more than {SCRATCH_LIMIT >> 20}"
    return box_refusal(n, device)


def scratch_bytes(problem: "SparseProblem", heads: int) -> int:
    """Bytes of ds of every place in the lists of `heads` KV heads: 8 KiB for a pair of blocks."""
    n = problem.attention
    blocks = -(-n.seq_q // BLOCK)
    return heads * n.group * blocks * problem.capacity * BLOCK * BLOCK * n.itemsize


def heads_at_once(problem: "SparseProblem") -> int:
    """KV heads (of all sequences) per launch: as many as the limit lets be kept, since every launch ends half empty."""
    n = problem.attention
    return max(1, min(n.batch * n.kv_heads, SCRATCH_LIMIT // max(1, scratch_bytes(problem, 1)), MOST_HEADS))
