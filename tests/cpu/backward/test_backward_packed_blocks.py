"""What the kernel that adds dq in memory is told of a packed batch (kernels.backward_packed_blocks), and its sums' last step."""

import random
from itertools import pairwise

import pytest
import torch

from cases import rand
from tilefold.kernels.backward.backward_packed_blocks import backward_packed_blocks
from tilefold.kernels.backward.backward_reduced import backward_reduced

pytestmark = pytest.mark.interpreter

KEYS, DIM_QK, DIM, HEADS, KV_HEADS = 128, 72, 40, 4, 2
SOME = (0, 0, 1, 63, 64, 65, 128, 129, 300, 513)


class Batch:
    """A packed batch with rows of no sequence around it, and what the launch made of it."""

    def __init__(self, seed, rows, alternate):
        pick = random.Random(seed)
        self.batch, before, behind = pick.choice((1, 2, 3, 9)), *pick.choice(((0, 0), (5, 130), (300, 7)))
        self.lengths = [[pick.choice(SOME) for _ in range(self.batch)] for _ in range(2)]
        self.cu = [[before + sum(some[:i]) for i in range(self.batch + 1)] for some in self.lengths]
        total_q, total_k = (cu[-1] + behind for cu in self.cu)
        self.rows, self.held = rows, 128 if rows == 64 else 64
        dim_qk = min(DIM_QK, self.held)
        self.q, self.out, self.dout = (rand(total_q, HEADS, d) for d in (dim_qk, DIM, DIM))
        self.k, self.v = rand(total_k, KV_HEADS, dim_qk), rand(total_k, KV_HEADS, DIM)
        self.lse, self.dlse = rand(HEADS, total_q), rand(HEADS, total_q)
        self.beyond = [torch.full((len(t) + 1, *t.shape[1:]), torch.nan) for t in (self.q, self.k, self.v)]
        self.grads = [t[:-1] for t in self.beyond]
        self.q_tiles, blocks = total_q // rows + self.batch, total_k // KEYS + self.batch
        self.statistics = torch.full((HEADS * self.q_tiles + 1, 2, rows), torch.nan)
        self.progress = torch.full((77,), 77, dtype=torch.int32)
        self.entries = torch.full((blocks, 8), -1, dtype=torch.int32)
        self.tails = torch.full((self.batch * 2 * (HEADS * rows + KV_HEADS * KEYS) * self.held,), torch.nan)
        offsets = (torch.tensor(cu, dtype=torch.int32) for cu in self.cu)
        strides = (s for t in (self.q, self.k, self.v, self.out, self.dout, *self.grads) for s in t.stride()[:2])
        chunk, ends = 16, sum(-(-total // rows) for total in (total_q, total_k))
        programs = HEADS * self.q_tiles + 1 - (-blocks // chunk) + 2 * self.batch * (HEADS + KV_HEADS) + ends
        backward_packed_blocks[(programs,)](
            self.q, self.k, self.v, self.out, self.dout, self.lse, self.dlse, *offsets, *self.grads, self.statistics,
            self.progress, self.entries, self.tails, self.batch, (self.batch - 1).bit_length(), max(self.lengths[0]),
            max(self.lengths[1]), total_q, total_k, HEADS, KV_HEADS, self.q_tiles, blocks, 77, *strides, WIDE=False,
            DIM_QK=dim_qk, DIM=DIM, HELD=self.held, ROWS=rows, KEYS=KEYS, CHUNK=chunk, ALTERNATE=alternate,
        )  # fmt: skip


@pytest.mark.parametrize(("seed", "alternate"), [(seed, seed % 2 == 0) for seed in range(10)])
def test_blocks(seed, alternate):
    """Every block of keys is there once and knows its sequence; those of a sequence ascend."""
    b = Batch(seed, 64, alternate)
    found = [[] for _ in range(b.batch)]
    for first_q, n_q, first_k, n_k, tile, place, i, _ in b.entries.tolist():
        assert i >= 0  # every entry was written
        if tile * KEYS < n_k:
            assert (first_q, n_q, first_k, n_k) == (b.cu[0][i], b.lengths[0][i], b.cu[1][i], b.lengths[1][i])
            assert place == b.cu[0][i] // 64 + i
            found[i].append(tile)
    assert found == [list(range(-(-n // KEYS))) for n in b.lengths[1]]
    assert (b.progress == 0).all()


def test_turns():
    """Of two sequences of eight blocks the later half of the first one's takes turns with the earlier half of the other's."""
    made, cu = {}, torch.tensor([0, 896, 2 * 896], dtype=torch.int32)  # seven blocks, and a place without keys
    for alternate in (False, True):
        entries = torch.full((16, 8), -1, dtype=torch.int32)
        x = torch.zeros(cu[-1], 1, 16)
        lse = torch.zeros(1, len(x))
        rows, blocks = len(x) // 64 + 2, len(x) // KEYS + 2
        scratch = (
            torch.zeros(rows + 1, 2, 64),
            torch.zeros(1, dtype=torch.int32),
            entries,
            torch.zeros(2 * 2 * 192 * 64),
        )
        programs = rows + 1 + 1 + 2 * 2 * 2 + 2 * -(-len(x) // 64)
        backward_packed_blocks[(programs,)](
            x, x, x, x, x, lse, None, cu, cu, *(torch.empty_like(x) for _ in range(3)), *scratch, 2, 1, 896, 896, len(x),
            len(x), 1, 1, rows, blocks, 1, *[16, 16] * 8, WIDE=False, DIM_QK=16, DIM=16, HELD=64, ROWS=64, KEYS=KEYS,
            CHUNK=16, ALTERNATE=alternate,
        )  # fmt: skip
        made[alternate] = [(i, tile) for *_, tile, _, i, _ in entries.tolist()]
    first, second = ([(i, tile) for tile in range(8)] for i in (0, 1))
    assert made[False] == [*first, *second]
    turns = [one for pair in zip(second[:4], first[4:], strict=True) for one in pair]
    assert made[True] == [*first[:4], *turns, *second[4:]]


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("seed", range(10, 15))
def test_statistics_tails_and_zeros(seed, rows):
    b = Batch(seed, rows, True)
    delta = (b.out * b.dout).sum(-1).T - b.dlse
    for i, n in enumerate(b.lengths[0]):
        for begin in range(0, n, rows):
            number = [h * b.q_tiles + b.cu[0][i] // rows + i + begin // rows for h in range(HEADS)]
            made, live = b.statistics[number], min(rows, n - begin)
            at = slice(b.cu[0][i] + begin, b.cu[0][i] + begin + live)
            torch.testing.assert_close(made[:, 0, :live], b.lse[:, at] * 1.4426950408889634)
            torch.testing.assert_close(made[:, 1, :live], delta[:, at])
            assert (made[:, 0, live:] == torch.inf).all()
            assert (made[:, 1, live:] == 0).all()
    assert (b.statistics[-1, 0] == torch.inf).all()
    sides = ((b.q, 0, rows), (b.dout, 0, rows), (b.k, 1, KEYS), (b.v, 1, KEYS))
    rest = b.tails
    for x, side, size in sides:
        heads = x.shape[1]
        tiles, rest = rest[: heads * b.batch * size * b.held], rest[heads * b.batch * size * b.held :]
        tiles = tiles.view(heads, b.batch, b.held // 64, size, 64)  # panels
        for i, n in enumerate(b.lengths[side]):
            if n % size:
                end, live = b.cu[side][i] + n, n % size
                made = tiles[:, i].transpose(1, 2).reshape(heads, size, b.held)
                assert torch.equal(made[:, :live, : x.shape[2]], x[end - live : end].transpose(0, 1))
                assert made.count_nonzero() == x[end - live : end].count_nonzero()
            else:
                assert tiles[:, i].isnan().all()
    for grad, cu in zip(b.grads, (b.cu[0], b.cu[1], b.cu[1]), strict=True):
        assert (grad[: cu[0]] == 0).all()
        assert (grad[cu[-1] :] == 0).all()
        assert grad[cu[0] : cu[-1]].isnan().all()
    assert all(t[-1].isnan().all() for t in b.beyond)


@pytest.mark.parametrize(("rows", "columns", "dim"), [(64, 96, 72), (64, 128, 128), (128, 64, 40)])
def test_sums_become_dq(rows, columns, dim):
    """Rows of sequences alone are written, each from its tile's sum."""
    lengths, before, behind = [70, 0, 129, 300], 5, 140
    cu = [before + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    total, batch = cu[-1] + behind, len(lengths)
    q_tiles = total // rows + batch
    tiles = rand(HEADS * q_tiles, rows, columns)
    sums = torch.stack([_in_registers(tile) for tile in tiles])
    dq = torch.full((total + 1, HEADS, dim), torch.nan)
    offsets = torch.tensor(cu, dtype=torch.int32)
    backward_reduced[(HEADS * q_tiles * 2,)](
        sums, dq, 0.5, 0, HEADS, q_tiles, offsets, batch, 2, max(lengths), None, *dq.stride()[:2], QUERIES=rows, D=columns,
        COLUMNS=dim,
    )  # fmt: skip
    for i, (begin, end) in enumerate(pairwise(cu)):
        for h in range(HEADS):
            first = h * q_tiles + begin // rows + i
            made = tiles[first : first + -(-(end - begin) // rows)].reshape(-1, columns)
            assert torch.equal(dq[begin:end, h], made[: end - begin, :dim] * 0.5)
    assert dq[: cu[0]].isnan().all()
    assert dq[cu[-1] :].isnan().all()


def _in_registers(tile):
    """A query tile's sum [rows, columns] in the order in which it lies in memory: two parts of up to [64, 64]."""
    parts = tile.split(64) if len(tile) == 128 else tile.split(64, 1)
    return torch.cat([p.reshape(4, 2, 8, p.shape[1] // 8, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten() for p in parts])
