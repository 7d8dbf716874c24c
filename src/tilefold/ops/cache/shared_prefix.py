"""Attention of a batch whose sequences begin with the same keys: the prefix once for all queries, each rest apart, merged."""

from typing import Any

import torch

from ...errors import DtypeError, Unsupported, ValueRangeError
from ..call import Call, check_integer, check_options
from ..device import device_of, on_host
from ..faults import Mode, Watch, watch_of
from ..numerics import is_invariant
from ..operator import Operation
from ..records import recorded
from ..serve import function_at
from ..source import Cache, Scales, facts_of_values, key_of
from ..watch import refuse_at_once
from .cached_call import cache_of, cached_shapes, check_contents
from .decode import storage_of
from .kvcache import ATTENTION_KVCACHE, sizes_of
from .merge import merge_attention


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: Call, prefix: int, cascade: bool | None,
    check: Mode = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse); see `tilefold.attention_shared_prefix`.  call: over all keys, as a plain call has it."""
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sinks": call.sinks, "k_scale": call.scales.k,
             "v_scale": call.scales.v}  # fmt: skip
    refuse_at_once(named, "attention_shared_prefix passes none: call it under torch.no_grad()")
    looks = check is True, check == "device"
    return ATTENTION_SHARED_PREFIX(q, k_cache, v_cache, call, prefix, cascade, *looks)  # type: ignore[no-any-return]


def _plan(q: torch.Tensor, k: torch.Tensor, call: Call, whole: int, n: dict[str, int]) -> Any:
    from ...plan.cache.shared_prefix import PrefixProblem, plan_shared_prefix

    tokens = q.shape[0] if cache_of(call).cu_q is not None else n["batch"] * n["seq_q"]
    dtype = str(q.dtype).removeprefix("torch.")
    shape = (
        n["batch"],
        tokens,
        n["heads"],
        n["kv_heads"],
        n["dim_qk"],
        n["dim_v"],
        whole,
        dtype,
        storage_of(q, k),
    )
    return plan_shared_prefix(PrefixProblem(*shape), device_of(q.device))


def _key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, *others: Any) -> Any:
    return key_of(q, k, v, call), facts_of_values(*others)


@recorded("attention_shared_prefix", _key)
def _decided(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: Call, prefix: int, cascade: bool | None
) -> tuple[dict[str, int], bool]:
    """(sizes, whether the prefix is attended to apart), found once for calls of a kind."""
    n = _sizes(q, k_cache, v_cache, call, prefix, cascade)
    whole, apart = _whole(call, prefix, n), cascade
    empty = whole == 0 or q.numel() == 0 or n["batch"] == 0
    if is_invariant(call.numerics):
        if apart:
            raise Unsupported(
                'cascade=True with numerics="invariant": a merge of two finished results has other bits than one fold; leave it '
                "None"
            )
        apart = False
    if apart is None:  # without launches keys that are read once are always cheaper
        direct = function_at("attention_kvcache", q.device) is not None
        apart = not empty and (direct or _plan(q, k_cache, call, whole, n).cascade)
    return n, apart and not empty


def _sizes(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: Call, prefix: int, cascade: bool | None
) -> dict[str, int]:
    """Everything that is wrong with a call; sizes of its dimensions."""
    lengths = cache_of(call).lengths
    if not isinstance(lengths, torch.Tensor):
        raise DtypeError(f"cache_seqlens must be a torch.Tensor, got {type(lengths).__name__}")
    if cascade is not None and not isinstance(cascade, bool):
        raise DtypeError(f"cascade must be a bool or None, got {cascade!r}")
    check_integer("prefix_length", prefix)
    n = sizes_of(q, k_cache, v_cache, call)
    if not 0 <= prefix <= n["capacity"]:
        raise ValueRangeError(f"prefix_length is {prefix}, expected 0 to {n['capacity']}, the capacity of the cache")
    return n


def _whole(call: Call, prefix: int, n: dict[str, int]) -> int:
    """Keys of the prefix that are attended to apart: whole pages; the others belong to each sequence's rest."""
    return prefix if cache_of(call).block_table is None else prefix // n["page_size"] * n["page_size"]


