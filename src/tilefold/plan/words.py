"""Words of plans' sentences."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """`number` with its noun: 1 tile, 2 tiles.  many: the plural where it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
