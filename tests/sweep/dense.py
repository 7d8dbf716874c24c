"""Dense attention: `attention`, `attention_varlen` and flash_attn's functions, forward and backward."""

import random
from typing import Any

from .axes import Family, never
from .context import FORMS
from .dense_run import run
from .sizes import DIMS, WINDOWS, dims_of_heads, lengths, window_of

FLASH = {"flash", "flash_kv", "flash_qkv", "flash_varlen", "flash_varlen_kv", "flash_varlen_qkv"}
PACKED = {"varlen", "flash_varlen", "flash_varlen_kv", "flash_varlen_qkv"}
APIS = ("bshd", "bhsd", "varlen", *sorted(FLASH))
TOGETHER = {"flash_kv", "flash_qkv", "flash_varlen_kv", "flash_varlen_qkv"}
MASKS = ("off", "full", "row", "head", "batch")


def sizes(rng: random.Random, o: dict[str, Any], dims: dict[str, Any], most: int) -> dict[str, Any]:
    """Lengths of queries and keys, of each sequence where they are packed."""
    packed = o["api"] in PACKED
    if max(dims.values()) > 128 or o["group"] > 4:
        most = most // 2
    if most >= 600 and o["group"] <= 4 and rng.random() < 0.03:  # what only long sequences are given
        n = rng.choice((1024, 2048, 2049, rng.randint(1000, 2100)))
        q, k = [n], [n if "qkv" in o["api"] or rng.random() < 0.5 else rng.randint(1000, 2100)]
        return {"batch": 1, "q": q, "k": k, "kv": 1, "spare": 0, "window": window_of(rng, o["window"], n),
                "scale": 0.3 if o["scale"] else None}  # fmt: skip
    count = rng.randint(1, 4) if packed else 1
    q = lengths(rng, most, count)
    k = list(q) if "qkv" in o["api"] or rng.random() < 0.3 else lengths(rng, most, count)
    return {
        "batch": count if packed else rng.choice((1, 1, 2, 3)),
        "q": q,
        "k": k,
        "kv": rng.choice((1, 1, 2, 3)),
        "spare": rng.choice((0, 0, 1, 5)) if packed else 0,
        "window": window_of(rng, o["window"], most),
        "scale": rng.choice((0.3, 1.0, 0.08)) if o["scale"] else None,
    }


def _clashes() -> tuple[Any, ...]:
    flash_only_without = [("bias", MASKS[1:]), ("mask", MASKS[1:]), ("score_mod", ("near", "bent", "table")),
                          ("mask_mod", ("thirds", "document")), ("grad", ("lse",)), ("nondeterministic", (True,))]  # fmt: skip
    rules = [never("api", FLASH, axis, values) for axis, values in flash_only_without]
    rules += [
        never("api", PACKED, "nondeterministic", {True}),
        never("api", TOGETHER, "dim_v", {"less", "1", "odd", "64", "128", "256"}),
        never("api", {"flash_qkv", "flash_varlen_qkv"}, "group", {4, 7, 8}),
        never("api", TOGETHER, "sinks", {"same", "fp32"}),
        never("grad", {"none"}, "more_grads", {True}),
        never("grad", {"none"}, "nondeterministic", {True}),
        never("dropout", {True}, "dim_v", {"1"}),
        never("dropout", {True}, "dim", {"1", "tiny"}),
        never("lse", {False}, "grad", {"lse"}),
        never("api", TOGETHER, "more_grads", {True}),
        # one query a row sees all keys or few: a mask that shares rows has nothing to do with a window's
    ]
    return tuple(rules)


DENSE = Family(
    "dense",
    {
        "api": APIS,
        "dtype": ("fp16", "bf16", "fp32"),
        "dim": DIMS,
        "dim_v": ("same", "less", "1", "odd", "64", "128", "256"),
        "group": (1, 4, 7, 8),
        "form": FORMS,
        "causal": (False, True),
        "window": WINDOWS,
        "scale": (False, True),
        "softcap": (False, True),
        "alibi": ("off", "heads", "batch"),
        "bias": MASKS,
        "mask": MASKS,
        "sinks": ("off", "same", "fp32"),
        "score_mod": ("off", "near", "bent", "table"),
        "mask_mod": ("off", "thirds", "document"),
        "lse": (False, True),
        "grad": ("none", "out", "lse"),
        "more_grads": (False, True),
        "nondeterministic": (False, True),
        "dropout": (False, True),
    },
    run,
    sizes,
    dims_of_heads,
    _clashes(),
)
