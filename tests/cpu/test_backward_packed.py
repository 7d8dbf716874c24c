"""What the backward pass on sm_90 is told of a packed batch (kernels.backward_packed): every piece of work once, in an order in
which nothing waits for what comes later, statistics of every row, zeros where no sequence is."""

import collections
import random

import pytest
import torch

from tilefold.kernels import backward_packed as kernel
from tilefold.ops.attention_backward_packed import CHUNK, ENTRY
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan import attention_backward_packed as rules

pytestmark = pytest.mark.interpreter
DIM, UNIT = 16, 64
NAMES = ("what", "head", "tile", "first_q", "n_q", "first_k", "n_k", "place", "line", "block", "before", "wanted")


def offsets(lengths, before):
    return [sum(lengths[:i]) + before for i in range(len(lengths) + 1)]


class Batch:
    """A packed batch, what the launch is given, and what it made."""

    def __init__(self, lengths_q, lengths_k, kv_heads, group, lines=None, rows=UNIT, around=(0, 0), most=(None, None)):
        self.lengths_q, self.lengths_k, self.kv_heads, self.group, self.rows = lengths_q, lengths_k, kv_heads, group, rows
        batch, self.heads = len(lengths_q), kv_heads * group
        self.cu_q, self.cu_k = offsets(lengths_q, around[0]), offsets(lengths_k, around[0])
        self.total_q, self.total_k = self.cu_q[-1] + around[1], self.cu_k[-1] + around[1]
        self.max_q, self.max_k = most[0] or max(lengths_q), most[1] or max(lengths_k)
        problem = AttentionProblem(
            batch, self.max_q, self.max_k, self.heads, kv_heads, 64, 64, varlen=True, dtype="float16"
        )
        keys = 64 * lines if lines else rules.kept_at_once(problem, device_named("h200"))[1]
        order = rules.order_of(problem, device_named("h200"), keys, self.total_q, self.total_k)
        self.order = order._replace(queries=self.heads * (self.total_q // rows + batch), together=rows // UNIT)
        self.launch()

    def launch(self):
        o, total_q, total_k = self.order, self.total_q, self.total_k

        def rand(*shape):
            return torch.randn(*shape)

        self.out, self.dout = rand(total_q, self.heads, DIM), rand(total_q, self.heads, DIM)
        self.lse, self.dlse = rand(self.heads, total_q), rand(self.heads, total_q)
        self.lse[:, ::7] = -torch.inf
        shapes = (total_q, self.heads, DIM), *((total_k, self.kv_heads, DIM),) * 2
        self.grads = [torch.full(shape, torch.nan) for shape in shapes]
        self.statistics = torch.full((self.heads * o.q_places + 1, 2, UNIT), torch.nan)
        self.progress = torch.full((1 + 2 * o.blocks,), 77, dtype=torch.int32)
        self.entries = torch.full((o.keys + o.queries, ENTRY), 1 << 30, dtype=torch.int32)
        batch = len(self.lengths_q)
        offsets = (torch.tensor(cu, dtype=torch.int32) for cu in (self.cu_q, self.cu_k))
        programs = self.heads * o.q_places + 1 + -(-o.keys // CHUNK) + -(-o.queries // CHUNK)
        programs += -(-total_q // UNIT) - (-total_k // UNIT)
        strides = (s for t in (self.out, self.dout, *self.grads) for s in t.stride()[:2])
        kernel.backward_packed[(programs,)](
            self.out, self.dout, self.lse, self.dlse, *offsets, *self.grads, self.statistics, self.progress, self.entries,
            batch, (batch - 1).bit_length(), self.max_q, self.max_k, total_q, total_k, self.heads, self.kv_heads, o.keys, o.queries,
            o.longest, o.shift, o.lines, self.progress.numel(), *strides,
            WIDE=False, DIM=DIM, BLOCK_D=DIM, UNIT=UNIT, ROWS=self.rows, CHUNK=CHUNK,
        )  # fmt: skip
        self.work = [dict(zip(NAMES, entry, strict=True)) for entry in self.entries.tolist()]


def draw(seed):
    pick = random.Random(seed)
    batch = pick.choice((1, 2, 3, 7, 20))
    some = (0, 0, 1, 63, 64, 65, 128, 200, 700)
    lengths_q = [pick.choice(some) for _ in range(batch)]
    lengths_k = list(lengths_q) if pick.random() < 0.3 else [pick.choice(some) for _ in range(batch)]
    if max(lengths_q) == 0 or max(lengths_k) == 0:
        lengths_q[0] = lengths_k[-1] = 70
    kv_heads, group = pick.choice(((1, 1), (3, 1), (2, 3), (1, 4)))
    longest = -(-max(lengths_k) // 64) + 1
    lines = pick.choice((None, longest, longest + 1, longest + 5, 3 * longest))
    return lengths_q, lengths_k, kv_heads, group, lines, pick.choice((64, 128)), pick.choice(((0, 0), (5, 0), (200, 333)))


@pytest.mark.parametrize("seed", range(40))
def test_order(seed):
    """Every piece of work is there once and knows where its sequence is; whatever it waits for comes before it; a line has one
    owner at a time."""
    b = Batch(*draw(seed))
    o, per = b.order, b.rows // UNIT
    place_k = [cu // 64 + i for i, cu in enumerate(b.cu_k)]
    expected = set()
    for i, (n_q, n_k) in enumerate(zip(b.lengths_q, b.lengths_k, strict=True)):
        expected |= {(1, i, h, t) for h in range(b.kv_heads) for t in range(-(-n_k // 64))}
        expected |= {(0, i, h, t * per) for h in range(b.heads) for t in range(-(-n_q // b.rows))}
    assert all(piece["what"] in (-1, 0, 1) for piece in b.work)  # every entry was written
    done, owners, found = collections.Counter(), {}, set()
    for piece in b.work:
        if piece["what"] < 0:
            continue
        block = piece["block"]
        i, kv_head = divmod(block, b.kv_heads)
        keys = piece["what"] == 1
        found.add((piece["what"], i, piece["head"], piece["tile"]))
        assert kv_head == (piece["head"] if keys else piece["head"] // b.group)
        assert [piece[n] for n in NAMES[3:7]] == [b.cu_q[i], b.lengths_q[i], b.cu_k[i], b.lengths_k[i]]
        assert piece["place"] == b.cu_q[i] // 64 + i
        number = place_k[i] * b.kv_heads + kv_head * (place_k[i + 1] - place_k[i])
        readers = b.group * -(-b.lengths_q[i] // b.rows)
        if keys:
            number += piece["tile"]
            assert piece["line"] == number % o.lines
            if piece["wanted"]:
                assert done[0, piece["before"]] >= piece["wanted"]
            if (before := owners.get(piece["line"])) is not None:  # its readers are waited for
                assert before[0] == block or (piece["before"], piece["wanted"]) == before
                assert before[0] != block or done[0, block] >= before[1]
            owners[piece["line"]] = block, readers
        else:
            assert piece["line"] == number % o.lines
            assert piece["wanted"] == -(-b.lengths_k[i] // 64)
            assert done[1, block] >= piece["wanted"]
            for t in range(-(-b.lengths_k[i] // 64)):
                assert owners[(number + t) % o.lines][0] == block
        done[piece["what"], block] += 1
    assert found == expected
    assert sum(done.values()) == len(expected)
    assert (b.progress == 0).all()


@pytest.mark.parametrize("seed", range(40, 60))
def test_statistics_and_zeros(seed):
    b = Batch(*draw(seed))
    delta = (b.out * b.dout).sum(-1).T - b.dlse  # [heads, total_q]
    dead = b.lse == -torch.inf
    delta[dead] = 0.0
    lse = torch.where(dead, torch.inf, b.lse * 1.4426950408889634)
    for i, n in enumerate(b.lengths_q):
        for t in range(-(-n // 64)):
            rows = slice(b.cu_q[i] + t * 64, min(b.cu_q[i] + t * 64 + 64, b.cu_q[i + 1]))
            made = b.statistics[[h * b.order.q_places + b.cu_q[i] // 64 + i + t for h in range(b.heads)]]
            live = rows.stop - rows.start
            torch.testing.assert_close(made[:, 0, :live], lse[:, rows])
            torch.testing.assert_close(made[:, 1, :live], delta[:, rows])
            assert (made[:, 0, live:] == torch.inf).all()
            assert (made[:, 1, live:] == 0).all()
    assert (b.statistics[-1, 0] == torch.inf).all()
    assert (b.statistics[-1, 1] == 0).all()
    for grad, cu in zip(b.grads, (b.cu_q, b.cu_k, b.cu_k), strict=True):
        assert (grad[: cu[0]] == 0).all()
        assert (grad[cu[-1] :] == 0).all()
        assert grad[cu[0] : cu[-1]].isnan().all()


def test_lengths_beyond_what_was_said():
    """A sequence longer than max_seqlen gives wrong numbers, as elsewhere, but nobody waits for ever."""
    b = Batch([700, 300, 64], [900, 100, 500], 2, 2, lines=6, most=(128, 200))
    done = collections.Counter()
    for piece in b.work:
        assert piece["what"] in (-1, 0, 1)
        if piece["what"] >= 0:
            assert done[1 - piece["what"], piece["before"]] >= piece["wanted"]
            assert piece["n_q"] <= 128
            assert piece["n_k"] <= 200
            done[piece["what"], piece["block"]] += 1
