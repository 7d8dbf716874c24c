"""Code that is made in a test, in such a way that its source can be read: of functions in it Triton and tilefold want that."""

import linecache
from typing import Any


def run_source(text: str, names: dict[str, Any]) -> None:
    """Run it with these names, to which it adds its own."""
    file = f"<made {len(linecache.cache)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)
