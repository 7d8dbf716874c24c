"""Runs pages' Python as a reader would: `python tests/run_page.py PAGE...` runs the blocks of each page in one namespace.

It prints JSON: for each page (line, what the block printed, what the page says it prints or None).  A block that begins with
`# program.py` is a program of its own, and left out."""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

from sources import run_source

__all__ = ["BLOCK", "PROGRAM"]

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
PROGRAM = "# program.py\n"


def run(page: Path) -> list[tuple[int, str, str | None]]:
    """(line, printed, shown) of each block."""
    text, names, found = page.read_text(encoding="utf-8"), {"__name__": "page"}, []
    for block in BLOCK.finditer(text):
        if block[1].startswith(PROGRAM):
            continue
        printed = io.StringIO()
        line = text[: block.start()].count("\n") + 2
        try:
            with contextlib.redirect_stdout(printed):
                run_source(block[1], names)
        except Exception as error:
            raise RuntimeError(f"{page.name}:{line}: {error}") from error
        found.append((line, printed.getvalue(), block[2]))
    return found


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":  # the same numbers in a fraction of the time
        from tilefold.debug import patch_interpreter

        patch_interpreter()
    json.dump([run(Path(name)) for name in sys.argv[1:]], sys.stdout)
