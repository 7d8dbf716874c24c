"""The barrier protocol of the dense Gluon kernel on CPU threads; what `test_hopper_protocol` says of the sparse one holds."""

import random

import pytest

import gluon_threads
from gluon_threads import Barrier, Turn

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from forward_threads import CAUSAL, FULL, WINDOW, Run


@pytest.mark.parametrize("kind", [FULL, CAUSAL, WINDOW])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("programs", [1, 3])
def test_protocol(kind, slots, programs):
    for seq_q, seq_k, heads, group in ((400, 700, 2, 1), (300, 100, 4, 2)):
        Run(3, kind, [(seq_q, seq_k)], heads, group, slots)(programs)


@pytest.mark.parametrize(
    "version",
    [
        {"consumers": 3, "turns": True},
        {"consumers": 2, "turns": True, "late": True},
        {"consumers": 1},
        {"dims": (192, 192), "keys": 64},
        {"dims": (192, 128), "late": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("programs", [1, 2])
def test_versions(version, programs):
    Run(4, CAUSAL, [(400, 700)], 2, 1, 2, **version)(programs)
    Run(5, WINDOW, [(300, 100)], 4, 2, 3, **version)(programs)


@pytest.mark.parametrize("version", [{}, {"consumers": 3, "turns": True}, {"consumers": 1, "late": True}], ids=str)
def test_what_was_outgrown_is_made_again(version):
    """Once, whichever block of a program it is: the first, the last, or one on its way while another is told of."""
    made = []
    for seed in range(8):
        for lengths in ([(300, 700)], [(128, 256)], [(100, 300), (0, 50), (257, 257)], [(0, 5), (0, 7)]):
            run = Run(seed, CAUSAL, lengths, 4, 2, 2, lazy=True, **version)
            run(1 + seed % 3)
            made.append(len(run.outgrown))
    assert sum(made) > 20
    assert 0 in made


def test_packed_heads():
    Run(8, CAUSAL, [(21, 700)], 2, 1, 2, pack=8)(2)
    Run(9, WINDOW, [(100, 300)], 3, 3, 2, pack=4, consumers=3)(1)


@pytest.mark.parametrize("version", [{}, {"consumers": 3, "turns": True}, {"dims": (192, 192), "keys": 64}], ids=str)
@pytest.mark.parametrize("programs", [1, 3])
def test_packed(version, programs):
    Run(6, CAUSAL, [(100, 300), (0, 50), (257, 257), (1, 400), (64, 0)], 2, 1, 2, **version)(programs)
    Run(7, FULL, [(0, 0), (0, 7), (30, 129)], 2, 2, 2, **version)(programs)


@pytest.mark.parametrize("barrier", ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "turn"])
def test_a_missing_wait_is_found(monkeypatch, barrier):
    """The check itself: who does not wait for one kind of barrier is caught."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 5.0)
    waits = Barrier.wait
    monkeypatch.setattr(Barrier, "wait", lambda self, parity: None if barrier in self.name else waits(self, parity))
    if barrier == "turn":
        monkeypatch.setattr(Turn, "sync", lambda self: None)

    def several() -> None:
        pick = random.Random(5)
        for seed in range(100):  # threads race as they like: the first fault ends it
            lengths = [(pick.choice((300, 700)), pick.choice((150, 900)))]
            Run(seed, CAUSAL, lengths, 4, 1, 2, turns=barrier == "turn")(1)

    with pytest.raises(AssertionError):
        several()
