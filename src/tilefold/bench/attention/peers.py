"""The implementations that are measured: tilefold and the libraries it is compared with, each used if it can run here.

Every adapter takes the same tensors, [batch, seq, heads, dim] in memory, and gives back a view of that shape. Libraries that
want [batch, heads, seq, dim] get transposed views; nothing is copied, so none pays for the layout of another. Those that follow
lists of blocks alone are in `block_peers`.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tilefold
from tilefold.bench.attention.block_peers import BLOCK_PEERS, portable_plans
from tilefold.bench.attention.cases import Case, cases_of
from tilefold.bench.family import Calls, Family, Peer, absent, by_name
from tilefold.bench.implementation import Function, Inputs, make_inputs, output_of, prepared, sdpa_only, window_of
from tilefold.bench.judge import Judge
from tilefold.errors import Unsupported
from tilefold.plan.problem import AttentionProblem
from tilefold.sparse import BlockIndex

# --- tilefold: as a user calls it, and by kernels that a plan would not take ------------------------------------------------


def tilefold_call(inputs: Inputs, **options: Any) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """The public function of q, k and v, as a user calls it; of a packed batch its result is [tokens, H, Dv]."""
    p, index, ends = inputs.problem, inputs.index, inputs.offsets
    options["causal"] = p.causal
    if index is not None:
        return lambda q, k, v: tilefold.sparse_attention(q, k, v, index, **options)
    options["window"] = window_of(p)
    if ends is None:
        return lambda q, k, v: tilefold.attention(q, k, v, **options)
    lengths = ends, ends, p.seq_q, p.seq_q
    return lambda q, k, v: tilefold.attention_varlen(q[0], k[0], v[0], *lengths, **options)


def _prepare_tilefold(inputs: Inputs) -> Calls:
    function = tilefold_call(inputs)
    return prepared(inputs, (lambda *tensors: function(*tensors)[None]) if inputs.problem.varlen else function)


def _prepare_nondeterministic(inputs: Inputs) -> Calls:
    """Non-deterministic gradients, where a plan makes them by another kernel then."""
    mask: dict[str, Any] = {"causal": inputs.problem.causal, "window": window_of(inputs.problem)}
    tensors = (inputs.q, inputs.k, inputs.v)
    kept, free = (tilefold.attention_backward_plan(*tensors, **mask, deterministic=d).kernel for d in (True, False))
    if kept == free:
        raise Unsupported(f"the plan takes {kept} in either case")
    return prepared(inputs, tilefold_call(inputs, deterministic=False))


def _prepare_portable(inputs: Inputs) -> Calls:
    """`sparse_attention` by the portable kernels, where a plan takes another one by itself."""
    plans = portable_plans(inputs)
    if plans is None:
        raise Unsupported("it is what tilefold runs by itself here")
    return prepared(inputs, tilefold_call(inputs, plan=plans[0], backward_plan=plans[1]))


def _tilefold_refuses(case: Case, device: str) -> str | None:
    return None if case.problem.plain else "this adapter takes plain attention only"


def _nondeterministic_refuses(case: Case, device: str) -> str | None:
    if case.pattern is not None or case.problem.varlen or not case.backward:
        return "a row of its own for gradients of dense attention only"
    return _tilefold_refuses(case, device)


def _portable_refuses(case: Case, device: str) -> str | None:
    if case.pattern is None:
        return "a row of its own in the family sparse only"
    return _tilefold_refuses(case, device)


# --- torch.nn.functional.scaled_dot_product_attention -----------------------------------------------------------------------


def _beyond_causal(p: AttentionProblem) -> str | None:
    """Why a library that knows only plain and causal attention of equal lengths cannot take the problem, or None."""
    if not p.plain or p.window != (-1, -1):
        return "this adapter takes plain and causal attention only"
    if p.causal and p.seq_q not in (1, p.seq_k):
        return "its causal mask is aligned to the top left: lengths must be equal"
    return None


def _sdpa_refuses(backend: str, case: Case, device: str) -> str | None:
    p = case.problem
    if device != "cuda" and backend in ("cudnn", "efficient"):
        return "needs a GPU"
    if p.dtype == "float32" and (backend == "cudnn" or (backend == "flash" and device == "cuda")):
        return "takes float16 and bfloat16 only"
    if backend == "cudnn" and not torch.backends.cudnn.is_available():
        return "torch was built without cuDNN"
    if p.varlen and backend not in ("cudnn", "flash"):
        return "this adapter takes packed batches for cuDNN and FlashAttention-2 only"
    if p.varlen and device != "cuda":
        return "packed batches need a GPU"
    return _beyond_causal(p)


def _prepare_sdpa(backend: str, inputs: Inputs) -> Calls:
    from torch.nn.functional import scaled_dot_product_attention

    p = inputs.problem
    # One query sees every key under a bottom-right causal mask, torch's top-left one would hide all but the first.
    causal, grouped = p.causal and p.seq_q > 1, p.heads != p.kv_heads

    def function(*tensors: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in tensors)
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    packed = _packed_flash if backend == "flash" else _packed_sdpa
    return prepared(inputs, packed(inputs) if p.varlen else function, lambda: sdpa_only(backend))


def _packed_sdpa(inputs: Inputs) -> Function:
    """SDPA of a packed batch as torch's jagged tensors."""
    from torch.nested import nested_tensor_from_jagged
    from torch.nn.functional import scaled_dot_product_attention

    assert inputs.offsets is not None
    offsets, lengths, causal = inputs.offsets.long(), inputs.case.lengths, inputs.problem.causal

    def function(*tensors: Tensor) -> Tensor:
        q, k, v = (
            nested_tensor_from_jagged(t[0], offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)).transpose(1, 2)
            for t in tensors
        )
        out: Tensor = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).values()
        return out[None]

    return function


