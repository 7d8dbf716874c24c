"""The API reference's pages: every public name of every public module, found in the source without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import griffe

__all__ = ["MODULES", "Name", "owners", "page_of", "pages", "public_names", "types_in_signatures"]

SOURCE = Path(__file__).resolve().parents[2] / "src"
# In the order of the navigation, each with what it is for.
MODULES = {
    "tilefold": "attention, caches, errors",
    "tilefold.masks": "which query sees which key",
    "tilefold.scores": "what happens to scores before the softmax",
    "tilefold.sparse": "lists of blocks and the stages of video attention",
    "tilefold.video": "sparse attention in video models",
    "tilefold.paged": "KV caches in pages",
    "tilefold.nn": "torch modules, models in few bits",
    "tilefold.ops": "matrix products, convolution, transposition",
    "tilefold.quant": "weights in few bits",
    "tilefold.parallel": "several GPUs",
    "tilefold.plan": "plans, devices, costs",
    "tilefold.reference": "oracles in fp64, and the tolerance",
    "tilefold.debug": "helpers for writing kernels",
    "tilefold.profiling": "what bounds each kernel",
    "tilefold.ladder": "attention in five short programs",
    "tilefold.aot": "compilation ahead of time",
    "tilefold.compat.flash_attn": "flash-attention's functions",
}
# What a reader looks for first stands first, here and on each module's page; what is in no group follows.
GROUPS: dict[str, tuple[str, ...]] = {
    "Attention": ("attention", "attention_varlen", "constant", "quantize_fp8"),
    "Masks and scores": (
        "Mask",
        "masks.causal",
        "masks.window",
        "masks.documents",
        "masks.prefix",
        "masks.keys",
        "masks.tensor",
        "masks.blocks",
        "masks.rule",
        "Score",
        "scores.softcap",
        "scores.alibi",
        "scores.bias",
        "scores.rule",
    ),
    "Lists of blocks": ("sparse_attention", "BlockIndex", "sparse_attention_varlen", "sparse_attention_paged"),
    "Decoding and caches": (
        "attention_kvcache",
        "kvcache_append",
        "PagedKVCache",
        "CacheBatch",
        "attention_shared_prefix",
        "apply_rotary",
        "quantize_kv",
        "CacheStatistics",
    ),
    "Parts of results": ("merge_attention",),
    "The same bits everywhere": ("numerics",),
    "Plans: which kernel, and why": (
        "attention_plan",
        "attention_backward_plan",
        "attention_kvcache_plan",
        "sparse_plan",
        "plan_attention",
        "AttentionPlan",
        "DecodePlan",
        "InvariantPlan",
        "AttentionFp8Plan",
        "AttentionProblem",
    ),
    "Whole models": (
        "register",
        "unregister",
        "quantize",
        "save_quantized",
        "load_quantized",
        "nn.SparseVideoAttention",
        "nn.LowBitLinear",
        "compat.flash_attn.install",
    ),
    "Video": ("sparse.sparse_video_attention", "sparse.coarse", "sparse.select", "sparse.fuse", "sparse.GridTiling"),
    "Video models": ("video.sparsify", "video.desparsify", "video.Sparse", "video.Adapter"),
    "Several GPUs": (
        "parallel.attention",
        "parallel.context_parallel",
        "parallel.shard",
        "parallel.Sharding",
        "parallel.attention_kvcache",
        "parallel.sparse_attention",
        "parallel.attention_plan",
    ),
    "Matrices and weights": (
        "matmul",
        "bmm",
        "conv2d",
        "lowbit_matmul",
        "matmul_w8a8",
        "ops.rms_norm",
        "ops.rms_norm_rotary",
        "add",
        "transpose",
        "lowbit_matmul_plan",
        "quant.quantize_weight",
        "quant.QuantizedTensor",
    ),
    "What went wrong, and what takes the time": (
        "profile",
        "last_fault",
        "Fault",
        "debug.check_kernel",
        "debug.print_if",
        "reference.attention",
        "reference.compare",
    ),
    "Errors": (
        "TilefoldError",
        "Unsupported",
        "ShapeError",
        "DtypeError",
        "LayoutError",
        "ValueRangeError",
        "DeviceError",
        "PlanError",
        "ModifiedError",
        "OutOfPages",
        "CommunicationError",
    ),
}
HEADLESS = """
    options:
      show_root_heading: false
      show_root_toc_entry: false
      members: false"""


_TYPE = """
    options:
      heading: {name}
      toc_label: {name}
      members: false
      show_attribute_values: true"""


@dataclass(frozen=True)
class Name:
    """One name of a module's __all__: where it is public, what it is called there, and where it is defined.

    hidden: a file of the same name lies there (tilefold.sparse.coarse): as a dotted name of the source it means that file."""

    module: str
    name: str
    defined: str
    hidden: bool = False

    @property
    def path(self) -> str:
        """The dotted name by which a user has it."""
        return f"{self.module}.{self.name}"

    @property
    def anchor(self) -> str:
        """What the reference has it by."""
        return self.defined if self.hidden else self.path


@cache
def package() -> griffe.Module:
    """tilefold as its source says; nothing is imported."""
    found = griffe.load("tilefold", search_paths=[str(SOURCE)], allow_inspection=False)
    assert isinstance(found, griffe.Module)
    return found


def module_of(path: str) -> griffe.Module:
    """A module by its dotted name."""
    inside = path.split(".")[1:]
    found = package()[tuple(inside)] if inside else package()
    assert isinstance(found, griffe.Module), path
    return found


@cache
def public_names() -> tuple[Name, ...]:
    """Every public name of every module above, module by module, as each __all__ has it.  A module without one is an error."""
    found = []
    for path in MODULES:
        module = module_of(path)
        if not module.exports:
            raise ValueError(f"{path} has no __all__")
        for export in module.exports:
            name = str(export)
            imported = module.imports.get(name)
            hidden = module[name].is_module and imported not in (None, module[name].path)
            member = package()[tuple(imported.split(".")[1:])] if hidden and imported else module[name]
            target = member.final_target if isinstance(member, griffe.Alias) else member
            found.append(Name(path, name, target.path, hidden))
    return tuple(found)


@cache
def owners() -> dict[str, Name]:
    """By definition, the name that documents it: in the part that defines it, else in tilefold itself, else the first."""
    shown: dict[str, list[Name]] = {}
    for one in public_names():
        shown.setdefault(one.defined, []).append(one)

    def rank(one: Name) -> tuple[bool, bool]:
        inside = one.module != "tilefold" and one.defined.startswith(one.module + ".")
        return (not inside, one.module != "tilefold")

    return {defined: min(names, key=rank) for defined, names in shown.items()}


def definition(one: Name) -> griffe.Object:
    """What a name stands for, in the source."""
    found = package()[tuple(one.defined.split(".")[1:])]
    assert isinstance(found, griffe.Object), one.path
    return found


def page_of(module: str) -> str:
    """The page of a module, below docs/."""
    return f"api/{module}.md"


@cache
def types_in_signatures() -> dict[str, tuple[str, ...]]:
    """By module, the types that are no public names but stand in its signatures, which link to them; each where it is first."""
    found: dict[str, str] = {}
    for path in MODULES:
        for one in public_names():
            if one.module == path and owners()[one.defined] == one:
                for name in _named(definition(one)):
                    found.setdefault(name, path)
    return {path: tuple(name for name, where in found.items() if where == path) for path in MODULES}


def _named(member: griffe.Object) -> Iterator[str]:
    """The types of tilefold, not public, that the signatures of a name and of its members have."""
    expressions: list[Any] = []
    if isinstance(member, griffe.Function):
        expressions = [*(one.annotation for one in member.parameters), member.returns]
    elif isinstance(member, griffe.Attribute):
        expressions = [member.annotation]
    elif isinstance(member, griffe.Class):
        for name, inner in member.members.items():
            if isinstance(inner, griffe.Object) and (not name.startswith("_") or name == "__init__"):
                yield from _named(inner)
    for one in expressions:
        parts = one.iterate(flat=True) if isinstance(one, griffe.Expr) else ()
        for part in (part for part in parts if isinstance(part, griffe.ExprName)):
            if part.canonical_path.startswith("tilefold."):
                inside = tuple(part.canonical_path.split(".")[1:])
                try:
                    target = package()[inside]
                except KeyError:  # a module of the name of a property: mkdocs does not find it either
                    continue
                target = target.final_target if isinstance(target, griffe.Alias) else target
                alias = target.is_attribute and target.parent is not None and target.parent.is_module
                if target.path not in owners() and (target.is_class or alias):
                    yield target.path


def page(path: str) -> str:
    """One module's page: what it says of itself, what is documented elsewhere, then its own names."""
    names = [one for one in public_names() if one.module == path]
    own = [one for one in names if owners()[one.defined] == one]
    links = [f"[`{one.name}`][{owners()[one.defined].anchor}]" for one in names if one not in own]
    parts = [f"# {path}", f"::: {path}" + HEADLESS]
    if links:
        parts.append(f"Also here, documented with the part that defines them: {', '.join(links)}.")
    for one in by_importance(own):
        parts.append(f"::: {one.anchor}" + _options(one))
    if types := types_in_signatures()[path]:
        parts.append("Types in signatures:")
        parts += [f"::: {name}" + _TYPE.format(name=name.rpartition(".")[2]) for name in types]
    return "\n\n".join(parts) + "\n"


