"""What the compiler made of a kernel: registers, spills, memory, occupancy, instruction counts, and what is wrong.

The records are plain Python and JSON both ways; only `report_of` looks at a compiled kernel.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tilefold.aot.registers import undefined_registers
from tilefold.aot.sass import Loop, count_prefix, opcode_counts, parse_listing, tensor_loops
from tilefold.aot.targets import Target, target_named

if TYPE_CHECKING:
    from tilefold.aot.compile import Compiled

__all__ = ["CompileReport", "Occupancy", "SpillRule", "TensorRule", "occupancy", "report_of"]

TensorRule = Literal["best", "any", "none"]
"""Which tensor instructions a kernel must have: the target's own generation, any generation, or none."""

SpillRule = Literal["none", "outside loops", "any"]
"""Where spilled registers are tolerated: nowhere, outside the main loops, everywhere."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Programs that fit one SM (compute unit) at once, and the resource that sets the limit."""

    programs: int
    limit: str  # "registers" | "shared memory" | "warps" | "programs" | "tensor memory"


@dataclass(frozen=True, slots=True)
class CompileReport:
    """One kernel compiled for one target by one Triton version.

    `registers` are those of one thread (on AMD vector registers, `accumulator_registers` among them), `spill_*_bytes`
    and `stack_bytes` too; `shared_bytes` is for one program. `scalar_spills` counts AMD's scalar registers that went to
    lanes of vector registers, which costs no memory access. `opcodes` counts the machine code, `ptx` the PTX behind it
    (empty on AMD). `loops` are the innermost loops with tensor instructions: the main loops.
    """

    kernel: str
    target: str
    triton: str
    signature: str
    num_warps: int  # of the kernel as written; `threads` counts the warps of specialised partitions too
    num_stages: int
    threads: int
    registers: int
    accumulator_registers: int
    scalar_registers: int
    scalar_spills: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    tensor_columns: int
    occupancy: Occupancy
    opcodes: Mapping[str, int]
    ptx: Mapping[str, int]
    loops: tuple[Loop, ...]
    warnings: tuple[str, ...]
    undefined: tuple[str, ...]

    @property
    def spills(self) -> int:
        """Spilled bytes per thread, stored or loaded."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def loop_spills(self) -> int:
        """Accesses to spilled registers inside the main loops (instructions)."""
        return sum(loop.spills for loop in self.loops)

    @property
    def tensor_instructions(self) -> int:
        """Tensor instructions of any generation in the machine code."""
        return count_prefix(self.opcodes, target_named(self.target).any_tensor)

    @property
    def best_tensor_instructions(self) -> int:
        """Tensor instructions of the target's own generation (wgmma on sm_90, tcgen05 on sm_100)."""
        return count_prefix(self.opcodes, target_named(self.target).best_tensor)

    def problems(self, *, tensor: TensorRule = "best", spills: SpillRule = "none") -> tuple[str, ...]:
        """Everything that forbids shipping this configuration, as texts; empty when it is good.

        `tensor`: what tensor instructions the kernel must have. `spills`: where spilled registers are tolerated.
        """
        target, found = target_named(self.target), []
        if self.shared_bytes > target.shared_per_program:
            limit = target.shared_per_program
            found.append(f"shared memory: {self.shared_bytes} bytes a program, {target.name} has {limit}")
        if self.registers > target.registers_per_thread:
            found.append(f"registers: {self.registers} a thread, {target.name} has {target.registers_per_thread}")
        if self.tensor_columns > target.tensor_columns:
            found.append(f"tensor memory: {self.tensor_columns} columns, {target.name} has {target.tensor_columns}")
        if spills == "none" and self.spills:
            found.append(f"spills: a thread stores {self.spill_store_bytes} bytes, loads {self.spill_load_bytes}")
        if spills != "any" and self.loop_spills:
            found.append(f"spills: {self.loop_spills} accesses to spilled registers in the main loop")
        wanted = {"best": target.best_tensor, "any": target.any_tensor, "none": ()}[tensor]
        if wanted and not count_prefix(self.opcodes, wanted):
            found.append(f"tensor instructions: none of {', '.join(wanted)} in the machine code")
        found += [f"assembler: {warning}" for warning in self.warnings]
        found += [f"undefined register: {one}" for one in self.undefined]
        found += [f"wgmma hazard: {hazard}" for loop in self.loops for hazard in loop.hazards]
        return tuple(found)

    def to_json(self) -> str:
        """One line of JSON that `from_json` turns back into an equal record."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CompileReport":
        """The record that `to_json` wrote; TypeError or KeyError when the fields are not those of this version."""
        fields = json.loads(text)
        fields["occupancy"] = Occupancy(**fields["occupancy"])
        fields["warnings"] = tuple(fields["warnings"])
        fields["undefined"] = tuple(fields["undefined"])
        fields["loops"] = tuple(
            Loop(**{**loop, "schedule": tuple(loop["schedule"]), "hazards": tuple(loop["hazards"])})
            for loop in fields["loops"]
        )
        return cls(**fields)

    def __str__(self) -> str:
        built = f"for {self.target}, triton {self.triton}, {self.num_warps} warps, {self.num_stages} stages"
        extra = f" ({self.accumulator_registers} accumulators)" if self.accumulator_registers else ""
        lines = [
            f"{self.kernel} {built}",
            f"  registers {self.registers}{extra}, spills {self.spills} B, stack {self.stack_bytes} B",
            f"  shared memory {self.shared_bytes} B, tensor memory {self.tensor_columns} columns",
            f"  {self.occupancy.programs} programs of {self.threads} threads per SM, limit: {self.occupancy.limit}",
            f"  tensor instructions: {self.best_tensor_instructions}, of any generation {self.tensor_instructions}",
        ]
        for loop in self.loops:
            common = ", ".join(f"{name} {number}" for name, number in list(loop.opcodes.items())[:8])
            lines.append(f"  main loop of {loop.end - loop.start + 1} instructions: {common}")
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])


def occupancy(target: Target, *, threads: int, registers: int, shared_bytes: int, tensor_columns: int = 0) -> Occupancy:
    """How many programs of `threads` threads fit an SM of `target`, by the vendor's allocation rules.

    `registers` per thread and `shared_bytes` per program are what the compiler reports. 0 programs: no launch.
    """
    warps = -(-threads // target.warp_size)
    granule = target.register_granule
    per_thread = max(granule, -(-registers // granule) * granule)
    warps_by_registers = target.registers_per_sm // target.schedulers_per_sm // (per_thread * target.warp_size)
    limits = {
        "registers": warps_by_registers * target.schedulers_per_sm // warps,
        "shared memory": target.shared_per_sm // max(1, shared_bytes + target.shared_reserved),
        "warps": target.warps_per_sm // warps,
        "programs": target.programs_per_sm,
    }
    if tensor_columns:
        limits["tensor memory"] = target.tensor_columns // tensor_columns
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limit)


def report_of(compiled: "Compiled") -> CompileReport:
    """Read the report off a compiled kernel."""
    target = compiled.target
    machine = parse_listing(compiled.listings[target.listing], target.listing)
    resources = _nvidia_resources(compiled) if target.backend == "cuda" else _amd_resources(compiled)
    ptx = opcode_counts(parse_listing(compiled.listings["ptx"], "ptx")) if "ptx" in compiled.listings else {}
    return CompileReport(
        kernel=compiled.kernel,
        target=target.name,
        triton=compiled.triton,
        signature=compiled.signature,
        num_warps=compiled.num_warps,
        num_stages=compiled.num_stages,
        shared_bytes=compiled.shared_bytes,
        tensor_columns=compiled.tensor_columns,
        occupancy=occupancy(
            target,
            threads=resources["threads"],
            registers=resources["registers"],
            shared_bytes=compiled.shared_bytes,
            tensor_columns=compiled.tensor_columns,
        ),
        opcodes=opcode_counts(machine),
        ptx=ptx,
        loops=tensor_loops(machine, target.any_tensor),
        warnings=_warnings(compiled.assembler_log),
        undefined=undefined_registers(machine) if target.name in ("sm_80", "sm_90") else (),  # whose opcodes it knows
        **resources,
    )


def _number(pattern: str, text: str, default: int | None = None) -> int:
    """The number that `pattern` finds; ValueError when it is missing and has no default: the tool's output changed."""
    if match := re.search(pattern, text):
        return int(match.group(1))
    if default is None:
        raise ValueError(f"compiler output has no {pattern!r}; it reads: {text[-500:]!r}")
    return default


