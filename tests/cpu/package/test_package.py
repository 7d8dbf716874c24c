"""What `pip install tilefold` and `import tilefold` promise: light, lazy, typed, licensed, and one version."""

import importlib.metadata
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
IMPORT_SHARE = 0.05  # of what torch takes; 0.03 where it was measured

IMPORT_AND_REPORT = """
import json, sys, time
start = time.process_time()
import torch
middle = time.process_time()
import tilefold
share = (time.process_time() - middle) / (middle - start)
tilefold.plan, tilefold.masks.causal() & tilefold.masks.prefix(3)  # nor do these
heavy = [name for name in ("triton", "transformers", "typer", "rich", "matplotlib") if name in sys.modules]
already = json.loads(sys.argv[1])
print(json.dumps({"share": share, "heavy": [n for n in heavy if n not in already], "cuda": torch.cuda.is_initialized()}))
"""
TORCH_ALONE = """
import json, sys, torch
print(json.dumps([n for n in ("triton", "transformers", "typer", "rich", "matplotlib") if n in sys.modules]))
"""
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("typer", "rich", "click"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Absent())
sys.argv = ["tilefold", "explain"]
from tilefold.cli import main
sys.exit(main())
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that keeps bytecode, as an installed package has it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)


def report_import() -> dict[str, object]:
    """Import torch and then tilefold in a fresh process; what the second cost and brought along."""
    alone = python(TORCH_ALONE)
    assert alone.returncode == 0, alone.stderr
    done = python(IMPORT_AND_REPORT, alone.stdout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_is_lazy_and_touches_no_gpu() -> None:
    report = report_import()
    assert report["heavy"] == [], f"`import tilefold` loads {report['heavy']}, which torch had not loaded"
    assert report["cuda"] is False, "`import tilefold` initialised CUDA"


def test_import_costs_little_more_than_torch() -> None:
    """Processor time beside torch's in the same process, the least of several runs: neighbours only make an import slower."""
    best = float("inf")
    for _ in range(8):
        best = min(best, float(str(report_import()["share"])))
        if best <= IMPORT_SHARE:
            return
    pytest.fail(f"`import tilefold` takes {best:.1%} of the time that torch takes; the budget is {IMPORT_SHARE:.0%}")


def test_one_version() -> None:
    """It stands in the package; metadata, citation and changelog have the same."""
    import tilefold

    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r"^version = ", project, re.MULTILINE)
    assert 'path = "src/tilefold/__init__.py"' in project.split("[tool.hatch.version]")[1].split("[")[0]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d\S*), (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert released[0][0] == tilefold.__version__
    assert changes.index("## Unreleased") < changes.index(f"## {released[0][0]}")
    stated = tuple(re.findall(rf"^{name}: (.+)$", citation, re.MULTILINE) for name in ("version", "date-released"))
    assert stated == tuple([one] for one in released[0])
    try:
        installed = importlib.metadata.distribution("tilefold")
    except importlib.metadata.PackageNotFoundError:
        return  # on a machine that cannot build packages the source is on the path as it is
    direct = json.loads(installed.read_text("direct_url.json") or "{}")
    if not direct.get("dir_info", {}).get("editable"):  # a checkout's metadata are as old as its environment
        assert installed.version == tilefold.__version__


def test_the_build_knows_the_version_and_the_links() -> None:
    """What hatchling makes of pyproject.toml: links only where an address is given."""
    pytest.importorskip("hatchling")
    import tilefold

    def metadata(url: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "hatchling", "metadata"]
        env = os.environ | {"TILEFOLD_URL": url}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain, linked = metadata(""), metadata("https://host.invalid/tilefold/")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert plain["version"] == linked["version"] == tilefold.__version__
    assert "urls" not in plain
    assert plain["readme"]["text"] == readme
    assert linked["urls"]["Changelog"] == f"https://host.invalid/tilefold/blob/v{tilefold.__version__}/CHANGELOG.md"
    targets = re.findall(r"\]\(([^)#]+)|src=\"([^\"]+)", linked["readme"]["text"])
    assert len(targets) > 20
    assert all((link or picture).startswith("https://") for link, picture in targets)


def test_a_wheel_is_the_same_bytes_in_another_place(tmp_path: Path) -> None:
    """Another folder, umask, time zone and order of hashes; `make dist` does it with the source archive, too."""
    pytest.importorskip("hatchling")
    made = []
    for folder, mask, zone in (("a", 0o022, "UTC"), ("another folder", 0o077, "Asia/Tokyo")):
        before = os.umask(mask)
        try:
            place = tmp_path / folder
            shutil.copytree(
                ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile
            )
            (place / "scripts").mkdir()
            for name in ("pyproject.toml", "README.md", "LICENSE", "scripts/metadata.py"):
                shutil.copyfile(ROOT / name, place / name)
            command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "made"]
            env = os.environ | {"SOURCE_DATE_EPOCH": "1764000000", "TZ": zone, "PYTHONHASHSEED": str(mask)}
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env, cwd=place)
        finally:
            os.umask(before)
        assert done.returncode == 0, done.stderr
        made += (place / "made").glob("*.whl")
    first, second = made
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_the_contents_of_a_release_are_looked_at() -> None:
    import dist

    wheel, source = f"tilefold-{dist.version()}-py3-none-any.whl", f"tilefold-{dist.version()}.tar.gz"
    good = dict.fromkeys((one.replace("*", "tilefold-1") for one in dist.IN_WHEEL), 10)
    assert dist.problems(wheel, good) == []
    assert dist.problems(source, dict.fromkeys(dist.IN_SOURCE, 10)) == []
    assert all((ROOT / name).is_file() for name in dist.IN_SOURCE if name != "PKG-INFO")
    for extra in ("tests/conftest.py", "tilefold/__pycache__/a.pyc", "tilefold/big.bin"):
        size = dist.LARGEST + 1 if extra.endswith(".bin") else 1
        assert any(extra in one for one in dist.problems(wheel, good | {extra: size})), extra
    assert dist.problems(wheel, {name: 1 for name in good if "py.typed" not in name}) == [
        f"{wheel} lacks tilefold/py\\.typed"
    ]
    assert dist.listing("x", {"a/b/c": 1000, "a/b/d": 1000, "e": 500}) == [
        "x: 3 files, 0.00 MB unpacked",
        f"  {'.':44}     1 files       0.5 kB",
        f"  {'a/b':44}     2 files       2.0 kB",
    ]


