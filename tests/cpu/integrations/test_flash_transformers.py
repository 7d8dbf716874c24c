"""A transformers model with attn_implementation="flash_attention_2" on the installed functions: logits, generation, training."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPARE = """
import copy, sys, torch
sys.path[:0] = sys.argv[1:]
if not torch.cuda.is_available():
    import tilefold.debug
    tilefold.debug.patch_interpreter()  # as conftest.py does
import tilefold.compat.flash_attn as fa
fa.install()
import transformers.utils.import_utils as utils
from transformers import LlamaConfig, LlamaForCausalLM
if not torch.cuda.is_available():  # it asks for a GPU before it asks for flash_attn
    utils.is_torch_cuda_available = lambda: True
    getattr(utils.is_flash_attn_2_available, "cache_clear", lambda: None)()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(hidden_size=56, intermediate_size=64, num_hidden_layers=2, num_attention_heads=7, num_key_value_heads=1,
                     vocab_size=100, max_position_embeddings=64, head_dim=8)
eager = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").float().to(device)
flash = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="flash_attention_2").float().to(device)
flash.load_state_dict(eager.state_dict())
assert flash.config._attn_implementation == "flash_attention_2" and eager.config._attn_implementation == "eager"
ids = torch.randint(0, 100, (2, 9), device=device)
padded = torch.ones_like(ids)
padded[0, :4] = 0
with torch.no_grad():
    for mask in (torch.ones_like(ids), padded):
        one, other = (model.eval()(ids, attention_mask=mask).logits[mask.bool()] for model in (eager, flash))
        assert torch.allclose(one, other, atol=1e-5), (one - other).abs().max()
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(eager.generate(ids, **options), flash.generate(ids, **options))
for model in (eager, flash):
    model.train()(ids, labels=ids).loss.backward()
for one, other in zip(eager.parameters(), flash.parameters()):
    assert torch.allclose(one.grad, other.grad, atol=1e-5)
print("done")
"""


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_model_switches_by_one_argument(device):
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if device.type == "cpu" else {})}
    command = [sys.executable, "-c", COMPARE, str(ROOT / "src"), str(ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
