"""dk and dv over the query heads of a KV head, where each has programs of its own in `attention_backward_reduce`.

They wait in memory in fp32 from one head's program to the next one's.  The heads of a group add in their order, so the sums have
the same bits every run, and the last one stores them in the tensors' dtype.  A program waits for one with a smaller number, which
was launched before it: nothing can lock up.
"""

from .backward_config import UNIT
from .backward_scheduler import _await as await_counter
from .backward_scheduler import _count as count
from .gluon import barriers, gl, jit, mbarrier
from .reduce_pipeline import ReduceConfig
from .structs import Buffer, Value, struct


@struct
class GroupSums:
    """place: dv, then dk, [2, B * KV heads, blocks, 2, 64, D] fp32, or None where a program has all heads of a group.  turns
    [B * KV heads, blocks, 2] int32, 0 at launch: how many programs of the group have added to 64 keys.  done: a barrier for each
    consumer."""

    turns: Value
    place: Value
    blocks: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    members: gl.tensor
    done: Buffer
    config: ReduceConfig

    @jit
    def number(self, block, CID: gl.constexpr):
        """That of a consumer's 64 keys."""
        return ((block.batch * (self.heads // self.group) + block.head) * self.blocks + block.number) * 2 + CID

    @jit
    def await_turn(self, block, CID: gl.constexpr):
        """Until the heads of the group before this one have added."""
        if self.place is not None:
            await_counter(self.turns + self.number(block, CID), block.part)

    @jit
    def add(self, WHICH: gl.constexpr, acc, block, CID: gl.constexpr, FIRST: gl.constexpr = 0):
        """-> acc and what the heads before have added; it goes to memory, but for the last head's.  WHICH: 0 dv, 1 dk.  FIRST: of
        its columns."""
        if self.place is not None:
            D: gl.constexpr = self.config.D
            LAYOUT: gl.constexpr = acc.type.layout
            o_r = gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT))
            o_d = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
            number = self.number(block, CID) + WHICH * (gl.num_programs(0) // (self.group // self.members) * 2)
            place = self.place + number.to(gl.int64) * (UNIT * D)
            place += gl.expand_dims(o_r * D + FIRST, 1) + gl.expand_dims(o_d, 0)
            if block.part > 0:
                acc += gl.load(place)
            if ~self.is_last(block):
                gl.store(place, acc)
        return acc

    @jit
    def is_last(self, block):
        """Whether dk and dv are complete."""
        if self.place is None:
            return True
        else:
            return block.part == self.group // self.members - 1

    @jit
    def arrive(self, CID: gl.constexpr):
        """A consumer's sums are in memory."""
        if self.place is not None:
            mbarrier.arrive(self.done.index(CID), count=1)

    @jit
    def publish(self, block):
        """Let the group's next head go on."""
        if self.place is not None:
            for c in gl.static_range(2):
                mbarrier.wait(self.done.index(c), 0)
                count(self.turns + self.number(block, c))


@jit
def make_group_sums(turns, place, blocks, heads, group, members, config):
    """With their barriers."""
    if place is None:
        return GroupSums(None, None, blocks, heads, group, members, None, config)
    else:
        return GroupSums(turns, place, blocks, heads, group, members, barriers(2, 1), config)
