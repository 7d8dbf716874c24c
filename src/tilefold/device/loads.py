"""Gradients of tensors that a score_mod reads: what each score gives to the element that was loaded for it.

`ops.loads` makes a function of each tl.load of the mod, with the mod's parameters and the tensor's first address, that returns

    slope [M, N] fp32    the derivative of the new score by the number loaded
    place int64          which element of the tensor that is: a scalar or a tile that broadcasts to [M, N]; -1 for none

A *site* is such a function with (tensor, facts, sums): facts fp64 [2], the tensor's elements and a power of two; sums as many
elements.  Many scores read one element, so they add up in memory.  They do so in integers, in units of a power of two that a
pass before has found: the order of such a sum does not matter, so it is the same to the last bit in every run.
"""

import triton
import triton.language as tl

MEASURE = tl.constexpr(0)  # how much there is to add
ADD = tl.constexpr(1)  # in integers
ADD_FLOATS = tl.constexpr(2)  # in fp32, in an order that changes from run to run
UNITS = tl.constexpr(
    float(1 << 58)
)  # that the power of two in facts has: 32 times as much as there is to add fits int64


@triton.jit
def place_of(pointer, base):
    """Which element of the tensor that begins at `base` a pointer points at."""
    BYTES: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    return (pointer.to(tl.int64) - base.to(tl.int64)) // BYTES


@triton.jit
def shared_sum(x, place):
    """x [M, N] summed over the dimensions in which all places are the same."""
    if len(place.shape) == 0:
        x = tl.sum(x)
    else:
        tl.static_assert(len(place.shape) == 2, "a score_mod has to load a scalar, or a tile of rows and columns")
        if place.shape[0] == 1:
            x = tl.sum(x, 0, keep_dims=True)
        if place.shape[1] == 1:
            x = tl.sum(x, 1, keep_dims=True)
    return x


@triton.jit
def give_to_loads(total, ds, score, place, kv_index, mods, sites, PASS: tl.constexpr, SITES: tl.constexpr):
    """Give ds [M, N], the gradient of what the last of the mods returns for `score`, to what it loaded.

    -> total [SITES] fp32, the size of all that was given, by sites, where PASS is MEASURE; place: as for `mods.modify`."""
    batch, head, q_index, extent = place
    args = mods[len(mods) - 1][1] + extent
    for i in tl.static_range(len(sites)):
        slope, at = sites[i][0](score, batch, head, q_index, kv_index, args, sites[i][1])
        x = shared_sum(tl.where(ds != 0.0, ds * slope, 0.0), at)
        elements, unit = tl.load(sites[i][2]).to(tl.int64), tl.load(sites[i][2] + 1).to(tl.float32)
        x = tl.where((at >= 0) & (at < elements), x, 0.0)
        if PASS == MEASURE:
            size = tl.abs(x)
            if len(size.shape) > 0:
                size = tl.sum(size)
            total += tl.where(tl.arange(0, SITES) == i, size, 0.0)
        else:
            if PASS == ADD:
                given = tl.floor(x * unit * UNITS + 0.5).to(tl.int64)
            else:
                given = x
            tl.atomic_add(sites[i][3] + at, given, mask=x != 0.0, sem="relaxed")
    return total
