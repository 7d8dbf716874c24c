"""Gates: out = gate_coarse * coarse + gate_fine * fine, and its gradients.

All tensors are [d0, d1, d2, DIM] in the order in which the caller has them, with any strides; a gate's stride is 0 where it is
broadcast, and it holds one number a row or (CHANNELS) one an element.  A program makes ROWS rows, so one launch reads every
branch once.  Grid (cdiv(d0 * d1 * d2, ROWS),).

This is the stage as a kernel of its own, for gates that are known only after the fine branch, and for training; without
gradients the fine branch's kernel for sm_90 does the same to its accumulator.
"""

import triton
import triton.language as tl

from ...device.tile import narrow, widen

RUNTIME = ["rows", "d1", "d2"]


@triton.jit
def rows_of_program(rows, d1, d2, ROWS: tl.constexpr):
    """-> the places (i0, i1, i2) of this program's rows, each [ROWS] int64, their numbers, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = tl.cast(d1, tl.int64) * d2
    return (row // inner, row % inner // d2, row % d2), row, row < rows


@triton.jit
def offsets_of(place, strides):
    """[ROWS] int64: where the rows begin in a tensor with these strides."""
    return place[0] * strides[0] + place[1] * strides[1] + place[2] * strides[2]


@triton.jit
def load_branch(X, place, strides, inside, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[ROWS, BLOCK_D] in fp32; 0 if there is no such branch."""
    o_d = tl.arange(0, BLOCK_D)
    p = X + offsets_of(place, strides)[:, None] + o_d[None, :]
    return widen(tl.load(p, mask=inside[:, None] & (o_d < DIM)[None, :], other=0.0), EMULATE).to(tl.float32)


@triton.jit
def load_gate(G, place, strides, inside, EMULATE: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    """[ROWS, BLOCK_D] or [ROWS, 1] in fp32."""
    if CHANNELS:
        return load_branch(G, place, strides, inside, EMULATE, DIM, BLOCK_D)
    else:
        return widen(tl.load(G + offsets_of(place, strides), mask=inside, other=0.0), EMULATE).to(tl.float32)[:, None]


@triton.jit
def store_elements(X, place, strides, inside, x, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    p = X + offsets_of(place, strides)[:, None] + o_d[None, :]
    tl.store(p, narrow(x, X.dtype.element_ty, EMULATE), mask=inside[:, None] & (o_d < DIM)[None, :])


@triton.jit
def mix(a, b, has_a: tl.constexpr, has_b: tl.constexpr):
    if has_a and has_b:
        return a + b
    elif has_a:
        return a
    else:
        return b


@triton.jit(do_not_specialize=RUNTIME)
def fuse_forward(
    Coarse, Fine, GateC, GateF, Out, rows, d1, d2, strides_c, strides_f, strides_gc, strides_gf, strides_o,
    CHANNELS_C: tl.constexpr, CHANNELS_F: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Coarse, Fine (either may be None), Out [d0, d1, d2, DIM]; GateC, GateF or None: 1.  Computed in fp32, rounded once.
    Out may be one of the branches."""
    place, row, inside = rows_of_program(rows, d1, d2, ROWS)
    a = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b = a
    if Coarse is not None:
        a = load_branch(Coarse, place, strides_c, inside, EMULATE, DIM, BLOCK_D)
        if GateC is not None:
            a = a * load_gate(GateC, place, strides_gc, inside, EMULATE, CHANNELS_C, DIM, BLOCK_D)
    if Fine is not None:
        b = load_branch(Fine, place, strides_f, inside, EMULATE, DIM, BLOCK_D)
        if GateF is not None:
            b = b * load_gate(GateF, place, strides_gf, inside, EMULATE, CHANNELS_F, DIM, BLOCK_D)
    x = mix(a, b, Coarse is not None, Fine is not None)
    store_elements(Out, place, strides_o, inside, x, EMULATE, DIM, BLOCK_D)


@triton.jit
def branch_gradient(X, G, DX, DG, do, place, row, inside, strides_x, strides_g, strides_d, CHANNELS: tl.constexpr,
                    EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Of one branch x with gate g: DX = g * do, if wanted, and what each row (or, CHANNELS, each element) adds to DG."""
    if DX is not None:
        dx = do
        if G is not None:
            dx = do * load_gate(G, place, strides_g, inside, EMULATE, CHANNELS, DIM, BLOCK_D)
        store_elements(DX, place, strides_d, inside, dx, EMULATE, DIM, BLOCK_D)
    if DG is not None:
        product = load_branch(X, place, strides_x, inside, EMULATE, DIM, BLOCK_D) * do
        if CHANNELS:
            o_d = tl.arange(0, BLOCK_D)
            p = DG + (row * DIM)[:, None] + o_d[None, :]
            tl.store(p, narrow(product, DG.dtype.element_ty, EMULATE), mask=inside[:, None] & (o_d < DIM)[None, :])
        else:
            tl.store(DG + row, narrow(tl.sum(product, 1), DG.dtype.element_ty, EMULATE), mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def fuse_backward(
    Coarse, Fine, GateC, GateF, DOut, DCoarse, DFine, DGateC, DGateF, rows, d1, d2,
    strides_c, strides_f, strides_gc, strides_gf, strides_o, strides_d,
    CHANNELS_C: tl.constexpr, CHANNELS_F: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """As fuse_forward, with DOut like Out; DCoarse, DFine like the branches with strides_d, or None if not wanted; DGateC, DGateF
    [d0, d1, d2] or, CHANNELS, [d0, d1, d2, DIM] contiguous, or None.  A broadcast gate's are summed by the caller."""
    place, row, inside = rows_of_program(rows, d1, d2, ROWS)
    do = load_branch(DOut, place, strides_o, inside, EMULATE, DIM, BLOCK_D)
    branch_gradient(Coarse, GateC, DCoarse, DGateC, do, place, row, inside, strides_c, strides_gc, strides_d, CHANNELS_C,
                    EMULATE, DIM, BLOCK_D)  # fmt: skip
    branch_gradient(Fine, GateF, DFine, DGateF, do, place, row, inside, strides_f, strides_gf, strides_d, CHANNELS_F, EMULATE,
                    DIM, BLOCK_D)  # fmt: skip
