"""What is tuned: cases of the benchmarks by their names, or the attention and the linear layers of a model by its config.json."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import tilefold
from tilefold import ops
from tilefold.bench.attention.cases import Case, cases_of
from tilefold.bench.choice import select_cases
from tilefold.bench.decode.cases import DecodeCase, decode_cases
from tilefold.bench.decode.inputs import DecodeJudge, make_decode_inputs
from tilefold.bench.decode.peers import attend_cached
from tilefold.bench.family import Judge
from tilefold.bench.implementation import make_inputs, window_of
from tilefold.bench.judge import Judge as AttentionJudge
from tilefold.bench.judge import sampled_rows
from tilefold.bench.matrix.gemm import EIGHT, GEMM, GemmCase, gemm_inputs, gemm_judge
from tilefold.errors import Unsupported, ValueRangeError
from tilefold.ops.matrix.operands import operands
from tilefold.ops.matrix.product import Epilogue, problem_of
from tilefold.plan import AttentionPlan
from tilefold.plan.cache.decode import decode_kernel_refusal
from tilefold.plan.problem import AttentionProblem

PARTS = ("attention", "decode", "linear")
DTYPES = ("bfloat16", "float16", "float32")
BIASED = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")  # biases of q, k and v that their config.json does not name


@dataclass(frozen=True, slots=True)
class Work:
    """The tensors of a problem.

    sets: inputs, as many as timing goes around.  problem: as the operation makes it of the first set.  call: (inputs, plan) ->
    the operation, following the plan exactly.  judge: makes what judges the first set's result."""

    sets: Sequence[Any]
    problem: Any
    call: Callable[[Any, Any], Callable[[], Tensor]]
    judge: Callable[[], Judge]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A case of the benchmarks whose plan can be tuned.  kind: as of the table, "attention", "decode" or "matmul"; what: the name
    of a model's layer, for people."""

    kind: str
    case: Any
    what: str = ""

    @property
    def name(self) -> str:
        """As `tilefold bench` names it."""
        return str(self.case.name)

    @property
    def title(self) -> str:
        """The layer of the model, else the name."""
        return self.what or self.name

    def work(self, device: str, count: int) -> Work:
        """`count` sets of inputs on "cuda" or "cpu", with what runs and judges them."""
        made: Callable[[Any, str, int], Work]
        made = {"attention": _attention, "decode": _decode, "matmul": _matmul}[self.kind]  # type: ignore[assignment]
        return made(self.case, device, count)


def problems_of_cases(pattern: str, gpu: bool) -> tuple[Tunable, ...]:
    """The cases of dense, decode and gemm whose name a pattern has, as of `tilefold bench --case`; a family's name means all.

    Of dense the forward of batches that are not packed; of decode sequences of one length; of gemm tiles in grouped order, not of
    8 bits: their plans depend on nothing else.  gpu: False for the tiny cases.  ValueRangeError if there is none."""
    size = "full" if gpu else "tiny"
    families = {
        "dense": [Tunable("attention", one) for one in cases_of("dense", size) if not one.lengths],
        "decode": [Tunable("decode", one) for one in decode_cases(size) if not one.uneven],
        "gemm": [Tunable("matmul", one) for one in GEMM.cases(size) if one.order == "grouped" and one.dtype != EIGHT],
    }
    if pattern in families:
        return tuple(families[pattern])
    return select_cases(tuple(one for family in families.values() for one in family), pattern)


