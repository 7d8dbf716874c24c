"""Calls of every operation that follows index tensors, and a fault for each of these: what is planted, and what the note says."""

from dataclasses import dataclass
from typing import Any

import torch

import tilefold
from cases import rand
from cases.flash import angles

FAR = 2**30 + 5  # an element so far away that a read of it ends the process


@dataclass(frozen=True)
class Case:
    """run(**arguments | wrong) is to leave `fault` = (argument, position, value), and to be exact where `exact` says: indices
    along the first dimension of the result, None where nothing is promised."""

    run: Any
    arguments: dict[str, Any]
    wrong: dict[str, Any]
    fault: tuple[str, tuple[int, ...], int]
    exact: tuple[int, ...] | None = None
    said: bool = True  # check=True says the same sentence


def changed(t: torch.Tensor, place: tuple[int, ...], value: int) -> torch.Tensor:
    t = t.clone()
    t[place] = value
    return t


def decoding(device: torch.device, **more: Any) -> dict[str, Any]:
    """Three sequences of one token over pages of 8."""
    k = rand(9, 8, 2, 16, device=device)
    table = torch.tensor(
        [[0, 4, 99], [2, 7, 5], [8, 1, 3]], dtype=torch.int32, device=device
    )  # 99: behind the last key
    lengths = torch.tensor([13, 24, 17], dtype=torch.int32, device=device)
    q, v = rand(3, 1, 4, 16, device=device), rand(9, 8, 2, 16, device=device)
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "block_table": table} | more


def contiguous(device: torch.device, **more: Any) -> dict[str, Any]:
    """The same over caches in one piece, in another order, with rows that are no keys."""
    ints = {"dtype": torch.int32, "device": device}
    call = decoding(
        device, cache_seqlens=torch.tensor([6, 8, 7], **ints), cache_batch_idx=torch.tensor([4, 0, 8], **ints)
    )
    call |= {"cache_leftpad": torch.tensor([0, 2, 1], **ints), **more}
    del call["block_table"]
    return call


def packed(device: torch.device, longest: int = 40, **more: Any) -> dict[str, Any]:
    """Sequences of 2, `longest` and 3 tokens: a prompt among them if it is long."""
    cu = torch.tensor([0, 2, 2 + longest, 5 + longest], dtype=torch.int32, device=device)
    return decoding(device, q=rand(5 + longest, 4, 16, device=device), cu_seqlens_q=cu, max_seqlen_q=longest) | more


