"""The implementations that are measured: tilefold and the libraries it is compared with, each used if it can run here.

Every adapter takes the same tensors, [batch, seq, heads, dim] in memory, and gives back a view of that shape. Libraries that
want [batch, heads, seq, dim] get transposed views; nothing is copied, so none pays for the layout of another.
"""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilefold.errors import ValueRangeError
from tilefold.plan.problem import AttentionProblem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DEFAULT_PEERS",
    "IMPLEMENTATIONS",
    "Implementation",
    "Inputs",
    "Prepared",
    "implementations_named",
    "make_inputs",
]


@dataclass(frozen=True, slots=True)
class Inputs:
    """q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] of one problem, on one device."""

    problem: AttentionProblem
    q: "Tensor"
    k: "Tensor"
    v: "Tensor"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be timed, giving out [B, Sq, H, Dv]; `context` has to be open while it runs (backend choices)."""

    call: Callable[[], "Tensor"]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True)
class Implementation:
    """One implementation of attention.

    name: as on the command line and in result files; title: as in tables; what: one line for --help.
    refuses: (problem, device type "cuda" or "cpu") -> why it cannot be used there, or None.
    prepare: makes the call; whatever is done once (compilation, block masks) happens there.
    """

    name: str
    title: str
    what: str
    refuses: Callable[[AttentionProblem, str], str | None]
    prepare: Callable[[Inputs], Prepared]

    @property
    def ours(self) -> bool:
        """Whether this is tilefold and not a peer."""
        return self.name.startswith("tilefold")


def make_inputs(problem: AttentionProblem, device: str, seed: int = 0) -> Inputs:
    """Standard-normal q, k and v, the same for a seed and device. Never zeros: a GPU draws less power on them and runs faster."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    p = problem

    def normal(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = normal(p.batch, p.seq_q, p.heads, p.dim_qk)
    k = normal(p.batch, p.seq_k, p.kv_heads, p.dim_qk)
    return Inputs(problem, q, k, normal(p.batch, p.seq_k, p.kv_heads, p.dim_v))


# --- tilefold ---------------------------------------------------------------------------------------------------------------


def prepare_tilefold(inputs: Inputs) -> Prepared:
    """The public function, as a user calls it."""
    import tilefold

    p, (q, k, v) = inputs.problem, (inputs.q, inputs.k, inputs.v)
    window = None if p.window == (-1, -1) else p.window

    def call() -> "Tensor":
        out: Tensor = tilefold.attention(q, k, v, causal=p.causal, window=window)
        return out

    return Prepared(call)


# --- torch.nn.functional.scaled_dot_product_attention -----------------------------------------------------------------------


def _beyond_causal(p: AttentionProblem) -> str | None:
    """Why a library that knows only plain and causal attention of equal lengths cannot take the problem, or None."""
    if p.varlen or not p.plain or p.window != (-1, -1):
        return "this adapter takes plain and causal attention only"
    if p.causal and p.seq_q not in (1, p.seq_k):
        return "its causal mask is aligned to the top left: lengths must be equal"
    return None


def _sdpa_refuses(backend: str) -> Callable[[AttentionProblem, str], str | None]:
    def refuses(p: AttentionProblem, device: str) -> str | None:
        if device != "cuda" and backend in ("cudnn", "efficient"):
            return "needs a GPU"
        if p.dtype == "float32" and (backend == "cudnn" or (backend == "flash" and device == "cuda")):
            return "takes float16 and bfloat16 only"
        if backend == "cudnn":
            import torch

            if not torch.backends.cudnn.is_available():
                return "torch was built without cuDNN"
        return _beyond_causal(p)

    return refuses


def _prepare_sdpa(backend: str) -> Callable[[Inputs], Prepared]:
    def prepare(inputs: Inputs) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        chosen = {
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH,
        }[backend]
        p = inputs.problem
        q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        # One query sees every key under a bottom-right causal mask, torch's top-left one would hide all but the first.
        causal, grouped = p.causal and p.seq_q > 1, p.heads != p.kv_heads

        def call() -> "Tensor":
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

        return Prepared(call, lambda: sdpa_kernel(chosen))

    return prepare


# --- FlexAttention ----------------------------------------------------------------------------------------------------------


def _flex_refuses(p: AttentionProblem, device: str) -> str | None:
    if device != "cuda":
        return "compiled FlexAttention needs a GPU"
    if p.varlen or not p.plain or p.window != (-1, -1):
        return "this adapter takes plain and causal attention only"
    return None


def _prepare_flex(inputs: Inputs) -> Prepared:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    p = inputs.problem
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    offset, mask = p.seq_k - p.seq_q, None
    if p.causal:

        def sees(batch: "Tensor", head: "Tensor", i: "Tensor", j: "Tensor") -> "Tensor":
            return i + offset >= j

        mask = create_block_mask(sees, None, None, p.seq_q, p.seq_k, device=q.device)
    # Each case compiles for its own lengths; without this the later ones would run into the limit of recompilations.
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = p.heads != p.kv_heads

    def call() -> "Tensor":
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return Prepared(call)


# --- FlashAttention-4 (CuTe DSL) --------------------------------------------------------------------------------------------


def _installed(module: str) -> bool:
    """Whether a (dotted) module can be imported, found out without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _fa4_refuses(p: AttentionProblem, device: str) -> str | None:
    if not _installed("flash_attn.cute"):
        return "flash-attn-4 is not installed"
    if device != "cuda":
        return "needs a GPU"
    import torch

    if torch.cuda.get_device_capability()[0] < 9:
        return "needs sm_90 or newer"
    if p.dtype == "float32":
        return "takes float16 and bfloat16 only"
    if p.varlen or not p.plain or p.window != (-1, -1):
        return "this adapter takes plain and causal attention only"
    return None


def _prepare_fa4(inputs: Inputs) -> Prepared:
    interface: Any = importlib.import_module("flash_attn.cute")
    function, causal = interface.flash_attn_func, inputs.problem.causal
    q, k, v = inputs.q, inputs.k, inputs.v

    def call() -> "Tensor":
        result: Any = function(q, k, v, causal=causal)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Prepared(call)


# --- the list ---------------------------------------------------------------------------------------------------------------


def _tilefold_refuses(p: AttentionProblem, device: str) -> str | None:
    return None if p.plain and not p.varlen else "this adapter takes plain dense attention only"


_ALL = (
    Implementation("tilefold", "tilefold", "tilefold.attention", _tilefold_refuses, prepare_tilefold),
    Implementation("cudnn", "cuDNN", "torch SDPA, cuDNN backend", _sdpa_refuses("cudnn"), _prepare_sdpa("cudnn")),
    Implementation(
        "flash", "FA2", "torch SDPA, flash backend (FlashAttention-2)", _sdpa_refuses("flash"), _prepare_sdpa("flash")
    ),
    Implementation("fa4", "FA4", "flash_attn.cute (FlashAttention-4), if installed", _fa4_refuses, _prepare_fa4),
    Implementation("flex", "Flex", "torch FlexAttention, compiled", _flex_refuses, _prepare_flex),
    Implementation(
        "efficient",
        "efficient",
        "torch SDPA, memory-efficient backend",
        _sdpa_refuses("efficient"),
        _prepare_sdpa("efficient"),
    ),
    Implementation(
        "math",
        "math",
        "torch SDPA, math backend (materialises the scores)",
        _sdpa_refuses("math"),
        _prepare_sdpa("math"),
    ),
)
IMPLEMENTATIONS: dict[str, Implementation] = {each.name: each for each in _ALL}
DEFAULT_PEERS: dict[str, tuple[str, ...]] = {"cuda": ("cudnn", "flash", "fa4", "flex"), "cpu": ("flash", "math")}


def implementations_named(names: tuple[str, ...]) -> tuple[Implementation, ...]:
    """tilefold, then the named peers in the order given; "none" alone names no peer. ValueRangeError: unknown name."""
    peers = [name for name in IMPLEMENTATIONS if name != "tilefold"]
    wanted = () if names == ("none",) else tuple(dict.fromkeys(name for name in names if name != "tilefold"))
    for name in wanted:
        if name not in peers:
            raise ValueRangeError(f"peers must be from {', '.join(peers)} (or none), got {name!r}")
    return (IMPLEMENTATIONS["tilefold"], *(IMPLEMENTATIONS[name] for name in wanted))
