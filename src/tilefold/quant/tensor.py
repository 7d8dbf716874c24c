"""QuantizedTensor: one record for a weight of few bits, wherever it was quantised, that saves, loads, moves and dequantises."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from .packing import check_bits, check_plane, pack, packed_shapes, unpack

SCHEMES = ("symmetric", "asymmetric", "table")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
SHARED = {"tensor": "one scale", "channel": "a scale a row"}  # by `per`, in words
VERSION = 1  # of the layout of packed codes and of the metadata in state()
TENSORS = ("packed", "packed_high", "scales", "zeros", "table", "perm")
PLAIN = ("bits", "group", "shape", "scheme", "dtype")


def check_dtype(name: str, dtype: torch.dtype, accepted: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise DtypeError unless `dtype` is among the accepted ones."""
    if dtype not in accepted:
        raise DtypeError(f"{name} must be one of {', '.join(map(str, accepted))}, got {dtype}")


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """A weight [N, K] (out_features, in_features) in 8, 4, 3 or 2 bits a number.

    Stored column j of row n, in group g = j // group (the last group is shorter where group does not divide K), is

        symmetric     (code - 2**(bits - 1)) * scales[g, n]
        asymmetric    (code - zeros[g, n]) * scales[g, n]
        table         table[code] * scales[g, n]

    packed, packed_high: the codes in int32 words, as `tilefold.quant.packing` draws them; packed_high only at 3 bits.
    scales: [groups, N] in fp16, bf16 or fp32, neighbouring rows side by side as kernels read them; [1, 1] where one holds for
    all.
    zeros: like scales, for "asymmetric" only; uint8 for integers, at most 128 below 8 bits (kernels round larger ones in bf16), a
        float dtype for zero points between codes.
    table: fp32 [2**bits], for "table" only.
    perm: int32 [K]; stored column j is column perm[j] of the weight.  None: as they come.  x @ weight.T is x[:, perm] @ stored.T.
    dtype: what `dequantize` gives by default.

    Construction checks names, types, shapes and devices, and reads no values.  Raises DtypeError, ShapeError, DeviceError,
    ValueRangeError, each with the field and its value."""

    packed: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int
    shape: tuple[int, int]
    scheme: str
    dtype: torch.dtype
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    perm: torch.Tensor | None = None
    packed_high: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if len(self.shape) != 2 or not all(type(size) is int and size > 0 for size in self.shape):
            raise ShapeError(f"shape must be (N, K), two integers from 1 on, got {self.shape!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        if type(self.group) is not int or not 1 <= self.group <= self.shape[1]:
            raise ValueRangeError(f"group must be an integer from 1 to K = {self.shape[1]}, got {self.group!r}")
        if self.scheme not in SCHEMES:
            raise ValueRangeError(f"scheme must be one of {SCHEMES}, got {self.scheme!r}")
        check_dtype("dtype", self.dtype)
        self._check_codes()
        self._check_scales()
        for name in TENSORS:
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.packed.device:
                raise DeviceError(f"{name} must lie on {self.packed.device} like packed, got {tensor.device}")

    def _check_codes(self) -> None:
        planes = packed_shapes(self.bits, self.shape)
        check_plane("packed", self.packed, planes[0], self.bits, self.shape)
        if (self.packed_high is not None) != (len(planes) == 2):
            given = "None" if self.packed_high is None else f"a tensor {list(self.packed_high.shape)}"
            raise ValueRangeError(f"packed_high is the plane of the third bit, got {given} at bits = {self.bits}")
        if self.packed_high is not None:
            check_plane("packed_high", self.packed_high, planes[1], self.bits, self.shape)
        if self.perm is not None and (self.perm.dtype != torch.int32 or tuple(self.perm.shape) != (self.shape[1],)):
            raise ShapeError(f"perm must be int32 [{self.shape[1]}], got {self.perm.dtype} {list(self.perm.shape)}")

    def _check_scales(self) -> None:
        check_dtype("scales", self.scales.dtype)
        accepted = [(self.groups, self.shape[0])] + ([(1, 1)] if self.groups == 1 else [])
        if tuple(self.scales.shape) not in accepted or not self.scales.is_contiguous():
            raise ShapeError(
                f"scales must be contiguous [groups, N] = {list(accepted[0])}, or [1, 1] for one group, "
                f"got {list(self.scales.shape)}"
            )
        for name, scheme in (("zeros", "asymmetric"), ("table", "table")):
            if (getattr(self, name) is not None) != (self.scheme == scheme):
                given = "None" if getattr(self, name) is None else "a tensor"
                raise ValueRangeError(
                    f"{name} goes with scheme={scheme!r} and only that, got {given} with {self.scheme!r}"
                )
        if self.zeros is not None:
            check_dtype("zeros", self.zeros.dtype, (torch.uint8, *DTYPES))
            if self.zeros.shape != self.scales.shape or not self.zeros.is_contiguous():
                raise ShapeError(
                    f"zeros must be contiguous {list(self.scales.shape)} like scales, got {list(self.zeros.shape)}"
                )
        if self.table is not None and (self.table.dtype != torch.float32 or tuple(self.table.shape) != (2**self.bits,)):
            raise ShapeError(f"table must be float32 [{2**self.bits}], got {self.table.dtype} {list(self.table.shape)}")

    @property
    def groups(self) -> int:
        """Groups along K, the shorter last one included."""
        return -(-self.shape[1] // self.group)

    @property
    def per(self) -> str:
        """What shares a scale: "tensor", "channel" (a row of the weight) or "group"."""
        if self.groups > 1:
            return "group"
        return "tensor" if self.scales.numel() == 1 and self.shape[0] > 1 else "channel"

    @property
    def device(self) -> torch.device:
        """Where all its tensors lie."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, padding included."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def codes(self) -> torch.Tensor:
        """uint8 [N, K], columns in stored order."""
        return unpack(self.packed, self.packed_high, self.bits, self.shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [N, K] in `dtype` (self.dtype by default), columns in their own order.

        The difference and the product are fp32, rounded once to `dtype`; with float64 they are fp64."""
        dtype = self.dtype if dtype is None else dtype
        check_dtype("dtype", dtype, (*DTYPES, torch.float64))
        work = torch.float64 if dtype == torch.float64 else torch.float32
        codes = self.codes()
        if self.table is not None:
            value = self.table.to(work)[codes.int()]
        elif self.zeros is not None:
            value = codes.to(work) - self._spread(self.zeros.to(work))
        else:
            value = codes.to(work) - 2 ** (self.bits - 1)
        value = (value * self._spread(self.scales.to(work))).to(dtype)
        return value if self.perm is None else torch.zeros_like(value).index_copy_(1, self.perm.long(), value)

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """[groups, N] or [1, 1] to something that broadcasts over [N, K], a value a stored column."""
        if self.groups == 1:
            return values.t()
        return values.t().repeat_interleave(self.group, 1)[:, : self.shape[1]]

    def to(self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None) -> "QuantizedTensor":
        """The same weight on another device, or with its scales (and `dtype`) rounded to another float dtype.

        Raises ValueRangeError if a scale would become 0 or infinite."""
        moved = dict(self.__dict__)
        if device is not None:
            moved.update({name: tensor.to(device) for name, tensor in self._tensors().items()})
        if dtype is not None:
            check_dtype("dtype", dtype)
            before = moved["scales"]
            after = before.to(dtype)
            lost = ((after == 0) & (before != 0)) | (after.isinf() & before.isfinite())
            if bool(lost.any()):
                old, new = float(before[lost][0]), float(after[lost][0])
                raise ValueRangeError(f"dtype {dtype} cannot hold the scale {old:g}: it would become {new}")
            moved.update(scales=after, dtype=dtype)
        return QuantizedTensor(**moved)

    def state(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Everything as plain tensors by name, for safetensors or a state_dict; `meta` is JSON in uint8, with a version."""
        meta = {name: getattr(self, name) for name in PLAIN}
        meta |= {"version": VERSION, "dtype": str(self.dtype).removeprefix("torch.")}
        text = torch.tensor(list(json.dumps(meta, sort_keys=True).encode()), dtype=torch.uint8)
        return {prefix + name: tensor for name, tensor in [*self._tensors().items(), ("meta", text)]}

    @classmethod
    def from_state(cls, state: Mapping[str, torch.Tensor], prefix: str = "") -> "QuantizedTensor":
        """The inverse of `state`.  Other names in `state` are left alone; raises ValueRangeError for what is missing or newer."""
        for name in ("meta", "packed", "scales"):
            if prefix + name not in state:
                raise ValueRangeError(f"state must hold {prefix + name!r}, got {sorted(state)[:8]}")
        try:
            meta = json.loads(bytes(state[prefix + "meta"].cpu().tolist()))
        except (ValueError, TypeError) as error:
            raise ValueRangeError(f"{prefix}meta is not JSON in uint8: {error}") from error
        if not isinstance(meta, dict) or meta.get("version") != VERSION:
            found = meta.get("version") if isinstance(meta, dict) else meta
            raise ValueRangeError(f"{prefix}meta must be of version {VERSION}, got {found!r}")
        missing = set(PLAIN) - set(meta)
        if missing or meta["dtype"] not in NAMED:
            raise ValueRangeError(
                f"{prefix}meta lacks {sorted(missing)} or has a dtype not in {sorted(NAMED)}, got {meta}"
            )
        held: dict[str, Any] = {name: state[prefix + name] for name in TENSORS if prefix + name in state}
        held |= {name: meta[name] for name in PLAIN}
        held |= {"shape": tuple(meta["shape"]), "dtype": NAMED[meta["dtype"]]}
        return cls(**held)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in TENSORS if getattr(self, name) is not None}

    def __eq__(self, other: object) -> bool:
        """Same settings, dtypes and values, wherever padding differs; tensors on different devices are different."""
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        if any(getattr(self, name) != getattr(other, name) for name in (*PLAIN, "device")):
            return False
        mine, theirs = self._tensors(), other._tensors()
        if set(mine) != set(theirs) or any(mine[name].dtype != theirs[name].dtype for name in mine):
            return False
        values = [name for name in mine if not name.startswith("packed")]
        return all(torch.equal(mine[name], theirs[name]) for name in values) and torch.equal(
            self.codes(), other.codes()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        n, k = self.shape
        groups = SHARED.get(self.per, f"groups of {self.group}")
        if self.groups > 1 and k % self.group:
            groups += f", the last of {k % self.group}"
        zeros = "" if self.zeros is None else f", zeros {str(self.zeros.dtype).removeprefix('torch.')}"
        scales = str(self.scales.dtype).removeprefix("torch.")
        order = "" if self.perm is None else ", columns permuted"
        return (
            f"QuantizedTensor([{n}, {k}], {self.bits} bits, {self.scheme}, {groups}, scales {scales}{zeros}{order}, "
            f"{8 * self.nbytes / (n * k):.3g} bits a weight, {self.device})"
        )


def packed_weight(codes: torch.Tensor, bits: int, **fields: Any) -> QuantizedTensor:
    """The record of codes uint8 [N, K], which are packed here; fields: its others."""
    packed, high = pack(codes, bits)
    shape = (codes.shape[0], codes.shape[1])
    return QuantizedTensor(packed=packed, packed_high=high, bits=bits, shape=shape, **fields)