def kvcache_cases(device: torch.device) -> dict[str, Case]:
    run = tilefold.attention_kvcache
    paged, plain, prompts = decoding(device), contiguous(device), packed(device)
    table = paged["block_table"]
    prompt = decoding(device, q=rand(3, 70, 4, 16, device=device))
    found = {}
    coded = dict(paged)
    for name in ("k_cache", "v_cache"):
        coded[name] = (coded[name] * 30).to(torch.int8)
    coded |= {name: torch.rand(9, 2, device=device) + 0.5 for name in ("k_scale", "v_scale")}
    split, window = paged | {"num_splits": 3}, paged | {"window": (6, 0), "causal": True}
    seven = decoding(device, k_cache=rand(9, 7, 2, 16, device=device), v_cache=rand(9, 7, 2, 16, device=device))
    seven["cache_seqlens"] = torch.tensor([13, 20, 17], dtype=torch.int32, device=device)
    latent = rand(9, 8, 1, 48, device=device)
    mla = paged | {"q": rand(3, 1, 4, 48, device=device), "k_cache": latent, "v_cache": latent[..., :32]}
    calls = {"paged": paged, "bytes": coded, "splits": split, "pages of 7": seven, "latent": mla, "prompts": prompt,
             "window": window}  # fmt: skip
    for name, call in calls.items():
        for value in (FAR, -FAR, 9) if name == "paged" else (FAR,):
            fault = ("block_table", (1, 2), value)
            found[f"table {value}, {name}"] = Case(
                run, call, {"block_table": changed(table, (1, 2), value)}, fault, (0, 2)
            )
    for name, call, room in (("paged", paged, 24), ("in one piece", plain, 8), ("prompts", prompt, 24)):
        for value in (FAR, -5, room + 1):
            fault = ("cache_seqlens", (2,), value)
            found[f"length {value}, {name}"] = Case(
                run, call, {"cache_seqlens": changed(call["cache_seqlens"], (2,), value)}, fault, (0, 1)
            )
    for value in (FAR, -1, 9):
        wrong = {"cache_batch_idx": changed(plain["cache_batch_idx"], (1,), value)}
        found[f"cache {value}"] = Case(run, plain, wrong, ("cache_batch_idx", (1,), value), (0, 2))
    wrong = {"cache_leftpad": changed(plain["cache_leftpad"], (1,), -FAR)}
    found["pad"] = Case(run, plain, wrong, ("cache_leftpad", (1,), -FAR), (0, 2))
    long = plain | {"q": rand(3, 70, 4, 16, device=device)}
    found["pad, prompts"] = Case(run, long, wrong, ("cache_leftpad", (1,), -FAR), (0, 2))
    ends = (0, 1, *range(42, 45))
    for name, call, rows in (("prompts", prompts, ends), ("few", packed(device, 6), (0, 1, 8, 9, 10))):
        cu = call["cu_seqlens_q"]
        wrong = {"block_table": changed(table, (1, 1), FAR)}
        found[f"table, packed {name}"] = Case(run, call, wrong, ("block_table", (1, 1), FAR), rows)
        for place, value, kept in ((3, FAR, rows[:2]), (0, -FAR, None), (2, 1, None)):
            wrong = {"cu_seqlens_q": changed(cu, (place,), value)}
            found[f"offset {place}, {name}"] = Case(run, call, wrong, ("cu_seqlens_q", (place,), value), kept, False)
        short = {"max_seqlen_q": call["max_seqlen_q"] - 1}
        found[f"longest, {name}"] = Case(
            run, call, short, ("max_seqlen_q", (1,), call["max_seqlen_q"]), rows[:2], False
        )
    found["a length of 2^31 with a pad"] = Case(
        run, plain, {"cache_seqlens": changed(plain["cache_seqlens"], (1,), -(2**31)),
                     "cache_leftpad": changed(plain["cache_leftpad"], (1,), 2**31 - 1)},
        ("cache_seqlens", (1,), -(2**31)), (0, 2),
    )  # fmt: skip
    return found | {"two pages": Case(run, paged, {"block_table": changed(changed(table, (1, 0), -1), (1, 1), FAR)},
                                      ("block_table", (1, 0), -1), (0, 2))}  # fmt: skip


def prefix_cases(device: torch.device) -> dict[str, Case]:
    run = tilefold.attention_shared_prefix
    found = {}
    for cascade in (True, False):
        call = decoding(device, prefix_length=8, cascade=cascade)
        call["block_table"][:, 0] = 6
        table, lengths = call["block_table"], call["cache_seqlens"]
        for place in ((1, 1), (1, 2)):
            wrong = {"block_table": changed(table, place, FAR)}
            found[f"page {place}, {cascade}"] = Case(run, call, wrong, ("block_table", place, FAR), (0, 2))
        for value in (FAR, 25, 8, 3, -5):
            wrong = {"cache_seqlens": changed(lengths, (1,), value)}
            fault = ("cache_seqlens", (1,), value)
            found[f"length {value}, {cascade}"] = Case(run, call, wrong, fault, (0, 2), value > 24)
        whole = {"block_table": changed(table, (0, 0), FAR)}
        found[f"the prefix, {cascade}"] = Case(run, call, whole, ("block_table", (0, 0), FAR), None, False)
    return found


def append(k_cache: torch.Tensor, v_cache: torch.Tensor, **call: Any) -> torch.Tensor:
    """The caches after a call, side by side, so that pages are the first dimension."""
    pair = k_cache.clone(), v_cache.clone()
    tilefold.kvcache_append(call.pop("k"), call.pop("v"), *pair, **call)
    return torch.cat(pair, -1)


