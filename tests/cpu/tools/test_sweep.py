"""The sweep: a small part of it, and that it finds what it is there to find, makes it smaller and can show it again."""

import json
import random
from dataclasses import replace

import pytest
import torch

import tilefold
from cases import same
from sweep.axes import covered_by, draw_options, fill, never, packed_options, pairs_of, valid_pairs
from sweep.cli import main, prepare
from sweep.context import Context
from sweep.families import FAMILIES, chosen
from sweep.problem import Problem, failure_of, run_problem, shrink, specialisations
from tilefold.ops.launch import Launch

FEW = {"dense": 3, "sparse": 2, "kvcache": 2, "prefix": 2}


@pytest.fixture(scope="module")
def setting():
    return prepare()


@pytest.mark.parametrize("op", list(FAMILIES))
def test_a_few_problems_of(op: str, setting) -> None:
    drawn = specialisations(chosen(op, light=True), seed=1)
    for _ in range(FEW.get(op, 3)):
        family, options, dims, rng = next(drawn)
        problem = Problem(op, options, dims, family.sizes(rng, options, dims, 24), rng.randrange(1 << 30))
        assert failure_of(family, problem, setting) is None, json.dumps(problem.plain())


FOUND = (  # by the sweep, and fixed
    # the interpreter's check of factors looked up what stands behind a sequence's last page
    """{"op": "prefix", "o": {"dtype": "fp16", "store": "e4m3", "place": "pages", "page": "1", "packed": true, "causal": true,
    "scale": true, "softcap": false, "sinks": "fp32", "scales": "page", "splits": 1, "lse": false, "dim_v": "64", "group": 4,
    "form": "gap", "dim": "16", "queries": "one", "cascade": true}, "dims": {"d": 16, "dv": 64, "page": 1}, "sizes": {"q": [1, 1],
    "k": [1, 2], "room": 1, "kv": 1, "pad": 0, "window": null, "scale": 0.2, "prefix": 1, "spare": 0}, "seed": 343466025}""",
)


@pytest.mark.parametrize("line", FOUND)
def test_what_was_found_before(line: str, setting) -> None:
    problem = Problem(**json.loads(line))
    assert failure_of(FAMILIES[problem.op], problem, setting) is None


# ---------------------------------------------------------------- faults that were planted

PLAIN = {axis: values[0] for axis, values in FAMILIES["dense"].axes.items()}
SIZES = {"batch": 1, "q": [37], "k": [45], "kv": 2, "spare": 0, "window": None, "scale": None}
DENSE = Problem("dense", {**PLAIN, "lse": True, "grad": "out"}, {"d": 16, "dv": 24}, SIZES, 7)


def one_wrong(name_of: str):
    """One element of a result holds what stands beside it."""

    def plant(name: str, got: torch.Tensor) -> torch.Tensor:
        if name_of in name and got.numel() > 8:
            got = got.clone()
            got.view(-1)[7] = got.view(-1)[6]
        return got

    return plant


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", ["out", "lse", "gradient of q", "gradient of k", "gradient of v"])
def test_one_wrong_element_is_found(name: str, dtype: str, setting) -> None:
    problem = replace(DENSE, o={**DENSE.o, "dtype": dtype, "grad": "out" if "gradient" in name else "none"})
    failure = failure_of(FAMILIES["dense"], problem, setting, one_wrong(name))
    assert failure is not None
    assert failure.startswith(f"wrong: {name}")
    assert " 1 of " in failure


