"""The arithmetic of the dense kernel for sm_90, in its versions and with ALiBi: its own functions, in numpy."""

import types

import numpy as np
import pytest

from simulated.arrays import Array, Pointer, array, arrays, class_of, functions
from tilefold.kernels.hopper import backward_mods, parts, score_mods, softmax

NEG_INF = np.float32(-np.inf)
CONSTANTS = {name: np.float32(getattr(softmax, name).value) for name in ("P1", "P2", "P3", "ROUNDS", "GROWTH")}


def power_function():
    return functions(arrays(), (softmax, "power_of_two"), **CONSTANTS)[0]


def softmax_of(sinks=None, stride=None, pack=1, skip=False, **more):
    config = types.SimpleNamespace(PACK=pack, SCORES=None, PROBS=None, DTYPE=None, BITS=16, CHUNK=0)
    made = class_of(arrays(), softmax, "Softmax", **CONSTANTS, **more)
    return made(sinks, stride, config, 16, skip, False)


def test_powers_of_two_by_a_polynomial():
    power = power_function()
    x = array(np.concatenate([np.linspace(-126, 0, 400_001), -np.geomspace(1e-30, 1, 1001), np.arange(-126, 1)]))
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(np.asarray(power(x), np.float64) / exact - 1)) < 1.05e-4
    assert power(array([0.0]))[0] == 1.0


def test_what_is_masked_weighs_nothing_and_what_is_no_number_stays_none():
    power = power_function()
    assert (power(array([NEG_INF, -3e38, -1000.0, -127.0])) == 0).all()
    assert np.isnan(power(array([np.nan]))).all()
    below = power(array(np.linspace(-127, -126, 1001)))
    assert ((below >= 0) & (below < 1.3e-38)).all()


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_softcap(size):
    more = {"quick_reciprocal": lambda x: np.float32(1) / x, "LOG2E": np.float32(np.log2(np.e))}
    (softcap,) = functions(arrays(), (score_mods, "softcap"), **more)
    s = array(np.random.default_rng(0).standard_normal(10_000) * size)
    inner = np.float32(1 / 20)
    exact = np.tanh(s.astype(np.float64) * float(inner))
    assert np.max(np.abs(softcap(s, inner, 1) - exact)) < 4e-7
    assert np.isnan(softcap(array([np.nan]), inner, 1)).all()


def fold(tiles, skip):
    """Softmax.step over tiles of scores, with the products in fp64; -> out, lse in base 2."""
    version = softmax_of(skip=skip, exponentials=lambda x, share: np.exp2(x), quad_sums=lambda p: p.sum(1)[:, None])
    rows = tiles[0][0].shape[0]
    m, l = np.full(rows, -3e38).view(Array), np.zeros((rows, 1)).view(Array)
    acc, kept = np.zeros((rows, tiles[0][1].shape[1])), 0
    for s, v in tiles:
        p, m, l, alpha = version.step(s.view(Array), m, l, 1.0)
        kept += int((np.asarray(alpha) == 1).sum())
        assert np.max(p) <= 2.0**8
        acc = acc * np.asarray(alpha)[:, None] + np.asarray(p) @ v
    return acc / np.asarray(l), np.asarray(m) + np.log2(np.asarray(l)[:, 0]), kept


@pytest.mark.parametrize("size", [1.0, 10.0, 300.0])
def test_sums_may_be_relative_to_an_older_maximum(size):
    random = np.random.default_rng(1)
    tiles = [(random.standard_normal((64, 32)) * size, random.standard_normal((32, 8))) for _ in range(12)]
    tiles[3][0][:5] = -np.inf
    tiles[0][0][7:9] = -np.inf  # rows that have seen no key yet
    exact, lse, kept_always = fold(tiles, False)
    found, found_lse, kept = fold(tiles, True)
    assert np.allclose(found, exact, rtol=1e-12, atol=1e-12)
    assert np.allclose(found_lse, lse, rtol=1e-12, atol=1e-12)
    assert kept > kept_always  # and it is worth something


