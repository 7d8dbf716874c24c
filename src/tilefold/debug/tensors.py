"""`check_tensors`: is what a kernel is about to be given what it will read as memory?"""

from collections.abc import Collection, Mapping, Sequence

import torch

from tilefold.debug.inside import interpreting
from tilefold.debug.overlap import overlap, overlaps_itself
from tilefold.errors import DeviceError, DtypeError, LayoutError, ValueRangeError

_NAMES = (
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
KERNEL_DTYPES = tuple(getattr(torch, name) for name in _NAMES)  # what Triton makes pointers of


def check_tensors(
    *tensors: torch.Tensor,
    device: torch.device | str | None = None,
    contiguous: bool = True,
    same_device: bool = True,
    aligned: int = 16,
    dtypes: Sequence[torch.dtype] | Mapping[str, Sequence[torch.dtype]] = KERNEL_DTYPES,
    outputs: Collection[str] = (),
    **named: torch.Tensor,
) -> None:
    """Raise an error for the first tensor that a kernel would misread, by its name.

    tensors, named: any shapes; errors call them `tensor 0`, `tensor 1`, ... and by keyword. device: where they must be ("cuda" is
    any GPU); None is wherever kernels run here, a GPU unless TRITON_INTERPRET is set. contiguous: False takes any strides.
    aligned: bytes that addresses must be a multiple of, 0 for any; 16 is what Triton's vector loads and tensor descriptors need.
    dtypes: accepted, for all or by name. outputs: the names that the kernel writes: their elements must not share memory with
    one another or with another tensor. Nothing is read or copied.

    Raises DtypeError (no tensor, or another dtype), LayoutError (not strided, lazy, not contiguous, misaligned, overlapping),
    DeviceError, ValueRangeError (an option that cannot be)."""
    given = {**{f"tensor {place}": tensor for place, tensor in enumerate(tensors)}, **named}
    _check_options(given, aligned, dtypes, outputs)
    first: tuple[str, torch.Tensor] | None = None
    for name, tensor in given.items():
        _check_memory(name, tensor)
        accepted = dtypes.get(name, KERNEL_DTYPES) if isinstance(dtypes, Mapping) else dtypes
        if tensor.dtype not in accepted:
            raise DtypeError(f"{name} has dtype {_short(tensor.dtype)}, accepted: {', '.join(map(_short, accepted))}")
        _check_device(name, tensor, device)
        first = first or (name, tensor)
        if same_device and tensor.device != first[1].device:
            raise DeviceError(
                f"{name} is on {tensor.device}, but {first[0]} is on {first[1].device}: one device is accepted"
            )
        if contiguous and not tensor.is_contiguous():
            raise LayoutError(
                f"{name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, accepted: contiguous; call "
                f"{name}.contiguous() first if a copy is acceptable, or give the strides to the kernel and say contiguous=False"
            )
        if aligned and tensor.numel() and tensor.data_ptr() % aligned:
            raise LayoutError(
                f"{name} starts {tensor.data_ptr() % aligned} bytes behind a multiple of {aligned} (storage offset "
                f"{tensor.storage_offset()} elements), accepted: addresses that are multiples of {aligned} bytes"
            )
    check_outputs(given, outputs)


def check_outputs(given: Mapping[str, torch.Tensor], outputs: Collection[str]) -> None:
    """LayoutError where an element that is written shares memory with another element of any tensor."""
    for name in outputs:
        if overlaps_itself(given[name]):
            raise LayoutError(
                f"{name} is written, but elements of it share memory: strides {tuple(given[name].stride())} for shape "
                f"{tuple(given[name].shape)}; accepted: one place for each element"
            )
        for other, tensor in given.items():
            shared = other != name and overlap(given[name], tensor)
            if shared is not False:
                verb = "shares" if shared else "may share (their strides interlock)"
                raise LayoutError(
                    f"{name} is written and {verb} memory with {other}; accepted: outputs with memory of their own"
                )


def tensor_names(given: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors among a kernel's arguments, those in tuples as `name[0]`."""
    found: dict[str, torch.Tensor] = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= tensor_names({f"{name}[{place}]": part for place, part in enumerate(value)})
    return found


def _check_options(
    given: Mapping[str, object],
    aligned: int,
    dtypes: Sequence[torch.dtype] | Mapping[str, Sequence[torch.dtype]],
    outputs: Collection[str],
) -> None:
    if isinstance(aligned, bool) or not isinstance(aligned, int) or aligned < 0:
        raise ValueRangeError(f"aligned must be a number of bytes, or 0 for any address, got {aligned!r}")
    if isinstance(outputs, str):
        raise DtypeError(f"outputs must be a tuple of names, got the string {outputs!r}")
    for option, names in (("outputs", outputs), ("dtypes", dtypes if isinstance(dtypes, Mapping) else ())):
        for name in names:
            if name not in given:
                raise ValueRangeError(f"{option} names {name!r}, but the tensors are {', '.join(given) or 'none'}")


def _check_memory(name: str, tensor: object) -> None:
    """The tensor has memory that a pointer describes."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise LayoutError(f"{name} must be a dense strided tensor, got layout {tensor.layout}")
    if tensor.is_neg() or tensor.is_conj():
        what = "negation" if tensor.is_neg() else "conjugate"
        raise LayoutError(
            f"{name} is a lazy {what}, its memory holds other numbers; call resolve_neg() or resolve_conj() first"
        )
    if tensor.device.type == "meta":
        raise DeviceError(f"{name} is on the meta device and has no memory")


def _check_device(name: str, tensor: torch.Tensor, device: torch.device | str | None) -> None:
    if device is None:
        if tensor.device.type == "cpu" and not interpreting():
            raise DeviceError(f"{name} is on the CPU, where kernels run with TRITON_INTERPRET=1 only; accepted: a GPU")
        return
    wanted = torch.device(device)
    if tensor.device.type != wanted.type or wanted.index not in (None, tensor.device.index):
        raise DeviceError(f"{name} is on {tensor.device}, accepted: {wanted}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
