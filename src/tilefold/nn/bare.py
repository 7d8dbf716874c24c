"""Whether a module's parameters may be used without a call of it."""

import torch
from torch import nn
from torch.nn.modules import module as every

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


def is_bare(module: nn.Module, device: torch.device) -> bool:
    """Whether nobody would miss the call: no hooks, of its own or of all modules, no `forward` in the instance, as of
    offloading, and parameters on the device."""
    if any(getattr(module, name) for name in HOOKS) or any(getattr(every, name, None) for name in _GLOBAL):
        return False
    return "forward" not in vars(module) and all(one.device == device for one in module.parameters(recurse=False))