def _packed_flash(inputs: Inputs) -> Function:
    """torch's own function for packed batches, which is FlashAttention-2."""
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn
    longest, causal = inputs.problem.seq_q, inputs.problem.causal
    newer = "window_size" in inspect.signature(attend).parameters  # a causal mask had an argument of its own before
    mask = {"window_size": (-1, 0) if causal else (-1, -1)} if newer else {"is_causal": causal}

    return lambda q, k, v: attend(q[0], k[0], v[0], inputs.offsets, inputs.offsets, longest, longest, **mask)[None]


# --- FlexAttention ----------------------------------------------------------------------------------------------------------


def _flex_refuses(case: Case, device: str) -> str | None:
    p = case.problem
    if device != "cuda":
        return "compiled FlexAttention needs a GPU"
    if p.varlen or not p.plain or p.window != (-1, -1):
        return "this adapter takes plain and causal attention only"
    return None


def _prepare_flex(inputs: Inputs) -> Calls:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    mask, options = flex_mask(inputs), flex_options(inputs.case)
    grouped, pattern = inputs.problem.heads != inputs.problem.kv_heads, inputs.case.pattern
    # Each case compiles for its own lengths; without this the later ones would run into the limit of recompilations.
    torch.compiler.reset()
    config.donated_buffer = False  # buffers that a backward gives away would forbid to run it twice
    # Its one backward tile for sm_90 does not fit blocks of 64 keys; tuning finds one that does.
    tuned = inputs.case.backward and pattern is not None and pattern.block_k < 128
    mode = "max-autotune-no-cudagraphs" if tuned else None
    compiled: Any = torch.compile(flex_attention, dynamic=False, mode=mode)

    def function(*tensors: Tensor) -> Any:
        q, k, v = (t.transpose(1, 2) for t in tensors)
        return compiled(q, k, v, block_mask=mask, enable_gqa=grouped, kernel_options=options).transpose(1, 2)

    return prepared(inputs, function)


def flex_options(case: Case) -> dict[str, int] | None:
    """A forward tile that fits small blocks: the usual one on sm_90 has 128 queries, and there is no other without tuning.
    Shorter sequences take another kernel, which has its own."""
    pattern = case.pattern
    if pattern is None or pattern.block_q >= 128 or case.problem.seq_q < 128:
        return None
    tile = {"BLOCK_M": pattern.block_q, "BLOCK_N": min(64, pattern.block_k), "num_warps": 4, "num_stages": 3}
    return {f"fwd_{name}": size for name, size in tile.items()}