def _forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: Call, prefix: int, cascade: bool | None, checked: bool,
    watched: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """checked, watched: index tensors are looked at on the host, or on the device."""
    n, apart = _decided(q, k_cache, v_cache, call, prefix, cascade)
    whole, packed = _whole(call, prefix, n), cache_of(call).cu_q is not None
    if checked or (on_host(q) and not watched):
        _check_values(call, prefix, whole, n)
    of_all, of_prefix, of_rest = _watches(call, prefix, whole, n) if watched else (checked, False, False)
    if checked and apart:
        check_contents(n, q, k_cache, call)
    if not apart:
        return ATTENTION_KVCACHE(q, k_cache, v_cache, call, of_all)  # type: ignore[no-any-return]
    first, rest = _parts(k_cache, v_cache, call, n, whole)
    # All queries are one sequence's, which sees the whole prefix; the sinks are the other part's.
    rows = q[None] if packed else q.reshape(1, -1, *q.shape[2:])
    out_a, lse_a = ATTENTION_KVCACHE(rows, *first, of_prefix)
    out_b, lse_b = ATTENTION_KVCACHE(q, *rest, of_rest)
    if packed:
        return merge_attention(out_b, lse_b, out_a[0], lse_a[0])
    batch, seq = q.shape[:2]
    lse_a = lse_a[0].unflatten(1, (batch, seq)).transpose(0, 1)
    return merge_attention(out_b, lse_b, out_a.view(out_b.shape), lse_a)


def _watches(call: Call, prefix: int, whole: int, n: dict[str, int]) -> tuple[Watch, Watch, Watch]:
    """How to look at all keys, at those of the prefix, and at the rest, whose lengths begin behind the prefix."""
    cache = cache_of(call)
    columns, pages = (0, 0) if cache.block_table is None else (cache.block_table.shape[1], whole // n["page_size"])
    one = watch_of("attention_shared_prefix")._replace(columns=columns)
    least = prefix + (n["seq_q"] if call.causal and cache.cu_q is None else 0)
    return one._replace(fewest=least), one, one._replace(fewest=least - whole, shift=pages)


Part = tuple[torch.Tensor, torch.Tensor, Call]


def _parts(k: torch.Tensor, v: torch.Tensor, call: Call, n: dict[str, int], prefix: int) -> tuple[Part, Part]:
    """(k, v, call) of the prefix, which is sequence 0's, and of what follows it in each sequence."""
    cache = cache_of(call)._replace(more=-prefix)
    table, index = cache.block_table, cache.batch_index
    alone, of_first = Cache(splits=cache.splits), call._replace(causal=False, sinks=None)
    if table is not None:
        pages = prefix // n["page_size"]
        first = of_first._replace(source=alone._replace(block_table=table[:1, :pages]))
        return (k, v, first), (k, v, call._replace(source=cache._replace(block_table=table[:, pages:])))
    rest = k[:, prefix:], v[:, prefix:], call._replace(source=cache)
    if index is not None:
        first = of_first._replace(source=alone._replace(batch_index=index[:1]))
        return (k[:, :prefix], v[:, :prefix], first), rest
    of_one = Scales(*(t[:1] if t is not None and t.dim() == 2 else t for t in call.scales))  # one cache is looked at
    return (k[:1, :prefix], v[:1, :prefix], of_first._replace(source=alone, scales=of_one)), rest


def _check_values(call: Call, prefix: int, whole: int, n: dict[str, int]) -> None:
    """Only in the interpreter, where reading costs nothing: every query lies behind the prefix, which is everyone's."""
    cache = cache_of(call)
    new = [n["seq_q"]] * n["batch"] if cache.cu_q is None else cache.cu_q.diff().tolist()
    for b, (length, more) in enumerate(zip(cache.lengths.tolist(), new, strict=True)):  # type: ignore[union-attr]
        if length > n["capacity"]:
            raise ValueRangeError(f"cache_seqlens[{b}] is {length}, the cache has room for {n['capacity']} keys")
        least = prefix + (more if call.causal else 0)
        if more and length < least:
            raise ValueRangeError(f"cache_seqlens[{b}] is {length}, expected at least {least}: the prefix of {prefix} "
                                  f"keys{' and its own queries' if call.causal else ''}")  # fmt: skip
    if cache.block_table is not None:
        pages = whole // n["page_size"]
        for b, row in enumerate(cache.block_table[:, :pages].tolist()):
            if new[b] and row != cache.block_table[0, :pages].tolist():
                raise ValueRangeError(f"block_table[{b}] begins with pages {row}, expected those of sequence 0")


def _fake(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    call: Call,
    prefix: int,
    cascade: bool | None,
    *others: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = cached_shapes(_sizes(q, k_cache, v_cache, call, prefix, cascade), cache_of(call))
    return q.new_empty(out), q.new_empty(lse, dtype=torch.float32)


ATTENTION_SHARED_PREFIX = Operation(
    "attention_shared_prefix",
    _forward,
    _fake,
    "attention_shared_prefix passes no gradients",
    lambda q, k, v, call, *others: check_options(call),
    (Cache, Scales),
)
