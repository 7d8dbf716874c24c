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
from tilefold.plan.cache.decode import STORAGES
from tilefold.plan.cache.dispatch import POLICIES
from tilefold.plan.cache.flash_split import CALLS
from tilefold.plan.matrix.conv import ConvProblem, plan_conv
from tilefold.plan.matrix.eight import EightProblem, plan_eight
from tilefold.plan.matrix.lowbit import BITS, ZEROS, LowbitProblem, plan_lowbit
from tilefold.plan.matrix.matmul import plan_matmul
from tilefold.plan.matrix.problem import MatmulProblem
from tilefold.plan.matrix.rms_norm import RMSNormProblem, plan_rms_norm
from tilefold.plan.matrix.transpose import TransposeProblem, plan_transpose
from tilefold.plan.parallel.plan import plan_parallel
from tilefold.plan.parallel.problem import Links, ParallelProblem
from tilefold.plan.sparse.select import SelectProblem, plan_select

flags = st.booleans()
seldom = st.integers(0, 7).map(lambda n: n == 7)
mostly = seldom.map(lambda no: not no)
halves = st.sampled_from(["bfloat16", "float16"])
hoppers = st.sampled_from(["h100", "h200"]).map(device_named)
devices = st.one_of(st.sampled_from(list(DEVICES)).map(device_named), hoppers)  # sm_90 has most of the rules


def sizes(most: int, least: int = 0) -> st.SearchStrategy[int]:
    """As many small numbers as large ones, and the round ones that real problems have."""
    powers = [1 << n for n in range(most.bit_length()) if least <= 1 << n <= most]
    return st.one_of(st.sampled_from(powers), *(st.integers(least, min(top, most)) for top in (64, 1024, most)))


ANY: dict[str, Any] = {
    "batch": sizes(64, 1), "seq_q": sizes(16384), "seq_k": sizes(131072), "kv_heads": st.sampled_from([1, 2, 4, 8]),
    "group": st.sampled_from([1, 1, 4, 7, 8]), "dim_qk": st.sampled_from([64, 128, 128, 40, 90, 96, 192, 256]),
    "dim_v": st.sampled_from([0, 0, 0, 64, 128, 256]), "dtype": st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]),
    "causal": flags, "window": st.sampled_from([(-1, -1), (-1, -1), (-1, -1), (255, 0), (128, 128)]), "varlen": seldom,
    "score_mods": st.sampled_from([(), (), (), ("softcap",), ("alibi",), ("bias",), ("softcap", "alibi", "bias", "user")]),
    "mask_mods": st.sampled_from([(), (), (), ("mask",), ("prefix",)]), "sinks": seldom, "descriptors": mostly,
    "query_descriptors": mostly,
    "dropout": seldom, "bias_descriptors": st.sampled_from(["", "tiles"]),
}  # fmt: skip
PLAIN: dict[str, Any] = {"score_mods": (), "mask_mods": (), "sinks": False, "dropout": False, "window": (-1, -1)}
HALF: dict[str, Any] = {**PLAIN, "dtype": halves, "dim_qk": st.sampled_from([64, 128]), "dim_v": 0, "varlen": False}
FAST: dict[str, Any] = {**HALF, "descriptors": True, "query_descriptors": True}


@st.composite
def attentions(draw: Callable[..., Any], asked: dict[str, Any] = ANY, **changes: Any) -> AttentionProblem:
    """Dense and packed problems.  asked, changes: fields that are fixed or drawn otherwise; dim_v 0: that of Q and K."""
    fields = {**ANY, **asked, **changes}
    drawn = {name: draw(made) if isinstance(made, st.SearchStrategy) else made for name, made in fields.items()}
    drawn["heads"] = drawn["kv_heads"] * drawn.pop("group")
    drawn["dim_v"] = drawn["dim_v"] or drawn["dim_qk"]
    if "bias" not in drawn["score_mods"]:
        drawn["bias_descriptors"] = ""
    return AttentionProblem(**drawn)


@st.composite
def sparses(draw: Callable[..., Any], asked: dict[str, Any] = ANY, **changes: Any) -> SparseProblem:
    """Lists over dense, packed and paged keys."""
    attention = draw(attentions(asked, **changes))
    page = 0 if attention.varlen else draw(st.sampled_from([0, 0, 0, 16, 64]))
    blocks = st.sampled_from([64, 64, 128, 32])
    return SparseProblem(
        attention, draw(blocks), draw(blocks), draw(sizes(2048)), draw(seldom), draw(mostly), page, draw(seldom)
    )


@st.composite
def split_decisions(
    draw: Callable[..., Any], policies: tuple[str, ...] = POLICIES, calls: tuple[str, ...] = CALLS, **changes: Any
) -> Any:
    problem, call = draw(attentions(HALF, seq_k=sizes(131072, 1), **changes)), draw(st.sampled_from(calls))
    cache, paged = call == "kvcache", call != "dense" and draw(seldom)
    return plan_splits(
        problem, draw(devices), draw(st.sampled_from(policies)), call=call,
        capacity=problem.seq_k + draw(st.sampled_from([0, 0, 128, 4096])) if cache else None,
        paged=paged, append=cache and draw(seldom), splits=draw(st.sampled_from([0, 0, 0, 1, 2, 7])) if cache else 0,
    )  # fmt: skip


