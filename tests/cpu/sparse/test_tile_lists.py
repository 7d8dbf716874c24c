"""Lists of the KV tiles that a mask_mod shows (ops.sparse.classify.TileLists), against the dense mask."""

import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tilefold
from cases import DEEP, rand
from tilefold import masks
from tilefold.cpu import rules
from tilefold.device import mods
from tilefold.ops.backward import attention_backward_reduce
from tilefold.ops.call import Call
from tilefold.ops.dense import attention_hopper
from tilefold.ops.dense.attention_parts import problem_of
from tilefold.ops.masking import Terms, spelled
from tilefold.ops.reads import Reads, reads
from tilefold.ops.sparse import classify
from tilefold.ops.sparse.classify import QueryLists, TileLists
from tilefold.plan import device_named, plan_attention
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.types import Rule, Rules

TILE = 32, 16
LENGTHS = 150, 230


@triton.jit
def same(score, batch, head, q_index, kv_index, args):
    numbers, seq_q, seq_k = args
    return load(numbers, q_index + (seq_k - seq_q)) == load(numbers, kv_index)


@triton.jit
def load(numbers, index):
    return tl.load(numbers + index)


@triton.jit
def of_head(score, batch, head, q_index, kv_index, args):
    return kv_index >= 40 * head


@triton.jit
def of_sequence(score, batch, head, q_index, kv_index, args):
    return kv_index < 64 * batch


@triton.jit
def of_all(score, batch, head, q_index, kv_index, args):
    return (kv_index < 20) | (q_index < 10) | (tl.abs(2 * q_index - kv_index) < 10)


@triton.jit
def of_score(score, batch, head, q_index, kv_index, args):
    return score > 0


