"""What context parallelism is asked for, on which machine, and what a scheme of it costs: values."""

from dataclasses import dataclass

from tilefold.errors import DtypeError, ValueRangeError

from .sharding import KINDS

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
BACKWARD_FLOPS = 2.5  # of the forward pass: five products instead of two


@dataclass(frozen=True, slots=True)
class Links:
    """The machine, as far as it decides.  Rates are assumptions until they are measured: give your own.

    ranks: GPUs that share a sequence; ranks_per_node: of those with fast links to each other, 1 if not known.
    inside, across: bytes/s that one rank sends, within a node and between nodes.  latency: seconds a message takes at least.
    flops, flops_backward, flops_nondeterministic: attention FLOP/s of one rank, of each pass, the last of a
    non-deterministic backward pass; where ranks differ, of the slowest.  dram: bytes/s of a rank's memory.  memory: bytes that
    one rank can spare for what the scheme adds, None: not limited.
    """

    ranks: int
    ranks_per_node: int = 1
    inside: float = (
        290e9  # over NVLink 4 (450 by its data sheet) as NCCL sends on four H200: to all at once 409, to the next 288
    )
    across: float = 50e9  # one 400 Gb/s port a GPU
    latency: float = 10e-6
    flops: float = 680e12  # bfloat16, D=128, at the power limit: slow H200 had 640 before `lazy`, 718 with it
    flops_backward: float = 530e12  # the slowest of four
    flops_nondeterministic: float = 565e12  # three H200 had 555 to 585 with 32768 keys and more in a call
    dram: float = 4e12  # of an H200, as kernels that add and merge reach it
    memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueRangeError(f"{name} must be an int, at least 1, got {value!r}")
        if self.ranks % self.ranks_per_node:
            raise ValueRangeError(f"ranks_per_node must divide ranks={self.ranks}, got {self.ranks_per_node}")
        for name in (
            "inside",
            "across",
            "flops",
            "flops_backward",
            "flops_nondeterministic",
            "dram",
            "latency",
            "memory",
        ):
            value = getattr(self, name)
            if name == "memory" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DtypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
            if name in ("latency", "memory") and not value >= 0:
                raise ValueRangeError(f"{name} must be at least 0, got {value!r}")
            if name not in ("latency", "memory") and not value > 0:
                raise ValueRangeError(f"{name} must be greater than 0, got {value!r}")

    def backward(self, problem: "ParallelProblem") -> float:
        """FLOP/s of a problem's backward pass."""
        return self.flops_backward if problem.deterministic else self.flops_nondeterministic

    @property
    def nodes(self) -> int:
        """Nodes; one if all ranks lie in one, or where nodes are not known: then every link counts as `inside`."""
        return self.ranks // self.ranks_per_node if self.ranks_per_node > 1 else 1


@dataclass(frozen=True, slots=True)
class ParallelProblem:
    """What is asked: sizes of the whole attention over all ranks.  window: (left, right), -1 for unbounded; (-1, 0) is causal.
    kind: how tokens are sharded.  backward: gradients follow.  sequences: packed ones, of which seq_q and seq_k are the sums.
    deterministic: gradients have the same bits every run; else they may be non-deterministic, with other memory."""

    batch: int
    seq_q: int
    seq_k: int
    heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    dtype: str = "bfloat16"
    window: tuple[int, int] = (-1, -1)
    kind: str = "contiguous"
    backward: bool = False
    sequences: int = 1
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise ValueRangeError(f"dtype must be one of {', '.join(BYTES)}, got {self.dtype!r}")
        if self.kind not in KINDS:
            raise ValueRangeError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")
        for name in ("batch", "seq_q", "seq_k", "heads", "kv_heads", "dim_qk", "dim_v", "sequences"):
            value, least = getattr(self, name), 0 if name in ("batch", "seq_q", "seq_k") else 1
            if type(value) is not int or value < least:
                raise ValueRangeError(f"{name} must be an int, at least {least}, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueRangeError(f"heads must be a multiple of kv_heads={self.kv_heads}, got {self.heads}")

    @property
    def flops(self) -> float:
        """Of the forward pass on all ranks, sequences taken as equally long."""
        left, right = self.window
        rows, keys = self.seq_q, self.seq_k / max(1, self.sequences)
        band = (keys if left < 0 else min(keys, left)) + (keys if right < 0 else min(keys, right))
        seen = keys if left < 0 and right < 0 else min(keys, band / 2 if self.window == (-1, 0) else band)
        return 2.0 * self.batch * self.heads * rows * seen * (self.dim_qk + self.dim_v)

    @property
    def halves(self) -> bool:
        """Do a rank's queries and another's keys have half of their pairs in common: a causal mask over zigzag shards?"""
        return self.kind == "zigzag" and self.window == (-1, 0)

    def imbalance(self, ranks: int) -> float:
        """The busiest rank's work beside the mean: one causal sequence in contiguous shards leaves the last rank most of it."""
        uneven = self.kind == "contiguous" and self.window == (-1, 0) and self.sequences == 1
        return 2.0 - 1.0 / ranks if uneven else 1.0


@dataclass(frozen=True, slots=True)
class SchemeCost:
    """The prediction for one scheme, of one rank: bytes sent within the node and between nodes, messages one after the other,
    seconds of forward and, if asked for, backward; bytes of memory beyond the rank's q, k, v and dout, results included; why it
    is impossible, "" if it is not."""

    scheme: str
    inside: float
    across: float
    messages: int
    seconds: float
    memory: float
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.scheme}: {self.refusal}"
        return (
            f"{self.scheme}: {self.seconds * 1e3:.3f} ms, sends {size_text(self.inside)} inside and "
            f"{size_text(self.across)} across, {size_text(self.memory)} more memory"
        )


def size_text(value: float) -> str:
    """Bytes, for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
