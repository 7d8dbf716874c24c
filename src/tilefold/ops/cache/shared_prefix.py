"""Attention of a batch whose sequences begin with the same keys: the prefix once for all queries, each rest apart, merged."""

from typing import Any, NamedTuple

import torch

from ...errors import DtypeError, Unsupported, ValueRangeError
from ..call import Call, check_integer, check_options
from ..device import device_of, on_host
from ..faults import Mode, Watch, watch_of
from ..numerics import is_invariant
from ..operator import Operation
from ..records import recorded
from ..serve import function_at
from ..source import Cache, Scales, facts_of_values
from ..watch import refuse_at_once
from .cached_call import cache_of, cached_shapes, check_contents
from .decode import storage_of
from .kvcache import ATTENTION_KVCACHE, sizes_of
from .merge import merge_attention


class SharedPrefix(NamedTuple):
    """What `attention_shared_prefix` takes beside q and the caches, in the operator's order."""

    lengths: torch.Tensor
    block_table: torch.Tensor | None
    batch_index: torch.Tensor | None
    cu_q: torch.Tensor | None
    sinks: torch.Tensor | None
    prefix: int
    max_q: int
    causal: bool
    scale: float | None
    softcap: float
    splits: int
    cascade: bool | None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    numerics: str = ""

    @property
    def call(self) -> Call:
        """Over all keys, as a plain call has it."""
        cache = Cache(lengths=self.lengths, batch_index=self.batch_index, block_table=self.block_table, cu_q=self.cu_q,
                      max_q=self.max_q, splits=self.splits)  # fmt: skip
        return Call(self.causal, None, self.scale, self.softcap, sinks=self.sinks, source=cache,
                    scales=Scales(k=self.k_scale, v=self.v_scale), numerics=self.numerics)  # fmt: skip


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: SharedPrefix, check: Mode = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse); see `tilefold.attention_shared_prefix`."""
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sinks": given.sinks, "k_scale": given.k_scale,
             "v_scale": given.v_scale}  # fmt: skip
    refuse_at_once(named, "attention_shared_prefix passes none: call it under torch.no_grad()")
    return ATTENTION_SHARED_PREFIX(q, k_cache, v_cache, given, check is True, check == "device")  # type: ignore[no-any-return]


def plan_of(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: SharedPrefix) -> Any:
    """The SharedPrefixPlan of a call, whose `cascade` a caller's overrides."""
    return _plan(q, k_cache, given, _sizes(q, k_cache, v_cache, given))


def _plan(q: torch.Tensor, k: torch.Tensor, given: SharedPrefix, n: dict[str, int]) -> Any:
    from ...plan.cache.shared_prefix import PrefixProblem, plan_shared_prefix

    tokens = q.shape[0] if given.cu_q is not None else n["batch"] * n["seq_q"]
    dtype = str(q.dtype).removeprefix("torch.")
    shape = (
        n["batch"],
        tokens,
        n["heads"],
        n["kv_heads"],
        n["dim_qk"],
        n["dim_v"],
        _whole(given, n),
        dtype,
        storage_of(q, k),
    )
    return plan_shared_prefix(PrefixProblem(*shape), device_of(q.device))


@recorded(
    "attention_shared_prefix", lambda q, k, v, given: (facts_of_values(q, k, v, *given), is_invariant(given.numerics))
)
def _decided(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: SharedPrefix
) -> tuple[dict[str, int], bool]:
    """(sizes, whether the prefix is attended to apart), found once for calls of a kind."""
    n = _sizes(q, k_cache, v_cache, given)
    empty = _whole(given, n) == 0 or q.numel() == 0 or n["batch"] == 0
    apart = given.cascade
    if is_invariant(given.numerics):
        if apart:
            raise Unsupported(
                'cascade=True with numerics="invariant": a merge of two finished results has other bits than one fold; leave it '
                "None"
            )
        apart = False
    if apart is None:  # without launches keys that are read once are always cheaper
        direct = function_at("attention_kvcache", q.device) is not None
        apart = not empty and (direct or _plan(q, k_cache, given, n).cascade)
    return n, apart and not empty


def _sizes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: SharedPrefix) -> dict[str, int]:
    """Everything that is wrong with a call; sizes of its dimensions."""
    if not isinstance(given.lengths, torch.Tensor):
        raise DtypeError(f"cache_seqlens must be a torch.Tensor, got {type(given.lengths).__name__}")
    if given.cascade is not None and not isinstance(given.cascade, bool):
        raise DtypeError(f"cascade must be a bool or None, got {given.cascade!r}")
    check_integer("prefix_length", given.prefix)
    n = sizes_of(q, k_cache, v_cache, given.call)
    if not 0 <= given.prefix <= n["capacity"]:
        raise ValueRangeError(
            f"prefix_length is {given.prefix}, expected 0 to {n['capacity']}, the capacity of the cache"
        )
    return n


