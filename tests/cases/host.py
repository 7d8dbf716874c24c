"""Nothing may be read on the host: a dispatch mode, and the methods of a tensor by which a value reaches Python."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("index.Tensor", "_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal",
         "repeat_interleave.Tensor")  # fmt: skip


class NoReads(TorchDispatchMode):
    """Counts what it sees and forbids operators by how their names begin: else those whose shape or value the host waits for."""

    seen = 0

    def __init__(self, *reads: str) -> None:
        super().__init__()
        self.reads = reads or READS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        assert not str(func).removeprefix("aten.").startswith(self.reads), f"{func} reads values on the host"
        return func(*args, **(kwargs or {}))


def refuse_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value of a tensor may reach Python."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a value was read on the host")

    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
