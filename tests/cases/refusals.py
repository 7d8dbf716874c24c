"""What calls refuse: the error and a part of its message in a line."""

from collections.abc import Callable
from typing import Any

import pytest

from tilefold.errors import TilefoldError


def refuses(error: type[Exception], text: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """`call(*args, **options)` raises this error, which is one of tilefold's, and its message has this text."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert text in str(caught.value), str(caught.value)
    assert isinstance(caught.value, TilefoldError)
