"""`tilefold bench decode`: cases, bytes, inputs, the judge, tables, the command; what it hands to libraries that are not here."""

import json
import types
from dataclasses import replace

import pytest
import torch

from cases.cli import command, refused, reports
from cases.refusals import refuses
from tilefold.bench.decode import peers as decode_peers
from tilefold.bench.decode.cases import DecodeCase, decode_cases
from tilefold.bench.decode.inputs import DecodeJudge, make_decode_inputs
from tilefold.bench.decode.peers import DECODE, DECODE_PEERS, in_pages
from tilefold.bench.family_report import family_lines, family_table
from tilefold.bench.run import Cell, Row, run_case
from tilefold.bench.setting import Options
from tilefold.bench.timers import Timing
from tilefold.errors import Unsupported

ONE = DecodeCase((70, 70), 4, 2, 16, 16)


run = command("bench", "decode")


# ---------------------------------------------------------------- cases


def test_the_cases_are_those_that_were_promised():
    names = [case.name for case in decode_cases()]
    assert len(names) == len(set(names))
    assert {"b1_n8192_h32k8_d128", "b1_n131072_h32k8_d128", "b1_n8192_h28k4_d128"} < {*names}
    assert {f"b32_n8192_h32k8_d128{more}" for more in ("", "_q4", "_page16_int8", "_float16")} < {*names}
    assert {"b64_n2048_h32k8_d128_page256", "b32_n8192_h16k1_d576v512_mla_page64"} < {*names}
    uneven = [case for case in decode_cases() if case.uneven]
    for case in uneven:
        assert (case.batch, min(case.lengths), case.longest) == (32, 1, 131072)
        (balanced,) = [
            one for one in decode_cases() if not one.uneven and one.page == case.page and one.longest == sum(case.lengths) // 32
        ]  # fmt: skip
        assert abs(balanced.bytes / case.bytes - 1) < 1e-3


def test_bytes_are_what_has_to_move():
    case = DecodeCase((8192,) * 32)
    rows = 32 * 32 * (128 + 128) * 2
    assert case.bytes == 32 * 8192 * 8 * 256 * 2 + rows + 4 * 32
    assert replace(case, page=16).bytes == case.bytes + 4 * 32 * 512
    assert replace(case, cache="fp8").bytes == 32 * 8192 * 8 * 256 + rows + 4 * 32 + 4 * 16
    shared = replace(case, heads=16, kv_heads=1, dim_qk=576, dim_v=512, shared=True)
    assert shared.bytes == 32 * 8192 * 576 * 2 + 32 * 16 * (576 + 512) * 2 + 4 * 32
    assert DecodeCase((10,), 2, 1, 8, 8, queries=3).flops == 2 * 16 * 2 * (8 + 9 + 10)


# ---------------------------------------------------------------- inputs and the judge


@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
@pytest.mark.parametrize("page", [0, 16])
def test_plain_caches_hold_the_same_numbers(cache, page):
    case = replace(ONE, lengths=(70, 33) if page else (70, 70), cache=cache, page=page)
    inputs = make_decode_inputs(case, "cpu")
    assert (inputs.plain is inputs) == (not cache and not page)
    for b, n in enumerate(case.lengths):
        for mine, plain in zip(inputs.sequence(b, torch.float64), inputs.plain.sequence(b, torch.float64), strict=True):
            assert mine.shape == (1, n, 2, 16)
            torch.testing.assert_close(plain, mine, rtol=2**-8, atol=0)
    spread = inputs.plain.k_cache.double().std()
    assert 0.5 < spread < 1.5
    assert torch.equal(make_decode_inputs(case, "cpu").q, inputs.q)
    assert not torch.equal(make_decode_inputs(case, "cpu", 1).q, inputs.q)


def test_pages_belong_to_one_sequence_each():
    case = replace(ONE, lengths=(5, 90, 33), page=16)
    inputs = make_decode_inputs(case, "cpu")
    used = [number for b, count in enumerate(case.pages) for number in inputs.table[b, :count].tolist()]
    assert sorted(used) == list(range(sum(case.pages))) and inputs.k_cache.shape[0] == 1 + 6 + 3


