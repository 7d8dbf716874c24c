"""`context_parallel`: inside it, `tilefold.attention` takes tokens that are sharded over ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from ..errors import DtypeError, Unsupported, ValueRangeError
from ..ops import route
from ..ops.call import Call
from ..plan.parallel.plan import SCHEMES
from ..plan.parallel.problem import Links
from ..plan.parallel.sharding import Sharding
from .calls import eager_attention
from .compiled import compiled_attention
from .group import check_sharding, ranks_of
from .job import OWN, Setting, check_kernels, number_for, wanted
from .local import Kernels

_DEFAULT = Call()
_SERVED = ("causal", "window", "scale", "softcap", "layout", "deterministic")


@contextmanager
def context_parallel(
    group: Any,
    sharding: Sharding,
    *,
    scheme: str = "auto",
    links: Links | None = None,
    kernels: Kernels | None = None,
) -> Iterator[None]:
    """Inside it, every `tilefold.attention(q, k, v, ...)` is `tilefold.parallel.attention(q, k, v, sharding, ...)`.

    Nothing is patched: `tilefold.attention` itself looks whether such a context is open, so calls by `tilefold.register()` and
    `tilefold.compat` that end there are routed as well.  It is open for the process, all threads: calls that activation
    checkpointing repeats during the backward pass go the same way, so keep the context open around backward() where there are
    checkpoints.

    group: a ProcessGroup, DeviceMesh (mesh["cp"], or two dimensions: nodes, ranks of a node) or Ranks.
    sharding, scheme, links, kernels: as for `tilefold.parallel.attention`.

    A call whose tokens are not those of this rank, a packed call (give the sequences to `shard` instead), e4m3 tensors, and
    arguments other than causal, window, scale, softcap, deterministic and layout raise ShapeError or Unsupported: nothing is
    computed on one rank's tokens as if they were all.  Other functions, `attention_kvcache` and the sparse ones, are not
    concerned."""
    ranks = ranks_of(group)
    check_sharding(sharding, ranks)
    if scheme not in ("auto", *SCHEMES):
        raise ValueRangeError(f"scheme must be 'auto' or one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    if links is not None and not isinstance(links, Links):
        raise DtypeError(f"links must be a Links or None, got {type(links).__name__}")
    check_kernels(kernels or OWN)
    setting = Setting(ranks, sharding, sharding, scheme, links, kernels or OWN)
    route.STACK.append(("context_parallel", _route(setting)))
    try:
        yield
    finally:
        route.STACK.pop()


@lru_cache(maxsize=256)
def _route(setting: Setting) -> route.Route:
    """The same function for equal settings: a compiled program is kept when the context is opened again."""
    number = number_for(setting)

    def go(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        for name, value, default in zip(Call._fields, call, _DEFAULT, strict=True):
            if name not in _SERVED and not (value is default or (type(value) is type(default) and value == default)):
                what = "packed sequences (give them to `shard` instead)" if name == "source" else name
                raise Unsupported(f"{what} inside context_parallel: served are {', '.join(sorted(_SERVED))}")
        if call.layout not in ("bshd", "bhsd"):
            raise ValueRangeError(f"layout must be 'bshd' or 'bhsd', got {call.layout!r}")
        if call.layout == "bhsd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = call.causal, call.window, call.scale, call.softcap, call.deterministic
        if torch.compiler.is_compiling():
            out, lse = compiled_attention(q, k, v, number, wanted(q, k, v), *scores)
        else:
            out, lse = eager_attention(setting, q, k, v, scores)
        return (out.transpose(1, 2) if call.layout == "bhsd" else out), lse

    return go
