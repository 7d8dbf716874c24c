"""Random problems of every planner: plans that are made of them, by kind.  Needs hypothesis."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tilefold.plan import (
    DEVICES,
    AttentionProblem,
    DecodeProblem,
    PrefixProblem,
    SparseProblem,
    device_named,
    plan_attention,
    plan_attention_backward,
    plan_attention_fp8,
    plan_decode,
    plan_forward,
    plan_shared_prefix,
    plan_sparse,
    plan_sparse_backward,
    plan_splits,
)
from tilefold.plan.decode import STORAGES
from tilefold.plan.dispatch import POLICIES
from tilefold.plan.flash_split import CALLS
from tilefold.plan.matrix.conv import ConvProblem, plan_conv
from tilefold.plan.matrix.eight import EightProblem, plan_eight
from tilefold.plan.matrix.lowbit import BITS, ZEROS, LowbitProblem, plan_lowbit
from tilefold.plan.matrix.matmul import plan_matmul
from tilefold.plan.matrix.problem import MatmulProblem
from tilefold.plan.matrix.transpose import TransposeProblem, plan_transpose
from tilefold.plan.parallel import plan_parallel
from tilefold.plan.parallel_problem import Links, ParallelProblem
from tilefold.plan.select import SelectProblem, plan_select

__all__ = ["KINDS"]

flags = st.booleans()
seldom = st.integers(0, 7).map(lambda n: n == 7)
halves = st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"])
# Hopper has most of the rules.
devices = st.sampled_from([*DEVICES, *["h100", "h200"] * 4]).map(device_named)


def sizes(most: int, least: int = 0) -> st.SearchStrategy[int]:
    """As many small numbers as large ones, and the round ones that real problems have."""
    powers = [1 << n for n in range(most.bit_length()) if least <= 1 << n <= most]
    return st.one_of(st.sampled_from(powers), *(st.integers(least, min(top, most)) for top in (64, 1024, most)))


@st.composite
def attentions(draw: Callable[..., Any], **fixed: Any) -> AttentionProblem:
    """Dense problems, one in four packed."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    dim = draw(st.sampled_from([64, 128, 128, 40, 96, 192, 256]))
    scores = draw(
        st.sampled_from([(), (), (), ("softcap",), ("alibi",), ("bias",), ("softcap", "alibi", "bias", "user")])
    )
    fields = {
        "batch": draw(sizes(64, 1)),
        "seq_q": draw(sizes(16384)),
        "seq_k": draw(sizes(131072)),
        "heads": heads * draw(st.sampled_from([1, 1, 4, 7, 8])),
        "kv_heads": heads,
        "dim_qk": dim,
        "dim_v": draw(st.sampled_from([dim, dim, dim, 64, 128, 256])),
        "dtype": draw(halves),
        "causal": draw(flags),
        "window": draw(st.sampled_from([(-1, -1), (-1, -1), (-1, -1), (255, 0), (128, 128)])),
        "varlen": draw(st.integers(0, 3)) == 3,
        "score_mods": scores,
        "mask_mods": draw(st.sampled_from([(), (), (), ("mask",)])),
        "sinks": draw(seldom),
        "descriptors": not draw(seldom),
        "query_descriptors": not draw(seldom),
        "dropout": draw(seldom),
        "bias_descriptors": "tiles" if "bias" in scores and draw(flags) else "",
        **fixed,
    }
    return AttentionProblem(**fields)


plain = attentions(score_mods=(), mask_mods=(), sinks=False, dropout=False, bias_descriptors="")
decoding = attentions(
    score_mods=(), mask_mods=(), sinks=False, causal=False, dropout=False, bias_descriptors="", varlen=False
)


@st.composite
def sparses(draw: Callable[..., Any]) -> SparseProblem:
    """Lists over dense, packed and paged keys; one in three of a few query blocks, as in decoding."""
    attention = draw(plain) if draw(st.integers(0, 3)) else draw(attentions())
    if draw(st.integers(0, 2)) == 0:
        attention = AttentionProblem(
            1, 64 * draw(st.integers(1, 4)), attention.seq_k, 12, draw(st.sampled_from([3, 12])), 128, 128
        )
    page = 0 if attention.varlen else draw(st.sampled_from([0, 0, 0, 16, 64]))
    blocks = st.sampled_from([64, 64, 128, 32])
    return SparseProblem(
        attention, draw(blocks), draw(blocks), draw(sizes(512)), draw(seldom), not draw(seldom), page, draw(seldom)
    )


@st.composite
def split_decisions(draw: Callable[..., Any]) -> Any:
    problem, call = draw(attentions(mask_mods=(), sinks=False)), draw(st.sampled_from(CALLS))
    cache = call == "kvcache"
    return plan_splits(
        problem, draw(devices), draw(st.sampled_from(POLICIES)), call=call,
        capacity=problem.seq_k + draw(st.sampled_from([0, 0, 128, 4096])) if cache else None,
        paged=call != "dense" and draw(seldom), append=cache and draw(seldom),
        splits=draw(st.sampled_from([0, 0, 0, 1, 2, 7])) if cache else 0,
    )  # fmt: skip


@st.composite
def matmuls(draw: Callable[..., Any]) -> Any:
    eight = draw(seldom)
    problem = MatmulProblem(
        draw(st.sampled_from([1, 1, 2, 32])), draw(sizes(8192)), draw(sizes(8192)), draw(sizes(16384)),
        "float8_e4m3fn" if eight else draw(halves), b_major="k" if eight or draw(flags) else "n", fold=draw(seldom),
        activation=draw(st.sampled_from(["none", "gelu"])), descriptors=not draw(seldom),
    )  # fmt: skip
    return plan_matmul(problem, draw(devices), draw(st.sampled_from(["grouped", "plain"])), draw(seldom))