def test_latent_values_share_the_memory_of_the_keys():
    inputs = make_decode_inputs(replace(ONE, kv_heads=1, dim_qk=40, dim_v=32, shared=True), "cpu")
    assert inputs.v_cache.data_ptr() == inputs.k_cache.data_ptr() and inputs.v_cache.shape[-1] == 32
    assert torch.equal(inputs.v_cache, inputs.k_cache[..., :32])


@pytest.mark.parametrize("case", decode_cases("tiny"), ids=lambda case: case.name)
def test_the_judge_takes_what_is_right_and_nothing_else(case):
    """Right: torch's own attention over the plain cache, of each sequence by itself."""
    inputs = make_decode_inputs(case, "cpu")
    judge = DecodeJudge(inputs)
    outs = []
    for b, n in enumerate(case.lengths):
        q, k, v = (x.transpose(1, 2) for x in (inputs.q[b : b + 1], *inputs.plain.sequence(b, inputs.q.dtype)))
        mask = torch.ones(case.queries, n, dtype=torch.bool).tril(n - case.queries)
        outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))
    out = torch.cat(outs).transpose(1, 2)
    assert judge.verdict(out).ok
    assert not judge.verdict(out.roll(1, 0) if case.batch > 1 else -out).ok
    assert not judge.verdict(out * 1.1).ok
    out[-1, -1, 0, 3] = float("nan")
    assert not judge.verdict(out).finite and not judge.verdict(out).ok


def test_contiguous_caches_are_pages_in_order():
    inputs = make_decode_inputs(replace(ONE, lengths=(64, 64)), "cpu")
    k, _, table, page = in_pages(inputs)
    assert page == 16 and table.shape == (2, 4)
    assert torch.equal(k[table.long()].flatten(1, 2), inputs.k_cache) and k.data_ptr() == inputs.k_cache.data_ptr()
    refuses(Unsupported, "pages of 16 do not cut", in_pages, make_decode_inputs(ONE, "cpu"))
    refuses(Unsupported, "queries' dtype only", in_pages, make_decode_inputs(replace(ONE, cache="fp8"), "cpu"))


# ---------------------------------------------------------------- what is made of the figures


def cell(name, ms=None, **more):
    time = None if ms is None else Timing(ms, ms, ms, 1, "made up")
    return Cell(None, name, "ok" if ms else "refused", timing=time, graph=time, **more)


def test_the_table_counts_from_the_copy_and_the_fastest_other_library():
    case = DecodeCase((8192,) * 32)
    row = Row(DECODE, case, (cell("tilefold", 0.3), cell("plain", 0.27), cell("cudnn", 0.6), cell("flash", 0.36)), 4e12)
    (line,) = family_table([row], "graph").rows
    assert row.floor_ms == pytest.approx(case.bytes / 4e9)
    assert line == (case.name, "300", "3581", "1.12", "1.20x", "270 (0.90x)", "600 (2.00x)", "360 (1.20x)")


def test_uneven_batches_are_named_beside_balanced_ones():
    uneven, balanced = (
        next(c for c in decode_cases() if c.name.startswith(f"b32_{kind}") and c.page == 64) for kind in ("uneven", "n15")
    )  # fmt: skip
    rows = [Row(DECODE, uneven, (cell("tilefold", 0.55),), 4e12), Row(DECODE, balanced, (cell("tilefold", 0.5),), 4e12)]
    assert f"tilefold, graph: {uneven.name} takes 1.10 times {balanced.name}" in family_lines(rows)
    gone = [Row(DECODE, uneven, (cell("tilefold", note="too long"),)), rows[1]]
    assert family_lines(gone) == [f"tilefold ({uneven.name}): too long"]
    assert family_table(gone, "graph").rows[0][1:5] == ("-", "", "", "")


# ---------------------------------------------------------------- the command


