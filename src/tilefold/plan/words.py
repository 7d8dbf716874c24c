"""Words of plans' sentences."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """`number` with its noun: 1 tile, 2 tiles.  many: the plural where it is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def sentence(text: str) -> str:
    """First letter large, full stop at the end; identifiers such as sm_90 stay as they are."""
    start = text if any(c in "_0123456789" for c in text.split()[0]) else text[0].upper() + text[1:]
    return start if start.endswith(".") else f"{start}."
