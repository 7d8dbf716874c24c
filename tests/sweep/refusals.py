"""Calls that the documents refuse: each raises one of tilefold's errors, before anything is written."""

import random
from collections.abc import Callable
from typing import Any

import torch

import tilefold
from tilefold import sparse

from .axes import Family
from .context import Context
from .dense_run import DTYPES


class Given:
    """Small tensors to call with, of one dtype."""

    def __init__(self, ctx: Context, dtype: torch.dtype, s: dict[str, Any]) -> None:
        self.ctx, self.dtype, n, d = ctx, dtype, s["n"], s["d"]
        self.q, self.k, self.v = (
            ctx.normal(2, n, 4, d, dtype=dtype),
            ctx.normal(2, n, 2, d, dtype=dtype),
            ctx.normal(2, n, 2, d, dtype=dtype),
        )
        self.a, self.b = ctx.normal(n, d, dtype=dtype), ctx.normal(d, n, dtype=dtype)
        self.other = torch.float16 if dtype != torch.float16 else torch.float32
        self.ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=ctx.device)
        self.eight = (
            self.q.float().to(torch.float8_e4m3fn),
            self.k.float().to(torch.float8_e4m3fn),
            self.v.float().to(torch.float8_e4m3fn),
        )
        self.index = tilefold.BlockIndex.from_map(torch.ones(1, 1, -(-n // 64), -(-n // 64), dtype=torch.bool, device=ctx.device),
                                                  seq_q=n, seq_k=n)  # fmt: skip


def attend(g: Given, *tensors: Any, **options: Any) -> Any:
    return tilefold.attention(*(tensors or (g.q, g.k, g.v)), **options)


def wants(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_()


def cached(g: Given, **options: Any) -> Any:
    return tilefold.attention_kvcache(g.q, g.k, g.v, **options)


def appended(g: Given, **options: Any) -> Any:
    return tilefold.kvcache_append(g.k, g.v, g.k.clone(), g.v.clone(), **{"cache_seqlens": g.ints(0, 0), **options})


CASES: dict[str, Callable[[Given], Any]] = {
    "heads not a multiple": lambda g: attend(g, g.q[:, :, :3], g.k, g.v),
    "another dtype": lambda g: attend(g, g.q, g.k.to(g.other), g.v),
    "another length of v": lambda g: attend(g, g.q, g.k, torch.cat([g.v, g.v], 1)),
    "another dim of k": lambda g: attend(g, g.q, torch.cat([g.k, g.k], 3), g.v),
    "three dimensions": lambda g: attend(g, g.q[0], g.k, g.v),
    "dim 0": lambda g: attend(g, g.q[..., :0], g.k[..., :0], g.v),
    "dim 257": lambda g: attend(g, *(g.ctx.normal(1, 3, 1, 257, dtype=g.dtype) for _ in "qkv")),
    "last dimension not contiguous": lambda g: attend(g, torch.stack([g.q, g.q], -1)[..., 0], g.k, g.v),
    "scale 0": lambda g: attend(g, scale=0.0),
    "scale below 0": lambda g: attend(g, scale=-1.0),
    "softcap below 0": lambda g: attend(g, softcap=-1.0),
    "layout": lambda g: attend(g, layout="sbhd"),
    "window of three": lambda g: attend(g, window=(1, 2, 3)),
    "dropout of 1": lambda g: attend(g, dropout_p=1.0),
    "dropout below 0": lambda g: attend(g, dropout_p=-0.1),
    "slopes of a dtype": lambda g: attend(g, alibi_slopes=torch.ones(4, dtype=torch.float64, device=g.q.device)),
    "slopes of another shape": lambda g: attend(g, alibi_slopes=torch.ones(3, device=g.q.device)),
    "mask of floats": lambda g: attend(g, mask=torch.ones(1, 1, 1, g.k.shape[1], device=g.q.device)),
    "bias of another length": lambda g: attend(g, bias=torch.zeros(1, 1, 1, g.k.shape[1] + 1, device=g.q.device)),
    "sinks of another shape": lambda g: attend(g, sinks=torch.zeros(3, device=g.q.device)),
    "gradient of slopes": lambda g: attend(g, alibi_slopes=wants(torch.ones(4, device=g.q.device))),
    "return_lse of 1": lambda g: attend(g, return_lse=1),
    "deterministic of None": lambda g: attend(g, deterministic=None),
    "e4m3 with softcap": lambda g: attend(g, *g.eight, softcap=1.0),
    "e4m3 with sinks": lambda g: attend(g, *g.eight, sinks=torch.zeros(4, device=g.q.device)),
    "e4m3 with a bias": lambda g: attend(g, *g.eight, bias=torch.zeros(1, 1, 1, g.k.shape[1], device=g.q.device)),
    "descale without e4m3": lambda g: attend(g, q_descale=torch.ones(2, 4, device=g.q.device)),
    "cu_seqlens of int64": lambda g: tilefold.attention_varlen(
        g.q[0], g.k[0], g.v[0], g.ints(0, 1).long(), g.ints(0, 1), 1, 1
    ),
    "packed e4m3": lambda g: tilefold.attention_varlen(*(x[0] for x in g.eight), g.ints(0, 1), g.ints(0, 1), 1, 1),
    "int8 cache without factors": lambda g: tilefold.attention_kvcache(g.q, g.k.to(torch.int8), g.v.to(torch.int8)),
    "129 splits": lambda g: cached(g, num_splits=129),
    "splits below 0": lambda g: cached(g, num_splits=-1),
    "lengths of int64": lambda g: cached(g, cache_seqlens=g.ints(1, 1).long()),
    "pages and caches": lambda g: cached(
        g, block_table=g.ints(0, 1)[:, None], cache_seqlens=g.ints(1, 1), cache_batch_idx=g.ints(0, 1)
    ),
    "packed queries without max_seqlen_q": lambda g: tilefold.attention_kvcache(
        g.q[0], g.k, g.v, cu_seqlens_q=g.ints(0, 1, 1)
    ),
    "check: length past the cache": lambda g: cached(g, cache_seqlens=g.ints(1, 1 << 20), check=True),
    "check: page that is not": lambda g: cached(
        g, cache_seqlens=g.ints(1, 1), block_table=g.ints(0, 99)[:, None], check=True
    ),
    "window of a shared prefix": lambda g: tilefold.attention_shared_prefix(
        g.q, g.k, g.v, prefix_length=1, cache_seqlens=g.ints(1, 1), window=(1, 1)
    ),
    "factors of a float cache": lambda g: cached(
        g, k_scale=torch.ones(2, device=g.q.device), v_scale=torch.ones(2, device=g.q.device)
    ),
    "q without angles": lambda g: appended(g, q=g.q),
    "gradient into a cache": lambda g: tilefold.kvcache_append(
        wants(g.k), g.v, g.k.clone(), g.v.clone(), cache_seqlens=g.ints(0, 0)
    ),
    "one table": lambda g: appended(g, rotary_cos=torch.ones(99, 1, device=g.q.device)),
    "more pairs than channels": lambda g: appended(
        g, rotary_cos=torch.ones(99, 129, device=g.q.device), rotary_sin=torch.ones(99, 129, device=g.q.device)
    ),
    "rotary past the table": lambda g: tilefold.apply_rotary(
        g.q, *(torch.ones(1, 1, device=g.q.device),) * 2, offsets=5
    ),
    "merge of two dtypes": lambda g: tilefold.merge_attention(
        g.q,
        torch.zeros(2, 4, g.q.shape[1], device=g.q.device),
        g.q.to(g.other),
        torch.zeros(2, 4, g.q.shape[1], device=g.q.device),
    ),
    "index of other lengths": lambda g: tilefold.sparse_attention(torch.cat([g.q] * 65, 1), g.k, g.v, g.index),
    "no index": lambda g: tilefold.sparse_attention(g.q, g.k, g.v, torch.ones(1, 1, 1, 1, dtype=torch.bool)),
    "block of 48": lambda g: tilefold.BlockIndex.from_map(torch.ones(1, 1, 1, 1, dtype=torch.bool), block_q=48),
    "gradient over pages": lambda g: tilefold.sparse_attention_paged(
        wants(g.q), g.k, g.v, g.index, g.ints(0, 1)[:, None], g.ints(1, 1)
    ),
    "inner sizes": lambda g: tilefold.matmul(g.a, torch.cat([g.b, g.b])),
    "product of two dtypes": lambda g: tilefold.matmul(g.a, g.b.to(g.other)),
    "activation": lambda g: tilefold.matmul(g.a, g.b, activation="tanh"),
    "order": lambda g: tilefold.matmul(g.a, g.b, order="best"),
    "scales of floats": lambda g: tilefold.matmul(g.a, g.b, scale_a=torch.ones(1, device=g.q.device)),
    "bmm of two matrices": lambda g: tilefold.bmm(g.a, g.b),
    "same with stride 2": lambda g: tilefold.conv2d(
        g.q.transpose(1, 3), g.ctx.normal(2, g.q.shape[3], 1, 1, dtype=g.dtype), padding="same", stride=2
    ),
    "channels of a group": lambda g: tilefold.conv2d(g.q, g.ctx.normal(2, g.q.shape[1] + 1, 1, 1, dtype=g.dtype)),
    "convolution's method": lambda g: tilefold.conv2d(
        g.q, g.ctx.normal(2, g.q.shape[1], 1, 1, dtype=g.dtype), method="fft"
    ),
    "transpose's method": lambda g: tilefold.transpose(g.a, method="best"),
    "add of two shapes": lambda g: tilefold.add(g.a, torch.cat([g.a, g.a])),
    "quantise to int16": lambda g: tilefold.quantize_kv(g.k, torch.int16),
    "gate without its branch": lambda g: sparse.fuse(None, g.q, gate_coarse=torch.ones(4, device=g.q.device)),
    "select's method": lambda g: sparse.select(torch.rand(1, 1, 2, 2, device=g.q.device), method="best"),
    "coarse dense without weights": lambda g: sparse.coarse(g.q, g.k, g.v, kind="dense"),
}


def run(ctx: Context, o: dict[str, Any], dims: dict[str, Any], s: dict[str, Any]) -> None:
    g = Given(ctx, DTYPES[o["dtype"]], s)
    if o["case"] == "product of two dtypes" and DTYPES[o["dtype"]] == g.other:
        return
    try:
        CASES[o["case"]](g)
    except tilefold.TilefoldError as error:
        ctx.expect("an error says something", len(str(error)) > 10, str(error))
    else:
        ctx.expect("refused", False, f"{o['case']} was not")


def sizes(rng: random.Random, o: dict[str, Any], dims: dict[str, Any], most: int) -> dict[str, Any]:
    return {"n": rng.randint(2, 20), "d": rng.randint(2, 20)}


REFUSALS = Family("refusals", {"case": tuple(CASES), "dtype": ("fp16", "bf16", "fp32")}, run, sizes, each=1)
