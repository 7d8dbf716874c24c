"""How much a reader of this library has to hold: a Markdown table of counts, from the sources and from a profiler.

    python scripts/structure.py [--json FILE] [--beside FILE]

--json writes the counts; --beside adds a column with those of an earlier run.  Ways of calls are counted in Triton's interpreter:
functions of tilefold's host side that a warm call enters, their files, and how often the next one lies in another file.
"""

import argparse
import ast
import itertools
import json
import os
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = ROOT / "src" / "tilefold", ROOT / "tests"
HOPPER = SOURCE / "kernels" / "hopper"
DEVICE_SIDE = ("kernels", "device")  # what a launch runs
MANY = 12  # arguments
JIT = {"jit", "constexpr_function"}
ARCH = re.compile(r"\barch\s*[=!]=|\.generation\b|get_device_capability")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what a reader of this library has to hold")
    parser.add_argument("--json", type=Path, help="write the counts to a file")
    parser.add_argument("--beside", type=Path, help="counts of an earlier run, as another column")
    args = parser.parse_args(argv)
    found = {**ways(), **counts()}
    before = json.loads(args.beside.read_text()) if args.beside else {}
    print("| count | " + ("before | now |\n|---|---:|---:|" if before else "now |\n|---|---:|"))
    for name, value in found.items():
        print(f"| {name} | " + (f"{before.get(name, '-')} | " if before else "") + f"{value} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


# ---------------------------------------------------------------- the way of a call


def ways() -> dict[str, str]:
    """Functions entered / files / changes of file of warm calls."""
    sys.path.insert(0, str(SOURCE.parent))
    import torch

    import tilefold

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape)

    q, k, v = (rand(1, 16, 2, 16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    index = tilefold.BlockIndex.from_map(
        torch.ones(1, 2, 1, 1, dtype=torch.bool), block_q=16, block_k=16, seq_q=16, seq_k=16
    )
    lengths = torch.tensor([16], dtype=torch.int32)
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: tilefold.attention(q, k, v),
        "sparse_attention": lambda: tilefold.sparse_attention(q, k, v, index),
        "attention_kvcache": lambda: tilefold.attention_kvcache(q[:, :1], k, v, cache_seqlens=lengths),
        "attention, forward and backward": lambda: tilefold.attention(*leaves).sum().backward(),
    }
    found = {}
    for name, call in calls.items():
        call()
        files = entered(call)
        changes = sum(a != b for a, b in itertools.pairwise(files))
        found[
            f"a warm `{name.split(',')[0]}`{''.join(name.partition(',')[1:])}: functions / files / changes of file"
        ] = f"{len(files)} / {len(set(files))} / {changes}"
    return found


def entered(call: Callable[[], Any]) -> list[str]:
    """The file of every function of the host side that a call enters, in order."""
    seen: list[str] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if path.startswith(f"{SOURCE}{os.sep}"):
                inside = path[len(str(SOURCE)) + 1 :]
                if inside.split(os.sep)[0] not in DEVICE_SIDE and frame.f_code.co_name[:1] != "<":
                    seen.append(inside)

    threading.setprofile(watch)  # backward passes have threads of their own
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


# ---------------------------------------------------------------- the sources


def counts() -> dict[str, Any]:
    """Lines, functions, arguments, and what stands more than once."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    ops = {path: tree for path, tree in trees.items() if "ops" in path.relative_to(SOURCE).parts[:1]}
    binds = [f for f in functions(ops) if re.fullmatch(r"_?bind\w*", f.name)]
    glue = [
        f
        for f in functions(ops)
        if decorated(f, {"custom_op", "register_fake"}) or re.search(r"(^|_)(op|fake)$", f.name)
    ]
    classes = [
        node.name
        for tree in ops.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and re.search(r"Prepared|Bound|Step$|Entry$", node.name)
    ]
    jit = [number_of(f) for f in functions(trees) if decorated(f, JIT)]
    hopper = [number_of(f) for f in functions({p: t for p, t in trees.items() if HOPPER in p.parents})]
    return {
        "lines of src/; of tests/": f"{lines(SOURCE)}; {lines(TESTS)}",
        "lines of ops/": lines(SOURCE / "ops"),
        "caches of records in ops/": sum(
            isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") in ("CACHE", "_CACHE")
            for tree in ops.values()
            for node in tree.body
        ),
        "classes of prepared or bound calls": len(classes),
        "`bind` functions (lines)": f"{len(binds)} ({sum(map(length, binds))})",
        "operators and fakes by hand (lines)": f"{len(glue)} ({sum(map(length, glue))})",
        "records of a call": sum(
            isinstance(node, ast.ClassDef)
            and bool(re.fullmatch(r"\w*Call|Cache", node.name))
            and any("NamedTuple" in ast.dump(base) or "Record" in ast.dump(base) for base in node.bases)
            for tree in ops.values()
            for node in ast.walk(tree)
        ),
        "arguments of a function that is compiled: 95th percentile / most": (
            f"{statistics.quantiles(jit, n=20)[-1]:.0f} / {max(jit)}"
        ),
        f"Hopper: lines; functions with more than {MANY} arguments; most": (
            f"{lines(HOPPER)}; {sum(n > MANY for n in hopper)}; {max(hopper)}"
        ),
        "files outside kernels/hopper that name Hopper": sum(
            bool(re.search("hopper", path.read_text(), re.IGNORECASE)) for path in trees if HOPPER not in path.parents
        ),
        "tests of an architecture": sum(len(ARCH.findall(path.read_text())) for path in trees),
        "places that define FULL, CAUSAL, WINDOW": sum(
            all(re.search(rf"^{name}\b.*=", path.read_text(), re.MULTILINE) for name in ("FULL", "CAUSAL", "WINDOW"))
            for path in trees
        ),
    }


def functions(trees: dict[Path, ast.Module]) -> Iterator[ast.FunctionDef]:
    for tree in trees.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def decorated(function: ast.FunctionDef, names: set[str]) -> bool:
    def name_of(node: ast.expr) -> str:
        node = node.func if isinstance(node, ast.Call) else node
        return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")

    return any(name_of(decorator) in names for decorator in function.decorator_list)


def number_of(function: ast.FunctionDef) -> int:
    """Of its arguments."""
    a = function.args
    return len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs)


def length(function: ast.FunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
