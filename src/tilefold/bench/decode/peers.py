"""Who makes a decoding step: tilefold, and the libraries it is compared with, each used if it can run here.

Those that know no pages or no quantised cache get the same numbers contiguous and in the queries' dtype, made before the clock
starts; their times are then of another number of bytes, and their outputs are judged like all others."""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import tilefold
from tilefold.bench.decode.cases import DecodeCase, decode_cases
from tilefold.bench.decode.inputs import DecodeInputs, DecodeJudge, make_decode_inputs
from tilefold.bench.family import Calls, Family, Peer, absent, by_name, each
from tilefold.bench.implementation import output_of, sdpa_only
from tilefold.bench.run import METHODS, Row
from tilefold.errors import Unsupported
from tilefold.ops.environment import importable

WORKSPACE = 256 << 20  # bytes that flashinfer's planner may use, twice what its documentation gives
VLLM_MODULES = ("vllm.v1.attention.ops.triton_decode_attention", "vllm.attention.ops.triton_decode_attention")
LEAST_PAGE = 16  # of what a contiguous cache is cut into for those who know pages only

# --- tilefold ---------------------------------------------------------------------------------------------------------------


def attend_cached(inputs: DecodeInputs, **more: Any) -> Callable[[], Tensor]:
    """The step as a user of tilefold calls it."""
    i, options = inputs, inputs.options | more
    return lambda: tilefold.attention_kvcache(i.q, i.k_cache, i.v_cache, **options)


def _plain_refuses(case: DecodeCase, device: str) -> str | None:
    if case.plain == case:
        return "a row of its own for pages and quantised caches only"
    return "lengths differ: contiguous it would be padded to the longest" if case.uneven else None


# --- torch ------------------------------------------------------------------------------------------------------------------


def _sdpa_refuses(backend: str, case: DecodeCase, device: str) -> str | None:
    if case.uneven:
        return "it knows no lengths"
    if backend == "math":
        return None
    if device != "cuda":
        return "needs a GPU"
    return "takes float16 and bfloat16 only" if case.dtype == "float32" else None


def _prepare_sdpa(backend: str) -> Callable[[Sequence[DecodeInputs]], Calls]:
    def attend(inputs: DecodeInputs) -> Callable[[], Tensor]:
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        i = inputs.plain
        case, grouped = i.case, i.case.heads != i.case.kv_heads
        mask: Any = None
        if case.causal and backend == "flash":  # it knows this mask, but takes no tensor
            mask = causal_lower_right(case.queries, case.longest)
        elif case.causal:
            mask = torch.ones(case.queries, case.longest, dtype=torch.bool, device=i.q.device)
            mask = mask.tril(case.longest - case.queries)
        q, k, v = (t.transpose(1, 2) for t in (i.q, i.k_cache, i.v_cache))
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return each(attend, lambda: sdpa_only(backend))


def _prepare_flex(sets: Sequence[DecodeInputs]) -> Calls:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # else the cases would run into the limit of recompilations
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    case, lengths, queries = sets[0].case, sets[0].lengths, sets[0].case.queries
    grouped, mask = case.heads != case.kv_heads, None

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + lengths[batch] - queries

    if case.uneven or case.causal:  # one mask for all sets, whose lengths are the same: another would be compiled again
        mask = create_block_mask(sees, case.batch, None, queries, case.longest, device=sets[0].q.device)

    def attend(inputs: DecodeInputs) -> Callable[[], Tensor]:
        i = inputs.plain
        q, k, v = (t.transpose(1, 2) for t in (i.q, i.k_cache, i.v_cache))
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)

    return Calls([attend(one) for one in sets])


# --- FlashAttention-4 (CuTe DSL) --------------------------------------------------------------------------------------------


def _fa4_refuses(case: DecodeCase, device: str) -> str | None:
    single = "takes float16 and bfloat16 only" if case.dtype == "float32" else None
    return absent("flash-attn-4", device, "flash_attn.cute") or single