def flex_mask(inputs: Inputs) -> Any:
    """The BlockMask of a case: its lists as full blocks, or causal, or None."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    p, index = inputs.problem, inputs.index
    if index is not None:
        whole = index.expand(p.batch, p.heads)
        full = torch.nn.functional.pad(whole.indices, (0, index.kv_blocks - index.capacity))
        counts, none = whole.counts.contiguous(), torch.zeros_like(whole.counts)
        blocks, lengths = (index.block_q, index.block_k), (p.seq_q, p.seq_k)
        return BlockMask.from_kv_blocks(
            none, torch.zeros_like(full), counts, full, BLOCK_SIZE=blocks, seq_lengths=lengths
        )
    if not p.causal:
        return None
    offset = p.seq_k - p.seq_q

    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + offset >= j

    return create_block_mask(sees, None, None, p.seq_q, p.seq_k, device=inputs.q.device)


# --- FlashAttention-4 (CuTe DSL) --------------------------------------------------------------------------------------------


def _fa4_refuses(case: Case, device: str) -> str | None:
    p, pattern = case.problem, case.pattern
    if why := absent("flash-attn-4", device, "flash_attn.cute"):
        return why
    if torch.cuda.get_device_capability()[0] < 9:
        return "needs sm_90 or newer"
    if p.dtype == "float32":
        return "takes float16 and bfloat16 only"
    if not p.plain:
        return "this adapter takes plain attention only"
    if pattern is not None and case.backward and pattern.block_k % 128:
        return "its backward takes KV blocks of 128 on sm_90"
    return None


def _fa4_deterministic_refuses(case: Case, device: str) -> str | None:
    if case.pattern is not None or not case.backward:
        return "a row of its own for gradients of dense attention only"
    why = _fa4_refuses(case, device)
    if why is None and torch.cuda.get_device_capability()[0] == 12:
        return "its backward has no deterministic form on sm_120"
    return why


def _prepare_fa4(inputs: Inputs, **extra: Any) -> Calls:
    interface: Any = importlib.import_module("flash_attn.cute")
    p = inputs.problem
    options: dict[str, Any] = {"causal": p.causal, **extra}
    if p.window != (-1, -1):
        options["window_size"] = tuple(None if side < 0 else side for side in p.window)
    if inputs.index is not None:
        options["block_sparse_tensors"] = _fa4_lists(inputs, inputs.index)
        if inputs.grad is not None:
            options["block_sparse_tensors_bwd"] = _fa4_lists(inputs, inputs.index.transpose())

    def packed(*tensors: Tensor) -> Any:
        where = {f"cu_seqlens_{side}": inputs.offsets for side in "qk"} | dict.fromkeys(
            ("max_seqlen_q", "max_seqlen_k"), p.seq_q
        )
        return output_of(interface.flash_attn_varlen_func(*(t[0] for t in tensors), **where, **options))[None]

    def dense(*tensors: Tensor) -> Any:
        return output_of(interface.flash_attn_func(*tensors, **options))

    return prepared(inputs, packed if p.varlen else dense)


def _fa4_lists(inputs: Inputs, index: BlockIndex) -> Any:
    """Its record of lists: all blocks full, none masked; block sizes are (query, key), also of the transposed lists."""
    sparsity: Any = importlib.import_module("flash_attn.cute.block_sparsity")
    whole, pattern = index.expand(inputs.problem.batch, inputs.problem.heads), inputs.case.pattern
    counts, lists = whole.counts.contiguous(), whole.indices.contiguous()
    return sparsity.BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(counts),
        mask_block_idx=torch.zeros_like(lists),
        full_block_cnt=counts,
        full_block_idx=lists,
        block_size=(pattern.block_q, pattern.block_k) if pattern else None,
    )


# --- the list ---------------------------------------------------------------------------------------------------------------


def _sdpa(name: str, title: str, what: str) -> Peer:
    prepare, refuses = functools.partial(_prepare_sdpa, name), functools.partial(_sdpa_refuses, name)
    return Peer(name, title, f"torch SDPA, {what}", "torch", prepare, refuses)


_ALL = (
    Peer("tilefold", "tilefold", "tilefold.attention and sparse_attention", "tilefold",
         _prepare_tilefold, _tilefold_refuses, lists=True),
    _sdpa("cudnn", "cuDNN", "cuDNN backend"),
    _sdpa("flash", "FA2", "flash backend (FlashAttention-2)"),
    Peer("fa4", "FA4", "flash_attn.cute (FlashAttention-4), if installed", "flash-attn-4",
         _prepare_fa4, _fa4_refuses, lists=True),
    Peer("fa4-det", "FA4 det.", "flash_attn.cute with deterministic=True, gradients only", "flash-attn-4",
         functools.partial(_prepare_fa4, deterministic=True), _fa4_deterministic_refuses),
    Peer("flex", "Flex", "torch FlexAttention, compiled", "torch", _prepare_flex, _flex_refuses, lists=True),
    _sdpa("efficient", "efficient", "memory-efficient backend"),
    _sdpa("math", "math", "math backend (materialises the scores)"),
    Peer("portable", "portable", "tilefold.sparse_attention by its portable kernels, where a plan takes another one", "tilefold",
         _prepare_portable, _portable_refuses, lists=True),
    Peer("non-deterministic", "non-deterministic",
         "tilefold.attention(deterministic=False), where another kernel makes its gradients", "tilefold",
         _prepare_nondeterministic, _nondeterministic_refuses),
    *BLOCK_PEERS,
)  # fmt: skip
IMPLEMENTATIONS = by_name(*_ALL)
# Family -> device -> the peers that are measured unasked.
DEFAULT_PEERS: dict[str, dict[str, tuple[str, ...]]] = {
    "dense": {"cuda": ("cudnn", "flash", "fa4", "fa4-det", "flex"), "cpu": ("flash", "math")},
    "sparse": {"cuda": ("portable", "bsa", "tk", "fastvideo", "fa4", "flex", "cudnn"), "cpu": ("math",)},
}


def _calls(one: Peer, sets: Sequence[Inputs]) -> Calls:
    """One that does not follow a case's lists computes every pair, and is judged by that."""
    ready = [one.prepare(inputs) for inputs in sets]
    every_pair = not one.lists and sets[0].index is not None
    return Calls([each.call for each in ready], ready[0].context, Judge(sets[0], lists=False) if every_pair else None)


DENSE, SPARSE = (
    Family(
        name,
        functools.partial(cases_of, name),
        make_inputs,
        Judge,
        IMPLEMENTATIONS,
        DEFAULT_PEERS[name],
        record=lambda case: {"density": case.density, "kept": case.kept, "dtype": case.dtype},
        prepare=_calls,
        replayed=lambda case: case.replayed,
        attention=True,
    )
    for name in ("dense", "sparse")
)