def numbers_of(length=LENGTHS[1], documents=5):
    return (torch.arange(length) * documents // length).int()


def want_of(seen, band):
    """Entries of each query tile by [B, H, Sq, Sk]; band: [Sq, Sk], what the window lets it see."""
    found = []
    for rows, cut in zip(seen.split(TILE[0], 2), band.split(TILE[0], 0), strict=True):
        pairs = list(zip(rows.split(TILE[1], 3), cut.split(TILE[1], 1), strict=True))
        found.append(pairs)
    batch, heads = seen.shape[:2]
    made = {}
    for b in range(batch):
        for h in range(heads):
            for i, pairs in enumerate(found):
                entries = [
                    2 * n + bool(tile[b, h].all())
                    for n, (tile, cut) in enumerate(pairs)
                    if bool(tile[b, h].any()) and bool(cut.any())
                ]
                made[b, h, i] = entries or [0]
    return made


def entries_of(lists):
    return [row[1 : 1 + row[0]] for row in lists.flatten(0, 2).tolist()]


WINDOWS = [(-1, -1), (-1, 0), (40, 3), (5, -1)]


def in_turn(values):
    """(value, window): two windows with each value, two values with each window; all by HYPOTHESIS_PROFILE=deep."""
    return [(one, w) for i, one in enumerate(values) for j, w in enumerate(WINDOWS) if DEEP or (j - i) % 4 < 2]


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "window"), in_turn(["same", "of_head", "of_sequence", "rules"]), ids=str)
def test_entries_are_those_of_the_dense_mask(name, window):
    batch, heads, (seq_q, seq_k) = 2, 3, LENGTHS
    mod, args = {
        "same": (same, (numbers_of(),)),
        "of_head": (of_head, ()),
        "of_sequence": (of_sequence, ()),
        "rules": (None, ()),
    }[name]
    i, j = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    seen = {
        "same": (numbers_of()[i] == numbers_of()[j])[None, None],
        "of_head": j >= 40 * h,
        "of_sequence": j < 64 * b,
        "rules": ((j < 50) | (j <= i))[None, None],
    }[name]
    if mod is None:
        mod, args = Rules(("all", Rule("prefix", 1))), (50,)
    call = Call(mask_mod=mod, mask_args=args)
    made = TileLists(call, (batch, heads, seq_q, seq_k), TILE, window, torch.device("cpu"), False)
    got = made.of(call)
    left, right = window
    band = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    shape = 2 if name == "of_sequence" else 1, 3 if name == "of_head" else 1
    assert got.shape == (*shape, -(-seq_q // TILE[0]), 1 + -(-seq_k // TILE[1]))
    steps = [n * (size > 1) for n, size in zip(got.stride()[:2], shape, strict=True)]
    assert made.strides == (*steps, got.stride(2))
    want = want_of(seen.expand(*shape, seq_q, seq_k), band)
    for (at_b, at_h, at_q), entries in want.items():
        row = got[at_b, at_h, at_q].tolist()
        assert row[0] == len(entries)
        assert row[1 : 1 + row[0]] == entries


@pytest.mark.interpreter
def test_lists_are_kept_until_an_argument_changes(monkeypatch):
    made = TileLists(Call(mask_mod=same), (1, 1, *LENGTHS), TILE, (-1, -1), torch.device("cpu"), False)
    count = []
    make = made._make
    monkeypatch.setattr(TileLists, "_make", lambda self, call: count.append(1) or make(call))
    numbers = numbers_of()

    def ask(t=numbers, lists=made):
        return lists.of(Call(mask_mod=same, mask_args=(t,)))

    first = ask()
    assert ask() is first and len(count) == 1
    numbers[100:] = 9
    changed = ask()
    assert len(count) == 2 and entries_of(changed) != entries_of(first)
    assert ask(numbers.clone()) is not changed and len(count) == 3
    numbers.data = numbers_of()  # other memory, the same version
    assert entries_of(ask()) == entries_of(first) and len(count) == 4
    gc.collect()
    fresh = [numbers_of(documents=n) for n in range(1, 9)]
    for t in fresh:
        assert entries_of(ask(t)) == entries_of(make(Call(mask_mod=same, mask_args=(t,))))
    assert len(made._kept) <= classify.KEPT
    with torch.inference_mode():
        unversioned = numbers_of()
    before = len(count)
    assert entries_of(ask(unversioned)) == entries_of(ask(unversioned)) and len(count) == before + 2
    anew = TileLists(Call(mask_mod=same), (1, 1, *LENGTHS), TILE, (-1, -1), torch.device("cpu"), True)
    assert ask(lists=anew) is not ask(lists=anew)


@pytest.mark.interpreter
def test_values_of_masks_share_lists():
    """Each call with a value finds the lists of the one before, until a tensor changes."""

    def int32(*values):
        return torch.tensor(values, dtype=torch.int32)

    q, k = (torch.empty(2, n, 3, 16) for n in LENGTHS)
    of_each, cu = int32(90, 200), int32(0, 40, 41, 160, LENGTHS[1])
    rows = rand(2, 1, LENGTHS[0], LENGTHS[1]) > 0
    kinds = torch.randint(0, 3, (2, 1, 5, 8)).to(torch.uint8)
    for mask, changed in (
        (masks.documents(cu), cu),
        (masks.documents(cu) | masks.window(5, 0), cu),
        (masks.keys(of_each), of_each),
        (masks.prefix(of_each) & masks.keys(of_each), of_each),
        (masks.tensor(rows) | masks.causal(), rows),
        (masks.rule(same, (numbers_of(),)), None),
        (masks.blocks(kinds, (32, 32), masks.documents(cu)), kinds),
        (~masks.window(9, 9), None),
    ):

        def call(mask=mask):
            made = spelled(q, k, Terms(mask=mask), None)._asdict()
            return Call(**{name: value for name, value in made.items() if name in Call._fields})

        lists = TileLists(call(), (2, 3, *LENGTHS), TILE, (-1, -1), torch.device("cpu"), False)
        first = lists.of(call())
        assert lists.of(call()) is first, mask
        if changed is not None:
            changed.copy_(changed.flip(0).sort().values if changed.dim() == 1 else changed.roll(1, 2))
            assert lists.of(call()) is not first, mask


@pytest.mark.interpreter
@pytest.mark.parametrize(("shape", "window"), in_turn([(1, 1), (2, 1), (2, 3), (1, 3)]), ids=str)
def test_lists_of_a_mask_tensor(shape, window):
    """Alone and beside a mask_mod; one for what the tensor does not tell apart."""
    seq_q, seq_k = LENGTHS
    i, j = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    reach = torch.randint(20, 200, (*shape, 1, 1))
    mask = (i - j).abs() < reach
    left, right = window
    band = ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
    numbers = numbers_of()
    for mod, args, seen in ((None, (), mask), (same, (numbers,), mask & (numbers[i] == numbers[j]))):
        call = Call(mask=mask, mask_mod=mod, mask_args=args)
        lists = TileLists(call, (2, 12, *LENGTHS), TILE, window, torch.device("cpu"), False)
        assert lists.masked and lists.shape[:2] == (shape[0], 12 if shape[1] > 1 else 1)
        if shape[1] == 1:
            got = lists.of(call)
            for (b, h, at), entries in want_of(seen, band).items():
                assert entries_of(got[b : b + 1, h : h + 1, at : at + 1]) == [entries]


@pytest.mark.interpreter
def test_lists_of_a_mask_tensor_are_kept_until_it_changes():
    """Also for another view of it, as each layer of a model cuts one."""
    mask = torch.ones(1, 1, *LENGTHS, dtype=torch.bool)
    call = Call(mask=mask)
    lists = TileLists(call, (1, 4, *LENGTHS), TILE, (-1, -1), torch.device("cpu"), False)
    first = lists.of(call)
    assert lists.of(Call(mask=mask[:, :, :, : LENGTHS[1]])) is first
    assert entries_of(first)[0] == [2 * n + 1 for n in range(first.shape[3] - 1)]
    mask[..., 100:] = False
    assert entries_of(lists.of(call))[0] == [1, 3, 5, 7, 9, 11, 12]
    assert lists.of(Call(mask=mask.clone())) is not lists.of(call)


def test_which_masks_are_listed():
    """Those that heads share; and those that no box reads, which kernels ask as a mask_mod."""
    q, k, v = (torch.empty(1, 2048, 8, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    device = device_named("h200")
    sizes = {"batch": 1, "seq_q": 2048, "seq_k": 2048, "heads": 8, "kv_heads": 8, "dim_qk": 64, "dim_v": 64}
    for shape, listed in (((1, 1, 2048), True), ((1, 8, 2048), False), ((1, 1, 1), True)):
        mask = torch.empty(*shape, 2048, dtype=torch.bool, device="meta")
        for mod in (None, of_score, of_head):
            made = problem_of(q, k, v, Call(mask=mask, mask_mod=mod), sizes, (-1, -1))
            assert made.mask_by_place is (listed if mod is None else mod is of_head)
        made = problem_of(q, k, v, Call(mask=mask), sizes, (-1, -1))
        plan = plan_attention(replace(made, heads=64, kv_heads=64), device)
        assert (plan.kernel, "lists" in plan.options) == ("attention_forward_hopper", listed)
        assert plan_attention_backward(made, device).options.lists is listed
    odd = torch.empty(1, 8, 2048, 2051, dtype=torch.bool, device="meta")[..., 3:]
    made = problem_of(q, k, v, Call(mask=odd, mask_mod=of_head), sizes, (-1, -1))
    assert not made.mask_descriptors and plan_attention_backward(made, device).options.lists
    assert QueryLists(8, Call(mask=odd, mask_mod=of_head), (1, 8, 2048, 2048), TILE, (-1, -1), odd.device, False).masked


def test_what_a_mod_reads():
    assert reads(same) == Reads(False, False, False)
    assert reads(of_head) == Reads(False, False, True)
    assert reads(of_sequence) == Reads(False, True, False)
    assert reads(of_score).score
    both = Rules(("any", Rule(of_head, 0), Rule("keys", 1)))
    assert reads(both) == Reads(False, True, True)


RULES = sorted(set(rules.__all__) - {"every", "either", "inverse"})  # those that have no rules inside


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_reads_is_what_its_results_differ_by(name):
    """Every rule of the library: which of batch and head move what it says, asked of the rule in torch itself."""
    batch, heads, seq_q, seq_k = sizes = 2, 3, 4, 6
    table = torch.arange(batch * heads * seq_q * seq_k).view(sizes) % 7 % 3  # another one for each batch entry and head
    tables = (table, *table.stride())
    args = {
        "causal": (),
        "window": (2, 1),
        "prefix": (3,),
        "prefix_each": (torch.tensor([3, 6]),),
        "keys": (torch.tensor([2, 5]),),
        "between": (torch.zeros(seq_k, dtype=torch.int32), torch.arange(seq_k) + 1),
        "keep": tables,
        **dict.fromkeys(("listed", "listed_tiles", "whole", "whole_tiles"), (*tables, 1, 1)),
    }[name]
    b, h, i, j = (torch.arange(n).view([-1 if at == dim else 1 for at in range(4)]) for dim, n in enumerate(sizes))
    seen = getattr(rules, name)(None, b, h, i, j, (*args, seq_q, seq_k)).expand(sizes)
    by = [bool((seen != seen.narrow(dim, 0, 1)).any()) for dim in (0, 1)]
    assert reads(Rules(("all", ("not", Rule(name, 1))))) == Reads(False, *by)


def test_every_mask_rule_of_kernels_is_a_rule_in_torch():
    """So no rule is left out above: functions of device.mods that return booleans, and those made of several."""
    path = Path(mods.__file__)
    mask_mods = path.read_text().split("- mask mods")[1]
    named = re.findall(r"^def (\w+)\(score, batch, head, q_index, kv_index, args\)", mask_mods, re.MULTILINE)
    named += ["listed_tiles", "whole_tiles"]
    assert sorted(named) == sorted(rules.__all__)


def test_an_unknown_rule_is_taken_to_read_everything():
    assert reads(Rules(("all", Rule("a_new_one", 0)))) == Reads(True, True, True)
    assert reads(Rules(("all", Rule("element_pointers", 0)))) == Reads(True, True, True)


def test_plans_take_lists_where_a_mask_mod_looks_at_places_alone():
    device = device_named("h200")

    def problem_of(mod):
        return tilefold.plan.AttentionProblem(
            1, 4096, 4096, 4, 4, 128, 128, mask_mods=("user",), mask_by_place=not reads(mod).score
        )

    taken = plan_attention(problem_of(of_head), device)
    assert "lists" in taken.options
    assert "lists" not in plan_attention(problem_of(of_score), device).options
    with pytest.raises(tilefold.PlanError, match="anew is a version of lists"):
        taken.with_tile(options=("skip", "anew"))
    with pytest.raises(tilefold.PlanError, match="indices alone"):
        plan_attention(problem_of(of_score), device).with_tile(options=("skip", "lists"))


@pytest.mark.parametrize("anew", [True, False])
def test_plans_of_gradients_say_whether_lists_are_kept(anew):
    problem = tilefold.plan.AttentionProblem(1, 4096, 4096, 4, 4, 128, 128, mask_mods=("user",), mask_by_place=True)
    plan = plan_attention_backward(problem, device_named("h200"))
    chosen = plan.with_tiles(options=replace(plan.options, anew=anew))
    assert ("made in every call" in str(chosen)) is anew
    lists = attention_backward_reduce._lists_of(Call(mask_mod=of_head), chosen, torch.device("cpu"))
    assert lists.anew is anew
    with pytest.raises(tilefold.PlanError, match=r"options\.anew: is a version of lists"):
        plan.with_tiles(options=replace(plan.options, lists=False, anew=True))
    with pytest.raises(tilefold.PlanError, match=r"options\.anew: must be a bool, got 1"):
        plan.with_tiles(options=replace(plan.options, anew=1))


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "window"), in_turn(["same", "of_head", "of_sequence", "of_all"]), ids=str)
def test_entries_of_keys_are_those_of_queries_turned(name, window):
    """And each says how many KV tiles its query tile sees before; KV heads share what one of their group sees.  Keys that are
    seen by far later queries than those behind them have the last query tile first."""
    batch, heads, kv_heads = 2, 4, 2
    mod, args = {
        "same": (same, (numbers_of(),)), "of_head": (of_head, ()), "of_sequence": (of_sequence, ()), "of_all": (of_all, ()),
    }[name]  # fmt: skip
    sizes = batch, heads, *LENGTHS
    call = Call(mask_mod=mod, mask_args=args)
    lists = TileLists(call, sizes, TILE, window, torch.device("cpu"), False)
    turned = QueryLists(kv_heads, call, sizes, TILE, window, torch.device("cpu"), False)
    got, (_, shared, q_blocks, _) = turned.of(call), lists.of(call).shape
    rows = entries_of(lists.of(call))
    kinds = lists._classified(call).flatten(0, 1)
    each = heads // kv_heads if shared > 1 else 1
    last: dict[tuple[int, int], int] = {}
    descended = False
    for at, row in reversed([*enumerate(got.flatten(0, 2).tolist())]):
        which, kv_block = divmod(at, got.shape[2])
        seen = {}
        for i in range(q_blocks):
            # A query tile that sees nothing has one tile, as a partial one, to fold: no KV tile's list names it.
            of_group = [rows[(which * each + g) * q_blocks + i] for g in range(each)]
            group = kinds[which * each : (which + 1) * each, i]
            if bool((group[:, kv_block] > 0).any()):
                seen[i] = bool((group[:, kv_block] == 2).all()), int((group[:, :kv_block] > 0).any(0).sum())
                assert any(kv_block in [entry >> 1 for entry in entries] for entries in of_group)
        last[which, kv_block] = max(seen, default=-1)
        following = (last[which, other] for n in range(6) if (other := kv_block + 2**n) < got.shape[2])
        after = next((tile for tile in following if 0 <= tile < max(seen, default=-1)), None)
        if after is not None and 4 * sum(i > after for i in seen) > 3 * len(seen):
            seen, descended = dict(reversed(seen.items())), True
        assert row[0] == len(seen)
        assert row[1 : 1 + len(seen)] == [2 * i + whole for i, (whole, _) in seen.items()]
        assert row[1 + q_blocks : 1 + q_blocks + len(seen)] == [before for _, before in seen.values()]
        if not seen:
            assert (row[1] >> 1, row[1 + q_blocks]) == (q_blocks, 0)
    assert descended or name != "of_all" or window != (-1, -1)


@pytest.mark.interpreter
@pytest.mark.parametrize("block", [(16, 16), (32, 16), (64, 48), (24, 40)], ids=str)
@pytest.mark.parametrize("inner", [True, False])
def test_lists_of_a_table_of_blocks(block, inner):
    """They are those of the table: a tile is empty, or whole, where all of its blocks are; kept with the table."""
    seq_q, seq_k = LENGTHS
    shape = 2, 3, -(-seq_q // block[0]), -(-seq_k // block[1])
    kinds = (3 * rand(*shape).sigmoid()).to(torch.uint8)
    kinds[0, :, :2, :2], kinds[1, 0, 1:] = 2, 0
    mask = masks.blocks(kinds, block, *[masks.rule(of_head)] * inner)
    q, k = (torch.empty(2, n, 3, 16) for n in LENGTHS)
    call = Call(**{n: v for n, v in spelled(q, k, Terms(mask=mask), None)._asdict().items() if n in Call._fields})
    sizes = 2, 3, *LENGTHS
    lists = TileLists(call, sizes, TILE, (-1, -1), torch.device("cpu"), False)
    assert lists.by_table
    got = lists.of(call)
    each = kinds[:, :, torch.arange(seq_q) // block[0]][..., torch.arange(seq_k) // block[1]]
    for b in range(2):
        for h in range(3):
            for i, rows in enumerate(each[b, h].split(TILE[0], 0)):
                tiles = list(enumerate(rows.split(TILE[1], 1)))
                want = [2 * n + bool((tile >= 1 + inner).all()) for n, tile in tiles if bool(tile.any())] or [0]
                assert entries_of(got[b : b + 1, h : h + 1, i : i + 1]) == [want]
    assert lists.of(call) is got
    again = TileLists(call, sizes, TILE, (-1, -1), torch.device("cpu"), False)
    assert again.of(call) is got
    kinds[0, 0] = 0
    assert again.of(call) is not got
    turned = QueryLists(3, call, sizes, TILE, (-1, -1), torch.device("cpu"), False).of(call)
    assert turned.shape == (2, 3, -(-seq_k // TILE[1]), 1 + 2 * -(-seq_q // TILE[0]))


@pytest.mark.interpreter
@pytest.mark.parametrize("inner", [True, False])
def test_blocks_of_whole_tiles_are_asked_for_the_rest_alone(inner):
    kinds = torch.tensor([[0, 0, 0], [1, 2, 0], [2, 1, 1]], dtype=torch.uint8)[None, None]
    mask = masks.blocks(kinds, (128, 128), *[masks.rule(of_head)] * inner)
    q, k = (torch.empty(1, n, 3, 16) for n in (300, 380))
    call = Call(**{n: v for n, v in spelled(q, k, Terms(mask=mask), None)._asdict().items() if n in Call._fields})
    made = TileLists(call, (1, 3, 300, 380), (128, 64), (-1, -1), torch.device("cpu"), False)
    empty = 12 if inner else 0  # behind the last tile, or a tile about which the table is asked
    want = [[empty], [0, 2, 5, 7], [1, 3, 4, 6, 8, 10]]
    assert entries_of(made.of(call)) == (want if inner else [want[0], *[[n | 1 for n in row] for row in want[1:]]])
    asked = made.inner(call)
    assert next(asked.mask_mod.rules).function == (of_head if inner else "listed_tiles")
    assert asked.mask_args == (() if inner else call.mask_args)
    by_head = call._replace(mask_args=tuple(a.expand(1, 3, -1, -1) if a is kinds else a for a in call.mask_args))
    for heads, kv_heads, table in ((3, 1, by_head), (3, 1, call), (3, 3, by_head)):
        turned = QueryLists(kv_heads, table, (1, heads, 300, 380), (128, 128), (-1, -1), torch.device("cpu"), False)
        assert (turned.inner(table) is table) is (not inner or (table is by_head and kv_heads == 1))
    other = TileLists(call, (1, 3, 300, 380), (192, 64), (-1, -1), torch.device("cpu"), False)
    assert other.inner(call) is call


@pytest.mark.parametrize("block", [(128, 256), (64, 128)], ids=str)
def test_what_kernels_ask_in_partial_tiles(block):
    """Both kernels of sm_90: the mask inside of a table whose blocks hold whole tiles, the table too of another."""
    q, k, v = (torch.empty(1, 2048, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    kinds = torch.empty(1, 1, 2048 // block[0], 2048 // block[1], dtype=torch.uint8, device="meta")
    mask = masks.blocks(kinds, block, masks.rule(of_head))
    call = Call(**{n: x for n, x in spelled(q, k, Terms(mask=mask), None)._asdict().items() if n in Call._fields})
    sizes = {"batch": 1, "seq_q": 2048, "seq_k": 2048, "heads": 16, "kv_heads": 16, "dim_qk": 128, "dim_v": 128}
    problem, device = problem_of(q, k, v, call, sizes, (-1, -1)), device_named("h200")
    plan, backward = plan_attention(problem, device), plan_attention_backward(problem, device)
    bound = attention_hopper.bind(q, k, v, call, (-1, -1), 0.1, plan, (q.shape, (1, 16, 2048))).bound
    given = bound.arguments((q, k, v, q, q, call))
    (forward,) = [each for each in given if isinstance(each, tuple) and each]
    lists = attention_backward_reduce._lists_of(call, backward, q.device)
    values = attention_backward_reduce._mod_values(call, problem, lists)
    asked = of_head if block == (128, 256) else mods.either
    assert forward[0][0] is values["mask_mods"].make(call)[0][0] is asked
    assert (values["lists_b"], values["lists_h"]) == (0, 0)
    assert values["Lists"].make(call).shape == (1, 1, 16, 1 + 2 * 32)


def test_which_masks_are_tables():
    kinds = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    q, k = (torch.empty(1, 20, 1, 16) for _ in range(2))
    table = masks.blocks(kinds, (16, 16), masks.prefix(3))
    for mask, found in (
        (table, True),
        (masks.blocks(kinds, (16, 16)), True),
        (~masks.blocks(kinds, (16, 16)), False),
        (table | masks.prefix(3), False),
        (table & masks.prefix(3), False),
        (masks.blocks(kinds, (16, 16)) | masks.prefix(3), False),
    ):
        assert classify._is_table(spelled(q, k, Terms(mask=mask), None).mask_mod) is found, mask