@st.composite
def matmuls(draw: Callable[..., Any]) -> Any:
    eight = draw(seldom)
    problem = MatmulProblem(
        draw(st.sampled_from([1, 1, 2, 32])), draw(sizes(8192)), draw(sizes(8192)), draw(sizes(16384)),
        "float8_e4m3fn" if eight else draw(ANY["dtype"]), b_major="k" if eight or draw(flags) else "n", fold=draw(seldom),
        activation=draw(st.sampled_from(["none", "gelu"])), descriptors=draw(mostly),
    )  # fmt: skip
    return plan_matmul(problem, draw(devices), draw(st.sampled_from(["grouped", "plain"])), draw(seldom))


@st.composite
def convolutions(draw: Callable[..., Any]) -> Any:
    side, taps, groups = draw(sizes(128, 1)), draw(st.sampled_from([1, 3, 7])), draw(st.sampled_from([1, 1, 1, 4, 64]))
    stride, pad = draw(st.sampled_from([1, 1, 2])), taps // 2
    out = (side + 2 * pad - taps) // stride + 1
    problem = ConvProblem(
        draw(sizes(64, 1)), groups * draw(sizes(512, 1)), side, side, groups * draw(sizes(512, 1)), (taps, taps), (out, out),
        (stride, stride), (pad, pad), groups=groups, dtype=draw(ANY["dtype"]), x_last=draw(flags), y_last=draw(flags),
    )  # fmt: skip
    return plan_conv(problem, draw(devices), draw(st.sampled_from(["auto", "auto", "auto", "im2col", "implicit"])))


@st.composite
def transposes(draw: Callable[..., Any]) -> Any:
    rows, columns, size = draw(sizes(8192, 1)), draw(sizes(8192, 1)), draw(st.sampled_from([1, 2, 4, 8]))
    row = draw(st.sampled_from([columns, columns, columns + 1, -columns, 0]))
    strides = (row, draw(st.sampled_from([1, 1, 1, 2])))
    return plan_transpose(TransposeProblem(rows, columns, size, strides, draw(mostly)), draw(devices))


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
    problems = st.builds(
        LowbitProblem,
        *sides,
        st.sampled_from(BITS),
        groups,
        st.sampled_from(ZEROS),
        ANY["dtype"],
        scales,
        mostly,
        flags,
    )
    return st.builds(plan_lowbit, problems, devices, seldom)


def eights() -> st.SearchStrategy[Any]:
    kinds = st.sampled_from(["int8", "float8_e4m3fn"])
    problems = st.builds(EightProblem, sizes(8192), sizes(16384, 1), sizes(16384, 1), kinds, mostly)
    return st.builds(plan_eight, problems, devices, seldom)


def decodes() -> st.SearchStrategy[Any]:
    attention = attentions(PLAIN, causal=False, varlen=False, seq_q=st.one_of(st.integers(0, 16), sizes(16384)))
    pages = st.sampled_from([0, 0, 16, 64, 256])
    problems = st.builds(DecodeProblem, attention, st.sampled_from(STORAGES), pages, st.just(False), flags)
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
        ANY["dtype"],
    )
    return st.builds(plan_shared_prefix, problems, devices)


few = st.integers(1, 4)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "attention": st.builds(plan_attention, attentions(), devices, seldom),
    "attention on sm_90": st.builds(plan_attention, attentions(FAST, batch=few, dim_qk=sizes(256, 32)), hoppers),
    "forward": st.builds(plan_forward, attentions(), devices, seldom),
    "forward of few queries": st.builds(plan_forward, attentions(HALF, seq_q=sizes(256)), devices),
    "splits": split_decisions(sinks=False, dropout=seldom, dtype=ANY["dtype"], score_mods=ANY["score_mods"]),
    "flash-attention's splits": split_decisions(("flash-attn",), batch=few, seq_q=sizes(256, 1)),
    "splits of prompts": split_decisions(
        ("tilefold",), ("kvcache",), batch=st.integers(1, 2), kv_heads=few, group=1, seq_q=st.integers(129, 512)
    ),
    "splits of few queries": split_decisions(("tilefold",), ("dense", "varlen"), group=1, seq_q=st.integers(1, 128)),
    "decode": decodes(),
    "backward": st.builds(plan_attention_backward, attentions(), devices, deterministic=flags, portable=seldom),
    "backward on sm_90": st.builds(
        plan_attention_backward, attentions(FAST, seq_q=sizes(131072), varlen=seldom), hoppers, deterministic=flags
    ),
    "sparse": st.builds(plan_sparse, sparses(), devices, seldom),
    "sparse on sm_90": st.builds(plan_sparse, sparses(FAST, causal=False), hoppers),
    "sparse decoding": st.builds(
        plan_sparse, sparses(FAST, batch=few, causal=False, seq_q=st.sampled_from([16, 64, 128, 256]), kv_heads=few), devices
    ),
    "sparse backward": st.builds(plan_sparse_backward, sparses(), devices, seldom),
    "fp8": st.builds(plan_attention_fp8, attentions(PLAIN, dtype="bfloat16", varlen=False), devices, seldom),
    "shared prefix": prefixes(),
    "select": st.builds(
        plan_select, st.builds(SelectProblem, sizes(4, 1), sizes(16, 1), sizes(512), sizes(8192), flags), devices
    ),
    "matmul": matmuls(),
    "eight": eights(),
    "lowbit": lowbits(),
    "conv": convolutions(),
    "transpose": transposes(),
    "rms_norm": st.builds(
        plan_rms_norm, st.builds(RMSNormProblem, sizes(1 << 20), sizes(40000, 1), st.sampled_from([2, 4]), flags), devices
    ),
    "parallel": parallels(),
}  # fmt: skip
