"""Read machine code listings: opcode counts, the loops that hold tensor instructions, and hazards of wgmma in flight.

Works on SASS as nvdisasm prints it, on PTX (counts only) and on AMDGCN as LLVM prints it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Listing", "Loop", "count_prefix", "opcode_counts", "parse_listing", "tensor_loops", "wgmma_hazards"]

_SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(.*?)\s*;")
_GCN_LINE = re.compile(r"^\t([a-z]\w+(?:\s.*?)?)\s*(?:;.*)?$")
_PTX_LINE = re.compile(r"^\s+\{?\s*([a-z@][^;]*);")
_LABEL = re.compile(r"^(\.L\w+):")
_PREDICATE = re.compile(r"^@!?%?\w+\s+")
_BRANCH = {"sass": re.compile(r"^BRA\S*\s.*\((\.L\w+)\)"), "amdgcn": re.compile(r"^s_c?branch\w*\s+(\.L\w+)")}
_ENDS = ("EXIT", "RET", "s_endpgm")
_JUMP = re.compile(r"^(BRA|BRX|JMP)\b(?!\S*\s+!?U?P\d)")  # with no predicate, before it or as its first operand
_SPILL = {"sass": ("STL", "LDL"), "amdgcn": ("scratch_",)}
_LINES = {"sass": _SASS_LINE, "amdgcn": _GCN_LINE, "ptx": _PTX_LINE}
_TWO_PART_FAMILIES = ("MUFU", "WARPGROUP", "BAR", "SYNCS")  # their second part tells what they do


@dataclass(frozen=True, slots=True)
class Listing:
    """Instructions in program order, predicates removed.

    `labels` has the index of the instruction after each label, `ends` those of the unconditional ends of the program, `jumps`
    those of its unconditional branches.
    """

    kind: str  # "sass" | "ptx" | "amdgcn"
    instructions: tuple[str, ...]
    labels: Mapping[str, int]
    ends: tuple[int, ...]
    jumps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop that holds tensor instructions: [start, end] in the listing.

    `opcodes` counts its instruction families, `spills` its accesses to spilled registers; `schedule` tells what lies
    between its waits and barriers; `hazards` are the findings of `wgmma_hazards`.
    """

    start: int
    end: int
    opcodes: Mapping[str, int]
    spills: int
    schedule: tuple[str, ...]
    hazards: tuple[str, ...]


