"""Uniform registers that machine code reads although nobody wrote them: a fault of the assembler, and a silent one.

ptxas 12.8 makes such code for two products whose operands lie at the same address under different swizzles: the descriptor of the
second is added to a register that has no value."""

import re
from collections.abc import Sequence

from tilefold.aot.sass import Listing

__all__ = ["undefined_registers"]

_UNIFORM = re.compile(r"\bUR(\d+)\b")
_TARGET = re.compile(r"\((\.L\w+)\)")
_BRANCHES = ("BRA", "BRX", "BSYNC", "JMP", "WARPSYNC.COLLECTIVE")
# Opcodes that begin with U, but whose first operand is an address or a predicate.
_NO_WRITERS = ("UTMA", "UBLK", "UCGABAR", "UISETP", "UPLOP3", "USETMAXREG", "UMEMSETS", "USETP")
_WRITERS = ("U", "R2UR", "S2UR", "REDUX", "CREDUX", "ELECT", "CS2UR", "VOTEU")


def undefined_registers(listing: Listing) -> tuple[str, ...]:
    """A text for each instruction of a SASS listing that reads a uniform register which some way to it leaves unwritten.

    A write under a predicate counts as one, and so does any write of a function that is called: what is found is no doubt wrong,
    what is not found may be."""
    texts = listing.instructions
    reads, writes = zip(*map(_uses, texts), strict=True) if texts else ((), ())
    called = 0
    for index in range(min(listing.ends, default=0), len(texts)):
        called |= writes[index]
    written: dict[int, int] = {}  # of each instruction reached: registers with a value, bit by bit
    found: dict[int, int] = {}
    ways = [(0, 0)]
    while ways:
        index, known = ways.pop()
        while index < len(texts):
            if index in written and written[index] & known == written[index]:
                break
            known = written[index] = written.get(index, known) & known
            found[index] = reads[index] & ~known
            known |= writes[index]
            text = texts[index]
            if text.startswith("CALL"):
                known |= called
            elif text.startswith(_BRANCHES):
                ways += [(to, known) for to in _targets(listing, text)]
                if index in listing.jumps:
                    break
            if index in listing.ends:
                break
            index += 1
    return tuple(
        f"UR{','.join(_numbers(missing))} is read, but was never written: {texts[index][:60]}"
        for index, missing in sorted(found.items())
        if missing
    )


def _targets(listing: Listing, text: str) -> list[int]:
    target = _TARGET.search(text)
    return [listing.labels[target.group(1)]] if target and target.group(1) in listing.labels else []


def _numbers(mask: int) -> list[str]:
    return [str(number) for number in range(mask.bit_length()) if mask >> number & 1]


def _uses(text: str) -> tuple[int, int]:
    """Uniform registers that an instruction reads and writes, bit by bit."""
    opcode, _, rest = text.partition(" ")
    operands = [part.strip() for part in re.split(r",(?![^\[]*\])", rest)]
    writer = opcode.startswith(_WRITERS) and not opcode.startswith(_NO_WRITERS)
    wide = ".64" in opcode or ".WIDE" in opcode
    target = 1 if opcode.startswith("ELECT") else 0
    reads = writes = 0
    for place, operand in enumerate(operands):
        for match in _UNIFORM.finditer(operand):
            number = int(match.group(1))
            if writer and place == target and "[" not in operand:
                writes |= _bits(number, 2 if wide else 1)
            elif "gdesc[" in operand:
                reads |= _descriptors(number, operands)
            else:
                reads |= _bits(number, 2 if opcode.startswith("UIADD3.64") or operand.startswith("desc[") else 1)
    return reads, writes


def _descriptors(number: int, operands: Sequence[str]) -> int:
    """Four registers hold the descriptors of both operands of a wgmma, the last two B's; a left operand in registers has none."""
    return _bits(number + 2, 2) if re.match(r"R\d+", operands[1]) else _bits(number, 4)


def _bits(first: int, count: int) -> int:
    return ((1 << count) - 1) << first
