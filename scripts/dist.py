"""What a release is made of, into dist/: `make dist`.

The source archive and the wheel of the last commit are built twice, in two folders, under other umasks and time zones, the wheel
out of the archive.  Both times have to give the same bytes; their dates are the commit's.  `twine check` and
`check-wheel-contents` have to pass, the contents have to be what `problems` asks, and the hashes are written beside them.
TILEFOLD_URL becomes the metadata's links (scripts/metadata.py).  Runs in .venv-release (constraints/release.txt).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WORK = ROOT / ".cache" / "dist"
LARGEST = 3 << 20  # bytes of one file
# What a wheel and a source archive have to hold, and what no file of theirs is called.
IN_WHEEL = ("tilefold/__init__.py", "tilefold/py.typed", "*.dist-info/licenses/LICENSE", "*.dist-info/entry_points.txt")
IN_SOURCE = (
    *(
        "pyproject.toml",
        "PKG-INFO",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "SECURITY.md",
        "LICENSE",
        "Makefile",
        "mkdocs.yml",
    ),
    *("src/tilefold/py.typed", "tests/public_api.txt", "docs/index.md", "scripts/metadata.py", ".ci/run"),
)
NEVER = re.compile(r"(^|/)(__pycache__|\.cache|\.venv[^/]*|\.git)/|^(out|dist)/|\.pyc$|\.so$|~$")


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    """What a command prints; it ends the run where it fails."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"dist: {' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def version() -> str:
    """That of the checkout."""
    text = (ROOT / "src" / "tilefold" / "__init__.py").read_text(encoding="utf-8")
    return str(re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0])


def build(folder: Path, epoch: str, umask: int, zone: str) -> list[Path]:
    """The commit unpacked into `folder`, the archive built of it, and the wheel of the archive."""
    shutil.rmtree(folder, ignore_errors=True)
    source, made = folder / "source", folder / "made"
    source.mkdir(parents=True)
    before = os.umask(umask)
    try:
        archive = folder / "commit.tar"
        run("git", "archive", "--format=tar", f"--output={archive}", "HEAD")
        run("tar", "-xf", str(archive), "-C", str(source))
        builder = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made))
        run(*builder, str(source), SOURCE_DATE_EPOCH=epoch, TZ=zone, PYTHONHASHSEED=str(umask))
    finally:
        os.umask(before)
    return sorted(made.iterdir())


def hashes(files: list[Path]) -> dict[str, str]:
    """SHA-256 by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def contents(path: Path) -> dict[str, int]:
    """Bytes by name; those of a source archive without its folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {one.filename: one.file_size for one in wheel.infolist()}
    with tarfile.open(path) as archive:
        return {one.name.partition("/")[2]: one.size for one in archive.getmembers() if one.isfile()}


def problems(name: str, files: dict[str, int]) -> list[str]:
    """What is wrong with the contents: a file that is missing, too large, or has no business there."""
    wheel = name.endswith(".whl")
    wanted = [re.escape(one).replace(r"\*", "[^/]*") for one in (IN_WHEEL if wheel else IN_SOURCE)]
    found = [f"{name} lacks {one}" for one in wanted if not any(re.fullmatch(one, file) for file in files)]
    found += [f"{name} has {file}" for file in files if NEVER.search(file)]
    found += [f"{name}: {file} has {size} bytes" for file, size in files.items() if size > LARGEST]
    if wheel:
        found += [f"{name} has {file}" for file in files if not re.match(r"tilefold(-[^/]*\.dist-info)?/", file)]
    return found


def listing(name: str, files: dict[str, int]) -> list[str]:
    """Files and bytes by folder, two levels deep."""
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for file, amount in files.items():
        folder = "/".join(file.split("/")[:-1][:2]) or "."
        count[folder] += 1
        size[folder] += amount
    rows = [f"  {folder:44} {count[folder]:5} files {size[folder] / 1e3:9.1f} kB" for folder in sorted(count)]
    return [f"{name}: {len(files)} files, {sum(files.values()) / 1e6:.2f} MB unpacked", *rows]


def main() -> None:
    """Build twice, compare, check, list."""
    if changed := run("git", "status", "--porcelain"):
        print(f"dist: what is not committed is left out:\n{changed}", flush=True)
    epoch = run("git", "log", "-1", "--format=%ct")
    first = build(WORK / "first", epoch, 0o022, "UTC")
    second = build(WORK / "another folder", epoch, 0o077, "Asia/Tokyo")
    if hashes(first) != hashes(second):
        raise SystemExit(f"dist: two builds differ, see {WORK}\n{hashes(first)}\n{hashes(second)}")
    names = [f"tilefold-{version()}-py3-none-any.whl", f"tilefold-{version()}.tar.gz"]
    if [path.name for path in first] != names:
        raise SystemExit(f"dist: {[path.name for path in first]} were built instead of {names}")
    print(run(sys.executable, "-m", "twine", "check", "--strict", *map(str, first)))
    print(run(str(Path(sys.executable).parent / "check-wheel-contents"), str(first[0])))
    wrong = [one for path in first for one in problems(path.name, contents(path))]
    if wrong:
        raise SystemExit("dist: " + "\n".join(wrong))
    for path in first:
        print("\n".join(listing(path.name, contents(path))))
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for path in first:
        shutil.copyfile(path, DIST / path.name)
    sums = "".join(f"{digest}  {name}\n" for name, digest in hashes(first).items())
    (DIST / "SHA256SUMS").write_text(sums, encoding="utf-8")
    shutil.rmtree(WORK)
    print(f"dist: two builds are equal\n{sums}", end="")


if __name__ == "__main__":
    main()
