"""`install` and `uninstall`: this package under the name `flash_attn`, for code that imports that.

A finder in sys.meta_path serves the names below as modules of their own, which hold what their originals here hold, and tells
importlib.metadata of a distribution flash-attn, since callers ask for its version before they import it.  Submodules that are
not served come from an installed flash_attn, if there is one.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from .arguments import VERSION

__all__ = ["NAMES", "install", "uninstall"]

PACKAGE = "flash_attn"
NAMES = {
    PACKAGE: True,  # whether it is a package
    f"{PACKAGE}.flash_attn_interface": False,
    f"{PACKAGE}.bert_padding": False,
    f"{PACKAGE}.layers": True,
    f"{PACKAGE}.layers.rotary": False,
}


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata finds under the name flash-attn."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\nSummary: served by tilefold\n",
            "top_level.txt": f"{PACKAGE}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flash-attn is served by tilefold and has no files")


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds the modules of NAMES and the distribution; loads a module by copying what its original here holds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in NAMES:
            return None
        origin = f"{__package__}{name.removeprefix(PACKAGE)}"
        spec = importlib.machinery.ModuleSpec(name, self, origin=origin, is_package=NAMES[name])
        if NAMES[name]:
            real = importlib.machinery.PathFinder.find_spec(name, path)
            spec.submodule_search_locations = list((real and real.submodule_search_locations) or [])
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """None: the module that Python makes will do."""

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        original = importlib.import_module(str(spec and spec.origin))
        module.__doc__ = original.__doc__
        own = {key: value for key, value in vars(original).items() if not isinstance(value, ModuleType)}
        vars(module).update({key: value for key, value in own.items() if not key.startswith("__") or key == "__all__"})
        if hasattr(original, "__version__"):
            module.__version__ = original.__version__  # type: ignore[attr-defined]

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        return [_Distribution()] if name is None or name.lower().replace("-", "_") == PACKAGE else []

    def invalidate_caches(self) -> None:
        """There are none."""


_finder = _Finder()
_before: dict[str, ModuleType] = {}


def install() -> None:
    """Make `import flash_attn` import this package: now, before the modules that are to use it are imported.

    A flash_attn that was imported already keeps working where it is held, and comes back with `uninstall`."""
    if _finder in sys.meta_path:
        return
    _before.update(_taken_out())
    sys.meta_path.insert(0, _finder)
    importlib.invalidate_caches()
    for name in NAMES:
        importlib.import_module(name)


def uninstall() -> None:
    """Put back what `install` found."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    _taken_out()
    sys.modules.update(_before)
    _before.clear()
    importlib.invalidate_caches()


def _taken_out() -> dict[str, ModuleType]:
    """Everything under the package's name, no longer in sys.modules."""
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}
