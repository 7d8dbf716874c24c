"""`tilefold explain`: which kernel, tile and grid a problem gets on a device, and why. Pure planning: no GPU is touched."""

from types import SimpleNamespace
from typing import Annotated

import typer
from typer import Option

from tilefold.cli.explain_modes import explain_cache, explain_ranks, explain_split, explain_steps, said
from tilefold.cli.options import dtype_named, pair_of
from tilefold.cli.runtime import prepare_runtime, user_errors
from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan import AttentionProblem, Device, device_named, plan_forward
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.base import Plan
from tilefold.plan.capabilities import plan_of
from tilefold.plan.problem import next_power_of_two
from tilefold.plan.sparse.sparse import SparseProblem, plan_sparse
from tilefold.plan.sparse.sparse_backward import plan_sparse_backward

EPILOG = """
**Examples**

One decode step of Qwen2.5-7B on an H200, by `attention`, which cuts no keys, and by `attention_kvcache` over pages of 16:

    tilefold explain --device h200 --heads 28 --kv-heads 4 --q 1 --kv 8192 --dim 128

    tilefold explain --device h200 --heads 28 --kv-heads 4 --q 1 --kv 8192 --dim 128 --cache same --page-size 16

One step of DeepSeek's latent attention over an e4m3 cache, whose V is the first 512 columns of K:

    tilefold explain --heads 128 --kv-heads 1 --q 1 --kv 8192 --dim 576 --dim-v 512 --batch 32 --cache e4m3 --v-in-k

Causal training on an A100, with a sliding window of 1024 keys, as JSON:

    tilefold explain --device a100 --heads 16 --q 4096 --dim 128 --causal --window 1023,0 --json

One block of 64 queries against 36 listed blocks of a KV cache in pages of 16:

    tilefold explain --device h200 --heads 12 --q 64 --kv 23296 --dim 128 --blocks 64,64 --listed 36 --page-size 16

Does flash-attention split the keys in that decode step, and why:

    tilefold explain --policy flash-attn --device h200 --heads 28 --kv-heads 4 --q 1 --kv 8192 --dim 128

Every step of a generation of 512 tokens after a prompt of 40, grouped by what is launched:

    tilefold explain --trace --policy flash-attn --heads 28 --kv-heads 4 --dim 128 --prompt 40 --new 512

Context parallelism: a million tokens over 64 GPUs, 8 to a node, and what other numbers of GPUs would take:

    tilefold explain --heads 32 --kv-heads 8 --q 1048576 --dim 128 --causal --ranks 64 --per-node 8 --link 290,50 --backward

The gradients: their kernel, memory, and time where it was measured:

    tilefold explain --heads 32 --q 16384 --dim 64 --causal --backward

What calls take on this machine: its GPU, or plain torch:

    tilefold explain --device here --heads 32 --q 2048 --dim 64
"""


