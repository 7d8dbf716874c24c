"""The file that keeps Triton's hash of itself: the same value, while no file of Triton changes, whatever the file holds."""

import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tilefold.aot import newest_triton
from tilefold.ops import triton_key

VALUE = "3.6.0" + "-".join(["0" * 64] * 3)

ALONE = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("triton_key", sys.argv[1])  # without tilefold, and so without torch
triton_key = importlib.util.module_from_spec(spec)
spec.loader.exec_module(triton_key)
"""
SAME = (
    ALONE
    + """
from triton.runtime import cache
original = cache.triton_key
assert triton_key.install(), "this Triton is not known"
assert not triton_key.install(), "installed twice"
key = cache.triton_key()
computed = original.cache_info().currsize  # by Triton
print(json.dumps([key, computed, not computed or original() == key, cache.triton_key() is key]))
"""
)
KEEPER = (
    ALONE
    + """
path, value = Path(sys.argv[2]), sys.argv[3]
for _ in range(200):
    triton_key._keep(path, "listed", value)
    assert triton_key.kept_key(path, "listed", "3.6.0") == value
"""
)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The files of a Triton, as small ones."""
    root = tmp_path / "triton"
    for name in (
        "compiler/compiler.py",
        "backends/nvidia/driver.py",
        "language/core.py",
        "_C/libtriton.so",
        *triton_key.ALSO,
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"the text of {name}")
    return root


@pytest.fixture
def keys(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[str, int]]:
    """What a process does: the value, and how often Triton had to compute it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def process() -> tuple[str, int]:
        @functools.lru_cache
        def original() -> str:
            return VALUE

        filed = triton_key._filed(original, installed, "3.6.0")
        assert filed() == filed()
        return filed(), original.cache_info().misses

    return process


def test_another_folder(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "lasting"
    assert triton_key._filed(functools.lru_cache(lambda: VALUE), installed, "3.6.0", folder)() == VALUE
    assert len([*folder.iterdir()]) == 1
    assert not (tmp_path / "cache").exists()


def kept_file(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache").iterdir()
    return found


def test_the_second_process_reads_the_file(keys: Callable[[], tuple[str, int]], tmp_path: Path) -> None:
    assert keys() == (VALUE, 1)
    assert keys() == (VALUE, 0)
    assert kept_file(tmp_path).stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def touch(root: Path) -> None:
    path = root / "_C" / "libtriton.so"
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))


def lengthen(root: Path) -> None:
    path = root / "language" / "core.py"
    state = path.stat()
    path.write_text(path.read_text() + " ")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def add(root: Path) -> None:
    (root / "backends" / "nvidia" / "new.py").write_text("")


def remove(root: Path) -> None:
    (root / "compiler" / "compiler.py").unlink()


@pytest.mark.parametrize("change", [touch, lengthen, add, remove], ids=lambda change: change.__name__)
def test_a_changed_installation_is_hashed_anew(
    keys: Callable[[], tuple[str, int]], installed: Path, change: Callable[[Path], None]
) -> None:
    keys()
    change(installed)
    assert keys() == (VALUE, 1)
    assert keys() == (VALUE, 0)


def test_what_is_not_code_changes_nothing(keys: Callable[[], tuple[str, int]], installed: Path) -> None:
    keys()
    cached = installed / "compiler" / "__pycache__"
    cached.mkdir()
    (cached / "compiler.cpython-311.pyc").write_text("")
    assert keys() == (VALUE, 0)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": 3}', '{"listing": "other", "sha256": "", "key": "3.6.0"}', "\x00\xff"],
)
def test_a_broken_file_is_replaced(keys: Callable[[], tuple[str, int]], tmp_path: Path, text: str) -> None:
    keys()
    kept_file(tmp_path).write_text(text, encoding="latin-1")
    assert keys() == (VALUE, 1)
    assert keys() == (VALUE, 0)


@pytest.mark.parametrize("field", ["key", "sha256", "listing"])
def test_every_field_has_to_agree(keys: Callable[[], tuple[str, int]], tmp_path: Path, field: str) -> None:
    keys()
    held = json.loads(kept_file(tmp_path).read_text())
    kept_file(tmp_path).write_text(json.dumps({**held, field: held[field] + "1"}))
    assert keys() == (VALUE, 1)


def test_a_file_that_cannot_be_read_or_written(
    keys: Callable[[], tuple[str, int]], installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert keys() == (VALUE, 1)
    assert keys() == (VALUE, 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    (installed / "_C" / "libtriton.so").unlink()
    assert keys() == (VALUE, 1)
    assert not (tmp_path / "other").exists()


def test_an_installation_that_changes_meanwhile_is_not_kept(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    @functools.lru_cache
    def original() -> str:
        touch(installed)
        return VALUE

    assert triton_key._filed(original, installed, "3.6.0")() == VALUE
    assert not (tmp_path / "cache").exists()


def test_processes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "key.json"
    command = [sys.executable, "-c", KEEPER, triton_key.__file__, str(path), VALUE]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [each.communicate(timeout=120)[1] for each in running]
    assert [each.returncode for each in running] == [0] * 4, errors
    assert [each.name for each in path.parent.iterdir()] == [path.name], "parts of files are left"


def unlike(version: str = "3.6.0", **attributes: object) -> tuple[types.SimpleNamespace, str]:
    from triton.runtime import cache

    return types.SimpleNamespace(**{"__file__": cache.__file__, "triton_key": cache.triton_key, **attributes}), version


def test_only_a_known_triton_is_changed() -> None:
    same, _ = unlike()
    assert triton_key.known(same, "3.6.0")
    assert triton_key.known(same, "3.9.1+git123")
    assert not triton_key.known(same, "3.10.0")
    assert not triton_key.known(same, "unknown")
    other = functools.lru_cache(lambda: "3.6.0")
    assert not triton_key.known(*unlike(triton_key=other))
    assert not triton_key.known(*unlike(triton_key=lambda: "3.6.0"))
    assert not triton_key.known(*unlike(triton_key=None))
    assert not triton_key.known(*unlike(__file__="elsewhere.py"))


@pytest.mark.parametrize("which", ["installed", "newest"])
def test_the_value_is_tritons_own(which: str, tmp_path: Path) -> None:
    """In processes of their own: the first one hashes, the second reads, and both agree with Triton."""
    folder = newest_triton() if which == "newest" else None
    if which == "newest" and folder is None:
        pytest.skip("no second Triton here")
    environment = {**os.environ, "PYTHONPATH": str(folder or ""), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SAME, triton_key.__file__]
    results = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert [each[1:] for each in results] == [[1, True, True], [0, True, True]]
    assert results[0][0] == results[1][0]
