"""What a layer's queries may see, in a form that attention can use without a dense mask.

Transformers makes one mask per kind of layer and forward pass and hands it to every layer of the kind.  Most masks are a rule
(causal, a window, sequences packed one after the other) and perhaps padding; a `Visible` says so, where SDPA's mask would be
batch x queries x keys of booleans."""

from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from ..errors import Unsupported


class Rows(NamedTuple):
    """Sequences packed one after the other, along the tokens of all rows of the batch.

    offsets: [sequences + 1] int32 on the device; longest: the most tokens of a sequence."""

    offsets: torch.Tensor
    longest: int


class Visible(BlockMask):
    """The rule, and what is beside it.

    shape: (batch, 1, queries, keys), as of the mask that it stands for.
    causal, window: as in `tilefold.attention`, aligned to the bottom right of queries by `end` keys.
    end: keys at and after this index are empty places of a static cache.
    keys: [batch, end] bool, true where a key is a token rather than padding; None if all are.
    rows: the packed sequences; then nothing is visible across them.
    lengths: [batch] int32 on the device, of a step of generation: its one query sees so many keys; `end` is the cache's room.

    It derives from torch's BlockMask because transformers passes on, unread, what is a tensor or a BlockMask of four dimensions;
    it has none of a BlockMask's contents."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        causal: bool,
        window: tuple[int, int] | None,
        end: int,
        keys: torch.Tensor | None,
        rows: Rows | None,
        lengths: torch.Tensor | None = None,
    ) -> None:
        self._shape, self.causal, self.window, self.end, self.keys, self.rows = shape, causal, window, end, keys, rows
        self.lengths = lengths
        self.again: Any = None  # of a step: what its first layer leaves for the others
        self.mask = None if keys is None else keys[:, None, None, :]  # as `attention` takes it; every layer asks

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> "Visible":
        """Itself: generation asks it of the masks that it makes beforehand."""
        return self

    def to(self, device: Any, *_: Any, **__: Any) -> "Visible":
        """With its tensors on another device, for models that are spread over several."""
        if isinstance(device, torch.dtype):
            return self
        keys = None if self.keys is None else self.keys.to(device)
        rows = None if self.rows is None else Rows(self.rows.offsets.to(device), self.rows.longest)
        lengths = None if self.lengths is None else self.lengths.to(device)
        return Visible(self._shape, self.causal, self.window, self.end, keys, rows, lengths)

    def __getitem__(self, index: Any) -> Any:
        raise Unsupported(
            "this model takes its attention mask apart, but with attn_implementation='tilefold' it is no tensor: give it a mask "
            "of your own, [batch, 1, queries, keys]"
        )

    def __repr__(self) -> str:
        beside = [f"end={self.end}"]
        if self.keys is not None:
            beside.append("padding")
        if self.lengths is not None:
            beside.append("lengths on the device")
        if self.rows is not None:
            beside.append(f"{len(self.rows.offsets) - 1} packed sequences")
        return f"Visible({self._shape}, causal={self.causal}, window={self.window}, {', '.join(beside)})"

    __str__ = __repr__