def test_types_are_shipped() -> None:
    assert (importlib.resources.files("tilefold") / "py.typed").is_file()


def test_the_command_says_what_it_needs() -> None:
    """Without typer and rich, `tilefold` names the extra to install and fails without a traceback."""
    done = python(WITHOUT)
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "tilefold[cli]" in text
    assert "Traceback" not in text


def test_every_module_says_what_it_is() -> None:
    silent = [
        p for p in sorted((ROOT / "src").rglob("*.py")) if not p.read_text().lstrip().startswith(('"""', 'r"""', "#"))
    ]
    assert not silent, f"no module docstring: {[str(p.relative_to(ROOT)) for p in silent]}"


def test_an_active_environment_of_the_checkout_is_not_what_replaces_it(tmp_path: Path) -> None:
    """scripts/environment.py deletes it before it makes the new one."""
    if not (script := ROOT / "scripts" / "find-python").is_file():
        pytest.skip("no checkout")
    (tmp_path / "scripts").mkdir()
    copy = shutil.copy(script, tmp_path / "scripts")
    for name in (".venv-test", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python3").symlink_to(sys.executable)
    path = [str(tmp_path / name / "bin") for name in (".venv-test", "other")]
    environment = {**os.environ, "PATH": os.pathsep.join([*path, os.environ["PATH"]])}
    environment.pop("PYTHON", None)
    found = subprocess.check_output(["sh", copy], text=True, env=environment).strip()
    assert found == str(tmp_path / "other" / "bin" / "python3")


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """pytest passes by folders of some names, `dist` among them, and says nothing."""
    skipped = pytestconfig.getini("norecursedirs")
    files = list((ROOT / "tests").rglob("test_*.py"))
    assert "dist" in skipped and len(files) > 200
    lost = [
        file for file in files for part in file.relative_to(ROOT).parts[:-1] if any(fnmatch(part, p) for p in skipped)
    ]
    assert not lost
