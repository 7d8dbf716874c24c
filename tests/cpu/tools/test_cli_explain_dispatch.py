"""`tilefold explain --policy` and `--trace`: the decisions as text and JSON, errors that name the option, the page's examples."""

import json
import shlex
from pathlib import Path

import pytest

from cases.cli import command
from tilefold.plan import AttentionProblem, Generation, SplitDecision, device_named, plan_splits, trace_generation

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / part / "dispatch.md" for part in ("explanation", "performance")]
H200 = device_named("h200")
MODEL = ["--heads", "28", "--kv-heads", "4", "--dim", "128"]
STEP = [*MODEL, "--q", "1", "--kv", "8192"]
TRACE = [*MODEL, "--trace", "--prompt", "40", "--new", "512"]


run = command("explain", columns=100)


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
def test_an_impossible_request_is_one_red_line_and_exit_code_2(arguments, message):
    result = run(*arguments, code=2)
    assert result.output.startswith("error: ")
    assert message in result.output
    assert result.output.count("\n") == 1


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
