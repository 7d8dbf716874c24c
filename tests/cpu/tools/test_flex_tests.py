"""scripts/flex_tests.py on a file made as PyTorch's: what is compiled runs tilefold, outcomes are counted, the sample."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch_cases

SCRIPT = Path(__file__).parents[3] / "scripts" / "flex_tests.py"
FILE = '''
import functools

import torch
from torch._inductor.test_case import TestCase as InductorTestCase
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing._internal import common_utils
from torch.testing._internal.common_device_type import instantiate_device_type_tests


def doubled(score, b, h, m, n):
    return score * 2


def causal(b, h, m, n):
    return m >= n


class TestFlex(InductorTestCase):
    def compared(self, device, dtype=torch.float32, compiled=torch.compile, **options):
        q, k, v = (torch.randn(1, 1, 24, 16, dtype=dtype, device=device) for _ in range(3))
        attention = functools.partial(flex_attention, **options)
        gold, found = attention(q.double(), k.double(), v.double()), compiled(attention)(q, k, v)
        error = (gold - found).abs().mean()
        if error > 1e-2:
            self.assertTrue(False, f"Out Compiled error {error} is greater than ref error 0 by more than 1X.")

    @common_utils.parametrize("dtype", [torch.float16, torch.float32])
    @common_utils.parametrize("score_mod", [None, doubled])
    def test_scores(self, device, dtype, score_mod):
        self.compared(device, dtype, score_mod=score_mod)

    def test_scores_of_modules(self, device):
        class Attention(torch.nn.Module):
            def forward(self, q, k, v):
                return flex_attention(q, k, v)

        def compiled(_):
            made = Attention()
            made.compile()
            return made

        self.compared(device, compiled=compiled)

    @common_utils.parametrize("size", [16, 32])
    def test_blocks(self, device, size):
        self.compared(device, block_mask=create_block_mask(causal, 1, 1, 24, 24, device=device, BLOCK_SIZE=size))

    def test_eager_alone(self, device):
        self.compared(device, compiled=lambda attention: attention)

    def test_digamma(self, device):
        self.compared(device, score_mod=lambda score, b, h, m, n: torch.digamma(score))

    def test_epilogue_fused(self, device):
        self.assertEqual(torch._dynamo.utils.counters["frames"]["ok"], 1)

    def test_flash_is_far(self, device):
        def wrong(attention):
            return lambda *given: torch.compile(attention)(*given) + 1

        self.compared(device, compiled=wrong)

    def test_skipped(self, device):
        self.skipTest("not here")

    def test_expected_text(self, device):
        self.assertExpectedInline(str(create_block_mask(causal, 1, 1, 40, 40, device=device).shape), """(1, 1, 40, 40)""")


instantiate_device_type_tests(TestFlex, globals(), only_for=("cpu",))
'''


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("flex_tests", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.no_poison
def test_every_outcome_is_counted(tmp_path):
    file = tmp_path / "test_flex.py"
    file.write_text(FILE)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT), str(file), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    lines = [json.loads(line) for line in (tmp_path / "out" / "flex_tests_1_of_1.jsonl").read_text().splitlines()]
    found = {}
    for line in lines:
        found.setdefault(line["test"], set()).add(line["outcome"])
    assert found == {
        "test_scores": {"passed"},
        "test_scores_of_modules": {"passed"},
        "test_blocks": {"passed"},
        "test_eager_alone": {"passed, without a call of tilefold"},
        "test_digamma": {"refused by name"},
        "test_epilogue_fused": {"failed as listed"},
        "test_flash_is_far": {"failed"},
        "test_skipped": {"skipped by the file"},
        "test_expected_text": {"passed, without a call of tilefold"},
    }, done.stdout[-3000:] + done.stderr[-2000:]
    assert len(lines) == 13
    assert done.returncode == 1
    assert "13 cases in the file, 9 tests" in done.stdout
    assert "| passed | 7 | 3 |" in done.stdout
    assert "digamma has no translation" in done.stdout
    again = [*command, "--shard", "2/3", "--sample", "9", "--seconds", "0"]
    subprocess.run(again, env=environment, capture_output=True, text=True, timeout=500, check=False)
    late = [json.loads(line) for line in (tmp_path / "out" / "flex_tests_2_of_3.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in late] == ["not run: no time left"] * 3


def test_the_sample_takes_tests_in_turns():
    cases = [f"test_a_{i}" for i in range(10)] + ["test_b", "test_ab_0", "test_ab_1"]
    tests = ["test_ab", "test_a", "test_b"]
    first = [torch_cases.test_of(cases[i], tests) for i in torch_cases.sampled(cases, tests, 3)]
    assert sorted(first) == ["test_a", "test_ab", "test_b"]
    assert torch_cases.sampled(cases, tests, 99) == list(range(13))
    assert torch_cases.sampled(cases, tests, 6) == torch_cases.sampled(cases, tests, 6)


def test_a_result_that_is_far_off_is_a_failure_whatever_its_name(script):
    report = type("Report", (), {"passed": False, "skipped": False})
    for text, outcome in (("Tensor-likes are not close!", "failed"), ("Scalars are not equal!", "failed as listed")):
        assert (
            torch_cases.judged("test_epilogue_fused", report, AssertionError(text), True, script.EXPECTED)[0] == outcome
        )
