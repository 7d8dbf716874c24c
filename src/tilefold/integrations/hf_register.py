"""Puts the attention function and the mask function into transformers' registries, and the name into continuous batching."""

from typing import Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .hf_attention import attention_forward
from .hf_mask import make_mask

try:
    from transformers.generation.continuous_batching import ContinuousBatchingManager as Manager
except ImportError:  # older than continuous batching
    Manager = None

_SWITCH = "switch_to_cb_friendly_attn"
_theirs: list[Any] = []  # the manager's own method, while ours is in its place


def register(name: str) -> None:
    """Both functions under one name: models take the mask function that goes with the attention function.

    Continuous batching knows implementations by a fixed list of names.  Its check lets this one pass."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    if _theirs or not hasattr(Manager, _SWITCH):
        return
    theirs = getattr(Manager, _SWITCH)

    def switch(self: Any, model: Any, *args: Any, **options: Any) -> None:
        if model.config._attn_implementation != name:
            theirs(self, model, *args, **options)

    _theirs.append(theirs)
    setattr(Manager, _SWITCH, switch)


def unregister(name: str) -> None:
    """Take all of it out again."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
    if _theirs:
        setattr(Manager, _SWITCH, _theirs.pop())