@cache
def _ranks() -> dict[str, int]:
    """By definition, where the groups have it.  ValueError: a group has what is not public, or has it twice."""
    public = {one.path: one.defined for one in public_names()}
    ranks: dict[str, int] = {}
    for name in (name for names in GROUPS.values() for name in names):
        path = f"tilefold.{name}"
        if path not in public or public[path] in ranks:
            raise ValueError(f"GROUPS has {name!r}, which is {'there already' if path in public else 'not public'}")
        ranks[public[path]] = len(ranks)
    return ranks


def by_importance(names: list[Name]) -> list[Name]:
    """Names in the order of the groups, then functions, classes and values in that of their modules."""
    ranks = _ranks()

    def rank(one: Name) -> tuple[int, bool, bool]:
        what = definition(one)
        return ranks.get(one.defined, len(ranks)), what.is_class, what.is_attribute

    return sorted(names, key=rank)


def summary(one: Name) -> str:
    """The first sentence of what a name says of itself."""
    said = definition(one).docstring
    words = " ".join(said.value.split("\n\n")[0].split()) if said else ""
    first = re.split(r"(?<=[.:]) ", words)[0].rstrip(".:").replace("|", "\\|")
    return "`".join(part if n % 2 else part.replace("*", "\\*") for n, part in enumerate(first.split("`")))