def _prepare_fa4(sets: Sequence[DecodeInputs]) -> Calls:
    interface: Any = importlib.import_module("flash_attn.cute")
    if sets[0].case.uneven:
        known = inspect.signature(interface.flash_attn_varlen_func).parameters
        if missing := [name for name in ("seqused_k", "page_table") if name not in known]:
            raise Unsupported(f"this version's flash_attn_varlen_func has no {missing[0]}")

    def attend(inputs: DecodeInputs) -> Callable[[], Tensor]:
        i = inputs if inputs.case.uneven and not inputs.case.cache else inputs.plain
        options: dict[str, Any] = {"causal": i.case.causal}
        function = interface.flash_attn_func
        if i.case.uneven:
            function = interface.flash_attn_varlen_func
            options |= {"seqused_k": i.lengths} | ({} if i.table is None else {"page_table": i.table})
        return lambda: output_of(function(i.q, i.k_cache, i.v_cache, **options))

    return Calls([attend(one) for one in sets])


# --- libraries that serve: pages alone --------------------------------------------------------------------------------------


def in_pages(inputs: DecodeInputs) -> tuple[Tensor, Tensor, Tensor, int]:
    """(k, v, table, page) of a cache in the queries' dtype; a contiguous one is seen as pages of 16 that lie in order.

    Raises Unsupported where that needs a copy."""
    i, case = inputs, inputs.case
    if case.cache:
        raise Unsupported("this adapter takes caches in the queries' dtype only")
    if i.table is not None:
        return i.k_cache, i.v_cache, i.table, case.page
    if case.longest % LEAST_PAGE:
        raise Unsupported(f"pages of {LEAST_PAGE} do not cut a cache of {case.longest} rows")
    k, v = (t.unflatten(1, (-1, LEAST_PAGE)).flatten(0, 1) for t in (i.k_cache, i.v_cache))
    table = torch.arange(k.shape[0], dtype=torch.int32, device=k.device).view(case.batch, -1)
    return k, v, table, LEAST_PAGE


# --- flashinfer -------------------------------------------------------------------------------------------------------------


def _flashinfer_refuses(case: DecodeCase, device: str) -> str | None:
    shared = "this adapter takes keys and values apart only" if case.shared else None
    return absent("flashinfer", device, "flashinfer") or shared


