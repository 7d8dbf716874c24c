"""Puts the attention function and the mask function into transformers' registries, and the name into continuous batching."""

import importlib
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .hf_attention import attention_forward
from .hf_mask import make_mask

_BATCHING = "transformers.generation.continuous_batching"
_replaced: list[tuple[Any, str, Any]] = []  # (where, name, theirs) of what ours stands in for


def register(name: str) -> None:
    """Both functions under one name: models take the mask function that goes with the attention function.

    Continuous batching knows implementations by fixed names.  It takes this one as it takes flash attention: no mask is built,
    steps that only decode come with a block table, and CUDA graphs and asynchronous batches are on."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    if _replaced:
        return

    def switch(theirs: Callable[..., None]) -> Callable[..., None]:
        def ours(self: Any, model: Any, *args: Any, **options: Any) -> None:
            if model.config._attn_implementation != name:
                theirs(self, model, *args, **options)

        return ours

    def is_flash(theirs: Callable[..., bool]) -> Callable[..., bool]:
        def ours(config: Any = None, *args: Any, **options: Any) -> bool:
            return getattr(config, "_attn_implementation", None) == name or theirs(config, *args, **options)

        return ours

    def functions(theirs: Callable[..., Any]) -> Callable[..., Any]:  # is asked whether there is one of block tables
        return lambda implementation, *args, **options: (
            ((attention_forward,) * 5, ()) if implementation == name else theirs(implementation, *args, **options)
        )

    _replace("", "ContinuousBatchingManager.switch_to_cb_friendly_attn", switch)
    for module in (".initialization", ".cache"):
        _replace(module, "is_flash_attention_requested", is_flash)
    _replace(".initialization", "lazy_import_flash_attention", functions)


def unregister(name: str) -> None:
    """Take all of it out again."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
    while _replaced:
        setattr(*_replaced.pop())


def _replace(module: str, path: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of it in the place of a function of continuous batching, if this version has it."""
    *owner, name = path.split(".")
    place: Any
    try:
        place = importlib.import_module(_BATCHING + module)
    except ImportError:  # older than continuous batching, or than its parts
        return
    for one in owner:
        place = getattr(place, one, None)
    if hasattr(place, name):
        theirs = getattr(place, name)
        _replaced.append((place, name, theirs))
        setattr(place, name, make(theirs))