def _options(one: Name) -> str:
    """Programs of the ladder show their function and their cost; what is a value shows that it is there."""
    member = definition(one)
    options = [f"heading: {one.path}", f"toc_label: {one.name}"] if one.hidden else []
    options += ["members: [attention, cost, tile_for]"] if member.is_module else []
    options += ["show_if_no_docstring: true"] if member.is_attribute else []
    return "".join(["\n    options:", *(f"\n      {option}" for option in options)]) if options else ""


def pages() -> dict[str, str]:
    """Markdown by page, the index first: names by importance, not by alphabet."""
    names, grouped = {one.path: one for one in public_names()}, _ranks()
    lines = ["# API reference", "Made from the docstrings of every public name: what is needed first stands first."]
    for group, members in GROUPS.items():
        rows = [names[f"tilefold.{member}"] for member in members]
        table = [f"| [`{one.path}`][{owners()[one.defined].anchor}] | {summary(one)} |" for one in rows]
        lines += [f"## {group}", "| | |\n|---|---|\n" + "\n".join(table)]
    lines += ["## By module", "| module | |\n|---|---|"]
    lines[-1] += "".join(f"\n| [`{path}`]({path}.md) | {what} |" for path, what in MODULES.items())
    lines.append("## Every other name")
    for path in MODULES:
        own = [one for one in names.values() if one.module == path and one.defined not in grouped]
        links = ", ".join(f"[`{one.name}`][{owners()[one.defined].anchor}]" for one in by_importance(own))
        lines += [f"**{path}**: {links}"] if links else []
    return {"api/index.md": "\n\n".join(lines) + "\n", **{page_of(path): page(path) for path in MODULES}}
