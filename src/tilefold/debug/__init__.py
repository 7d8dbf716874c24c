"""Helpers for people who write Triton kernels: conditions on programs, printing, stopping, and kernels run under watch.

`when`, `print_if` and `breakpoint_if` are called inside kernels; `check_tensors`, `check_kernel` and `checked` around them;
`patch_interpreter` makes the interpreter faster. Set
TRITON_INTERPRET=1 before triton is imported to have all of it (docs/guides/debugging.md says what a compiled kernel leaves).
"""

from tilefold.debug.checked import CheckedKernel, check_kernel, checked
from tilefold.debug.conditions import AxisCondition, ProgramCondition, parse_condition
from tilefold.debug.inside import breakpoint_if, print_if, when
from tilefold.debug.interpreter import patch_interpreter
from tilefold.debug.report import Fault, KernelFault, KernelReport
from tilefold.debug.tensors import check_tensors

__all__ = [
    "AxisCondition",
    "CheckedKernel",
    "Fault",
    "KernelFault",
    "KernelReport",
    "ProgramCondition",
    "breakpoint_if",
    "check_kernel",
    "check_tensors",
    "checked",
    "parse_condition",
    "patch_interpreter",
    "print_if",
    "when",
]