def _nvidia_resources(compiled: "Compiled") -> dict[str, int]:
    """Registers, stack and spills from the log of ptxas -v, threads from the PTX."""
    log, ptx = compiled.assembler_log, compiled.listings["ptx"]
    return {
        "threads": _number(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx),
        "registers": _number(r"Used (\d+) registers", log),
        "accumulator_registers": 0,
        "scalar_registers": 0,
        "scalar_spills": 0,
        "spill_store_bytes": _number(r"(\d+) bytes spill stores", log),
        "spill_load_bytes": _number(r"(\d+) bytes spill loads", log),
        "stack_bytes": _number(r"(\d+) bytes stack frame", log),
    }


def _amd_resources(compiled: "Compiled") -> dict[str, int]:
    """The same from the metadata in the assembly; LLVM counts spilled registers, not how often each is moved."""
    text = compiled.listings["amdgcn"]
    spilled = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    return {
        "threads": compiled.num_warps * compiled.target.warp_size,
        "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
        "accumulator_registers": _number(r"\.agpr_count:\s+(\d+)", text),
        "scalar_registers": _number(r"\.sgpr_count:\s+(\d+)", text),
        "scalar_spills": _number(r"\.sgpr_spill_count:\s+(\d+)", text),
        "spill_store_bytes": spilled,
        "spill_load_bytes": spilled,
        "stack_bytes": _number(r"\.private_segment_fixed_size:\s+(\d+)", text),
    }


def _warnings(log: str) -> tuple[str, ...]:
    """What the assembler complains of, among it wgmma made serial (C7510) and code that it could not pipeline."""
    marks = ("warning", "potential performance loss", "serializ", "error")
    lines = (line.strip() for line in log.splitlines())
    return tuple(dict.fromkeys(line for line in lines if any(mark in line.lower() for mark in marks)))
