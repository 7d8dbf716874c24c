"""What the backward pass on sm_90 is told of a packed batch (kernels.backward_packed): every piece of work once, in an order in
which nothing waits for what comes later, statistics of every row, zeros where no sequence is."""

import collections

import pytest
import torch

from packed_batch import NAMES, Batch, draw

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("seed", range(12))
def test_order(seed):
    """Every piece of work is there once and knows where its sequence is; whatever it waits for comes before it; a line has one
    owner at a time."""
    b = Batch(*draw(seed))
    o, per = b.order, b.rows // 64
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
            assert piece["line"] == number % o.slots
            if piece["wanted"]:
                assert done[0, piece["before"]] >= piece["wanted"]
            if (before := owners.get(piece["line"])) is not None:  # its readers are waited for
                assert before[0] == block or (piece["before"], piece["wanted"]) == before
                assert before[0] != block or done[0, block] >= before[1]
            if readers:  # keys without queries keep nothing there, and nobody waits for them
                owners[piece["line"]] = block, readers
        else:
            assert piece["line"] == number % o.slots
            assert piece["wanted"] == -(-b.lengths_k[i] // 64)
            assert done[1, block] >= piece["wanted"]
            for t in range(-(-b.lengths_k[i] // 64)):
                assert owners[(number + t) % o.slots][0] == block
        done[piece["what"], block] += 1
    assert found == expected
    assert sum(done.values()) == len(expected)
    assert (b.progress == 0).all()


@pytest.mark.parametrize("seed", range(16, 20))
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
        assert (
            grad[cu[0] : cu[-1]].isnan().all()
        )  # head dims of 24 and 16, tiles of 32 columns: nothing beside the zeros
    assert all(t[-1].isnan().all() for t in b.beyond)


def test_lengths_beyond_what_was_said():
    """A sequence longer than max_seqlen gives wrong numbers, as elsewhere, but nobody waits for ever."""
    b = Batch([700, 300, 64], [900, 100, 500], 2, 2, slots=6, most=(128, 200))
    done = collections.Counter()
    for piece in b.work:
        assert piece["what"] in (-1, 0, 1)
        if piece["what"] >= 0:
            assert done[1 - piece["what"], piece["before"]] >= piece["wanted"]
            assert piece["n_q"] <= 128
            assert piece["n_k"] <= 200
            done[piece["what"], piece["block"]] += 1
