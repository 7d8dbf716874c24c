"""Libraries that do block-sparse attention and nothing else, as peers: cuDNN's and the two of FastVideo; and our portable plan.

They want [batch, heads, seq, dim] in memory: each gets a copy of that layout, made before the clock starts, so that none pays for
ours. The same holds for lists that a backward wants transposed. Their APIs as of nvidia-cudnn-frontend 1.32 and
fastvideo-kernel 0.3.5.
"""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.attention.cases import Case
from tilefold.bench.family import Calls, Peer
from tilefold.bench.implementation import Inputs
from tilefold.errors import Unsupported
from tilefold.ops.call import Call
from tilefold.ops.environment import installed as version_of
from tilefold.ops.source import Lists
from tilefold.ops.sparse.sparse import prepare
from tilefold.plan.sparse.sparse import SparsePlan, plan_sparse
from tilefold.plan.sparse.sparse_backward import SparseBackwardPlan, plan_sparse_backward
from tilefold.sparse import BlockIndex

CUDNN, FASTVIDEO = "nvidia-cudnn-frontend", "fastvideo-kernel"


def portable_plans(inputs: Inputs) -> tuple[SparsePlan, SparseBackwardPlan] | None:
    """The plans of the portable kernels for a sparse case of which a plan takes another kernel by itself; None where none does.

    Raises Unsupported if no portable tile fits."""

    if inputs.index is None:
        return None
    plan = prepare(inputs.q, inputs.k, inputs.v, Call(lists=Lists.of(inputs.index))).plan
    if plan is None:
        return None
    made = plan.problem, plan.device
    portable = plan_sparse(*made, portable=True), plan_sparse_backward(*made, portable=True)
    chosen = plan_sparse(*made), plan_sparse_backward(*made)
    # A forward case never comes to a backward plan.
    same = portable[0].kernel == chosen[0].kernel, portable[1].kernel == chosen[1].kernel
    return None if all(same[: 1 + inputs.case.backward]) else portable


def _heads_first(t: Tensor) -> Tensor:
    """[batch, heads, seq, dim] in memory."""
    return t.transpose(1, 2).contiguous()


def _lists(inputs: Inputs, index: BlockIndex | None) -> tuple[Tensor, Tensor]:
    """(indices, counts) of an index in full and contiguous, for every batch entry and head."""
    assert index is not None
    whole = index.expand(inputs.problem.batch, inputs.problem.heads)
    return whole.indices.contiguous(), whole.counts.contiguous()


def _refusal(case: Case, device: str, package: str, blocks: tuple[int, ...], dims: tuple[int, ...]) -> str | None:
    """What holds for all of them: installed, lists, a GPU, half precision, square blocks and head dims of these sizes."""
    p, pattern = case.problem, case.pattern
    if version_of(package) is None:
        return f"{package} is not installed"
    if pattern is None:
        return "takes lists of blocks only"
    if device != "cuda" or torch.version.hip:
        return "needs an NVIDIA GPU"
    if pattern.block_q != pattern.block_k or pattern.block_k not in blocks:
        return f"takes square blocks of {' or '.join(map(str, blocks))} only"
    if not p.plain or p.causal or p.window != (-1, -1):
        return "takes attention without masks beyond its lists only"
    if p.dim_qk not in dims or p.dim_v != p.dim_qk:
        return f"takes head dims of {', '.join(map(str, dims))} only"
    if p.seq_q % pattern.block_q or p.seq_k % pattern.block_k:
        return "takes whole blocks only"
    return None


# --- cuDNN block-sparse attention (CuTe DSL) ----------------------------------------------------------------------------------


def _bsa_refuses(case: Case, device: str) -> str | None:
    p = case.problem
    reason = _refusal(case, device, CUDNN, (64, 128), (64, 96, 128))
    if reason is None and p.dtype == "float32":
        return "takes float16 and bfloat16 only"
    if reason is None and case.backward and (p.dtype != "bfloat16" or p.heads != p.kv_heads or p.dim_qk != 128):
        return "its backward takes bfloat16, head dim 128 and as many KV heads as query heads only"
    return reason


def _prepare_bsa(inputs: Inputs) -> Calls:
    bsa: Any = importlib.import_module("cudnn.block_sparse_attention")
    q, k, v = (_heads_first(t) for t in (inputs.q, inputs.k, inputs.v))
    indices, counts = _lists(inputs, inputs.index)
    options: dict[str, Any] = {"sparse_block_size": inputs.index.block_k if inputs.index else None}
    if not bool((counts == indices.shape[-1]).all()):
        options["q2k_block_nums"] = counts  # lists of one length go without, which is its faster way
    splits = _splits(inputs)

    def forward() -> Any:
        return bsa.block_sparse_attention_forward(q, k, v, indices, kv_splits=splits, **options)

    if inputs.grad is None:
        return Calls([lambda: forward()["o_tensor"].transpose(1, 2)])
    result, grad = forward(), _heads_first(inputs.grad)
    state = (grad, q, k, v, result["o_tensor"], result["lse_tensor"])

    def backward() -> tuple[Tensor, ...]:
        found = bsa.block_sparse_attention_backward(*state, indices, **options)
        return tuple(found[name].transpose(1, 2) for name in ("dq_tensor", "dk_tensor", "dv_tensor"))

    return Calls([backward])


