"""torch's operators over the architecture `cpu`: the tests of the interpreter in plain torch."""

import sys

import pytest

from torch_cpu import again, device, torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")

globals().update(
    again(
        "test_torch_door",
        "both_passes_in_every_memory_layout shapes_and_windows nothing_to_do a_gradient_from_sum varlen_attn "
        "dropout_is_the_same_in_both_passes what_torch_keeps_is_counted",
    )
)
door, original = (getattr(sys.modules["test_torch_door"], name) for name in ("door", "original"))
_counted = sys.modules["test_torch_door"]._counted