def _whole(given: SharedPrefix, n: dict[str, int]) -> int:
    """Keys of the prefix that are attended to apart: whole pages; the others belong to each sequence's rest."""
    return given.prefix // n["page_size"] * n["page_size"] if given.block_table is not None else given.prefix


def _forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: SharedPrefix, checked: bool, watched: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """checked, watched: index tensors are looked at on the host, or on the device."""
    n, apart = _decided(q, k_cache, v_cache, given)
    if checked or (on_host(q) and not watched):
        _check_values(given, n)
    of_all, of_prefix, of_rest = _watches(given, n) if watched else (checked, False, False)
    if checked and apart:
        check_contents(n, q, k_cache, given.call)
    if not apart:
        return ATTENTION_KVCACHE(q, k_cache, v_cache, given.call, of_all)  # type: ignore[no-any-return]
    first, rest = _parts(k_cache, v_cache, given, n, _whole(given, n))
    # All queries are one sequence's, which sees the whole prefix; the sinks are the other part's.
    rows = q[None] if given.cu_q is not None else q.reshape(1, -1, *q.shape[2:])
    out_a, lse_a = ATTENTION_KVCACHE(rows, *first, of_prefix)
    out_b, lse_b = ATTENTION_KVCACHE(q, *rest, of_rest)
    if given.cu_q is not None:
        return merge_attention(out_b, lse_b, out_a[0], lse_a[0])
    batch, seq = q.shape[:2]
    lse_a = lse_a[0].unflatten(1, (batch, seq)).transpose(0, 1)
    return merge_attention(out_b, lse_b, out_a.view(out_b.shape), lse_a)


def _watches(given: SharedPrefix, n: dict[str, int]) -> tuple[Watch, Watch, Watch]:
    """How to look at all keys, at those of the prefix, and at the rest, whose lengths begin behind the prefix."""
    columns = 0 if given.block_table is None else given.block_table.shape[1]
    one = watch_of("attention_shared_prefix")._replace(columns=columns)
    new = n["seq_q"] if given.causal and given.cu_q is None else 0
    whole = _whole(given, n)
    pages = whole // n["page_size"] if given.block_table is not None else 0
    least = given.prefix + new
    return one._replace(fewest=least), one, one._replace(fewest=least - whole, shift=pages)


Part = tuple[torch.Tensor, torch.Tensor, Call]


def _parts(k: torch.Tensor, v: torch.Tensor, given: SharedPrefix, n: dict[str, int], prefix: int) -> tuple[Part, Part]:
    """(k, v, call) of the prefix, which is sequence 0's, and of what follows it in each sequence."""
    call, table, index = given.call, given.block_table, given.batch_index
    alone, of_first = Cache(splits=given.splits), call._replace(causal=False, sinks=None)
    cache = cache_of(call)._replace(more=-prefix)
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


def _check_values(given: SharedPrefix, n: dict[str, int]) -> None:
    """Only in the interpreter, where reading costs nothing: every query lies behind the prefix, which is everyone's."""
    new = [n["seq_q"]] * n["batch"] if given.cu_q is None else given.cu_q.diff().tolist()
    for b, (length, more) in enumerate(zip(given.lengths.tolist(), new, strict=True)):
        if length > n["capacity"]:
            raise ValueRangeError(f"cache_seqlens[{b}] is {length}, the cache has room for {n['capacity']} keys")
        least = given.prefix + (more if given.causal else 0)
        if more and length < least:
            raise ValueRangeError(f"cache_seqlens[{b}] is {length}, expected at least {least}: the prefix of {given.prefix} "
                                  f"keys{' and its own queries' if given.causal else ''}")  # fmt: skip
    if given.block_table is not None:
        pages = _whole(given, n) // n["page_size"]
        for b, row in enumerate(given.block_table[:, :pages].tolist()):
            if new[b] and row != given.block_table[0, :pages].tolist():
                raise ValueRangeError(f"block_table[{b}] begins with pages {row}, expected those of sequence 0")


def _fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, given: SharedPrefix, *others: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = cached_shapes(_sizes(q, k_cache, v_cache, given), cache_of(given.call))
    return q.new_empty(out), q.new_empty(lse, dtype=torch.float32)


ATTENTION_SHARED_PREFIX = Operation(
    "attention_shared_prefix",
    _forward,
    _fake,
    "attention_shared_prefix passes no gradients",
    lambda q, k, v, given, *others: check_options(given.call),
)