@user_errors
def explain(
    heads: Annotated[int, Option(help="Query heads.")],
    dim: Annotated[int, Option(help="Head dimension of Q and K.")],
    q: Annotated[
        int | None, Option(help="Queries per sequence (with --varlen: of the longest); needed unless --trace.")
    ] = None,
    device: Annotated[
        str, Option(help="A device known by name (h200, h100, a100, l4, ..., cpu), or `here`: what calls take here.")
    ] = "h200",
    batch: Annotated[int, Option(help="Sequences.")] = 1,
    kv_heads: Annotated[int | None, Option(help="KV heads.", show_default="heads")] = None,
    kv: Annotated[int | None, Option(help="Keys per sequence.", show_default="q")] = None,
    dim_v: Annotated[int | None, Option(help="Head dimension of V and the output.", show_default="dim")] = None,
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    causal: Annotated[bool, Option("--causal", help="Causal mask, aligned to the bottom right.")] = False,
    window: Annotated[
        str | None, Option(metavar="LEFT,RIGHT", help="Sliding window, inclusive; -1 is unbounded.")
    ] = None,
    softcap: Annotated[bool, Option("--softcap", help="Scores capped by tanh.")] = False,
    alibi: Annotated[bool, Option("--alibi", help="ALiBi slopes.")] = False,
    bias: Annotated[bool, Option("--bias", help="An additive bias.")] = False,
    mask: Annotated[bool, Option("--mask", help="A boolean mask.")] = False,
    sinks: Annotated[bool, Option("--sinks", help="Attention sinks.")] = False,
    varlen: Annotated[bool, Option("--varlen", help="Sequences of different lengths, packed.")] = False,
    mean: Annotated[int | None, Option(help="With --varlen: queries of a sequence in the mean.")] = None,
    blocks: Annotated[
        str | None, Option(metavar="Q,KV", help="Block-sparse, with so many tokens per query and KV block.")
    ] = None,
    listed: Annotated[int | None, Option(help="With --blocks: KV blocks per list.", show_default="all of them")] = None,
    sizes: Annotated[bool, Option("--sizes", help="With --blocks: some KV blocks are partly valid.")] = False,
    page_size: Annotated[
        int, Option(help="With --blocks or --cache: keys per page of a paged KV cache, 0 for none.")
    ] = 0,
    cache: Annotated[
        str | None,
        Option(
            help="Over a KV cache, by attention_kvcache, which holds the same dtype as q, e4m3 or int8: same, e4m3, int8."
        ),
    ] = None,
    v_in_k: Annotated[bool, Option("--v-in-k", help="With --cache: V is the first columns of K (MLA).")] = False,
    policy: Annotated[
        str | None,
        Option(help="Whose decision to split keys: flash-attn or tilefold.", show_default="tilefold with --trace"),
    ] = None,
    call: Annotated[
        str | None,
        Option(
            help="With --policy or --trace: flash_attn's function, dense, varlen or kvcache.",
            show_default="dense: keys that grow by one a step",
        ),
    ] = None,
    capacity: Annotated[
        int | None, Option(help="With --call kvcache: rows of the cache.", show_default="the keys, or prompt + new")
    ] = None,
    paged: Annotated[bool, Option("--paged", help="With --policy or --trace: there is a block table.")] = False,
    append: Annotated[bool, Option("--append", help="With --call kvcache: new keys are written first.")] = False,
    num_splits: Annotated[
        int, Option(help="With --call kvcache or --cache: the caller's number of splits, 0 for none.")
    ] = 0,
    trace: Annotated[bool, Option("--trace", help="All steps of a generation, of --prompt and --new.")] = False,
    prompt: Annotated[int | None, Option(help="With --trace: tokens of the prompt.")] = None,
    new: Annotated[int | None, Option(help="With --trace: tokens that are generated.")] = None,
    ranks: Annotated[
        int | None, Option(min=1, help="Over so many GPUs, by tilefold.parallel: the scheme, traffic, memory, scaling.")
    ] = None,
    per_node: Annotated[int | None, Option(min=1, help="With --ranks: GPUs of a node.", show_default="1")] = None,
    link: Annotated[
        str | None,
        Option(
            metavar="INSIDE,ACROSS",
            help="With --ranks: GB/s of a GPU, in a node and between nodes.",
            show_default="290,50",
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        Option(
            help="With --ranks: attention TFLOP/s of one GPU.", show_default="680; backward 530, non-deterministic 565"
        ),
    ] = None,
    memory: Annotated[float | None, Option(help="With --ranks: spare GB of a GPU.", show_default="any")] = None,
    shards: Annotated[str | None, Option(help="With --ranks: zigzag or contiguous.", show_default="zigzag")] = None,
    backward: Annotated[
        bool, Option("--backward", help="The plan of the gradients; with --ranks: gradients follow.")
    ] = False,
    nondeterministic: Annotated[
        bool, Option("--non-deterministic", help="With --backward: gradients by deterministic=False.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say which kernel, tile and grid an attention call gets on a device, why, and what was rejected.

    Needs no GPU: the answer is computed from the shapes and the device's record alone. A causal mask, a window and the
    modifications of the scores count, their values do not. With --policy: how many parts the keys are folded in; with --trace
    for every step of a generation.
    """
    asked = SimpleNamespace(**locals())
    _check(asked)
    if trace:
        typer.echo(explain_steps(asked, dtype_named(dtype), _record(device)))
        return
    problem = _problem(asked)
    for given, mode in ((ranks, explain_ranks), (cache, explain_cache), (policy, explain_split)):
        if given is not None:
            typer.echo(mode(asked, problem, _record(device)))
            return
    if not (problem.batch and problem.seq_q):
        raise Unsupported("there is nothing to plan: no queries")
    sparse = _sparse_problem(asked, problem)
    record = _record(device)
    operation = ("attention" if sparse is None else "sparse_attention") + ("_backward" if backward else "")
    made = plan_of(operation, sparse or problem, record) or _of_kernels(sparse or problem, record, asked)
    typer.echo(said(made, as_json))


# Option -> one of these has to be given, too.
NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("per_node", "link", "tflops", "memory", "shards"), ("ranks",)),
    **dict.fromkeys(("call", "capacity", "paged", "append"), ("policy", "trace")),
    "num_splits": ("policy", "trace", "cache"),
    **dict.fromkeys(("prompt", "new"), ("trace",)),
    "mean": ("varlen",),
    **dict.fromkeys(("listed", "sizes"), ("blocks",)),
    "page_size": ("blocks", "cache"),
    "v_in_k": ("cache",),
    "nondeterministic": ("backward",),
}
_LISTS = ("varlen", "blocks", "listed", "sizes")
_MASKED = ("bias", "mask", *_LISTS, "policy", "trace")
# Option -> what does not go with it.
EXCLUDES: dict[str, tuple[str, ...]] = {
    "cache": _MASKED,
    "ranks": (*_MASKED, "cache", "sinks", "alibi"),
    "backward": ("cache", "policy", "trace"),
    "trace": ("q", "kv", "dim_v", "softcap", "alibi", "bias", "mask", "sinks", *_LISTS, "page_size", "num_splits"),
    "policy": (*_LISTS, "page_size"),
    "blocks": ("window", "alibi", "bias", "mask", "sinks", "nondeterministic"),
}
_NAMES = {"nondeterministic": "--non-deterministic"}
_WHY = {
    ("trace", "q"): ": --prompt and --new say it",
    ("trace", "kv"): ": --prompt and --new say it",
    ("trace", "num_splits"): ": the policy decides every step",
    ("policy", "varlen"): ": --call varlen says it",
    **dict.fromkeys((("blocks", name) for name in EXCLUDES["blocks"][:5]), ": sparse attention has no such argument"),
    ("blocks", "nondeterministic"): ": its gradients are deterministic",
}


def _check(asked: SimpleNamespace) -> None:
    """Unsupported, naming the option that lacks another one or does not go with it."""

    def given(name: str) -> bool:
        value = getattr(asked, name)
        return bool(value) if name in ("page_size", "num_splits") else value is not None and value is not False

    def flag(name: str) -> str:
        return _NAMES.get(name, f"--{name.replace('_', '-')}")

    for mode, names in EXCLUDES.items():
        for name in names:
            if given(mode) and given(name):
                raise Unsupported(f"{flag(name)} does not go with {flag(mode)}{_WHY.get((mode, name), '')}")
    for name, modes in NEEDS.items():
        if given(name) and not any(map(given, modes)):
            raise Unsupported(f"{flag(name)} needs {' or '.join(map(flag, modes))}")


def _problem(asked: SimpleNamespace) -> AttentionProblem:
    """Of one call."""
    q, mean = asked.q, asked.mean
    if q is None:
        raise ValueRangeError("--q must be given, the queries per sequence: only --trace does without")
    if mean is not None and not 1 <= mean <= q:
        raise ValueRangeError(f"--mean must be from 1 to {q}, the queries of the longest sequence, got {mean}")
    keys = q if asked.kv is None else asked.kv
    return AttentionProblem(
        batch=asked.batch,
        seq_q=q,
        seq_k=keys,
        heads=asked.heads,
        kv_heads=asked.heads if asked.kv_heads is None else asked.kv_heads,
        dim_qk=asked.dim,
        dim_v=asked.dim if asked.dim_v is None else asked.dim_v,
        dtype=dtype_named(asked.dtype),
        causal=asked.causal,
        window=(-1, -1) if asked.window is None else pair_of(asked.window, "--window"),
        varlen=asked.varlen,
        mean_q=0 if mean is None else next_power_of_two(mean),
        score_mods=tuple(name for name in ("softcap", "alibi", "bias") if getattr(asked, name)),
        mask_mods=("mask",) if asked.mask else (),
        sinks=asked.sinks,
        bias_descriptors="tiles" if asked.bias and keys % 8 == 0 else "",
        mask_descriptors="tiles" if asked.mask and keys % 16 == 0 else "",
    )


def _of_kernels(problem: AttentionProblem | SparseProblem, record: Device, asked: SimpleNamespace) -> Plan:
    """The plan of the kernels: of the call, or with --backward of the gradients of q, k, v."""
    if isinstance(problem, SparseProblem):
        return plan_sparse_backward(problem, record) if asked.backward else plan_sparse(problem, record)
    if asked.backward:
        return plan_attention_backward(problem, record, deterministic=not asked.nondeterministic)
    return plan_forward(problem, record)


def _record(device: str) -> Device:
    """The device of that name, or what calls run on here for "here"."""
    return prepare_runtime(kernels=False).record() if device == "here" else device_named(device)


def _sparse_problem(asked: SimpleNamespace, problem: AttentionProblem) -> SparseProblem | None:
    """The block-sparse problem that the options ask for, or None."""
    if asked.blocks is None:
        return None
    block_q, block_k = pair_of(asked.blocks, "--blocks", "Q,KV such as 64,64")
    for size in (block_q, block_k):
        if size < 16 or size & (size - 1):
            raise ValueRangeError(f"--blocks must be two powers of two of at least 16, got {asked.blocks!r}")
    room, listed = -(-problem.seq_k // block_k), asked.listed
    if listed is not None and not 0 <= listed <= room:
        raise ValueRangeError(f"--listed must be from 0 to {room}, the blocks of {problem.seq_k} keys, got {listed}")
    kept = room if listed is None else listed
    return SparseProblem(problem, block_q, block_k, kept, asked.sizes, page_size=asked.page_size)
