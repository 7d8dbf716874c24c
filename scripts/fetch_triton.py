"""Unpack a Triton wheel beside the installed one, so that kernels can be compiled under both: prints the folder.

    python scripts/fetch_triton.py [--version 3.9.0] [--into .cache]

pip downloads the wheel for the running Python, without its dependencies; nothing is installed. The folder is
INTO/triton-VERSION-cpXY, where the tests look for it (or name it in TILEFOLD_TRITON_NEWEST). Exit status 0 when it is
there, 3 with the reason on standard error when it cannot be had (no network, no wheel for this Python or machine).
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NEWEST = "3.9.0"
UNAVAILABLE = 3


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack `wheel` into `folder`, which appears whole or not at all; keeps the execute bits of ptxas and friends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        part = Path(temporary) / "part"
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = Path(archive.extract(member, part))
                mode = member.external_attr >> 16
                if mode & 0o111 and path.is_file():
                    path.chmod(path.stat().st_mode | 0o755)
        if not (part / "triton" / "__init__.py").is_file():
            raise FileNotFoundError(f"{wheel.name} holds no triton/__init__.py")
        part.rename(folder)


def download(version: str, folder: Path) -> Path:
    """The wheel triton==version, downloaded by pip into `folder`; RuntimeError with pip's last words when it fails."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    options = ["--only-binary=:all:", "--retries=1", "--timeout=20", f"--dest={folder}", f"triton=={version}"]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("triton-*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(said[-1] if said else f"pip ended with status {done.returncode} and no wheel")
    return wheels[0]


def main() -> int:
    """Command line: see the module's docstring."""
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=NEWEST, help="Triton version (default %(default)s)")
    parser.add_argument(
        "--into", type=Path, default=root / ".cache", help="parent folder (default: the checkout's .cache)"
    )
    chosen = parser.parse_args()
    folder = chosen.into.resolve() / f"triton-{chosen.version}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not folder.exists():
        try:
            with tempfile.TemporaryDirectory() as temporary:
                unpack(download(chosen.version, Path(temporary)), folder)
        except (RuntimeError, OSError, zipfile.BadZipFile) as reason:
            print(f"triton {chosen.version} is not available: {reason}", file=sys.stderr)
            return UNAVAILABLE
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
