"""How the Gluon kernel for sm_90 makes the gradients of a call too long for the room of its dS: its queries in spans.

A span is a call of its own: some tiles of 64 queries of every head, and the keys that they see, cut so that the mask, aligned to
the bottom right, is that of the whole call.  Each query belongs to one span, so dq is made in place; dk and dv are summed over
spans in fp32, in the order of the queries, by the kernel itself (kernels/hopper/backward_epilogue.py)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from tilefold.plan.backward import attention_backward_hopper as dense
from tilefold.plan.backward.kept_backward import UNIT, WIDE, kept_limit, least_kept
from tilefold.plan.base import Fault
from tilefold.plan.device import Device
from tilefold.plan.problem import AttentionProblem

# Key items whose dS has room at a time, for each running program, where spans are chosen; measured on an H200, D=128, 32 heads on
# 8, causal: in 3 spans with 2 of them 591 TFLOP/s, in 4 with 3 539; in 5 and 7 529 and 522; in 9 and 13 494 and 513.
HELD, HELD_IN_MANY, MANY = 2, 3, 6
SHORT_SPLIT = 4096
"""Keys of a KV split of the widest head dims, up to which spans are faster; causal, 16384 tokens, TFLOP/s.  H100, D=256: splits
of 2048 441, of 4096 468, in 3 spans 466.  H200: of 4096 471, in 2 spans 479; D=192, V of 128, 586 and 554, full 554 and 538."""
MAX_SPANS = 4096  # launches of a call


class Span(NamedTuple):
    """Queries q_low to q_high and the keys k_low to k_high that they see, none where k_low == k_high; window (left, right)
    is that of the call, aligned to the bottom right of this rectangle, -1 for unbounded.  written: how many of these keys, from
    k_low on, earlier spans have, too."""

    q_low: int
    q_high: int
    k_low: int
    k_high: int
    window: tuple[int, int]
    written: int


@lru_cache(maxsize=256)
def spans_of(problem: AttentionProblem, queries: int) -> tuple[Span, ...]:
    """Spans of so many queries, a multiple of 64, in order; the last may have fewer.  One of them all if queries is 0."""
    n = problem
    (left, right), shift = n.sides, n.seq_k - n.seq_q  # query i stands at key i + shift
    step, before = queries or max(1, n.seq_q), 0
    found = []
    for low in range(0, n.seq_q, step):
        high = min(low + step, n.seq_q)
        end = n.seq_k if right < 0 else min(max(high + shift + right, 0), n.seq_k)
        begin = 0 if left < 0 else max(low + shift - left, 0)
        if end <= begin:
            found.append(Span(low, high, 0, 0, (-1, -1), 0))
            continue
        corner = high + shift - end  # from the diagonal: from -right, where keys end at the mask, to 0
        window = -1 if left < 0 else left - corner, -1 if right < 0 else right + corner
        found.append(Span(low, high, begin, end, window, max(0, before - begin)))
        before = end
    return tuple(found)


def problem_of(problem: AttentionProblem, span: Span) -> AttentionProblem:
    """The problem of the launch for a span that has keys."""
    causal = span.window == (-1, 0)
    window = (-1, -1) if causal else span.window
    return replace(
        problem, seq_q=span.q_high - span.q_low, seq_k=span.k_high - span.k_low, causal=causal, window=window
    )


def batch_of(problem: AttentionProblem, heads: int, keys: int) -> tuple[int, int]:
    """(KV heads, keys) of one batch of a span's work, given those of the widest span."""
    return heads, min(keys, dense.tiles(problem)[1] * UNIT)


# ---------------------------------------------------------------- how many