def _flashinfer_call(inputs: DecodeInputs) -> Callable[[], Tensor]:
    library: Any = importlib.import_module("flashinfer")
    case = inputs.case
    k, v, table, page = in_pages(inputs)
    used = [-(-n // page) for n in case.lengths]
    ends = torch.tensor([0, *used], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    numbers = torch.cat([table[b, :n] for b, n in enumerate(used)])
    last = torch.tensor([(n - 1) % page + 1 for n in case.lengths], dtype=torch.int32)
    space = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
    kinds = {"q_data_type": inputs.q.dtype, "kv_data_type": k.dtype}
    where = (ends.to(numbers.device), numbers, last.to(numbers.device))
    shape = (case.heads, case.kv_heads, case.dim_qk, page)
    q = inputs.q.flatten(0, 1)
    if case.queries == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
        wrapper.plan(*where, *shape, **kinds)
    else:
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=q.device) * case.queries
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
        wrapper.plan(starts, *where, *shape, causal=True, **kinds)
    return lambda: wrapper.run(q, (k, v)).view(case.batch, case.queries, case.heads, case.dim_v)


# --- vLLM -------------------------------------------------------------------------------------------------------------------


def _vllm_call(inputs: DecodeInputs) -> Callable[[], Tensor]:
    module: Any = importlib.import_module(next(name for name in VLLM_MODULES if importable(name)))
    function, case = module.decode_attention_fwd, inputs.case
    k, v, table, page = in_pages(inputs)
    # As many splits as fill the GPU twice: its callers fix 4 or 8, which would leave a small batch waiting.
    sms = torch.cuda.get_device_properties(k.device).multi_processor_count
    splits = max(1, min(128, 2 * sms // (case.batch * case.kv_heads)))
    rows = (case.batch, case.heads)
    partials = torch.empty(*rows, splits, case.dim_v + 1, dtype=torch.float32, device=k.device)
    lse = (torch.empty(rows, dtype=torch.float32, device=k.device),)
    lse = lse if "lse" in inspect.signature(function).parameters else ()  # type: ignore[assignment]
    scale, q = case.dim_qk**-0.5, inputs.q[:, 0].contiguous()

    def call() -> Tensor:
        out = q.new_empty(*rows, case.dim_v)
        function(q, k, v, out, *lse, table, inputs.lengths, partials, splits, scale, page)
        return out[:, None]

    return call


# --- the list ---------------------------------------------------------------------------------------------------------------

DECODE_PEERS = by_name(
    Peer("tilefold", "tilefold", "tilefold.attention_kvcache", "tilefold", each(attend_cached)),
    Peer("plain", "tilefold plain", "the same with the cache contiguous and in the queries' dtype", "tilefold",
         each(lambda inputs: attend_cached(inputs.plain)), _plain_refuses),
    *(
        Peer(name, title, what, "torch", _prepare_sdpa(name), functools.partial(_sdpa_refuses, name))
        for name, title, what in (
            ("cudnn", "cuDNN", "torch SDPA, cuDNN backend"),
            ("flash", "FA2", "torch SDPA, flash backend (FlashAttention-2)"),
            ("math", "math", "torch SDPA, math backend"),
        )
    ),
    Peer("fa4", "FA4", "flash_attn.cute, if installed", "flash-attn-4", _prepare_fa4, _fa4_refuses),
    Peer("flex", "Flex", "torch FlexAttention, compiled", "torch", _prepare_flex,
         lambda case, device: None if device == "cuda" else "compiled FlexAttention needs a GPU"),
    Peer("flashinfer", "flashinfer", "flashinfer's paged wrappers, if installed", "flashinfer-python",
         each(_flashinfer_call), _flashinfer_refuses),
    Peer("vllm", "vLLM", "vLLM's decoding kernel in Triton, if installed", "vllm", each(_vllm_call),
         lambda case, device: absent("vllm", device, *VLLM_MODULES)
         or ("takes one query a sequence" if case.queries > 1 else None)),
)  # fmt: skip
# Device -> who is measured unasked.
DECODE_DEFAULTS: dict[str, tuple[str, ...]] = {
    "cuda": ("plain", "cudnn", "flash", "fa4", "flex", "flashinfer", "vllm"),
    "cpu": ("plain", "math"),
}


def record_of(case: DecodeCase) -> dict[str, Any]:
    """What a case adds to its record."""
    shape = {key: value for key, value in asdict(case).items() if key != "lengths"}
    keys = {"keys": sum(case.lengths), "shortest": min(case.lengths), "longest": case.longest}
    return {"batch": case.batch, **keys, **shape}


def balance_lines(rows: Sequence[Row]) -> list[str]:
    """Uneven batches beside balanced ones of as many keys."""
    lines = []
    for row in rows:
        for other in rows:
            same = row.case.uneven and not other.case.uneven and row.case.batch == other.case.batch
            if same and abs(row.case.bytes / other.case.bytes - 1) < 1e-2 and row.case.page == other.case.page:
                lines += _beside(row, other)
    return lines


def _beside(uneven: Row, balanced: Row) -> list[str]:
    found = []
    for name in (cell.implementation for cell in uneven.cells):
        cells = uneven.at(name), balanced.at(name)
        for method in METHODS:
            mine, other = (cell.by(method) if cell else None for cell in cells)
            if mine and other and other.ms:
                title = DECODE_PEERS[name].title
                found.append(
                    f"{title}, {method}: {uneven.case.name} takes {mine.ms / other.ms:.2f} times {balanced.case.name}"
                )
    return found


DECODE = Family(
    name="decode",
    cases=decode_cases,
    inputs=make_decode_inputs,
    judge=DecodeJudge,
    peers=DECODE_PEERS,
    defaults=DECODE_DEFAULTS,
    record=record_of,
    lines=balance_lines,
    rotating="caches",
)
