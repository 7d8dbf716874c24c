"""tilefold as an attention implementation of other libraries: `register()` makes it known to them by the name `tilefold`.

Importing this imports none of them; registering does."""

import importlib
import importlib.metadata
import importlib.util
import re
from typing import Any

from ..errors import Unsupported, ValueRangeError

__all__ = ["NAME", "register", "unregister"]

NAME = "tilefold"
"""What `attn_implementation` and `set_attention_backend` take."""

# By library: the module here that knows it, and the oldest version that has what it needs.
_LIBRARIES = {
    "transformers": ("hf_register", (4, 56)),
    "diffusers": ("diffusers_backend", (0, 35)),
    "torch": ("torch_flash", (2, 11)),
}


def register(library: str = "transformers") -> None:
    """Make `tilefold` an attention implementation of `library`, for all models of this process.

    Args:
        library: "transformers" (4.56 or newer): models then load with `attn_implementation="tilefold"`, or change to it by
            `model.set_attn_implementation("tilefold")`; or "diffusers" (0.35 or newer), whose models change to it by
            `model.set_attention_backend("tilefold")`; or "torch" (2.11 or newer), where
            `torch.nn.attention.activate_flash_attention_impl("tilefold")` then makes it the flash attention of
            scaled_dot_product_attention and varlen_attn (docs/reference/torch.md).

    With transformers 5.23 its continuous batching takes the name too.  Calling it again does nothing more.

    Raises:
        ValueRangeError for another library, Unsupported if the library is not installed or too old: both say what is needed.

    Source: transformers' AttentionInterface and AttentionMaskInterface (https://github.com/huggingface/transformers), diffusers'
    attention dispatcher (https://github.com/huggingface/diffusers), torch.nn.attention.register_flash_attention_impl."""
    _module(library).register(NAME)


def unregister(library: str = "transformers") -> None:
    """Take back what `register(library)` did; nothing if it was not called.  Models that chose it by name cannot run afterwards;
    torch's functions are torch's own again."""
    _module(library).unregister(NAME)


def _module(library: str) -> Any:
    """The module that knows the library, after checking that the library is there."""
    if library not in _LIBRARIES:
        raise ValueRangeError(f"library must be one of {', '.join(map(repr, _LIBRARIES))}, got {library!r}")
    module, oldest = _LIBRARIES[library]
    needed = f"tilefold.register({library!r}) needs {library} {'.'.join(map(str, oldest))} or newer"
    advice = f"pip install '{library}>={'.'.join(map(str, oldest))}'"
    if importlib.util.find_spec(library) is None:
        raise Unsupported(f"{needed}, which is not installed: {advice}")
    version = importlib.metadata.version(library)
    if tuple(int(part) for part in re.findall(r"\d+", version)[: len(oldest)]) < oldest:
        raise Unsupported(f"{needed}, and {version} is installed: {advice}")
    return importlib.import_module(f".{module}", __name__)