def parse_listing(text: str, kind: str) -> Listing:
    """Take the instructions and labels out of a listing of `kind` ("sass", "ptx" or "amdgcn")."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    ends: list[int] = []
    jumps: list[int] = []
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label.group(1)] = len(instructions)
        elif match := _LINES[kind].search(line):
            if match.group(1).startswith(_ENDS):
                ends.append(len(instructions))
            if _JUMP.match(match.group(1)):
                jumps.append(len(instructions))
            instructions.append(_PREDICATE.sub("", match.group(1)))
    return Listing(kind, tuple(instructions), labels, tuple(ends), tuple(jumps))


def opcode_counts(listing: Listing) -> dict[str, int]:
    """How often each instruction family occurs, most frequent first."""
    return dict(Counter(_family(text, listing.kind) for text in listing.instructions).most_common())


def count_prefix(opcodes: Mapping[str, int], prefixes: Iterable[str]) -> int:
    """Number of instructions whose family starts with one of `prefixes`."""
    wanted = tuple(prefixes)
    return sum(number for name, number in opcodes.items() if name.startswith(wanted))


def _opcode(instruction: str) -> str:
    return instruction.split(None, 1)[0]


def _family(instruction: str, kind: str) -> str:
    """Opcode without the modifiers that do not change what kind of work it is."""
    opcode = _opcode(instruction)
    parts = opcode.split(".")
    if kind == "amdgcn":
        return opcode
    if kind == "ptx":
        return ".".join(parts[: 4 if parts[0] == "cp" else 2])
    return ".".join(parts[:2]) if parts[0] in _TWO_PART_FAMILIES else parts[0]


def tensor_loops(listing: Listing, tensor: Sequence[str]) -> tuple[Loop, ...]:
    """The innermost loops that hold one of the `tensor` opcodes, in program order.

    A loop is a backward branch to a label with no unconditional end of program in between: slow paths of barrier waits,
    which the assembler puts behind the program and which branch back, are no loops.
    """
    branch, found = _BRANCH[listing.kind], []
    for end, text in enumerate(listing.instructions):
        match = branch.match(text)
        start = listing.labels.get(match.group(1), end + 1) if match else end + 1
        body = listing.instructions[start : end + 1]
        if _any_opcode(body, tensor) and not any(start <= index <= end for index in listing.ends):
            found.append((start, end))
    innermost: list[tuple[int, int]] = []
    for start, end in sorted(found, key=lambda pair: pair[1] - pair[0]):
        if not any(start <= low and high <= end for low, high in innermost):
            innermost.append((start, end))
    return tuple(_loop(listing, start, end) for start, end in sorted(innermost))


def _any_opcode(body: Sequence[str], prefixes: Sequence[str]) -> bool:
    wanted = tuple(prefixes)
    return any(text.startswith(wanted) for text in body)


def _loop(listing: Listing, start: int, end: int) -> Loop:
    body = listing.instructions[start : end + 1]
    opcodes = dict(Counter(_family(text, listing.kind) for text in body).most_common())
    return Loop(
        start=start,
        end=end,
        opcodes=opcodes,
        spills=count_prefix(opcodes, _SPILL[listing.kind]),
        schedule=_schedule(body) if listing.kind == "sass" else (),
        hazards=wgmma_hazards(body) if listing.kind == "sass" else (),
    )


def _schedule(body: Sequence[str]) -> tuple[str, ...]:
    """The loop body cut at its waits and barriers ("| ..."), with the counts of what lies between two of them."""
    lines: list[str] = []
    between: Counter[str] = Counter()
    for text in body:
        family = _family(text, "sass")
        if family.startswith(("WARPGROUP", "BAR", "SYNCS")):
            if between:
                lines.append(" ".join(f"{name}x{number}" for name, number in between.items()))
                between.clear()
            lines.append(f"| {text[:52]}")
        else:
            between[family] += 1
    if between:
        lines.append(" ".join(f"{name}x{number}" for name, number in between.items()))
    return tuple(lines)


def wgmma_hazards(body: Sequence[str]) -> tuple[str, ...]:
    """Writes to registers that a wgmma in flight still reads (its A operand) or accumulates into, in a loop body.

    ptxas before 13.3 is known to produce such code (triton issue 9433), and the results are then wrong. The body is
    walked twice, so that hazards carried over the back edge are seen; what is found is a text per offending write.
    """
    committed: list[set[int]] = []  # registers of each wgmma group in flight, oldest first
    building: set[int] = set()  # of the group not yet committed
    found: dict[str, None] = {}
    for lap, text in ((lap, text) for lap in (0, 1) for text in body):
        if text.startswith(("HGMMA", "QGMMA", "IGMMA")):
            building |= _wgmma_registers(text)
            if "gsb0" in text:
                committed.append(building)
                building = set()
        elif text.startswith("WARPGROUP.DEPBAR"):
            keep = int(text.split(",")[-1].strip(), 16)
            committed = committed[-keep:] if keep else []
        elif lap:
            for register in sorted(_written_registers(text) & building.union(*committed)):
                found[f"R{register} is written while a wgmma uses it: {text[:60]}"] = None
    return tuple(found)


def _wgmma_registers(text: str) -> set[int]:
    """Accumulator and A-operand registers of an HGMMA, or of a QGMMA or IGMMA, which multiply bytes."""
    opcode, rest = text.split(None, 1)
    columns = re.search(r"64x(\d+)x", opcode)
    operands = [part.strip() for part in rest.split(",")]
    registers: set[int] = set()
    if columns and (accumulator := re.match(r"R(\d+)", operands[0])):
        size = int(columns.group(1)) // (4 if ".F16" in opcode and ".F32" not in opcode else 2)
        registers |= set(range(int(accumulator.group(1)), int(accumulator.group(1)) + size))
    if len(operands) > 1 and (first := re.match(r"R(\d+)", operands[1])):
        registers |= set(range(int(first.group(1)), int(first.group(1)) + 4))
    return registers


def _written_registers(text: str) -> set[int]:
    """Registers that a SASS instruction writes (its first operand, unless it is an address or a uniform register)."""
    opcode, _, rest = text.partition(" ")
    if opcode.startswith(("ST", "BAR", "SYNCS", "RED", "BRA", "R2UR", "WARPGROUP", "UTMA")):
        return set()
    # A predicate or two may come before the destination (LOP3.LUT P0, R1, ...; ISETP has no destination register).
    destination = re.match(r"\s*(?:U?P[T\d]\s*,\s*){0,2}R(\d+)\b", rest)
    if destination is None or opcode.startswith(("ISETP", "FSETP", "PLOP3")):
        return set()
    first = int(destination.group(1))
    return set(range(first, first + _destination_size(opcode)))


def _destination_size(opcode: str) -> int:
    """How many consecutive 32-bit registers the opcode writes."""
    if opcode.startswith("LDSM"):
        matrices = re.search(r"\.([124])$", opcode)
        return int(matrices.group(1)) if matrices else 1
    if opcode.startswith("LD"):
        bits = re.search(r"\.(64|128)\b", opcode)
        return int(bits.group(1)) // 32 if bits else 1
    if opcode.startswith("CS2R"):
        return 1 if opcode.endswith(".32") else 2
    return 2 if opcode.startswith(("IMAD.WIDE", "DADD", "DMUL", "DFMA")) else 1