@pytest.mark.parametrize("op", ["dense", "append", "rotary", "sparse", "matmul", "lowbit", "w8a8", "merge", "fuse"])
def test_limits_are_tight(op: str, setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of elements that hold another one's value, a thousandth of the largest away or more, hardly any is taken for right."""
    compare, seen, total = Context.compare, 0, 0

    def counted(self, name, got, exact, limit) -> None:
        nonlocal seen, total
        compare(self, name, got, exact, limit)
        bound = (
            (limit if isinstance(limit, torch.Tensor) else torch.full_like(exact, limit)).expand(exact.shape).flatten()
        )
        x, other = exact.flatten(), got.detach().double().flatten().roll(1)
        usable = x.isfinite() & other.isfinite()
        if usable.sum() > 16:
            off = (other - x).abs()
            far = usable & (off > 1e-3 * x[usable].abs().max())
            seen, total = seen + int((far & (off > bound)).sum()), total + int(far.sum())

    monkeypatch.setattr(Context, "compare", counted)
    drawn = specialisations(chosen(op, light=True), seed=2)
    while total < 300:
        family, options, dims, rng = next(drawn)
        problem = Problem(op, options, dims, family.sizes(rng, options, dims, 24), rng.randrange(1 << 30))
        run_problem(family, problem, setting)
    assert seen > 0.9 * total, (seen, total)


def dropped_key(real, *tensors, **given):
    """One key of 45 is not seen by anyone."""
    mask = torch.ones(1, 1, 1, 45, dtype=torch.bool, device=tensors[0].device)
    mask[..., 11] = False
    return real(*tensors, **given, mask=mask)


def shifted_mask(real, *tensors, **given):
    """Queries see one key more than causal ones."""
    return real(*tensors, **{**given, "causal": False, "window": (-1, 1)})


def rounded_scores(real, *tensors, **given):
    """Keys lose two bits."""
    q, k, v = tensors
    return real(q, (k.detach().view(torch.int16) & -4).view(k.dtype), v, **given)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("fault", [dropped_key, shifted_mask, rounded_scores])
def test_a_fault_of_the_kernel_is_found(fault, dtype: str, setting, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(DENSE, o={**DENSE.o, "dtype": dtype, "causal": fault is shifted_mask, "grad": "none"})
    assert failure_of(FAMILIES["dense"], problem, setting) is None
    real = tilefold.attention
    monkeypatch.setattr(tilefold, "attention", lambda *tensors, **given: fault(real, *tensors, **given))
    failure = failure_of(FAMILIES["dense"], problem, setting)
    assert failure is not None
    assert failure.startswith("wrong: out")


def test_a_write_beside_a_tensor_is_found(setting, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["append"]
    o = {**{axis: values[0] for axis, values in family.axes.items()}, "rotary": "off"}
    problem = Problem("append", o, {"d": 8, "dv": 8, "page": 16, "pairs": 0},
                      {"q": [3], "k": [4], "kv": 1, "group": 1, "short": 0, "table": 0, "spare": 0}, 3)  # fmt: skip
    assert failure_of(family, problem, setting) is None
    real = tilefold.kvcache_append

    def beside(k, v, k_cache, v_cache, **given):
        real(k, v, k_cache, v_cache, **given)
        k_cache.as_strided((1,), (1,), k_cache.storage_offset() - 2).fill_(1.0)

    monkeypatch.setattr(tilefold, "kvcache_append", beside)
    assert "was written" in (failure_of(family, problem, setting) or "")

    def row_before(k, v, k_cache, v_cache, **given):
        real(k, v, k_cache, v_cache, **{**given, "cache_seqlens": given["cache_seqlens"] - 1})

    monkeypatch.setattr(tilefold, "kvcache_append", row_before)
    assert "in the cache" in (failure_of(family, problem, setting) or "")


# ---------------------------------------------------------------- smaller, and again


def test_a_failure_is_made_smaller_and_shown_again(setting, capsys, tmp_path, monkeypatch) -> None:
    """The fault shows where there are more than 5 keys and a softcap."""

    def plant(name: str, got: torch.Tensor) -> torch.Tensor:
        return got + 1 if keys > 5 and capped else got

    family = FAMILIES["dense"]
    problem = replace(
        DENSE, o={**DENSE.o, "grad": "none", "softcap": True, "alibi": "heads", "sinks": "same", "causal": True}
    )
    keys, capped = 0, False

    def run(ctx, o, dims, s):
        nonlocal keys, capped
        keys, capped = s["k"][0], o["softcap"]
        family.run(ctx, o, dims, s)

    watched = replace(family, run=run, memo={})
    small = shrink(watched, problem, setting, 20.0, plant)
    assert small.sizes["k"] == [6]
    assert small.sizes["q"] == [1]
    assert {axis for axis, value in small.o.items() if value != family.axes[axis][0]} <= {"softcap", "lse"}
    line = json.dumps(small.plain())
    for way in ("__call__", "flat"):  # launches are counted from here on, until the test ends
        monkeypatch.setattr(Launch, way, getattr(Launch, way))
    assert main(["--reproduce", line]) == 0
    assert "right" in capsys.readouterr().out
    path = tmp_path / "problem.json"
    path.write_text(line)
    assert main(["--reproduce", str(path)]) == 0


def test_a_problem_is_the_same_whenever_it_runs(setting) -> None:
    seen: list[torch.Tensor] = []
    for _ in range(2):
        run_problem(FAMILIES["dense"], DENSE, setting, lambda name, got: seen.append(got) or got)
    half = len(seen) // 2
    assert half
    assert same(seen[:half], seen[half:])


# ---------------------------------------------------------------- pairs


def test_pairs_are_those_that_some_problem_can_hold() -> None:
    family = replace(FAMILIES["dense"], axes={"a": (1, 2), "b": (1, 2), "c": (1, 2)}, memo={},
                     clashes=(never("a", {2}, "b", {2}), never("c", {2}, "a", {1})))  # fmt: skip
    pairs = valid_pairs(family)
    assert ("a=2", "b=2") not in pairs
    assert ("a=1", "c=2") not in pairs
    assert ("b=2", "c=2") not in pairs  # c = 2 needs a = 2, which refuses b = 2
    assert len(pairs) == 12 - 3
    assert pairs_of({"a": 1, "b": 2, "c": 1}) == {("a=1", "b=2"), ("a=1", "c=1"), ("b=2", "c=1")}


def test_a_run_goes_on_where_the_record_ends(tmp_path) -> None:
    """Two runs of the same seed, the second after the first's row: together they cover more, and say so."""
    record, drawn = tmp_path / "runs.jsonl", []
    for _ in range(2):
        kinds = specialisations(chosen("add,merge"), 3, done=covered_by(record))
        drawn.append([(family.name, options) for family, options, _, _ in (next(kinds) for _ in range(5))])
        with record.open("a") as lines:
            lines.write(json.dumps({"drawn": packed_options(drawn[-1])}) + "\n")
    first, second = (set().union(*(pairs_of(o) for _, o in run)) for run in drawn)
    assert set().union(*covered_by(record).values()) == first | second
    assert len(second - first) > len(second & first)  # most of what comes second is new
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("op", list(FAMILIES))
def test_every_pair_of_options_is_drawn(op: str) -> None:
    """Each specialisation is of options that go together, and few of them cover every pair."""
    family, rng = FAMILIES[op], random.Random(0)
    left, count = dict(valid_pairs(family)), 0
    while left:
        options = draw_options(family, rng, left)
        assert family.fits(options)
        assert fill(family, rng, options) == options
        for pair in pairs_of(options):
            left.pop(pair, None)
        count += 1
    most = max(len(x) for x in family.axes.values())
    assert count < 3 * most**2