def _splits(inputs: Inputs) -> int | str:
    """Shares of each list: its own rule never splits on sm_90 when there are few query blocks, so there as many as give each SM
    two; the path for blocks of 128 wants a number anyway."""
    p, index = inputs.problem, inputs.index
    assert index is not None
    if not inputs.case.replayed:
        return "auto" if index.block_k == 64 else 1
    sms: int = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
    return max(1, min(index.capacity, 2 * sms // (p.batch * p.heads * index.q_blocks)))


# --- FastVideo's kernels ------------------------------------------------------------------------------------------------------


def _fastvideo_refuses(case: Case, device: str) -> str | None:
    reason = _refusal(case, device, FASTVIDEO, (64,), (64, 128))
    if reason is None and case.problem.dtype != "bfloat16":
        return "takes bfloat16 only"
    if reason is None and case.problem.heads != case.problem.kv_heads:
        return "takes as many KV heads as query heads only"
    return reason


def _tk_refuses(case: Case, device: str) -> str | None:
    reason = _fastvideo_refuses(case, device)
    if reason is None and torch.cuda.get_device_capability() != (9, 0):
        return "was compiled for sm_90 only"
    return reason


@functools.cache
def _fastvideo_file(pattern: str) -> ModuleType:
    """A file of the installed package as a module by itself: the package as a whole imports much else that may not load here."""
    package = importlib.util.find_spec("fastvideo_kernel")
    folders = list(package.submodule_search_locations or ()) if package else []
    path = next((path for folder in folders for path in sorted(Path(folder).glob(pattern))), None)
    if path is None:
        raise Unsupported(f"fastvideo-kernel has no {pattern}")
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    if spec is None or spec.loader is None:
        raise Unsupported(f"{path.name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fastvideo(inputs: Inputs, forward: Any, backward: Any) -> Calls:
    """forward: (q, k, v, lists, sizes) -> (out, lse); backward: (grad, (q, k, v), (out, lse), both lists, sizes) -> gradients."""
    q, k, v = (_heads_first(t) for t in (inputs.q, inputs.k, inputs.v))
    index, lists = inputs.index, _lists(inputs, inputs.index)
    assert index is not None
    sizes = torch.full((index.kv_blocks,), index.block_k, dtype=torch.int32, device=q.device)  # of valid tokens: all
    if inputs.grad is None:
        return Calls([lambda: forward(q, k, v, *lists, sizes)[0].transpose(1, 2)])
    grad, made = _heads_first(inputs.grad), forward(q, k, v, *lists, sizes)
    both = lists, _lists(inputs, index.transpose())
    # The compiled kernels give fp32; what trains in bfloat16 needs gradients in that, as their autograd function makes them.
    return Calls([lambda: tuple(t.to(q.dtype).transpose(1, 2) for t in backward(grad, (q, k, v), made, *both, sizes))])


def _prepare_fastvideo(inputs: Inputs) -> Calls:
    module: Any = _fastvideo_file("triton_kernels/block_sparse_attn_triton.py")

    def backward(grad: Tensor, qkv: Any, made: Any, lists: Any, transposed: Any, sizes: Tensor) -> Any:
        return module.triton_block_sparse_attn_backward(grad, *qkv, *made, *lists, *transposed, sizes)

    return _fastvideo(inputs, module.triton_block_sparse_attn_forward, backward)


def _prepare_tk(inputs: Inputs) -> Calls:
    module: Any = _fastvideo_file("_C/fastvideo_kernel_ops*.so")

    def backward(grad: Tensor, qkv: Any, made: Any, lists: Any, transposed: Any, sizes: Tensor) -> Any:
        return module.block_sparse_bwd(*qkv, *made, grad, *transposed, sizes)

    return _fastvideo(inputs, module.block_sparse_fwd, backward)


BLOCK_PEERS = (
    Peer("bsa", "BSA", "cuDNN block-sparse attention (nvidia-cudnn-frontend), if installed", CUDNN,
         _prepare_bsa, _bsa_refuses, lists=True),
    Peer("tk", "TK", "fastvideo-kernel's ThunderKittens kernels, if installed", FASTVIDEO,
         _prepare_tk, _tk_refuses, lists=True),
    Peer("fastvideo", "FV", "fastvideo-kernel's Triton kernels, if installed", FASTVIDEO,
         _prepare_fastvideo, _fastvideo_refuses, lists=True),
)  # fmt: skip