def append_cases(device: torch.device) -> dict[str, Case]:
    ints = {"dtype": torch.int32, "device": device}
    call = decoding(device, k=rand(3, 2, 2, 16, device=device), v=rand(3, 2, 2, 16, device=device))
    call["cache_seqlens"] = torch.tensor([13, 22, 15], **ints)
    del call["q"]
    table, lengths = call["block_table"], call["cache_seqlens"]
    pages = (0, 4, 8, 1, 3, 6)  # all but those of sequence 1
    found = {}
    for value in (FAR, -1, 9):
        wrong = {"block_table": changed(table, (1, 2), value)}
        found[f"table {value}"] = Case(append, call, wrong, ("block_table", (1, 2), value), pages)
    for value in (FAR, 2**31 - 1, -7, 23):
        wrong = {"cache_seqlens": changed(lengths, (1,), value)}
        found[f"length {value}"] = Case(append, call, wrong, ("cache_seqlens", (1,), value), pages)
    plain = call | {
        "cache_seqlens": torch.tensor([6, 0, 3], **ints),
        "cache_batch_idx": torch.tensor([4, 0, 8], **ints),
    }
    del plain["block_table"]
    for value in (FAR, -1):
        wrong = {"cache_batch_idx": changed(plain["cache_batch_idx"], (1,), value)}
        found[f"cache {value}"] = Case(append, plain, wrong, ("cache_batch_idx", (1,), value), (4, 8, 1))
    cos, sin = angles(32, 8, torch.float32, device)
    turned = call | {"rotary_cos": cos, "rotary_sin": sin, "q": rand(3, 2, 4, 16, device=device)}
    found["length, turned"] = Case(
        append, turned, {"cache_seqlens": changed(lengths, (1,), FAR)}, ("cache_seqlens", (1,), FAR), pages
    )
    rows = call | {name: call[name].flatten(0, 1) for name in ("k", "v")}
    rows["cu_seqlens"] = torch.tensor([0, 2, 4, 6], **ints)
    found["packed length"] = Case(
        append, rows, {"cache_seqlens": changed(lengths, (1,), FAR)}, ("cache_seqlens", (1,), FAR), pages
    )
    for place, value in ((3, FAR), (1, -FAR), (2, 1)):
        wrong = {"cu_seqlens": changed(rows["cu_seqlens"], (place,), value)}
        found[f"offset {place}"] = Case(append, rows, wrong, ("cu_seqlens", (place,), value), None, False)
    return found


def sparse_index(device: torch.device, blocks: int = 4, **sizes: Any) -> Any:
    keep = torch.rand(2, 2, blocks, blocks, device=device) < 0.7
    keep[..., -1] = True
    return tilefold.BlockIndex.from_map(keep, block_q=16, block_k=16, **sizes)


def with_fault(index: Any, part: int, place: tuple[int, ...], value: int) -> Any:
    tensors = [None if t is None else t.clone() for t in index.tensors()]
    tensors[part][place] = value
    return index.with_tensors(*tensors)


PARTS = ("index.indices", "index.counts", "index.block_sizes", "index.query_sizes")


def list_cases(device: torch.device) -> list[tuple[Any, Any, tuple[str, tuple[int, ...], int]]]:
    """(index, the same with a fault in sequence 1, the fault)."""
    index, shared = sparse_index(device), torch.tensor([16, 9, 16, 3], dtype=torch.int32, device=device)
    each = shared.repeat(2, 1)
    sized = sparse_index(device, block_sizes=each, query_sizes=each.clone())
    deep = sparse_index(device, block_sizes=each[:, None].repeat(1, 2, 1))
    places = [(index, 0, (1, 1, 2, 0), FAR), (index, 0, (1, 0, 3, 0), -FAR), (index, 0, (1, 0, 0, 0), 4),
              (index, 1, (1, 1, 1), FAR), (index, 1, (1, 0, 3), -1), (sized, 2, (1, 1), FAR), (sized, 3, (1, 2), -FAR),
              (deep, 2, (1, 0, 3), 17)]  # fmt: skip
    return [(i, with_fault(i, part, at, value), (PARTS[part], at, value)) for i, part, at, value in places]


def sparse_cases(device: torch.device) -> dict[str, Case]:
    run = tilefold.sparse_attention
    q, k, v = (rand(2, 64, heads, 16, device=device) for heads in (2, 1, 1))
    call = {"q": q, "k": k, "v": v}
    found = {}
    for index, wrong, fault in list_cases(device):
        said = fault[0] in PARTS[:2]
        found[f"{fault}"] = Case(run, call | {"index": index}, {"index": wrong}, fault, (0,), said)
    return found


