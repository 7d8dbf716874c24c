"""scripts/transformers_tests.py on a file made as PyTorch's: what tilefold served is counted, failures are tried without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn import attention as registry

if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("torch 2.11 has what this needs", allow_module_level=True)

SCRIPT = Path(__file__).parents[3] / "scripts" / "transformers_tests.py"
FILE = """
import torch
from test_cpp_extensions_open_device_registration import generate_faked_module
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.common_cuda import PLATFORM_SUPPORTS_FLASH_ATTENTION
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_nn import NNTestCase
from torch.testing._internal.common_utils import parametrize

from tilefold.integrations.torch_flash import CALLS


def passes(device, dtype, near=1e-2, sk=24, **options):
    q = torch.randn(2, 3, 24, 16, device=device, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 3, sk, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    out = scaled_dot_product_attention(q, k, v, **options)
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    grad = torch.randn_like(out)
    for got, want in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(exact, (q, k, v), grad.double())):
        torch.testing.assert_close(got, want, atol=near, rtol=near)
    error = (out.double() - exact).abs().max()
    if error > near:
        raise ValueError(f"out Test error {error} is greater than threshold {near}!")


class TestSDPA(NNTestCase):
    @parametrize("dtype", [torch.float16, torch.bfloat16])
    @parametrize("is_causal", [True, False])
    def test_halves(self, device, dtype, is_causal):
        passes(device, dtype, 3e-2, is_causal=is_causal)

    @parametrize("options", [{"is_causal": True, "sk": 40}, {"attn_mask": torch.ones(24, 24).tril().bool()}])
    def test_torch_keeps(self, device, options):
        passes(device, torch.float16, **options)

    def test_singles(self, device):
        passes(device, torch.float32)

    def test_fails_anyhow(self, device):
        self.assertEqual(1, 2)

    def test_fails_here(self, device):
        before = CALLS.forward
        passes(device, torch.float16)
        self.assertEqual(CALLS.forward, before)

    def test_fused_sdp_priority_order(self, device):
        self.assertEqual(1, 2)

    @parametrize("far", [0, 1])
    def test_fused_backwards_throws_determinism_warning(self, device, far):
        passes(device, torch.float16, 1e-2 if far == 0 else 1e-7)

    def test_mem_efficient(self, device):
        self.assertEqual(1, 2)


class TestSDPACudaOnly(NNTestCase):
    def test_sdp_flash_attention_grad_against_math(self, device):
        assert PLATFORM_SUPPORTS_FLASH_ATTENTION
        passes(device, torch.float16)

    def test_of_cuda(self, device):
        self.assertEqual(device, "cuda")


class TestTransformers(NNTestCase):
    def test_other(self, device):
        self.assertEqual(1, 2)


instantiate_device_type_tests(TestSDPA, globals(), only_for=("cpu", "cuda"))
instantiate_device_type_tests(TestSDPACudaOnly, globals(), only_for=("cuda"))
instantiate_device_type_tests(TestTransformers, globals(), only_for=("cpu", "cuda"))
"""


def outcomes(results):
    found = {}
    for line in map(json.loads, results.read_text().splitlines()):
        found.setdefault(line["test"], set()).add(line["outcome"])
    return found


@pytest.mark.no_poison
def test_every_outcome_is_counted(tmp_path):
    file, results = tmp_path / "test_transformers.py", tmp_path / "transformers_tests_1_of_1.jsonl"
    file.write_text(FILE)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), str(file), "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    first = outcomes(results)
    assert first == {
        "test_halves": {"passed"},
        "test_torch_keeps": {"passed, without a call of tilefold"},
        "test_singles": {"passed, without a call of tilefold"},
        "test_fails_anyhow": {"failed"},
        "test_fails_here": {"failed"},
        "test_fused_sdp_priority_order": {"failed as listed"},
        "test_fused_backwards_throws_determinism_warning": {"passed", "failed"},
        "test_sdp_flash_attention_grad_against_math": {"passed"},
    }, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.returncode == 1
    assert "13 cases in the file, 11 tests" in done.stdout
    again = [*command, "--again"]
    done = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=500, check=False)
    both = {"test_fails_anyhow": {"failed, without tilefold too"}}
    both["test_fused_backwards_throws_determinism_warning"] = {"passed", "failed, without tilefold too"}
    assert outcomes(results) == {**first, **both}, done.stdout[-3000:] + done.stderr[-2000:]
    assert "13 cases in the file" in done.stdout
    assert "| failed | 1 | 1 |" in done.stdout
