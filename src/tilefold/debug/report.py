"""What was found when a kernel was run under watch: faults with the program that is to blame, in words and as values."""

from dataclasses import dataclass

from tilefold.errors import TilefoldError


class KernelFault(TilefoldError, AssertionError):
    """A kernel under `checked` did something wrong; `report` has every finding."""

    def __init__(self, report: "KernelReport") -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type, tuple["KernelReport"]]:
        return type(self), (self.report,)


@dataclass(frozen=True, slots=True)
class Fault:
    """The first finding of one kind in one tensor, and how many there are.

    kind: "raised" (an exception in the kernel), "store" (outside the tensor, or into a gap between its rows), "load" (outside of
    every tensor), "input" (a store into what is no output), "race" (two programs, or two lanes of one, wrote different values),
    "guard" (bytes around a tensor changed behind the interpreter's back), "unwritten", "mismatch". tensor: its name, "" where
    none is near. index: in the tensor; None where no element is meant. program: ids of the program to blame, as many as the grid
    has axes; None if none is. count: elements concerned. text: the finding in a sentence."""

    kind: str
    tensor: str
    index: tuple[int, ...] | None
    program: tuple[int, ...] | None
    count: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """How a watched run of a kernel went. faults: in the order of Fault.kind, worst first; programs: how many ran;
    outputs: (name, what was found when it was compared) for each output that has a reference."""

    kernel: str
    programs: int
    faults: tuple[Fault, ...]
    outputs: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        return not self.faults

    def raise_if_wrong(self) -> None:
        """KernelFault with this report unless all is well."""
        if self.faults:
            raise KernelFault(self)

    def __str__(self) -> str:
        head = f"{self.kernel}, {self.programs} programs: "
        if not self.faults:
            return head + "; ".join(["no fault", *(f"{name} {words}" for name, words in self.outputs)])
        many = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        return head + many + "".join(f"\n  {fault}" for fault in self.faults)