@pytest.mark.interpreter
@pytest.mark.no_poison
def test_tiny_cases_with_every_output(tmp_path):
    files, options = reports(tmp_path, "decode", "json", "markdown")
    results = tmp_path / "results"
    peers = "plain,math,flashinfer,vllm,fa4,cudnn,flex"
    result = run("--case", "q4|uneven|mla", "--peers", peers, "--rounds", 1, "--results", results, *options)
    for line in (
        "flashinfer: flashinfer is not installed",
        "vLLM: vllm is not installed",
        "FA4: flash-attn-4 is not installed",
        "Flex: compiled FlexAttention needs a GPU",
        "Times in the interpreter say nothing about a GPU",
    ):
        assert line in result.output
    rows = json.loads(files["json"].read_text())["rows"]
    assert {row["case"] for row in rows if row["status"] == "ok" and row["implementation"] == "tilefold"} == {
        "b2_n70_h4k2_d16_q4_page16",
        "b3_uneven42_h4k2_d16_page16",
        "b2_n70_h4k1_d40v32_mla",
    }
    for row in rows:
        assert (row["events_us"] is not None) == (row["status"] == "ok")
        assert row["graph_us"] is None and row["floor_us"] > 0
    kept = [json.loads(line) for line in (results / "decode.jsonl").read_text().splitlines()]
    assert [row["case"] for row in kept] == [row["case"] for row in rows]
    assert "| case | us | GB/s | x floor | best | tilefold plain | math |" in files["markdown"].read_text()


@pytest.mark.interpreter
def test_a_budget_and_refusals(tmp_path):
    assert "0 of 1 cases were reached" in run("--case", "float16", "--budget", "0").output
    refused(
        run,
        (
            "--peers tk",
            "peers must be from tilefold, plain, cudnn, flash, math, fa4, flex, flashinfer, vllm (or none), got 'tk'",
        ),
        ("--case b77", "case filter 'b77' matches none of"),
        (("--json", tmp_path / "no" / "file.json"), "--json must be a file that can be written"),
    )


@pytest.mark.interpreter
def test_too_little_memory_is_a_note():
    def none_left(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    row = run_case(
        replace(DECODE, inputs=none_left),
        ONE,
        [DECODE_PEERS[name] for name in ("tilefold", "math")],
        "cpu",
        Options(1),
        lambda *_: None,
    )
    assert [(one.status, one.note) for one in row.cells] == [("no memory", "out of memory")] * 2


# ---------------------------------------------------------------- libraries that are not installed here


EVEN = DecodeCase((64, 64), 4, 2, 16, 16)
CASES = (EVEN, replace(EVEN, lengths=(5, 90, 33), page=16), replace(EVEN, page=64, dtype="float16"))


def gathered(pages, numbers, length):
    """Keys or values [length, heads, dim] of a sequence in pages."""
    return pages[numbers.long()].flatten(0, 1)[:length]


def attention(q, k, v, causal=False):
    """q [S, H, D], k, v [N, Hkv, D]: plain attention of a sequence."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else None
    tensors = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


class PagedWrapper:
    """flashinfer's wrappers: pages of a sequence from indptr, the last one's length; causal with several queries."""

    starts = None

    def __init__(self, space, layout, use_tensor_cores=False):
        assert (space.dtype, layout) == (torch.uint8, "NHD")

    def plan(self, indptr, indices, last, heads, kv_heads, dim, page, *, q_data_type, kv_data_type, causal=False):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert q_data_type == kv_data_type
        self.shape, self.causal = (heads, kv_heads, dim), causal
        ends = indptr.tolist()
        self.sequences = [
            (indices[first:end], (end - first - 1) * page + tail)
            for first, end, tail in zip(ends, ends[1:], last.tolist(), strict=False)
        ]

    def run(self, q, caches):
        assert self.shape == (q.shape[1], caches[0].shape[2], q.shape[2])
        starts = range(len(q) + 1) if self.starts is None else self.starts.tolist()
        return torch.cat([
            attention(q[first:end], *(gathered(cache, *where) for cache in caches), self.causal)
            for first, end, where in zip(starts, starts[1:], self.sequences, strict=False)
        ])  # fmt: skip


class PrefillWrapper(PagedWrapper):
    """The one for several queries, whose plan begins with where each sequence's queries do."""

    def plan(self, starts, *where, **options):
        self.starts = starts
        super().plan(*where, **options)


FLASHINFER = types.SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=PagedWrapper, BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper
)


