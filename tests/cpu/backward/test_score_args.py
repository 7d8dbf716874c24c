"""Gradients of the tensors that a score_mod reads: against fp64, the same bits every run, and what is refused by name."""

import pytest
import torch
import triton
import triton.language as tl

import tilefold
from cases import qkv, rand, relative, relative_twin
from cases import loads as mods
from cases.gradient import check_gradients
from sources import run_source
from tilefold import PlanError, Unsupported
from tilefold.ops.loads import loads_of

pytestmark = pytest.mark.interpreter
HEAD = "(score, batch, head, q_index, kv_index, args):\n"
HEADS, SEQ_Q, SEQ_K = 4, 37, 45


def leaf(*shape, dtype=torch.float32):
    return rand(*shape, dtype=dtype).requires_grad_()


def args_of(name, dtype=torch.float32):
    """(mod, its args, its twin)."""
    table = leaf(HEADS, SEQ_Q, SEQ_K, dtype=dtype)
    columns = torch.randperm(SEQ_K, dtype=torch.int32)
    args = {
        "by_head": (leaf(HEADS, dtype=dtype),),
        "relative": (leaf(HEADS, 17, dtype=dtype), 8),
        "bucketed": (leaf(8, HEADS, dtype=dtype), HEADS),
        "by_index": (table, *table.stride()),
        "tempered": (rand(1, dtype=dtype)[0].requires_grad_(),),
        "mixed": (leaf(HEADS, dtype=dtype), leaf(SEQ_K, dtype=dtype), columns, 21),
    }[name]
    if name == "relative":
        return relative, args, relative_twin
    return getattr(mods, name), args, getattr(mods, f"{name}_twin")


def checked(name, q, k, v, dtype=torch.float32, **options):
    mod, args, twin = args_of(name, dtype)
    unjudged = ("dargs[0]",) if name == "tempered" else ()
    check_gradients(q, k, v, score_mod=mod, score_args=args, twins={"score_mod": twin}, unjudged=unjudged, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["by_head", "relative", "bucketed", "by_index", "tempered", "mixed"])
def test_gradients(name, dtype):
    checked(name, *qkv(2, SEQ_Q, SEQ_K, HEADS, 2, 16, dtype=dtype), dtype, causal=name == "bucketed")


OPTIONS = {
    "everything else": {"softcap": 20.0, "window": (30, 5), "sinks": True, "mask": True, "alibi_slopes": True, "bias": True},
    "layout": {"layout": "bhsd", "causal": True},
    "odd dims": {"dims": (24, 40), "scale": 0.3},
    "one tile": {"tile": (64, 64)},
    "boxes": {"kernel": "attention_backward_box"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_beside_other_options(options):
    options = dict(options)
    q, k, v = qkv(2, SEQ_Q, SEQ_K, HEADS, 1, *options.pop("dims", (16, 16)))
    if options.get("layout"):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    made = {
        "sinks": lambda: rand(HEADS), "mask": lambda: torch.rand(2, 1, SEQ_Q, SEQ_K) > 0.3, "bias": lambda: rand(1, 1, 1, SEQ_K),
        "alibi_slopes": lambda: torch.rand(HEADS) * 0.1,
    }  # fmt: skip
    checked("mixed", q, k, v, **{name: made[name]() if value is True and name in made else value for name, value in options.items()})
