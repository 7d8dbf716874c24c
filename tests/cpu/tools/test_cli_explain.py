"""`tilefold explain`: plans and decisions as text and as JSON, for any device, errors that name the value, the pages."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases.cli import command
from tilefold.ops.cache.kvcache import prepare
from tilefold.ops.call import Call
from tilefold.ops.source import Cache, Scales
from tilefold.plan import (
    DEVICES,
    AttentionPlan,
    AttentionProblem,
    DecodePlan,
    Generation,
    SplitDecision,
    device_named,
    plan_forward,
    plan_splits,
    trace_generation,
)
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.cache.decode import DecodeProblem, plan_decode
from tilefold.plan.parallel.plan import plan_parallel
from tilefold.plan.parallel.problem import Links, ParallelProblem
from tilefold.plan.parallel.scale import FORMULAS
from tilefold.plan.sparse.sparse import SparsePlan, SparseProblem, plan_sparse
from tilefold.plan.sparse.sparse_backward import SparseBackwardPlan

DECODE = ["--batch", "1", "--heads", "28", "--kv-heads", "4", "--q", "1", "--kv", "8192", "--dim", "128"]


run = command("explain", columns=100)


def test_the_decode_step_of_the_readme():
    result = run("--device", "h200", *DECODE)
    problem = AttentionProblem(1, 1, 8192, 28, 4, 128, 128)
    assert result.output == str(plan_forward(problem, device_named("h200"))) + "\n"
    assert "33 shares of each of 4 items" in result.output and "Would be 28 tiles for 132 SMs" in result.output


@pytest.mark.parametrize(
    ("options", "operation"),
    [
        ("", "attention"),
        ("--backward", "attention_backward"),
        ("--blocks 64,64 --listed 2", "sparse_attention"),
        ("--blocks 64,64 --backward", "sparse_attention_backward"),
        ("--cache int8 --page-size 16", "attention_kvcache"),
        ("--policy tilefold", ""),
        ("--policy flash-attn", ""),
        ("--trace --prompt 8 --new 4", ""),
    ],
)
def test_here_without_a_gpu_is_where_calls_run(options, operation, monkeypatch):
    """Plain torch, as text and as JSON, which say so where it has no such plan; the interpreter where it is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = f"--device here --heads 4 --dim 64 {options}" + " --q 512" * ("--trace" not in options)
    if "flash" not in options:  # which decides for NVIDIA GPUs alone
        assert "Triton interpreter" in run(sizes).output
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    text, found = run(sizes).output, json.loads(run(sizes, "--json").output)
    if operation:
        title = operation.replace("_", " ").capitalize()
        assert text.startswith(f"{title} plan for torch (CPU)\n  problem     1 x 512 queries, 512 keys, 4 heads")
        assert (found["kernel"], found["device"]["name"]) == (f"torch_{operation}", "cpu") and found["cut"]
    else:
        assert text.startswith("torch (CPU) has no plan of that")
        assert (found["device"], found["plan"], found["reason"] + "\n") == ("cpu", None, text)


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_json_is_the_plan_on_every_device(device):
    result = run("--device", device, *DECODE, "--json")
    json.loads(result.output)
    plan = DecodePlan.from_json(result.output)
    assert plan == plan_forward(AttentionProblem(1, 1, 8192, 28, 4, 128, 128), device_named(device))


def test_every_option_reaches_the_problem():
    result = run(
        "--heads 8 --q 64 --dim 80 --dim-v 96 --dtype fp16 --causal --window 31,0 --softcap",
        "--alibi --bias --mask --sinks --varlen --mean 50 --json",
    )
    problem = AttentionPlan.from_json(result.output).problem
    assert problem == AttentionProblem(
        *(1, 64, 64, 8, 8, 80, 96),
        dtype="float16",
        causal=True,
        window=(31, 0),
        varlen=True,
        mean_q=64,
        score_mods=("softcap", "alibi", "bias"),
        mask_mods=("mask",),
        sinks=True,
        bias_descriptors="tiles",
        mask_descriptors="tiles",
    )


