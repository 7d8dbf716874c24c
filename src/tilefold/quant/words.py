"""What the readers of other tools' formats share: fields out of int32 words, checks that name the tensor, orders of columns."""

import torch

from ..errors import DeviceError, DtypeError, ShapeError, ValueRangeError
from .tensor import DTYPES, QuantizedTensor, check_dtype, packed_weight


def check_tensor(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise DtypeError, ShapeError or DeviceError, naming `name`, unless the tensor is as said."""
    check_dtype(name, tensor.dtype, dtypes)
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise DeviceError(f"{name} must lie on {device} like the packed codes, got {tensor.device}")


def read_stream(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`count` values uint8 [count, C] of `bits` bits, read down the words int32 [W, C], lowest bits first, across word ends.

    Value j takes the bits from bits * j on of the words laid end to end; 32 values of 3 bits fill 3 words."""
    per_period, words_each = (32, bits) if 32 % bits else (32 // bits, 1)
    periods, c = -(-count // per_period), words.shape[1]
    padded = torch.zeros(periods * words_each, c, dtype=torch.int64, device=words.device)
    padded[: words.shape[0]] = words.long() & 0xFFFFFFFF
    padded = padded.view(periods, words_each, c)
    values = torch.zeros(periods, per_period, c, dtype=torch.uint8, device=words.device)
    for j in range(per_period):
        word, shift = divmod(j * bits, 32)
        value = padded[:, word] >> shift
        if shift + bits > 32:
            value = value | (padded[:, word + 1] << (32 - shift))
        values[:, j] = (value & (2**bits - 1)).to(torch.uint8)
    return values.flatten(0, 1)[:count]


def read_fields(words: torch.Tensor, bits: int, count: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """`count` values uint8 [R, count] of `bits` bits along the rows of words int32 [R, W]; none crosses a word's end.

    Field i of a word, lowest bits first, is its value order[i]; with no order, value i."""
    fields = 32 // bits
    values = torch.zeros(*words.shape, fields, dtype=torch.uint8, device=words.device)
    for i in range(fields):
        values[..., i if order is None else order[i]] = ((words >> (bits * i)) & (2**bits - 1)).to(torch.uint8)
    return values.flatten(1)[:, :count]


def group_size(given: int | None, k: int, groups: int) -> int:
    """Columns of a group: given, or K / groups where that is whole.  Raises ValueRangeError if it does not make `groups`
    groups."""
    if given is None:
        if k % groups:
            raise ValueRangeError(
                f"group must be given where K = {k} is no multiple of the {groups} groups of the scales"
            )
        return k // groups
    if type(given) is not int or given < 1 or -(-k // given) != groups:
        raise ValueRangeError(f"group must cut K = {k} into the {groups} groups of the scales, got {given!r}")
    return min(given, k)


def column_order(
    g_idx: torch.Tensor | None, name: str, k: int, groups: int, given: int | None, device: torch.device
) -> tuple[torch.Tensor | None, int]:
    """The order of columns that puts each group's side by side, int32 [K], or None if they are; and the size of a group.

    g_idx: the group of each column, integers [K]; None: neighbours are a group.  All groups but the last must have as many
    columns, the last no more: anything else has no such order and is refused with ValueRangeError."""
    if g_idx is None:
        return None, group_size(given, k, groups)
    check_tensor(name, g_idx, (g_idx.dtype,), (k,), device)
    if g_idx.is_floating_point() or g_idx.is_complex():
        raise DtypeError(f"{name} must be integers, got {g_idx.dtype}")
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise ValueRangeError(f"{name} must be from 0 to {groups - 1}, got {int(g_idx.min())} to {int(g_idx.max())}")
    counts = torch.bincount(g_idx.long(), minlength=groups)
    size = int(counts[0])
    if bool((counts[:-1] != size).any()) or not 0 < int(counts[-1]) <= size:
        raise ValueRangeError(
            f"{name} must give every group but the last, which may be shorter, as many columns, got {counts.tolist()[:8]}"
        )
    if given is not None and min(given, k) != size:
        raise ValueRangeError(f"group is {given!r}, but {name} has groups of {size} columns")
    order = torch.argsort(g_idx.long(), stable=True)
    plain = bool((order == torch.arange(k, device=order.device)).all())
    return (None if plain else order.to(torch.int32)), size


def build(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group: int,
    dtype: torch.dtype | None,
    perm: torch.Tensor | None,
) -> QuantizedTensor:
    """The record of codes uint8 [N, K] in their own order; zero points that are all in the middle make it symmetric."""
    check_dtype("scales", scales.dtype)
    dtype = scales.dtype if dtype is None else dtype
    check_dtype("dtype", dtype, DTYPES)
    if zeros is not None and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    return packed_weight(
        codes if perm is None else codes[:, perm.long()],
        bits,
        scales=scales.detach().contiguous(),
        zeros=None if zeros is None else zeros.contiguous(),
        group=group,
        scheme="symmetric" if zeros is None else "asymmetric",
        dtype=dtype,
        perm=perm,
    )
