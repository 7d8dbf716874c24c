"""Triton's hash of itself, kept in a file: it reads 400 MB in each process, for a value that only an installation changes.

Every key of Triton's cache begins with `triton.runtime.cache.triton_key()`, the SHA-256 of libtriton and of the sources of its
compiler, backends and language.  That takes 0.3 to 0.5 s, more than all else that a process with compiled kernels has to do.
Here the value that Triton computed is kept in Triton's own cache directory, under a hash of the path, size and time of
modification of every file that it may depend on.  It is the very same value, so the cache stays shared with all other users of
Triton.  Whatever is not as expected (another version, another function, an unreadable file) leaves Triton as it is.
"""

import contextlib
import functools
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

__all__ = ["install", "kept_key", "known", "listing", "place"]

KNOWN = (3, 6), (3, 10)  # the versions, from and below, of which `known` was compared with the source
# The texts in the code of the function of those versions: which folders it reads.
TEXTS = {
    *("rb", "compiler", "triton.compiler.", "backends", "triton.backends.", "language", "triton.language."),
    *("EXT_SUFFIX", ".", "_C", "libtriton.", "-"),
}
FOLDERS = ("compiler", "backends", "language", "_C")
ALSO = ("__init__.py", "runtime/cache.py")


def known(module: Any, version: str) -> bool:
    """Is `module`, which is triton.runtime.cache, the one whose `triton_key` reads FOLDERS and ALSO, and nothing else?"""
    cached = getattr(module, "triton_key", None)
    function = getattr(cached, "__wrapped__", None)
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount or code.co_filename != module.__file__ or not hasattr(cached, "cache_info"):
        return False
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    texts = {each for each in code.co_consts if isinstance(each, str) and each != function.__doc__}
    return KNOWN[0] <= numbers < KNOWN[1] and texts == TEXTS


def listing(root: Path) -> str:
    """A hash of what the value depends on: path, size in bytes and time of modification in nanoseconds of each file of code under
    FOLDERS, more than Triton reads, and of ALSO.  OSError where a file cannot be found.  root: the folder of triton."""
    found = sorted([*_code_under(root), *(root / name for name in ALSO)])
    if not any(path.name.startswith("libtriton.") for path in found):
        raise FileNotFoundError(f"no libtriton under {root}")
    lines = [f"{path}\n{state.st_size} {state.st_mtime_ns}" for path in found for state in (path.stat(),)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _code_under(root: Path) -> Iterator[Path]:
    suffixes = tuple(all_suffixes())
    for folder in FOLDERS:
        for path, folders, files in os.walk(root / folder, followlinks=True):  # an editable Triton links its backends
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (Path(path, name) for name in files if name.endswith(suffixes))


def place(cache: Path, listed: str) -> Path:
    """The file in Triton's cache directory for the installation that was listed."""
    return cache / f"tilefold-triton-key-{listed[:32]}.json"


def kept_key(path: Path, listed: str, version: str) -> str | None:
    """The value in the file, or None unless it is whole and of this installation."""
    try:
        held = json.loads(path.read_text())
        key = held["key"]
        whole = held["listing"] == listed and held["sha256"] == hashlib.sha256(key.encode()).hexdigest()
        return key if whole and key.startswith(version) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _keep(path: Path, listed: str, key: str) -> None:
    """Write the file; readers in other processes see the whole of it or none.  A cache that cannot be written stays without."""
    held = {"listing": listed, "sha256": hashlib.sha256(key.encode()).hexdigest(), "key": key}
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")  # with the user's umask, as Triton's own files
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(held))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def install(folder: Path | None = None) -> bool:
    """Let Triton look for its value in a file first; whether it does now.  Nothing is read before Triton asks.

    folder: where the file lies, if not in Triton's cache directory of then."""
    import triton
    from triton.runtime import cache

    original = cache.triton_key
    if not known(cache, triton.__version__) or original.cache_info().currsize:
        return False  # nothing known, or nothing left to save
    root = Path(triton.__file__).resolve().parent
    cache.triton_key = _filed(original, root, triton.__version__, folder)
    return True


def _filed(original: Callable[[], str], root: Path, version: str, folder: Path | None = None) -> Callable[[], str]:
    """`original`, computed only where no file has its value; by one thread, and once in a process, as Triton's own."""
    from triton import knobs

    lock = threading.Lock()

    @functools.lru_cache
    def value() -> str:
        try:
            listed = listing(root)
            path = place(folder or Path(knobs.cache.dir), listed)
        except (OSError, TypeError):  # TypeError: no cache directory
            return original()
        key = kept_key(path, listed, version)
        if key is None:
            key = original()
            if listing(root) == listed:  # nobody exchanged the files meanwhile
                _keep(path, listed, key)
        return key

    @functools.wraps(original)
    def triton_key() -> str:
        with lock:
            return value()

    vars(triton_key).update(cache_info=value.cache_info, cache_clear=value.cache_clear)
    return triton_key
