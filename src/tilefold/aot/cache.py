"""Reports kept on disk, so that what was compiled once is not compiled again by the next run of the tests.

The key covers the kernel's source and all that it calls, the signature and constants, the options, the target, the
Triton installation (all from `compile.prepare`) and the source of this package.
"""

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from tilefold.aot.report import CompileReport

__all__ = ["CACHE_VARIABLE", "cache_folder", "checkout", "load", "store"]

CACHE_VARIABLE = "TILEFOLD_AOT_CACHE"
"""Environment variable: folder of the cache, or "off" to keep nothing."""


def checkout() -> Path | None:
    """Root of the source checkout that this package runs from, None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "src" / "tilefold").is_dir() and (root / "tests").is_dir() else None


def cache_folder() -> Path | None:
    """Folder of reports: $TILEFOLD_AOT_CACHE, else .cache/aot of the checkout, else the user's cache; None if off."""
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    root = checkout()
    if root is not None:
        return root / ".cache" / "aot"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilefold" / "aot"


@functools.cache
def _own_source() -> str:
    """Hash of this package, because a change to how reports are read makes old ones wrong."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _path(key: str) -> Path | None:
    folder = cache_folder()
    name = hashlib.sha256(f"{key} {_own_source()}".encode()).hexdigest()
    return None if folder is None else folder / name[:2] / f"{name}.json"


def load(key: str) -> CompileReport | None:
    """The report kept under `key`, None when there is none or it cannot be read (it is then made anew)."""
    path = _path(key)
    if path is None:
        return None
    try:
        return CompileReport.from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(key: str, report: CompileReport) -> None:
    """Keep `report` under `key`; readers in other processes see the whole file or none."""
    path = _path(key)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
        part.write(report.to_json())
    Path(part.name).replace(path)