def triton_decode(q, k, v, out, lse, table, lengths, partials, splits, scale, page_size=1, logit_cap=0.0):
    """vLLM's function."""
    assert page_size == k.shape[1]
    assert partials.shape == (*q.shape[:2], splits, v.shape[-1] + 1)
    assert lse.shape == q.shape[:2]
    assert scale == pytest.approx(q.shape[-1] ** -0.5)
    for b, n in enumerate(lengths.tolist()):
        out[b] = attention(q[b : b + 1], *(gathered(cache, table[b], n) for cache in (k, v)))[0]


def older_triton_decode(q, k, v, o, req_to_token, *rest):
    """The one before it gave an lse."""
    triton_decode(q, k, v, o, torch.empty(q.shape[:2]), req_to_token, *rest)


def fa4_func(q, k, v, causal=False):
    return torch.stack([attention(*each, causal) for each in zip(q, k, v, strict=True)]), None


def fa4_varlen_func(q, k, v, seqused_k=None, page_table=None, causal=False):
    keys = [[gathered(t, page_table[b], n) for t in (k, v)] for b, n in enumerate(seqused_k.tolist())]
    return torch.stack([attention(one, *each, causal) for one, each in zip(q, keys, strict=True)]), None


def judged(name, case):
    """The verdicts over two sets of inputs, each by its own judge."""
    sets = [make_decode_inputs(case, "cpu", seed) for seed in range(2)]
    calls = DECODE_PEERS[name].prepare(sets)
    return [DecodeJudge(one).verdict(call()) for one, call in zip(sets, calls.calls, strict=True)]


@pytest.fixture
def modules(monkeypatch):
    """Stand-ins by module name, in place of what is not installed."""
    found = {"flashinfer": FLASHINFER}
    fake = types.SimpleNamespace(import_module=found.__getitem__)
    monkeypatch.setattr(decode_peers, "importlib", fake)
    monkeypatch.setattr(decode_peers, "importable", found.__contains__)
    monkeypatch.setattr("tilefold.bench.family.importable", found.__contains__)
    sms = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sms)
    return found


@pytest.mark.parametrize("case", [*CASES, replace(CASES[1], queries=4)], ids=lambda case: case.name)
def test_flashinfer_gets_pages_and_lengths(modules, case):
    assert all(one.ok for one in judged("flashinfer", case))
    assert DECODE_PEERS["flashinfer"].refuses(case, "cuda") is None


@pytest.mark.parametrize("function", [triton_decode, older_triton_decode])
@pytest.mark.parametrize(
    "case", [*CASES, replace(EVEN, kv_heads=1, dim_qk=40, dim_v=32, shared=True)], ids=lambda c: c.name
)
def test_vllm_gets_pages_and_room_for_its_splits(modules, case, function):
    modules[decode_peers.VLLM_MODULES[1]] = types.SimpleNamespace(decode_attention_fwd=function)
    assert all(one.ok for one in judged("vllm", case))
    assert DECODE_PEERS["vllm"].refuses(replace(case, queries=2), "cuda") == "takes one query a sequence"


@pytest.mark.parametrize("case", [*CASES, replace(EVEN, queries=4), replace(EVEN, cache="int8")], ids=lambda c: c.name)
def test_fa4_gets_plain_caches_and_uneven_ones_in_pages(modules, case):
    modules["flash_attn.cute"] = types.SimpleNamespace(flash_attn_func=fa4_func, flash_attn_varlen_func=fa4_varlen_func)
    assert all(one.ok for one in judged("fa4", case))
    modules["flash_attn.cute"].flash_attn_varlen_func = lambda q, k, v, seqused_k=None: None
    if case.uneven:
        refuses(Unsupported, "flash_attn_varlen_func has no page_table", judged, "fa4", case)


@pytest.mark.no_poison
@pytest.mark.parametrize("case", [EVEN, replace(CASES[1], queries=4), replace(EVEN, cache="fp8")], ids=lambda c: c.name)
def test_flex_sees_each_sequence_to_its_end(monkeypatch, case):
    """Without compilation, which the CPU does not need to show what is masked."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert all(one.ok for one in judged("flex", case))


@pytest.mark.parametrize("queries", [1, 4])
def test_math_takes_a_mask_from_the_bottom_right(queries):
    assert all(one.ok for one in judged("math", replace(EVEN, queries=queries, page=16)))
