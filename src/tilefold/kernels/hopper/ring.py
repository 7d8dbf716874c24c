"""The barriers of a ring of stages in shared memory, in the matrix kernels: who may use a stage, and when."""

from .gluon import barriers, constexpr_function, gl, jit, mbarrier
from .structs import struct


@constexpr_function
def swizzled(rank, bits=16):
    """The layout of tiles in shared memory, of numbers of `bits`: 128 bytes of a row together, as TMA and wgmma take them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


@struct
class Ring:
    """STAGES stages, which the steps of a program take in turn.

    A stage has two barriers: `full`, which its TMA loads complete, and `empty`, at which every consumer arrives.  The producer
    acquires a stage, says how many bytes come, and loads; a consumer waits for it, reads it and releases it."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @jit
    def stage(self, t):
        """The stage of step t."""
        return t % self.STAGES

    @jit
    def turn(self, t):
        """How often the ring has gone round before step t."""
        return t // self.STAGES

    @jit
    def acquire(self, stage, turn):
        """Wait until the consumers have released the stage; in turn 0 it is free."""
        mbarrier.wait(self.empty.index(stage), (turn & 1) ^ 1)

    @jit
    def expect(self, stage, BYTES):
        """The barrier of the stage's TMA loads, which bring so many bytes."""
        bar = self.full.index(stage)
        mbarrier.expect(bar, BYTES)
        return bar

    @jit
    def wait(self, stage, turn):
        """Wait until the loads of the stage have arrived."""
        mbarrier.wait(self.full.index(stage), turn & 1)

    @jit
    def release(self, stage):
        """The calling consumer has read the stage."""
        mbarrier.arrive(self.empty.index(stage), count=1)


@jit
def make_ring(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring that CONSUMERS read.  Fence before other warps use it."""
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, CONSUMERS)
    return Ring(full, empty, STAGES)
