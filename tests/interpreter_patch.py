"""Triton's interpreter replaces the language's functions once a launch here, rather than once a call of every device function.

Its launches replace the functions of triton.language by their own and put them back at the end.  It does the same again
whenever a device function is called, where all of them are replaced already: that takes half of a launch's time.
"""

from typing import Any


def patch_once_a_launch() -> None:
    """Make it so; a Triton that does it another way is left as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "patched"):
        return
    patch_lang, patched = interpreter._patch_lang, set[int]()  # modules whose functions are replaced just now
    seen: dict[Any, set[int]] = {}

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
        """A launch's: when it ends, nothing is replaced."""

        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(fn: Any) -> Any:
        modules = seen.get(fn)
        if modules is None:  # as patch_lang looks for them
            modules = seen[fn] = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= patched:
            return Scope()
        scope = Scope()
        scope._changes = patch_lang(fn)._changes
        patched.update(modules)
        return scope

    patch.patched = patched  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
