"""flash-attention 2.8's Python functions, computed by tilefold: `import tilefold.compat.flash_attn as flash_attn`.

`install()` registers it under the name `flash_attn`, for code that imports that; `uninstall()` puts back what was there.
docs/reference/flash_attn.md lists every argument and every deviation.
"""

from .arguments import VERSION as __version__
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .register import install, uninstall

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
