"""Are the tokens of every request those of Transformers' own greedy generation?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from continuous.engine import Request

__all__ = ["Comparison", "compare_requests", "with_weights"]


@dataclass(frozen=True)
class Comparison:
    """One request beside Transformers.

    same: how many tokens agree from the first on; gap: by how much, in fp32, Transformers' token is better than ours where they
    part, and rounding: twice what the dtype's rounding changes in those logits; None where all agree."""

    number: int
    same: int
    wanted: list[int]
    got: list[int]
    gap: float | None = None
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        return self.got == self.wanted

    @property
    def ok(self) -> bool:
        """Equal, or parted at two tokens between which only rounding decides."""
        return self.equal or (self.gap is not None and self.gap <= self.rounding)


@torch.no_grad()
def compare_requests(requests: Sequence[Request], theirs: Any, dtype: torch.dtype) -> list[Comparison]:
    """Generate each request by itself with Transformers in a dtype, on the device where `theirs`, in fp32, lies.

    In fp32 nothing but equal tokens will do.  In 16 bits two tokens may be equally good but for rounding, and everything after
    them differs then; so at the first difference both are looked up in the logits of fp32."""
    used = exact = theirs
    if dtype != torch.float32:
        used = with_weights(theirs, dtype)
        exact = with_weights(used, torch.float32)  # the rounded weights, computed with exactly
    return [_beside(one, _greedy(used, one), exact, used) for one in requests]


def with_weights(model: Any, dtype: torch.dtype) -> Any:
    """A copy with its weights in a dtype and its buffers as they are: rotary frequencies rounded to 16 bits would be other ones,
    0.03 rad off at position 100, as `model.to(dtype)` makes them."""
    import copy

    made = copy.deepcopy(model)
    for one in made.parameters():
        one.data = one.data.to(dtype)
    return made


def _greedy(model: Any, one: Request) -> list[int]:
    from transformers import GenerationConfig

    ids = torch.tensor([one.prompt], device=model.device)
    config = GenerationConfig(
        max_new_tokens=one.new_tokens, do_sample=False, eos_token_id=list(one.ends) or None, pad_token_id=0
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    wanted: list[int] = out[0, len(one.prompt) :].tolist()
    return wanted


def _beside(one: Request, wanted: list[int], exact: Any, used: Any) -> Comparison:
    got = one.generated
    same = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    if got == wanted or used is exact or same == min(len(got), len(wanted)):
        return Comparison(one.number, same, wanted, got)
    ids = torch.tensor([[*one.prompt, *wanted[:same]]], device=exact.device)
    true, rounded = (model(ids).logits[0, -1].float() for model in (exact, used))
    gap = float(true[wanted[same]] - true[got[same]])
    return Comparison(one.number, same, wanted, got, abs(gap), 2 * float((true - rounded).abs().max()))
