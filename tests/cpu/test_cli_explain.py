"""`tilefold explain`: the plan as text and as JSON, for any device, and errors that name the option's value."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tilefold.cli.app import app
from tilefold.plan import DEVICES, AttentionPlan, AttentionProblem, device_named, plan_attention
from tilefold.plan.sparse import SparsePlan, SparseProblem, plan_sparse

DECODE = ["--batch", "1", "--heads", "28", "--kv-heads", "4", "--q", "1", "--kv", "8192", "--dim", "128"]


def run(*arguments):
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_the_decode_step_of_the_readme():
    result = run("--device", "h200", *DECODE)
    problem = AttentionProblem(1, 1, 8192, 28, 4, 128, 128)
    assert result.exit_code == 0
    assert result.output == str(plan_attention(problem, device_named("h200"))) + "\n"


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_json_is_the_plan_on_every_device(device):
    result = run("--device", device, *DECODE, "--json")
    assert result.exit_code == 0
    json.loads(result.output)
    plan = AttentionPlan.from_json(result.output)
    assert plan == plan_attention(AttentionProblem(1, 1, 8192, 28, 4, 128, 128), device_named(device))


def test_every_option_reaches_the_problem():
    result = run(
        *("--heads", "8", "--q", "64", "--dim", "80", "--dim-v", "96", "--dtype", "fp16", "--causal"),
        *("--window", "31,0", "--softcap", "--alibi", "--bias", "--mask", "--sinks", "--varlen", "--json"),
    )
    problem = AttentionPlan.from_json(result.output).problem
    assert problem == AttentionProblem(
        *(1, 64, 64, 8, 8, 80, 96),
        dtype="float16",
        causal=True,
        window=(31, 0),
        varlen=True,
        score_mods=("softcap", "alibi", "bias"),
        mask_mods=("mask",),
        sinks=True,
        descriptors=False,
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
        (("--varlen",), SparseProblem(replace(dense, varlen=True, descriptors=False), 64, 128, 182)),
    ):
        result = run(*shape, *more)
        assert SparsePlan.from_json(result.output) == plan_sparse(problem, device_named("h200"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--device", "h300"], "device must be one of h200, h100, "),
        (["--kv-heads", "5"], "kv_heads must divide heads, got kv_heads=5 and heads=28"),
        (["--window", "wide"], "--window must be two integers LEFT,RIGHT"),
        (["--window", "3,-7"], "window must be (left, right) with sides of at least 0"),
        (["--dtype", "int8"], "dtype must be bf16, fp16 or fp32"),
        (["--dim", "512"], "256"),
        (["--heads", "0"], "heads must be at least 1"),
        (["--listed", "5"], "--listed needs --blocks"),
        (["--page-size", "16"], "--page-size needs --blocks"),
        (["--blocks", "64,64", "--sinks"], "--sinks does not go with --blocks"),
        (["--blocks", "64"], "--blocks must be two integers Q,KV such as 64,64, got '64'"),
        (["--blocks", "48,64"], "--blocks must be two powers of two of at least 16, got '48,64'"),
        (["--blocks", "64,0"], "--blocks must be two powers of two of at least 16, got '64,0'"),
        (["--blocks", "64,64", "--listed", "-1"], "--listed must be from 0 to 128, the blocks of 8192 keys, got -1"),
        (["--blocks", "64,64", "--listed", "129"], "--listed must be from 0 to 128"),
        (["--blocks", "64,64", "--page-size", "16", "--varlen"], "page_size must be 0 with varlen=True"),
    ],
)
def test_an_impossible_request_is_one_red_line_and_exit_code_2(change, message):
    result = run(*DECODE, *change)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert message in result.output
    assert result.output.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_step_over_a_cache():
    """The plan of `attention_kvcache`, which is the one a call gets."""
    from tilefold.plan.decode import DecodeProblem, plan_decode

    made = DecodeProblem(AttentionProblem(1, 1, 8192, 28, 4, 128, 128), page_size=16)
    result = run("--device", "h200", *DECODE, "--cache", "same", "--page-size", "16")
    assert result.output == str(plan_decode(made, device_named("h200"))) + "\n"
    cut = run("--device", "h200", *DECODE, "--cache", "e4m3", "--num-splits", "4", "--json")
    found = json.loads(cut.output)
    assert found["splits"] == 4 and found["problem"]["storage"] == "float8_e4m3fn"
    latent = ["--heads", "16", "--kv-heads", "1", "--q", "1", "--kv", "100", "--dim", "576", "--dim-v", "512"]
    result = run(*latent, "--cache", "same", "--v-in-k", "--page-size", "64")
    assert result.exit_code == 0 and "V is part of K" in result.output and "a cache of 128 keys" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "fp4"], "--cache must be one of same, e4m3, int8, got 'fp4'"),
        (["--cache", "same", "--mask"], "--mask does not go with --cache"),
        (["--cache", "same", "--policy", "flash-attn"], "--policy does not go with --cache"),
        (["--cache", "same", "--page-size", "-1"], "--page-size must be at least 0, got -1"),
        (["--cache", "same", "--num-splits", "129"], "num_splits must be 0 to 128, got 129"),
        (["--v-in-k"], "--v-in-k needs --cache"),
    ],
)
def test_what_does_not_go_with_a_cache(arguments, message):
    result = run(*DECODE, *arguments)
    assert result.exit_code == 2 and message in result.output
