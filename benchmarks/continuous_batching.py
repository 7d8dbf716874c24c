"""Throughput of Transformers' continuous batching by attention implementation: Qwen2-7B's shape, random weights, greedy tokens.

    PYTHONPATH=src python benchmarks/continuous_batching.py [--layers 28] [--requests 64] [--prompt 512] [--new 128]

Each implementation runs twice, the second time is printed: CUDA graphs are kept from the first.  Prompts have half to one and a
half times --prompt tokens.  Equal: sequences whose first token is sdpa's, as far as rounding leaves it."""

import argparse
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import tilefold


def model_of(layers: int) -> Any:
    """Qwen2-7B with so many layers."""
    config = Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=layers, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def tokens_of(model: Any, implementation: str, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Generated tokens, and the seconds that they took."""
    model.set_attn_implementation(implementation)
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_memory_percent=0.6, auto_switch_to_flash=False)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    outputs = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    names = sorted(outputs, key=lambda name: int(name.split("_")[1]))
    return [outputs[name].generated_tokens for name in names], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("layers", 28), ("requests", 64), ("prompt", 512), ("new", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.manual_seed(0)
    tilefold.register()
    model = model_of(options.layers)
    lengths = torch.randint(options.prompt // 2, options.prompt * 3 // 2, (options.requests,)).tolist()
    prompts = [torch.randint(10, 150000, (length,)).tolist() for length in lengths]
    print(f"{torch.cuda.get_device_name()}, transformers {transformers.__version__}, {options.layers} layers, {options.requests}"
          f" prompts of {sum(lengths) / len(lengths):.0f} tokens, {options.new} new ones")  # fmt: skip
    first: list[int] = []
    peer = 0.0
    for implementation in ("sdpa", "tilefold"):
        for _ in range(2):
            found, seconds = tokens_of(model, implementation, prompts, options.new)
        assert all(len(one) == options.new for one in found)
        rate = options.requests * options.new / seconds
        first, peer = first or [one[0] for one in found], peer or rate
        equal = sum(one[0] == other for one, other in zip(found, first, strict=True))
        print(
            f"{implementation:10} {seconds:8.2f} s {rate:8.0f} tokens/s {rate / peer:6.2f}   equal {equal} of {len(found)}"
        )


if __name__ == "__main__":
    main()
