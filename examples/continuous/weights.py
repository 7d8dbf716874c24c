"""Where weights come from: Transformers' own random ones for a seed, or a local directory in Hugging Face's format."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from continuous.qwen2 import Qwen2, Shape

__all__ = ["end_tokens", "load_directory", "random_model", "reference_model"]


def random_config(layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, positions: int) -> Any:
    """A Qwen2Config without an end token.  Weights are drawn wide enough that answers differ from token to token."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions,
        initializer_range=2.4 / hidden**0.5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip


def random_model(config: Any, seed: int) -> tuple[Qwen2, Any]:
    """(our model, Transformers') with the same random weights, in fp32 on the CPU."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(seed)
    theirs = Qwen2ForCausalLM(config).eval()
    for name, tensor in theirs.named_parameters():
        if name.endswith("bias"):  # zeros would hide a forgotten bias
            tensor.data.normal_(std=0.1)
    ours = Qwen2(Shape.of(config))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def load_directory(folder: Path) -> tuple[Qwen2, Any]:
    """(our model, its configuration) from config.json and *.safetensors, or pytorch_model*.bin, of a local directory.

    Raises FileNotFoundError, ValueError."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"there is no config.json in {folder}")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    weights = _weights(folder)
    with torch.device("meta"):
        ours = Qwen2(Shape.of(config))
    missing, unknown = ours.load_state_dict(weights, strict=False, assign=True)
    if ours.shape.tied:
        ours.lm_head.weight = ours.model.embed_tokens.weight
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unknown:
        raise ValueError(f"the weights in {folder} are not this model's: missing {missing[:4]}, unknown {unknown[:4]}")
    return ours, config


def _weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if files := sorted(folder.glob("*.safetensors")):
        from safetensors.torch import load_file

        for file in files:
            found |= load_file(file)
    else:
        files = sorted(folder.glob("pytorch_model*.bin"))
        for file in files:
            found |= torch.load(file, map_location="cpu", weights_only=True)
    if not files:
        raise FileNotFoundError(f"there are neither *.safetensors nor pytorch_model*.bin in {folder}")
    return found


def reference_model(folder: Path) -> Any:
    """Transformers' model of a local directory, in fp32 on the CPU."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()


def end_tokens(config: Any) -> tuple[int, ...]:
    """The tokens after which an answer ends."""
    ends = config.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
