"""FlexAttention's functions, computed by tilefold: `from tilefold.compat.flex_attention import flex_attention`.

`install()` puts them into `torch.nn.attention.flex_attention`; `uninstall()` takes them out.  docs/compat/flex_attention.md lists
what passes, and what is refused.
"""

from .functions import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    install,
    noop_mask,
    or_masks,
    uninstall,
)

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "install",
    "noop_mask",
    "or_masks",
    "uninstall",
]