@pytest.mark.parametrize("pack", [1, 4])
def test_a_sink_is_a_key_seen_before_the_first(pack):
    more = {"quad_sums": lambda like: np.zeros((64, 4)).view(Array), "LOWEST": -3e38, "LOG2E": np.log2(np.e)}
    sinks = [0.5, -np.inf, 3.0, 1e-3, -7.0, np.nan, 2.0, 100.0]
    for head in range(len(sinks) // pack):
        m, l = softmax_of(Pointer(np.repeat(sinks, 3)), 3, pack, **more).begin(None, np.int64(head))
        mine = np.array([sinks[head * pack + r % pack] for r in range(64)])
        with np.errstate(divide="ignore"):
            lse = (np.asarray(m) + np.log2(np.asarray(l).sum(1))) / np.log2(np.e)
        assert np.allclose(lse, mine, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("pack", [1, 8])
def test_distances(kind, pack):
    _, subtract = functions(arrays(), (parts, "columns_of"), (score_mods, "subtract_distance"))
    mods = class_of(arrays(), score_mods, "ScoreMods")
    scale, row, begin, shift = np.float32(0.3), 448 * pack, 384, -37
    s = array(np.random.default_rng(0).standard_normal((64, 128)))
    slopes = np.array([[0.5, -0.1, 0.0, 2.0**-8] * 4, [1.0, 0.3, -2.0, 0.7] * 4], np.float32)
    for batch, head in ((0, 0), (1, 1)):
        work = types.SimpleNamespace(sequence=np.array(batch).view(Array), head=np.array(head).view(Array))
        band = types.SimpleNamespace(KIND=kind, PACK=pack)
        slope = mods(1.0, None, Pointer(slopes.ravel()), 16, 1, None, None, 0, band).slope(s, work)
        got = np.asarray(subtract(s, scale, slope, row, begin, shift, kind, pack))
        query = (np.arange(64)[:, None] + row) // pack
        distance = query + shift - begin - np.arange(128)[None]
        mine = slopes[batch, head * pack + np.arange(64) % pack][:, None].astype(np.float64)
        exact = s.astype(np.float64) * float(scale) - mine * np.abs(distance)
        seen = distance >= 0 if kind == 1 else np.ones_like(distance, bool)
        assert seen.any()
        assert np.max(np.abs(got - exact)[seen]) < 2e-5


def backward_changes(**given):
    """BackwardMods of 64 x 64 scores, whose functions are Python's; given: what is not None."""
    more = {"static_range": range, "static_assert": lambda *x: None, "int1": bool, "tensor": Pointer}
    hidden = arrays(**more)
    found = (parts, "columns_of"), *((score_mods, name) for name in ("subtract_distance", "softcap", "hide"))
    names = {"LOG2E": np.float32(np.log2(np.e)), "quick_reciprocal": lambda x: np.float32(1) / x}
    changes = ("score_mods", "score_grads", "mask", "mask_mods")
    fields = ["scale", "cap", "Slopes", "stride_b", "stride_h", *changes, "SOFTCAP", "KIND"]
    unused = {"mask": types.SimpleNamespace(ROWS=0), "SOFTCAP": 0, "KIND": 0}
    chosen = dict.fromkeys(fields) | dict.fromkeys(("score_mods", "score_grads", "mask_mods"), ()) | unused | given
    return class_of(hidden, backward_mods, "BackwardMods", *found, **names)(*(chosen[name] for name in fields))


def lengthened(score, batch, head, q_index, kv_index, args):
    """Of both indices, of the head and of an argument; NaN past the last query or key."""
    rate, seq_q, seq_k = args
    assert (q_index.shape, kv_index.shape) == ((1, 64), (64, 1))
    return score * score * rate * np.sqrt((seq_q - 1 - q_index) + 2 * (seq_k - 1 - kv_index)) + head


def lengthened_grad(score, batch, head, q_index, kv_index, args):
    rate, seq_q, seq_k = args
    return 2 * score * rate * np.sqrt((seq_q - 1 - q_index) + 2 * (seq_k - 1 - kv_index))


def near_keys(score, batch, head, q_index, kv_index, args):
    return kv_index <= q_index + args[0]


def farther(score, batch, head, q_index, kv_index, args):
    return score - args[0] * kv_index


CHANGES = {
    "softcap": {"cap": np.float32(2.0), "SOFTCAP": 1},
    "alibi": {"Slopes": Pointer(np.array([0.5, 0.25, -0.1, 2.0**-6], np.float32)), "stride_b": 2, "stride_h": 1},
    "score_mod": {"score_mods": ((lengthened, (0.3,)),), "score_grads": ((lengthened_grad, ()),)},
    "adds": {"score_mods": ((farther, (0.01,)),), "score_grads": ((),)},
    "mask_mod": {"mask_mods": ((near_keys, (60,)),)},
}


EACH = [*((name,) for name in CHANGES), ("softcap", "mask_mod"), ("alibi", "score_mod"), ("softcap", "adds")]
EACH += [tuple(name for name in CHANGES if name != "adds")]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("names", EACH, ids="-".join)
def test_changes_of_the_backward_pass(names, kind):
    """Scores and derivatives as device.mods has them, of the product in fp64; queries and keys past the end are the last ones."""
    given = {key: value for name in names for key, value in CHANGES[name].items()}
    scale, batch, head = np.float32(0.3), np.array(1).view(Array), np.array(1).view(Array)
    lengths = types.SimpleNamespace(seq_q=100, seq_k=180)
    query, key = 64, 128
    s = array(np.random.default_rng(0).standard_normal((64, 64)) * 5)
    mods = backward_changes(scale=scale, KIND=kind, **given)
    assert mods.ON and bool({"softcap", "score_mod"} & {*names}) == mods.STEEP
    got, steep = mods.apply(s, mods.slope(batch, head), batch, head, query, key, lengths, True, 0, 0)
    natural = np.asarray(got, np.float64) * float(mods.to_base_2()) / np.log2(np.e)
    q_index = np.arange(query, query + 64)[None]
    kv_index = np.arange(key, key + 64)[:, None]
    inside = (q_index < 100) & (kv_index < 180) & ((kv_index <= q_index + 80) | (kind == 0))  # the rest is cut
    assert inside.any() and not inside.all()
    place = 1, 1, np.minimum(q_index, 99), np.minimum(kv_index, 179)
    exact, slope = s.astype(np.float64) * float(scale), np.ones((64, 64))
    if "softcap" in names:
        exact = 2.0 * np.tanh(exact / 2.0)
        slope = 1 - (exact / 2.0) ** 2
    if "alibi" in names:
        exact = exact - float(CHANGES["alibi"]["Slopes"].values[3]) * np.abs(q_index + 80 - kv_index)
    if "score_mod" in names:
        slope = slope * lengthened_grad(exact, *place, (0.3, 100, 180))
        exact = lengthened(exact, *place, (0.3, 100, 180))
    if "adds" in names:
        exact = farther(exact, *place, (0.01,))
    if "mask_mod" in names:
        exact = np.where(near_keys(exact, *place, (60,)), exact, -np.inf)
        assert np.isinf(exact).any() and np.isfinite(exact).any()
    assert np.allclose(natural[inside], exact[inside], rtol=1e-5, atol=1e-5)
    assert np.allclose(np.broadcast_to(steep, (64, 64))[inside], slope[inside], rtol=1e-5, atol=1e-5)
    assert not np.isnan(natural).any() and not np.isnan(steep).any()