def problems_of_model(
    path: Path,
    batches: Sequence[int] = (1, 32),
    prompts: Sequence[int] = (2048,),
    caches: Sequence[int] = (8192,),
    parts: Sequence[str] = PARTS,
) -> tuple[Tunable, ...]:
    """The problems of a decoder by its Hugging Face config.json, each once.

    attention: one causal prompt of each length.  decode: a step of so many sequences over a cache of each length.  linear: each
    layer's product for a prompt's tokens and for a step's, the head for a step's alone.
    ValueRangeError names a field of the file that is missing or cannot be."""
    config = _config(path)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueRangeError(f"{path}: torch_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    hidden, heads = _number(path, config, "hidden_size"), _number(path, config, "num_attention_heads")
    kv_heads = _number(path, config, "num_key_value_heads", heads)
    dim = _number(path, config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ValueRangeError(f"{path}: num_key_value_heads must divide num_attention_heads={heads}, got {kv_heads}")
    found: list[Tunable] = []
    for n in prompts if "attention" in parts else ():
        problem = AttentionProblem(1, n, n, heads, kv_heads, dim, dim, dtype=dtype, causal=True)
        found.append(Tunable("attention", Case("dense", problem), f"prompt of {n}"))
    for n in caches if "decode" in parts else ():
        for batch in batches:
            step = DecodeCase((n,) * batch, heads, kv_heads, dim, dim, dtype=dtype)
            found.append(Tunable("decode", step, f"step of {batch}, cache {n}"))
    if "linear" in parts:
        shapes = _layers(path, config, hidden, heads * dim, kv_heads * dim)
        for tokens in (*batches, *prompts):
            for what, (n, k, bias) in shapes.items():
                if what == "head" and tokens not in batches:
                    continue
                case = GemmCase(tokens, n, k, transposed=True, bias=bias, dtype=dtype)
                found.append(Tunable("matmul", case, f"{what}, {tokens} tokens"))
    return tuple({(one.kind, one.case): one for one in reversed(found)}.values())[::-1]


def _layers(
    path: Path, config: Mapping[str, Any], hidden: int, wide: int, narrow: int
) -> dict[str, tuple[int, int, str]]:
    """(outputs, inputs, bias) of the linear layers by name."""
    inner, words = _number(path, config, "intermediate_size"), _number(path, config, "vocab_size")
    bias = "n" if config.get("attention_bias", config.get("model_type") in BIASED) else ""
    return {
        "q": (wide, hidden, bias),
        "k, v": (narrow, hidden, bias),
        "o": (hidden, wide, ""),
        "gate, up": (inner, hidden, ""),
        "down": (hidden, inner, ""),
        "head": (words, hidden, ""),
    }


def _config(path: Path) -> Mapping[str, Any]:
    """What the file says of the language model."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueRangeError(f"--model must be a model's config.json, {path} cannot be read: {error}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ValueRangeError(f"--model must be a model's config.json, {path} holds a {type(config).__name__}")
    return config


def _number(path: Path, config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueRangeError(f"{path}: {name} must be an integer of at least 1, got {value!r}")
    return value


# ---------------------------------------------------------------- tensors and calls


def _attention(case: Case, device: str, count: int) -> Work:
    p = case.problem
    options: dict[str, Any] = {"causal": p.causal, "window": window_of(p)}
    sets = [make_inputs(case, device, seed) for seed in range(count)]
    first = sets[0]
    planned = tilefold.attention_plan(first.q, first.k, first.v, **options)
    if not isinstance(planned, AttentionPlan):
        raise Unsupported(f"{p.seq_q} queries are decoding, whose plans are tuned by the cases of decode")
    return Work(
        sets,
        planned.problem,
        lambda i, plan: lambda: tilefold.attention(i.q, i.k, i.v, plan=plan, **options),
        lambda: AttentionJudge(first),
    )


def _decode(case: DecodeCase, device: str, count: int) -> Work:
    sets = [make_decode_inputs(case, device, seed) for seed in range(count)]
    first = sets[0]
    planned = tilefold.attention_kvcache_plan(first.q, first.k_cache, first.v_cache, **first.options)
    if case.cache == "" and not case.shared and (why := decode_kernel_refusal(planned.problem.attention)):
        raise Unsupported(f"another kernel takes this step, whose plan is not tuned: {why}")
    return Work(sets, planned.problem, lambda i, plan: attend_cached(i, plan=plan), lambda: DecodeJudge(first))


def _matmul(case: GemmCase, device: str, count: int) -> Work:
    function: Any = ops.bmm if case.batch else ops.matmul
    sets = [gemm_inputs(case, device, seed) for seed in range(count)]
    first = sets[0]
    after = Epilogue(case.activation or "none", out_dtype=first.x.dtype)
    return Work(
        sets,
        problem_of(operands(first.x, first.y, first.bias, False), after, False),
        lambda i, plan: lambda: function(i.x, i.y, bias=i.bias, activation=case.activation, plan=plan),
        lambda: _Rows(first),
    )


class _Rows:
    """The judge of a product: of some rows of a large one, the first and the last among them; all have to be finite."""

    def __init__(self, inputs: Any) -> None:
        self.rows = sampled_rows(inputs.case.m) if not inputs.case.batch else None
        self.judge = gemm_judge(inputs if self.rows is None else inputs._replace(x=inputs.x[self.rows]))

    def verdict(self, out: Tensor) -> Any:
        found = self.judge.verdict(out if self.rows is None else out[self.rows])
        return replace(found, finite=bool(out.isfinite().all()))
