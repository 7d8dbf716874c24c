"""The trace that torch's profiler writes, read back."""

import json
import tempfile
from pathlib import Path
from typing import Any


def exported(profiler: Any) -> dict[str, Any]:
    """The Chrome trace of a profiler of torch's that has ended.

    The file is opened when it is written: torch may put another one in the place of one that is there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return document
