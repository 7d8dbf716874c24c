"""The door to Gluon: the only file that imports it, under names that hold for Triton 3.6 to 3.9.

    jit, constexpr_function   decorators: a kernel or a helper; a function that runs while compiling
    aggregate   decorator: a class whose fields are values, buffers, barriers and constants, and whose methods are `jit`
    field, descriptor         for its fields: a value or a constant; the type of a TMA descriptor
    gl                        the language: gl.arange, gl.allocate_shared_memory, layouts, gl.warp_specialize
    TensorDescriptor          host descriptor (tensor, shape, strides, block, layout) that the copy engine reads
    tma_load, tma_store, tma_reduce_add, tma_store_wait     copies by the tensor memory accelerator
    mbarrier                  init, wait, expect, arrive on one barrier in shared memory; barriers() makes several
    fence_async_shared        orders what threads wrote to or read from shared memory before the copy engine and wgmma use it
    thread_barrier            all threads of a partition have come here
    wgmma, wgmma_wait         products of a warpgroup
    reinterpret(buffer, dtype, shape, layout)      another view of the same shared memory
    KEEP_NAN                  propagate_nan of gl.maximum and gl.minimum: NaN, where one of the two is
    opaque                    keeps the compiler from computing something early and holding it in registers
    schedule_fence            keeps the assembler from moving a wait up
    named_wait, named_arrive  two warpgroups, by the hardware's named barriers: one waits, the other passes by
    pair_barrier              two warpgroups wait for each other, by one of them
    narrowed                  fp32 as 16 bits
    scale_unless_one          a product that warps leave out where every factor is 1
    mma                       products of a warp (mma.sync)
    copy_async, copies_commit, copies_wait     copies by threads from global to shared memory, in groups
    wait_for_previous, let_next_start     dependent launches

Argument tuples of gl.warp_specialize are written in place: 3.6 loses the constexprs of a tuple that has a name, or that is added
to another.  Those in the fields of an aggregate stay.  In 3.9 fields cannot be set after `__init__`.  Names that begin
a `while` as one and the same value, and of which one takes over another's (`before = last`), are taken for unchanged by it:
the loop goes on with what was there first, without an error.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr as plain
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as wgmma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wgmma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan
from triton.language.core import _aggregate, base_value

__all__ = [
    "KEEP_NAN",
    "TensorDescriptor",
    "aggregate",
    "barriers",
    "builtin",
    "constexpr_function",
    "copies_commit",
    "copies_wait",
    "copy_async",
    "descriptor",
    "fence_async_shared",
    "field",
    "gl",
    "jit",
    "let_next_start",
    "mbarrier",
    "mma",
    "named_arrive",
    "named_wait",
    "narrowed",
    "opaque",
    "pair_barrier",
    "quick_log2",
    "quick_reciprocal",
    "reinterpret",
    "scale_unless_one",
    "schedule_fence",
    "thread_barrier",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "wait_for_previous",
    "wgmma",
    "wgmma_wait",
]

jit = gluon.jit
constexpr_function = gluon.constexpr_function
aggregate = _aggregate  # private in 3.6 by name, public in 3.9
descriptor = tma.tensor_descriptor


@constexpr_function
def field(x):
    """What an aggregate holds where it may be a value of the device or a constant, None among them."""
    return x if isinstance(x, base_value) else gl.constexpr(x)


KEEP_NAN = gl.constexpr(PropagateNan.ALL)

# tma_load(descriptor, coordinates, barrier, buffer, pred=True); tma_store(descriptor, coordinates, buffer).
# 3.9 still has the old names, but they raise.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
# copy_async(buffer, pointers, mask)
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
copies_commit, copies_wait = async_copy.commit_group, async_copy.wait_group
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    """3.6 has the instruction (cp.reduce.async.bulk.tensor .add), but no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


# tma_reduce_add(descriptor, coordinates, buffer): adds a buffer to global memory.
tma_reduce_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _reduce_add


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """The same shared memory under another type, shape and layout (a method whose name changed)."""
    shape = [plain(n) for n in plain(shape)]
    return _semantic.memdesc_reinterpret(buffer, plain(dtype), shape, plain(layout))


@jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """NUMBER barriers [NUMBER, 1], each complete after COUNT arrivals.  Fence before other warps or the copy engine use them."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@jit
def quick_reciprocal(x):
    """1 / x in one instruction, right to 1 bit of fp32; 0 of inf."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def quick_log2(x):
    """log2(x) in one instruction, right to 2^-22 of 1."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def opaque(x):
    """x (32 bits an element), which the compiler takes for new: it neither looks into it nor moves what is made of it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@jit
def schedule_fence(x):
    """x (fp32, at least 0), computed before what follows: a performance event that never fires, since no x is below -1.

    ptxas (12.8 to 13.5) moves `wgmma.wait_group` up over independent arithmetic, and then nothing runs beside the product; this
    instruction depends on x and is not moved.  A NaN compares false."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred below; setp.lt.f32 below, $1, 0fBF800000; @below pmevent 1; mov.b32 $0, $1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@jit
def narrowed(x, DTYPE: gl.constexpr):
    """x (fp32) in 16 bits, rounded to nearest even, two by one instruction."""
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@constexpr_function
def _named_barrier(instruction, number):
    return f"bar.{instruction} {number}, 256; mov.b32 $0, 0;"


@jit
def named_wait(NUMBER: gl.constexpr):
    """Wait until another warpgroup has arrived at this barrier.  Triton itself uses the barriers below 8."""
    gl.inline_asm_elementwise(
        _named_barrier("sync", 8 + NUMBER), "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@jit
def named_arrive(NUMBER: gl.constexpr):
    """Let the warpgroup that waits at this barrier go on.  The caller does not wait."""
    gl.inline_asm_elementwise(
        _named_barrier("arrive", 8 + NUMBER), "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@constexpr_function
def _crossing(own):
    return (
        "{ .reg .b32 own, other; and.b32 own, $1, 1; shl.b32 own, own, 1; "
        f"add.s32 own, own, {8 + own}; xor.b32 other, own, 1; "
        "bar.arrive other, 256; bar.sync own, 256; mov.b32 $0, 0; }"
    )


@jit
def pair_barrier(OWN: gl.constexpr, i):
    """Two warpgroups, number 0 and 1, wait for each other here, and see what the other wrote to shared memory before.

    Each has a barrier of its own, at which the other only arrives: one barrier at which both wait, each at its place in the code,
    is right as well, but synccheck takes it for threads that went apart.  i: how often they were here: they take two pairs of
    barriers in turns, or who goes on at once could arrive a second time where the other's last warp does not wait yet."""
    gl.inline_asm_elementwise(_crossing(OWN), "=r,r,~{memory}", [i], dtype=gl.int32, is_pure=False, pack=1)


@constexpr_function
def _scaling(number):
    """Operands: results, then x tied to them, then factors.  Elements 0 and 1 of each four lie in one row, 2 and 3 in another."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * number + i};" for i in range(number))
    return (
        "{ .reg .pred one, two; "
        f"setp.neu.f32 one, ${2 * number}, 0f3F800000; setp.neu.or.f32 two, ${2 * number + 2}, 0f3F800000, one; "
        f"vote.sync.any.pred two, two, 0xffffffff; @!two bra.uni done; {products} done: }}"
    )


@constexpr_function
def _scaling_constraints(number):
    return ",".join(["=f"] * number + [str(i) for i in range(number)] + ["f"] * number)


@jit
def scale_unless_one(x, factor):
    """x [64, N] fp32, an accumulator of a warpgroup, times factor [64, 1]; a warp all of whose factors are 1 does nothing.

    As one instruction to the compiler, because a branch of its own would have to be taken by all warps alike."""
    NUMBER: gl.constexpr = x.shape[1] // 2  # elements of a thread
    return gl.inline_asm_elementwise(_scaling(NUMBER), _scaling_constraints(NUMBER), [x, factor], dtype=gl.float32, is_pure=False,
                                     pack=NUMBER)  # fmt: skip


@jit
def wait_for_previous(EARLY: gl.constexpr):
    """EARLY, a dependent launch: until the kernel before is through and what it wrote can be read."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False,
                                  pack=1)  # fmt: skip


@jit
def let_next_start(EARLY: gl.constexpr):
    """EARLY: a dependent kernel may take its places.  Called when a program's loads are done: any sooner, and programs of the
    next kernel lie unevenly beside those that still run."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip
