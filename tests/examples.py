"""How many examples a random test draws: what it names in CI, eight times fewer or 25 times more under the other profiles."""

from typing import Any

CI = 200  # what a test that names no number draws there


def examples(number: int) -> Any:
    """Settings that draw `number` examples in CI and in proportion elsewhere; needs hypothesis."""
    from hypothesis import settings

    return settings(max_examples=max(1, number * settings().max_examples // CI))
