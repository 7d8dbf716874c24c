"""The import law: which module of tilefold may import which.  Read from the source by ast, so nothing is imported to check it."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[3] / "src" / "tilefold"

# What each part of the package may import of the others.  A part is the first name under tilefold; parts may always import
# themselves, unless ALONE says otherwise.
LEAVES = {"errors", "types", "check", "keywords", "masks", "scores", "cache_formats"}
CORE = {"plan", "kernels", "device"}
WORK = {"api", "cache_api", "sparse_api", "ops"} | CORE | LEAVES
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "cache_formats": set(),
    "check": {"errors", "types", "cache_formats"},
    "keywords": set(),
    "masks": {"errors", "types", "check"},
    "scores": {"errors", "types", "check", "masks"},
    "plan": {"errors", "cache_formats"},
    "device": set(),
    "kernels": {"device"},
    "cpu": {"plan", "errors", "cache_formats"},  # found by the names in plan/capabilities.py
    "ops": {"plan", "kernels", "device", "quant"} | LEAVES,
    "api": {"ops", "plan"} | LEAVES,
    "cache_api": {"ops", "plan"} | LEAVES,
    "sparse_api": {"ops", "plan", "sparse"} | LEAVES,
    "reference": {"errors", "types", "sparse", "masks", "scores"},
    "sparse": {"ops", "plan"} | LEAVES,
    "paged": {"ops"} | LEAVES,
    "quant": {"errors"},
    "nn": WORK | {"sparse", "quant"},
    "parallel": WORK | {"sparse"},
    "video": WORK | {"sparse", "nn"},
    "compat": WORK | {"sparse", "nn"},
    "integrations": WORK | {"sparse", "video"},
    "aot": {"plan", "kernels", "device", "ops", "quant"} | LEAVES,
    "debug": {"reference"} | LEAVES,
    "bench": WORK | {"reference", "sparse", "nn", "compat", "aot", "paged", "quant", "parallel"},
    "tune": WORK | {"bench"},
    "ladder": WORK | {"reference", "sparse", "bench"},  # one of its rungs is measuring, by the timers of bench
    "profiling": WORK | {"bench", "aot", "ladder"},  # whose rungs are cases to profile
    "cli": WORK | {"reference", "sparse", "nn", "compat", "debug", "ladder", "bench", "aot", "paged", "quant", "profiling",
                   "parallel", "tune", "video"},
    "__init__": LEAVES | {"ops", "api", "cache_api", "sparse_api", "compat", "debug", "integrations", "ladder", "nn", "paged",
                          "sparse", "plan", "profiling", "quant"},
    "__main__": {"cli"},
}  # fmt: skip
ALONE = {"kernels"}  # one kernel file never imports another
# Third-party packages that a part may import; the standard library is always allowed, parts not listed are free.
OUTSIDE: dict[str, set[str]] = {
    "errors": set(),
    "keywords": set(),
    "cache_formats": set(),
    "plan": set(),
    "device": {"triton"},
    "kernels": {"triton"},
    "quant": {"torch"},
    "cpu": {"torch"},
}
ONLY_GLUON = ("kernels", "hopper")  # and there, in one file that hides its version differences
NOUNS = ("backward_config", "backward_consumer", "backward_epilogue", "backward_lists", "backward_mask",
         "backward_mods", "backward_pipeline", "backward_producer", "backward_scheduler", "backward_wide_consumer",
         "block_list", "config", "consumer", "dq_sums", "ds_ring", "epilogue", "fp8_parts", "mask", "ping_pong",
         "pipeline", "producer", "products", "recompute", "group_sums", "stored_ds", "reduce_pipeline", "reduce_scheduler",
         "scheduler", "score_mods", "softmax", "structs", "tails", "ring", "matmul_scheduler", "matmul_epilogue",
         "split_k")  # fmt: skip
# Gluon's front and the device helpers of its kernels: no kernels
SHARED_BY_HOPPER = ("gluon", "parts", "chunks", "lowbit_parts", *NOUNS)
GLUON_COMPILER = ("aot", "compile")  # drives Triton's compilers, Gluon's among them; writes no kernels
REFERENCE_IN_CLI = {"check", "demo", "video_demo"}


class Import:
    """One imported module: where, on which line, its dotted name, and whether it is there for types alone."""

    def __init__(self, module: tuple[str, ...], line: int, name: str, for_types: bool) -> None:
        self.module, self.line, self.name, self.for_types = module, line, name, for_types

    @property
    def part(self) -> str:
        return self.module[0]

    @property
    def target(self) -> str | None:
        """The part of tilefold imported, "" for the package itself, None for something else."""
        names = self.name.split(".")
        if names[0] != "tilefold":
            return None
        return names[1] if len(names) > 1 else ""

    def __str__(self) -> str:
        return f"src/tilefold/{'/'.join(self.module)}.py:{self.line} imports {self.name}"


def module_name(path: Path) -> tuple[str, ...]:
    """('plan', 'cost') for src/tilefold/plan/cost.py; a package's own __init__ is ('plan', '__init__')."""
    return path.relative_to(SRC).with_suffix("").parts


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_names(node: ast.Import | ast.ImportFrom, module: tuple[str, ...]) -> list[str]:
    """Dotted absolute names; `from tilefold import x` and `from tilefold.plan import cost` name what they take."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if base == "triton.experimental":
        return [f"{base}.{alias.name}" for alias in node.names]
    if node.level:
        package = ("tilefold", *module)[: -node.level]
        base = ".".join([*package, *([base] if base else [])])
    if base.split(".")[0] == "tilefold":
        return [f"{base}.{alias.name}" for alias in node.names]
    return [base]


def read_imports(path: Path) -> list[Import]:
    """Every import in the file, those inside functions and under TYPE_CHECKING too."""
    module = module_name(path)
    found = []

    def visit(node: ast.AST, for_types: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.extend(Import(module, node.lineno, name, for_types) for name in imported_names(node, module))
        types = for_types or is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # expressions import nothing
                visit(child, types)

    visit(ast.parse(path.read_text(), str(path)), False)
    return found


FILES = sorted(SRC.rglob("*.py"))
IMPORTS = [one for path in FILES for one in read_imports(path)]


def fail_on(broken: list[Import], law: str) -> None:
    assert not broken, "\n".join([law, *(f"  {one}" for one in broken)])


def target_part(one: Import) -> str | None:
    """The part imported; names that are not parts (tilefold.attention) come from the package itself."""
    target = one.target
    return target if target is None or target in MAY_IMPORT else ""


def test_the_tree_is_read() -> None:
    assert len(FILES) > 5
    assert any(one.target == "device" for one in IMPORTS)


def test_every_part_has_its_law() -> None:
    unknown = {module_name(path)[0] for path in FILES} - set(MAY_IMPORT)
    assert not unknown, (
        f"parts of tilefold without a line in MAY_IMPORT, which says what they may import: {sorted(unknown)}"
    )


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_go_one_way(part: str) -> None:
    allowed = MAY_IMPORT[part] | {part}
    if part in {"cli", "bench", "compat", "nn", "sparse", "parallel", "ladder", "tune", "__main__"}:
        allowed = allowed | {""}  # these use the package as a user does
    broken = [one for one in IMPORTS if one.part == part and target_part(one) not in {None, *allowed}]
    fail_on(broken, f"{part} may import of tilefold only {sorted(MAY_IMPORT[part]) or 'nothing'}:")


def test_the_law_has_no_cycles() -> None:
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()


def test_files_import_each_other_in_no_circle() -> None:
    """Whether at once or inside a function; what is imported for types alone does not count, nor what packages pass on."""
    files = {module_name(path) for path in FILES if path.name != "__init__.py"}
    needs: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for one in IMPORTS:
        names = tuple(one.name.split(".")[1:])
        reached = {part for part in (names, names[:-1]) if part in files} - {one.module}
        if one.module in files and not one.for_types and one.target is not None:
            needs.setdefault(one.module, set()).update(reached)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as circle:
        pytest.fail("a circle of imports: " + " -> ".join("/".join(module) for module in reversed(circle.args[1])))


@pytest.mark.parametrize("part", sorted(OUTSIDE))
def test_third_party_imports(part: str) -> None:
    allowed = OUTSIDE[part] | sys.stdlib_module_names | {"tilefold"}
    broken = [one for one in IMPORTS if one.part == part and one.name.split(".")[0] not in allowed]
    fail_on(
        broken,
        f"{part} may import from outside only the standard library and {sorted(OUTSIDE[part]) or 'nothing else'}:",
    )


def test_kernels_never_import_kernels() -> None:
    def is_other_kernel(one: Import) -> bool:
        shared = tuple(".".join(("tilefold", *ONLY_GLUON, name)) for name in SHARED_BY_HOPPER)
        return (
            one.part in ALONE
            and one.target == one.part
            and not f"{one.name}.".startswith(tuple(f"{s}." for s in shared))
        )

    fail_on(
        [one for one in IMPORTS if is_other_kernel(one)],
        "a kernel is prologue + fold + epilogue of its own; share in device/:",
    )


def test_only_checkers_import_the_reference() -> None:
    def allowed(one: Import) -> bool:
        in_cli = one.part == "cli" and bool(set(one.module) & REFERENCE_IN_CLI)
        return in_cli or one.part in {"reference", "debug", "ladder", "bench"}

    broken = [one for one in IMPORTS if one.target == "reference" and not allowed(one)]
    fail_on(broken, "only tests, cli check and demo, debug, ladder and bench may import tilefold.reference:")


def test_gluon_is_hidden_in_one_file() -> None:
    gluon = [one for one in IMPORTS if one.name.startswith("triton") and "gluon" in one.name.split(".")]
    users = [one for one in gluon if one.module != GLUON_COMPILER]
    files = {one.module for one in users}
    assert len(files) <= 1, (
        f"Gluon changes with Triton's versions; one file hides that, but these import it: {sorted(files)}"
    )
    fail_on([one for one in users if one.module[:2] != ONLY_GLUON], "Gluon is imported under kernels/hopper only:")


def test_files_of_hopper_are_where_a_reader_looks() -> None:
    """Each file in the package's docstring; what kernels share also among the concerns of docs/architecture.md."""
    folder = SRC / "kernels" / "hopper"
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    page = (SRC.parents[1] / "docs" / "architecture.md").read_text()
    stems = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {name for name in stems if not re.search(rf"\b{name}\b", said)} == set()
    assert set(SHARED_BY_HOPPER) < stems
    assert {name for name in SHARED_BY_HOPPER if f"`{name}.py`" not in page} == set()


