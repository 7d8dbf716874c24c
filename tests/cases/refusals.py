"""What calls refuse: the error and a part of its message in a line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilefold.errors import TilefoldError


def refuses(error: type[Exception], text: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """`call(*args, **options)` raises this error, which is one of tilefold's, and its message has this text."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert text in str(caught.value), str(caught.value)
    assert isinstance(caught.value, TilefoldError)


def refuses_given(error: type[Exception], text: str, call: Callable[..., Any], device: Any, **given: Any) -> None:
    """`call(**given)`, with tensors on the device, raises this error, which is one of tilefold's, with exactly this message."""
    with pytest.raises(error) as caught:
        call(**{name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in given.items()})
    assert str(caught.value) == text
    assert isinstance(caught.value, TilefoldError)


def each_refuses(*rows: tuple[type[Exception], str, Callable[[], Any]]) -> None:
    """Each call raises its error, whose message a pattern matches."""
    for error, pattern, call in rows:
        with pytest.raises(error, match=pattern):
            call()
