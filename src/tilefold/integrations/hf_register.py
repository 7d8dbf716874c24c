"""Puts the attention function and the mask function into transformers' registries."""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .hf_attention import attention_forward
from .hf_mask import make_mask

__all__ = ["register", "unregister"]


def register(name: str) -> None:
    """Both functions under one name: models take the mask function that goes with the attention function."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def unregister(name: str) -> None:
    """Take both out again."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