ATTENTION = ("attention_forward", "attention_fp8", "sparse_forward", "attention_backward", "attention_backward_packed",
             "attention_backward_reduce", "attention_backward_wide", "sparse_backward", *NOUNS)  # fmt: skip
MOST_ARGUMENTS = 12


def test_attention_kernels_of_hopper_pass_nouns() -> None:
    """A kernel's entry lists the pointers; what it calls takes a handful of aggregates by name."""
    long = [
        f"{name}.{node.name}: {len(node.args.args)}"
        for name in ATTENTION
        for node in ast.walk(ast.parse((SRC / "kernels" / "hopper" / f"{name}.py").read_text()))
        if isinstance(node, ast.FunctionDef) and len(node.args.args) > MOST_ARGUMENTS
    ]
    entries = ("attention_forward_hopper", "attention_forward_fp8", "sparse_forward_hopper", "attention_backward_hopper",
               "attention_backward_packed", "attention_backward_reduce", "attention_backward_hopper_wide",
               "sparse_backward_hopper")  # fmt: skip
    assert [one for one in long if one.split(":")[0].split(".")[1] not in entries] == []


# Where a comparison may ask which architecture a device has, in ops; and which generation, anywhere.
TILES = "tiles of a generation of GPUs, with their evidence"
MAY_ASK = {
    ("ops", "device"): "it finds the record of a torch device",
    ("plan", "limits"): "the oldest GPU that kernels run on",
    ("plan", "rules"): TILES,
    ("plan", "sparse", "sparse"): TILES,
    ("plan", "matrix", "conv"): TILES,
    ("plan", "cache", "flash_split"): "flash-attention's own heuristic",
}
REGISTERED = {
    target.id
    for node in ast.parse((SRC / "plan" / "architecture.py").read_text()).body
    if isinstance(node, ast.Assign) and "Architecture(" in ast.unparse(node.value)
    for target in node.targets
    if isinstance(target, ast.Name)
}


def asks(node: ast.AST, in_ops: bool) -> bool:
    """Is this what a device record says of its architecture, or a constant of the registry?"""
    if isinstance(node, ast.Attribute):
        return node.attr in ({"backend", "generation", "arch", "architecture"} if in_ops else {"generation"})
    return in_ops and isinstance(node, ast.Name) and node.id in REGISTERED


def test_who_asks_for_an_architecture() -> None:
    """An operation asks `ops.serve` what runs it, and a device record which features it has (`plan.architecture.FEATURES`)."""
    assert {"CPU", "SM_90"} <= REGISTERED
    found: dict[tuple[str, ...], list[int]] = {}
    for path in FILES:
        module = module_name(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and any(
                asks(part, module[0] == "ops") for one in (node.left, *node.comparators) for part in ast.walk(one)
            ):
                found.setdefault(module, []).append(node.lineno)
    assert set(found) == set(MAY_ASK), f"files and lines that ask: {found}; allowed: {MAY_ASK}"
