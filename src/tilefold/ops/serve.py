"""What runs an operation in place of kernels, where an architecture has functions for its operations.

An operation asks here where it binds its kernels, by the name that `plan/capabilities.py` has for it.  None is the answer for
every architecture that launches kernels."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PlanError, Unsupported
from ..types import Rules
from .device import device_of
from .numerics import is_invariant

if TYPE_CHECKING:
    from ..plan.device import Device

INVARIANT = (
    "attention",
    "attention_kvcache",
    "attention_cached",
)  # of which a query's bits may be its sequence's alone


class BoundFunction:
    """A function of an architecture and what all calls of a key share.  It is called as a `Bound` is.

    function(*given, *options); given: what a call gives, as the operation's GIVEN names it.  Autocast changes no kernel, and so
    no function."""

    __slots__ = ("function", "options")

    def __init__(self, function: Callable[..., Any], options: tuple[Any, ...]) -> None:
        self.function, self.options = function, options

    def __call__(self, given: tuple[Any, ...]) -> Any:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.function(*given, *self.options)
        return self.function(*given, *self.options)


def function_at(operation: str, device: torch.device, *options: Any) -> Any:
    """The `BoundFunction` of an operation on tensors of `device`; None where kernels are launched.

    DeviceError where nothing serves the device.  A tensor on "meta" is an example to compile a kernel with."""
    from ..plan.capabilities import function_of

    if device.type == "meta":
        return None
    function = function_of(operation, device_of(device, operation).architecture)
    return None if function is None else BoundFunction(function, options)


def has_function(operation: str, device: "Device") -> bool:
    """Whether a function serves the operation there, and no kernel."""
    from ..plan.capabilities import function_of

    function = function_of(operation, device.architecture)
    return function is not None


def plan_at(operation: str, problem: Any, device: "Device", call: Any, given: Any = None) -> Any:
    """The plan of a call on a device whose architecture has functions, or the given one if it is one for that; None where
    kernels are planned.

    Unsupported, naming it, for an argument that the architecture does not serve."""
    from ..plan.capabilities import capability, plan_of, refuse_arguments

    plan = plan_of(operation, problem, device)
    if plan is None:
        return None
    arguments, architecture = call._asdict(), device.architecture
    if is_invariant(arguments.get("numerics", "")) and operation in INVARIANT:
        plan = plan.invariant()
        if given is not None and getattr(given, "numerics", "") != "invariant":
            raise PlanError('plan has other bits than numerics="invariant": leave one of them out')
    found, mask = capability(operation, architecture), arguments.get("mask_mod")
    if found is not None and found.rules and isinstance(mask, Rules):
        functions = (rule.function for rule in mask.rules)
        arguments["mask_mod"] = next((one for one in functions if not isinstance(one, str)), None)
    elif isinstance(mask, Rules):
        raise Unsupported(
            f"mask is not served by {architecture.title} in {operation}, but for causal(); to run the kernels in Triton's "
            f"interpreter set TRITON_INTERPRET=1 before triton is imported"
        )
    refuse_arguments(operation, architecture, arguments)
    if given is None:
        return plan
    if type(given) is not type(plan):
        raise PlanError(f"plan is for {given.device.title}, the call is on {device.title}")
    if given.operation != operation:
        raise PlanError(f"plan is for {given.operation}, the call is {operation}")
    given.check(problem, device)
    return given