@lru_cache(maxsize=256)
def queries_at_once(problem: AttentionProblem, device: Device) -> int:
    """Queries of a span, 0 if all are made at once: where there is room for dS of enough keys of all queries (`why`).

    Else so many that HELD key items (HELD_IN_MANY of MANY spans or more) have room for each running program, in spans of one
    size, whole pairs of tiles; two spans at least of the widest head dims."""
    n = problem
    if not why(n, device):
        return 0
    total = dense.tiles(n)[0]
    item = dense.places(n, device) * n.group * UNIT * UNIT * n.itemsize
    most = max(1, least_kept(n.dim_qk, n.dim_v) // (HELD * item))
    if dense.width_of(n) == WIDE:
        most = min(most, -(-total // 2))
    if -(-total // most) >= MANY:
        most = max(1, least_kept(n.dim_qk, n.dim_v) // (HELD_IN_MANY * item))
    units = -(-total // -(-total // most))
    if units > 1:
        units += units & 1
    return 0 if units >= total else units * UNIT


def why(problem: AttentionProblem, device: Device) -> str:
    """What is wrong with all queries at once, as a sentence; "" if nothing is.

    Several query heads to a KV head whose keys come in KV splits are faster in spans, each with all keys, but for few queries; so
    are short splits of the widest head dims."""
    n, at_once = problem, dense.kept_at_once(problem, device)
    fault = dense.kept_violation(n, device, *at_once)
    if fault:
        return fault[1]
    slow = n.group > 1 or (dense.width_of(n) == WIDE and at_once[1] <= SHORT_SPLIT)
    if slow and n.sides in ((-1, -1), (-1, 0)) and 2 * n.seq_q >= n.seq_k and at_once[1] < n.seq_k:
        limit = f"{kept_limit(n) / 2**30:.2g} GiB"
        return f"{limit} hold dS of {at_once[1]} of {n.seq_k} keys at a time, in KV splits that wait for each other"
    return ""


def batches_at_once(problem: AttentionProblem, device: Device, queries: int) -> tuple[int, int]:
    """(KV heads, keys) of a batch, by the rule of one launch for the span with the most pairs."""
    if not queries:
        return dense.kept_at_once(problem, device)
    widest = max(spans_of(problem, queries), key=lambda s: (s.q_high - s.q_low) * (s.k_high - s.k_low))
    return dense.kept_at_once(problem_of(problem, widest), device)


def _launches(
    problem: AttentionProblem, queries: int, heads: int, keys: int
) -> Iterator[tuple[AttentionProblem, int, int]]:
    """(problem, KV heads, keys of a batch) of every span that has keys, each kind once."""
    made = {problem_of(problem, span) for span in spans_of(problem, queries) if span.k_high > span.k_low}
    return ((one, *batch_of(one, heads, keys)) for one in made)


# ---------------------------------------------------------------- memory


def scratch_bytes(problem: AttentionProblem, device: Device, queries: int, heads: int, keys: int) -> int:
    """Bytes beside the gradients: dS and sums of dq of the largest span, statistics; with spans counters, and the sums of dk and
    dv in fp32."""
    n = problem
    statistics = 8 * n.batch * n.heads * dense.tiles(n)[0] * UNIT
    if not queries:
        return dense.kept_bytes(n, device, heads, keys) + dense.partial_bytes(n, device, keys) + statistics
    launches = list(_launches(n, queries, heads, keys))
    kept = max((dense.kept_bytes(one, device, *batch) for one, *batch in launches), default=0)
    partial = max((dense.partial_bytes(one, device, batch[1]) for one, *batch in launches), default=0)
    most = max((dense.batches_of(one, *batch) for one, *batch in launches), default=0)
    counters = 4 * (1 + 2 * most) * len(spans_of(n, queries))
    return kept + partial + statistics + counters + sum_bytes(n)


def sum_bytes(problem: AttentionProblem) -> int:
    """Bytes of dk and dv in fp32."""
    n = problem
    return 4 * n.batch * n.kv_heads * n.seq_k * (n.dim_qk + n.dim_v)


def sum_traffic(problem: AttentionProblem, queries: int) -> int:
    """Bytes that the sums over spans are read and written with: each span's keys written, the earlier spans' read; once more in
    the end, with dk and dv written in their dtype."""
    n = problem
    if not queries:
        return 0
    row = 4 * n.batch * n.kv_heads * (n.dim_qk + n.dim_v)
    rows = sum(span.k_high - span.k_low + span.written for span in spans_of(n, queries))
    return row * (rows + n.seq_k) + row // 4 * n.itemsize * n.seq_k


def described(problem: AttentionProblem, queries: int) -> str:
    """For a person who reads the plan."""
    count, traffic = len(spans_of(problem, queries)), sum_traffic(problem, queries) / 1e9
    return f"{count} of {queries} queries, one after the other; their dk and dv are added up in fp32: {traffic:.3g} GB moved"


# ---------------------------------------------------------------- limits


@lru_cache(maxsize=256)  # a plan asks more than once
def hopper_backward_refusal(problem: AttentionProblem, device: Device) -> str | None:
    """Why the kernel does not serve this problem, in one launch or in spans, as a sentence, or None if it does."""
    if refusal := dense.hopper_backward_refusal(problem, device):
        return refusal
    queries = queries_at_once(problem, device)
    if fault := span_violation(problem, queries):
        return fault[1]
    if fault := kept_violation(problem, device, queries, *batches_at_once(problem, device, queries)):
        return fault[1]
    return None


def span_violation(problem: AttentionProblem, queries: int) -> Fault:
    """(field, sentence) of the first thing about the queries of a span that does not fit, or None."""
    if type(queries) is not int or queries < 0 or queries % UNIT:
        return "queries_at_once", f"must be 0 (all) or a multiple of {UNIT}, got {queries!r}"
    if queries and -(-problem.seq_q // queries) > MAX_SPANS:
        return "queries_at_once", f"{queries} queries at once are more than {MAX_SPANS} spans of {problem.seq_q}"
    return None


def kept_violation(problem: AttentionProblem, device: Device, queries: int, heads: int, keys: int) -> Fault:
    """As span_violation, of the KV heads and keys of a batch, too."""
    if not queries and type(queries) is int:
        return dense.kept_violation(problem, device, heads, keys)
    if fault := span_violation(problem, queries):
        return fault
    whole = dense.tiles(problem)[1] * UNIT
    if type(keys) is not int or keys < UNIT or keys % UNIT or keys > whole:
        return "keys_at_once", f"must be a multiple of {UNIT} up to {whole}, got {keys!r}"
    if type(heads) is not int:
        return dense.kept_violation(problem, device, heads, whole)
    return _launch_violation(problem, device, queries, heads, keys)


@lru_cache(maxsize=256)
def _launch_violation(problem: AttentionProblem, device: Device, queries: int, heads: int, keys: int) -> Fault:
    """That of the first launch that has one."""
    faults = (dense.kept_violation(one, device, *batch) for one, *batch in _launches(problem, queries, heads, keys))
    return next(filter(None, faults), None)