def test_sparse_attention():
    """Lists, sizes, packed sequences and pages reach the problem; the whole row of blocks is listed if nothing is said."""
    shape = ("--heads", "12", "--q", "64", "--kv", "23296", "--dim", "128", "--blocks", "64,128", "--json")
    dense = AttentionProblem(1, 64, 23296, 12, 12, 128, 128)
    for more, problem in (
        ((), SparseProblem(dense, 64, 128, 182)),
        (("--listed", "36", "--sizes"), SparseProblem(dense, 64, 128, 36, True)),
        (("--page-size", "16"), SparseProblem(dense, 64, 128, 182, page_size=16)),
        (("--varlen",), SparseProblem(replace(dense, varlen=True), 64, 128, 182)),
    ):
        result = run(*shape, *more)
        assert SparsePlan.from_json(result.output) == plan_sparse(problem, device_named("h200"))


def test_a_step_over_a_cache():
    """The plan of `attention_kvcache`, which is the one a call gets."""
    made = DecodeProblem(AttentionProblem(1, 1, 8192, 28, 4, 128, 128), page_size=16)
    result = run("--device", "h200", *DECODE, "--cache", "same", "--page-size", "16")
    assert result.output == str(plan_decode(made, device_named("h200"))) + "\n"
    cut = run("--device", "h200", *DECODE, "--cache", "e4m3", "--num-splits", "4", "--json")
    found = json.loads(cut.output)
    assert found["splits"] == 4 and found["problem"]["storage"] == "float8_e4m3fn"
    latent = ["--heads", "16", "--kv-heads", "1", "--q", "1", "--kv", "100", "--dim", "576", "--dim-v", "512"]
    result = run(*latent, "--cache", "same", "--v-in-k", "--page-size", "64")
    assert "V is part of K" in result.output and "a cache of 128 keys" in result.output


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("held", "seq_q", "part", "page", "dim"),
    [("same", 1, False, 0, 16), ("same", 19, False, 8, 16), ("same", 19, True, 0, 24), ("same", 2, False, 8, 12),
     ("e4m3", 1, False, 5, 24), ("int8", 19, False, 8, 32), ("int8", 3, True, 8, 48)],
)  # fmt: skip
def test_what_is_said_of_a_cache_is_what_a_call_does(held, seq_q, part, page, dim):
    """The same problem as that of tensors, and the same kernel."""
    rows = 40  # five pages of 8, eight of 5
    lead = (3 * rows // page, page) if page else (3, rows)
    stored = {"same": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}[held]
    k = torch.zeros(*lead, 1, dim).to(stored)
    v = k[..., :8] if part else torch.zeros(*lead, 1, 8).to(stored)
    table = torch.zeros(3, rows // page, dtype=torch.int32) if page else None
    scale = None if held == "same" else torch.ones(1)
    q = torch.zeros(3, seq_q, 7, dim, dtype=torch.bfloat16)
    lengths = torch.full((3,), 30, dtype=torch.int32)
    cache = Cache(lengths=lengths, block_table=table)
    call = prepare(q, k, v, Call(source=cache, scales=Scales(None, scale, scale)), False)
    asked = ("--heads", 7, "--kv-heads", 1, "--batch", 3, "--q", seq_q, "--kv", rows, "--dim", dim, "--dim-v", 8,
             "--cache", held, "--page-size", page, *["--v-in-k"] * part, "--json")  # fmt: skip
    result = run("--device", "h200", *map(str, asked))
    prompts = call.planned is None
    if prompts:
        assert json.loads(result.output)["kernel"] == "attention_cached"
    else:
        assert DecodePlan.from_json(result.output).problem == call.planned.problem
    assert prompts == (held == "same" and seq_q == 19 and not part)


def test_a_prompt_over_a_cache_says_whose_it_is():
    result = run(*DECODE, "--q", "64", "--cache", "same", "--num-splits", "3")
    first, rest = result.output.split("\n", 1)
    assert first.startswith(
        "attention_kvcache gives this call to attention_cached: 448 rows a KV head are more than the 128"
    )
    assert "attention_cached, then combine" in rest and "rejected" in rest


def test_context_parallelism_over_ranks_that_are_not_here():
    """The plan of tilefold.parallel, its formulas and a line for every number of ranks up to 64 and the one asked for."""
    sizes = ("--heads", "64", "--kv-heads", "8", "--q", "1048576", "--dim", "128", "--causal", "--backward")
    result = run(*sizes, "--ranks", "96", "--per-node", "8", "--link", "400,25", "--tflops", "500", "--memory", "4")
    problem = ParallelProblem(1, 1 << 20, 1 << 20, 64, 8, 128, 128, window=(-1, 0), kind="zigzag", backward=True)
    plan = plan_parallel(problem, Links(96, 8, 400e9, 25e9, flops=500e12, flops_backward=500e12, memory=4e9))
    assert result.output.startswith(str(plan))
    assert all(text in result.output for text in FORMULAS[plan.scheme])
    assert "other numbers of ranks, predicted:" in result.output
    table = [line.split() for line in result.output.splitlines()[-8:]]
    assert [row[0] for row in table] == ["1", "2", "4", "8", "16", "32", "64", "96"]
    assert table[1][1:] == ["nothing", "fits", "the", "memory"]
    assert table[-1][1] == plan.scheme
    assert float(table[-1][2]) == pytest.approx(plan.cost.seconds * 1e3, abs=1e-3)
    figures = json.loads(run(*sizes, "--ranks", "2", "--json").output)
    assert figures["plan"]["links"]["ranks"] == 2
    assert figures["scaling"][1][1]["seconds"] == figures["plan"]["cost"]["seconds"]
    assert json.loads(run(*sizes, "--ranks 2 --device cpu --json").output)["kernels"]["plan"] is None


def test_gradients():
    """The backward plan, with its memory and, where it was measured, its time."""
    sizes = "--heads 32 --q 16384 --dim 64 --causal --backward"
    kept, free = (run(sizes, *extra).output for extra in ((), ("--non-deterministic",)))
    problem = AttentionProblem(1, 16384, 16384, 32, 32, 64, 64, causal=True)
    plans = [plan_attention_backward(problem, device_named("h200"), deterministic=one) for one in (True, False)]
    assert [kept, free] == [f"{plan}\n" for plan in plans]
    assert plans[0].seconds is not None and 0.0045 < plans[0].seconds < 0.0055
    assert f"MiB beside inputs and gradients; about {1e3 * plans[0].seconds:.3g} ms" in kept
    assert AttentionBackwardPlan.from_json(run(sizes, "--json").output) == plans[0]
    assert "about" not in run("--heads 4 --q 999 --dim 80 --backward --device a100").output
    listed = run("--heads 4 --q 1024 --dim 64 --blocks 64,64 --listed 3 --backward --json").output
    assert SparseBackwardPlan.from_json(listed).problem.capacity == 3


def test_ranks_in_nondeterministic():
    """Another version of the kernel: more FLOP/s."""
    sizes = ("--heads 32 --kv-heads 8 --q 131072 --dim 128 --causal --ranks 2 --backward",)
    kept, free = (run(*sizes, *extra).output for extra in ((), ("--non-deterministic",)))
    assert "with backward\n" in kept
    assert "with non-deterministic backward\n" in free
    assert "(530 backward)" in kept
    assert "(565 backward)" in free
    figures = [json.loads(run(*sizes, "--json", *extra).output) for extra in ((), ("--non-deterministic",))]
    assert figures[0]["plan"]["cost"]["seconds"] > figures[1]["plan"]["cost"]["seconds"]


REFUSED = {
    "--device h300": "device must be one of h200, h100, ",
    "--kv-heads 5": "kv_heads must divide heads, got kv_heads=5 and heads=28",
    "--window wide": "--window must be two integers LEFT,RIGHT",
    "--window 3,-7": "window must be (left, right) with sides of at least 0",
    "--dtype int8": "dtype must be bf16, fp16 or fp32",
    "--dim 520": "512",
    "--heads 0": "heads must be at least 1",
    "--listed 5": "--listed needs --blocks",
    "--page-size 16": "--page-size needs --blocks",
    "--blocks 64,64 --sinks": "--sinks does not go with --blocks",
    "--blocks 64": "--blocks must be two integers Q,KV such as 64,64, got '64'",
    "--blocks 48,64": "--blocks must be two powers of two of at least 16, got '48,64'",
    "--blocks 64,0": "--blocks must be two powers of two of at least 16, got '64,0'",
    "--blocks 64,64 --listed -1": "--listed must be from 0 to 128, the blocks of 8192 keys, got -1",
    "--blocks 64,64 --listed 129": "--listed must be from 0 to 128",
    "--mean 1": "--mean needs --varlen",
    "--varlen --mean 0": "--mean must be from 1 to 1, the queries of the longest sequence, got 0",
    "--blocks 64,64 --page-size 16 --varlen": "page_size must be 0 with varlen=True",
    "--cache fp4": "--cache must be one of same, e4m3, int8, got 'fp4'",
    "--cache same --mask": "--mask does not go with --cache",
    "--cache same --policy flash-attn": "--policy does not go with --cache",
    "--cache same --page-size -1": "--page-size must be at least 0, got -1",
    "--cache same --num-splits 129": "num_splits must be 0 to 128, got 129",
    "--v-in-k": "--v-in-k needs --cache",
    "--cache int8 --q 0": "there is nothing to plan: no queries",
    "--q 0": "there is nothing to plan: no queries",
    "--batch 0 --backward": "there is nothing to plan: no queries",
    "--per-node 2": "--per-node needs --ranks",
    "--non-deterministic": "--non-deterministic needs --backward",
    "--backward --cache same": "--cache does not go with --backward",
    "--backward --non-deterministic --blocks 64,64": "--non-deterministic does not go with --blocks",
    "--ranks 4 --non-deterministic": "--non-deterministic needs --backward",
    "--ranks 4 --cache same": "--cache does not go with --ranks",
    "--ranks 4 --link fast": "--link must be",
    "--q 4096 --kv 4096 --ranks 4 --shards striped": "--shards must be",
    "--q 4096 --kv 4096 --ranks 4 --per-node 3": "ranks_per_node must divide",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_an_impossible_request_is_one_red_line_and_exit_code_2(arguments):
    red_line([*DECODE, arguments], REFUSED[arguments])


def red_line(arguments, message):
    result = run(*arguments, code=2)
    assert result.output.startswith("error: ")
    assert message in result.output
    assert result.output.count("\n") == 1
    assert "Traceback" not in result.output


# ---------------------------------------------------------------- --policy and --trace


DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / part / "dispatch.md" for part in ("explanation", "performance")]
H200 = device_named("h200")
MODEL = ["--heads", "28", "--kv-heads", "4", "--dim", "128"]
STEP = [*MODEL, "--q", "1", "--kv", "8192"]
TRACE = [*MODEL, "--trace", "--prompt", "40", "--new", "512"]


@pytest.mark.parametrize("policy", ["flash-attn", "tilefold"])
def test_one_call(policy):
    result = run(*STEP, "--policy", policy)
    assert (
        result.output == f"{plan_splits(AttentionProblem(1, 1, 8192, 28, 4, 128, 128), H200, policy, call='dense')}\n"
    )


def test_every_option_reaches_the_decision():
    options = ("--call kvcache --capacity 9000 --paged --append --num-splits 3 --alibi --window 99,0",)
    result = run(*STEP, "--policy", "flash-attn", "--device", "a100", *options, "--causal", "--json")
    problem = AttentionProblem(1, 1, 8192, 28, 4, 128, 128, causal=True, window=(99, 0), score_mods=("alibi",))
    assert SplitDecision.from_json(result.output) == plan_splits(
        problem, device_named("a100"), "flash-attn", call="kvcache", capacity=9000, paged=True, append=True, splits=3
    )


def test_a_generation():
    result = run(*TRACE)
    assert result.output == f"{trace_generation(Generation(28, 4, 128, 40, 512), H200)}\n"
    options = ("--policy flash-attn --call kvcache --capacity 1024 --window 255,0 --batch 2 --append",)
    result = run(*TRACE, *options, "--dtype", "fp16", "--device", "l4", "--json")
    wanted = Generation(
        28, 4, 128, 40, 512, batch=2, dtype="float16", call="kvcache", capacity=1024, window=255, append=True
    )
    assert result.output == trace_generation(wanted, device_named("l4"), "flash-attn").to_json() + "\n"
    assert json.loads(result.output)["policy"] == "flash-attn"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (MODEL, "--q must be given"),
        ([*STEP, "--policy", "mine"], "policy must be one of flash-attn, tilefold, got 'mine'"),
        ([*STEP, "--policy", "flash-attn", "--device", "mi300x"], "device must be an NVIDIA GPU"),
        ([*STEP, "--policy", "flash-attn", "--call", "func"], "call must be one of dense, varlen, kvcache, got 'func'"),
        ([*STEP, "--policy", "flash-attn", "--capacity", "9000"], "capacity must be the keys with call 'dense'"),
        ([*STEP, "--policy", "flash-attn", "--blocks", "64,64"], "--blocks does not go with --policy"),
        ([*STEP, "--policy", "flash-attn", "--varlen"], "--varlen does not go with --policy: --call varlen says it"),
        ([*STEP, "--policy", "flash-attn", "--listed", "0"], "--listed does not go with --policy"),
        ([*STEP, "--policy", "flash-attn", "--page-size", "16"], "--page-size does not go with --policy"),
        ([*STEP, "--call", "dense"], "--call needs --policy or --trace"),
        ([*STEP, "--capacity", "9000"], "--capacity needs --policy or --trace"),
        ([*STEP, "--paged"], "--paged needs --policy or --trace"),
        ([*STEP, "--num-splits", "2"], "--num-splits needs --policy or --trace"),
        ([*STEP, "--prompt", "4"], "--prompt needs --trace"),
        ([*MODEL, "--trace", "--new", "4"], "--prompt must be given with --trace"),
        ([*MODEL, "--trace", "--prompt", "4"], "--new must be given with --trace"),
        ([*MODEL, "--trace", "--prompt", "4", "--new", "0"], "new must be at least 1, got 0"),
        ([*TRACE, "--q", "1"], "--q does not go with --trace: --prompt and --new say it"),
        ([*TRACE, "--kv", "1"], "--kv does not go with --trace: --prompt and --new say it"),
        ([*TRACE, "--sinks"], "--sinks does not go with --trace"),
        ([*TRACE, "--alibi"], "--alibi does not go with --trace"),
        ([*TRACE, "--page-size", "16"], "--page-size does not go with --trace"),
        ([*TRACE, "--num-splits", "2"], "--num-splits does not go with --trace"),
        ([*TRACE, "--capacity", "0", "--call", "kvcache"], "--capacity must be at least 1, got 0"),
        ([*TRACE, "--window", "9,9"], "--window must be LEFT,0 with --trace"),
        ([*TRACE, "--device", "h300"], "device must be one of h200, h100, "),
    ],
)
def test_an_impossible_decision_is_one_red_line_and_exit_code_2(arguments, message):
    red_line(arguments, message)


def test_the_commands_of_the_page_print_what_it_shows():
    blocks = [part.split("\n```")[0] for page in PAGES for part in page.read_text().split("```console\n")[1:]]
    assert len(blocks) >= 6
    for block in blocks:
        command, _, shown = block.partition("\n")
        words = shlex.split(command.removeprefix("$ "))
        assert words[:2] == ["tilefold", "explain"]
        assert run(*words[2:]).output.rstrip("\n") == shown, command


def test_the_examples_of_the_page_run():
    names: dict[str, object] = {}
    examples = [part.split("```")[0] for part in PAGES[0].read_text().split("```python\n")[1:]]
    assert examples
    for example in examples:
        exec(example, names)