@st.composite
def convolutions(draw: Callable[..., Any]) -> Any:
    side, taps, groups = draw(sizes(128, 1)), draw(st.sampled_from([1, 3, 7])), draw(st.sampled_from([1, 1, 1, 4, 64]))
    stride, pad = draw(st.sampled_from([1, 1, 2])), taps // 2
    out = (side + 2 * pad - taps) // stride + 1
    problem = ConvProblem(
        draw(sizes(64, 1)), groups * draw(sizes(512, 1)), side, side, groups * draw(sizes(512, 1)), (taps, taps), (out, out),
        (stride, stride), (pad, pad), groups=groups, dtype=draw(halves), x_last=draw(flags), y_last=draw(flags),
    )  # fmt: skip
    return plan_conv(problem, draw(devices), draw(st.sampled_from(["auto", "auto", "auto", "im2col", "implicit"])))


@st.composite
def transposes(draw: Callable[..., Any]) -> Any:
    rows, columns, size = draw(sizes(8192, 1)), draw(sizes(8192, 1)), draw(st.sampled_from([1, 2, 4, 8]))
    row = draw(st.sampled_from([columns, columns, columns + 1, -columns, 0]))
    strides = (row, draw(st.sampled_from([1, 1, 1, 2])))
    return plan_transpose(TransposeProblem(rows, columns, size, strides, not draw(seldom)), draw(devices))


@st.composite
def parallels(draw: Callable[..., Any]) -> Any:
    per_node, nodes = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2, 3]))
    kv_heads = draw(st.sampled_from([1, 2, 8, 12]))
    tokens = draw(sizes(1 << 20))
    problem = ParallelProblem(
        draw(sizes(4, 1)), tokens, tokens, kv_heads * draw(st.sampled_from([1, 4])), kv_heads, 128, 128,
        window=draw(st.sampled_from([(-1, -1), (-1, 0), (1024, 0)])), kind=draw(st.sampled_from(["contiguous", "zigzag"])),
        backward=draw(flags), deterministic=draw(flags),
    )  # fmt: skip
    memory = draw(st.sampled_from([None, None, 1 << 30, 1 << 34]))
    return plan_parallel(problem, Links(per_node * nodes, per_node, memory=memory))


def lowbits() -> st.SearchStrategy[Any]:
    groups, scales = st.sampled_from([128, 64, 24, 1 << 20]), st.sampled_from(["bfloat16", "float32"])
    sides = sizes(2048), sizes(16384, 1), sizes(16384, 1)
    aligned = seldom.map(lambda no: not no)
    problems = st.builds(
        LowbitProblem, *sides, st.sampled_from(BITS), groups, st.sampled_from(ZEROS), halves, scales, aligned, flags
    )
    return st.builds(plan_lowbit, problems, devices)


def eights() -> st.SearchStrategy[Any]:
    kinds = st.sampled_from(["int8", "float8_e4m3fn"])
    problems = st.builds(
        EightProblem, sizes(8192), sizes(16384, 1), sizes(16384, 1), kinds, seldom.map(lambda no: not no)
    )
    return st.builds(plan_eight, problems, devices, seldom)


def decodes() -> st.SearchStrategy[Any]:
    problems = st.builds(
        DecodeProblem, decoding, st.sampled_from(STORAGES), st.sampled_from([0, 0, 16, 64, 256]), st.just(False), flags
    )
    return st.builds(plan_decode, problems, devices, st.sampled_from([0, 0, 0, 1, 2, 4, 16]))


def prefixes() -> st.SearchStrategy[Any]:
    problems = st.builds(
        PrefixProblem,
        sizes(64, 1),
        sizes(64, 1),
        st.just(32),
        st.sampled_from([4, 8, 32]),
        st.just(128),
        st.just(128),
        sizes(65536),
        halves,
    )
    return st.builds(plan_shared_prefix, problems, devices)


KINDS: dict[str, st.SearchStrategy[Any]] = {
    "attention": st.builds(plan_attention, attentions(), devices, seldom),
    "forward": st.builds(plan_forward, attentions(), devices, seldom),
    "splits": split_decisions(),
    "decode": decodes(),
    "backward": st.builds(plan_attention_backward, attentions(), devices, deterministic=flags, portable=seldom),
    "plain backward": st.builds(plan_attention_backward, plain, devices, deterministic=flags),
    "sparse": st.builds(plan_sparse, sparses(), devices, seldom),
    "sparse backward": st.builds(plan_sparse_backward, sparses(), devices, seldom),
    "fp8": st.builds(plan_attention_fp8, attentions(
        dtype="bfloat16", score_mods=(), mask_mods=(), sinks=False, dropout=False, varlen=False, bias_descriptors=""
    ), devices, seldom),
    "shared prefix": prefixes(),
    "select": st.builds(
        plan_select, st.builds(SelectProblem, sizes(4, 1), sizes(16, 1), sizes(512), sizes(8192), flags), devices
    ),
    "matmul": matmuls(),
    "eight": eights(),
    "lowbit": lowbits(),
    "conv": convolutions(),
    "transpose": transposes(),
    "parallel": parallels(),
}  # fmt: skip