def sparse_varlen_cases(device: torch.device) -> dict[str, Case]:
    run = tilefold.sparse_attention_varlen
    q, k, v = (rand(100, heads, 16, device=device) for heads in (2, 1, 1))
    cu = torch.tensor([0, 50, 100], dtype=torch.int32, device=device)
    call = {"q": q, "k": k, "v": v, "index": sparse_index(device), "cu_seqlens_q": cu, "cu_seqlens_k": cu.clone()}
    found = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        for place, value, rows in ((2, FAR, tuple(range(50))), (0, -FAR, None), (1, 101, None), (2, 40, None)):
            fault = (name, (place,), value)
            found[f"{fault}"] = Case(run, call, {name: changed(cu, (place,), value)}, fault, rows, False)
        fault = (f"index.seq_{name[-1]}", (0,), 90)
        found[f"{fault}"] = Case(run, call, {name: changed(cu, (1,), 90)}, fault, None, False)
    index, wrong, fault = list_cases(device)[0]
    found["list"] = Case(run, call | {"index": index}, {"index": wrong}, fault, tuple(range(50)))
    return found


def sparse_paged_cases(device: torch.device) -> dict[str, Case]:
    run = tilefold.sparse_attention_paged
    ints = {"dtype": torch.int32, "device": device}
    table = torch.tensor([[0, 4, 9, 99], [2, 7, 5, 1]], **ints)
    lengths = torch.tensor([40, 64], **ints)
    found = {}
    for layout in ("bshd", "bhsd"):
        k, v = (rand(10, 16, 1, 16, device=device) for _ in range(2))
        q = rand(2, 64, 2, 16, device=device)
        if layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        call = {"q": q, "k_pages": k, "v_pages": v, "index": sparse_index(device), "layout": layout}
        call |= {"block_table": table, "cache_seqlens": lengths}
        for value in (FAR, -FAR, 10):
            fault = ("block_table", (1, 3), value)
            found[f"{fault} {layout}"] = Case(
                run, call, {"block_table": changed(table, (1, 3), value)}, fault, (0,), False
            )
        for value in (FAR, -1, 65):
            fault = ("cache_seqlens", (1,), value)
            found[f"{fault} {layout}"] = Case(run, call, {"cache_seqlens": changed(lengths, (1,), value)}, fault, (0,))
    index, wrong, fault = list_cases(device)[1]
    found["list"] = Case(run, call | {"index": index}, {"index": wrong}, fault, (0,))
    return found


def varlen_cases(device: torch.device) -> dict[str, Case]:
    run = tilefold.attention_varlen
    q, k, v = (rand(100, heads, 16, device=device) for heads in (2, 1, 1))
    cu = torch.tensor([0, 50, 60, 100], dtype=torch.int32, device=device)
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu.clone(), "max_seqlen_q": 50, "max_seqlen_k": 50,
            "causal": True}  # fmt: skip
    found = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        for place, value, rows in (
            (3, FAR, range(60)),
            (1, FAR, range(60, 100)),
            (2, -FAR, range(50)),
            (0, -1, range(50, 100)),
            (2, 40, range(0)),
        ):
            fault = (name, (place,), value)
            found[f"{fault}"] = Case(run, call, {name: changed(cu, (place,), value)}, fault, tuple(rows), False)
        short = {f"max_seqlen_{name[-1]}": 49}
        found[f"longest {name}"] = Case(
            run, call, short, (f"max_seqlen_{name[-1]}", (0,), 50), tuple(range(50, 100)), False
        )
    return found


def rotary_cases(device: torch.device) -> dict[str, Case]:
    cos, sin = angles(64, 8, torch.float32, device)
    cu = torch.tensor([0, 50, 60, 100], dtype=torch.int32, device=device)
    call = {"x": rand(100, 2, 16, device=device), "cos": cos, "sin": sin, "cu_seqlens": cu, "max_seqlen": 50}
    wrong = {"cu_seqlens": changed(cu, (3,), FAR)}
    short = Case(
        tilefold.apply_rotary, call, {"max_seqlen": 49}, ("max_seqlen", (0,), 50), tuple(range(50, 100)), False
    )
    return {
        "offset": Case(tilefold.apply_rotary, call, wrong, ("cu_seqlens", (3,), FAR), tuple(range(60)), False),
        "longest": short,
    }


OPERATIONS = {
    "attention_kvcache": kvcache_cases,
    "attention_shared_prefix": prefix_cases,
    "kvcache_append": append_cases,
    "sparse_attention": sparse_cases,
    "sparse_attention_varlen": sparse_varlen_cases,
    "sparse_attention_paged": sparse_paged_cases,
    "attention_varlen": varlen_cases,
    "apply_rotary": rotary_cases,
}


def cases_of(operation: str, device: torch.device) -> dict[str, Case]:
    torch.manual_seed(3)
    return OPERATIONS[operation](device)
